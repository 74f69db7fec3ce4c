"""Fetching from Hugging Face with the real huggingface_hub, from a server on this machine."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub.constants
import numpy as np
import pytest
import safetensors.numpy

from tests.models.web import Answer, Request, Site, serve
from tqchat.models import hub
from tqchat.models.checkpoint import read_checkpoint
from tqchat.models.download import Progress
from tqchat.models.errors import ModelError, Stopped

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
REPO = "someone/small-model"
WEIGHTS = {"a": np.arange(1 << 20, dtype=np.float32)}


def commit_of(files: dict[str, bytes]) -> str:
    digest = hashlib.sha1()
    for name in sorted(files):
        digest.update(name.encode() + files[name])
    return digest.hexdigest()


class FakeHub:
    """The part of Hugging Face that a download needs: one repository, weights on another host."""

    def __init__(self) -> None:
        shard = safetensors.numpy.save(WEIGHTS)
        self.files = {
            "README.md": b"read me",
            "config.json": b'{"model_type": "llama"}',
            "model.safetensors": shard,
            "original/consolidated.safetensors": b"not wanted",
            "pytorch_model.bin": b"not wanted",
            "tokenizer.json": b'{"a": 1}',
            "tokenizer_config.json": b"{}",
        }
        self.error: tuple[int, str] | None = None
        self.stall_after: int | None = None
        self.damaged = False
        self.site: Site
        self.storage: Site

    def api(self, request: Request) -> Answer:
        path = urlsplit(request.path).path
        commit = commit_of(self.files)
        if self.error:
            status, code = self.error
            return Answer(status=status, headers={"X-Error-Code": code})
        if path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main"):
            siblings = [
                {"rfilename": name, "size": len(data), "blobId": git_id(data)} | lfs(name, data)
                for name, data in self.files.items()
            ]
            return as_json({"id": REPO, "modelId": REPO, "sha": commit, "siblings": siblings})
        if path == f"/api/models/{REPO}/tree/{commit}":
            tree = []
            for name, data in self.files.items():
                entry = {"type": "file", "path": name, "size": len(data), "oid": git_id(data)}
                if large := lfs(name, data):
                    entry["lfs"] = large["lfs"] | {"oid": large["lfs"]["sha256"]}
                tree.append(entry)
            return as_json(tree)
        prefix = f"/{REPO}/resolve/{commit}/"
        name = path.removeprefix(prefix)
        if not path.startswith(prefix) or name not in self.files:
            return Answer(status=404, headers={"X-Error-Code": "EntryNotFound"})
        data = self.files[name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{git_id(data)}"'}
        if not lfs(name, data):
            return Answer(data, headers=headers)
        headers |= {
            "X-Linked-Size": str(len(data)),
            "X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "Location": f"{self.storage.url}/{name}",
        }
        return Answer(status=302, headers=headers)

    def store(self, request: Request) -> Answer:
        data = self.files[urlsplit(request.path).path.removeprefix("/")]
        if self.damaged:
            data = data[:-1] + b"?"
        return Answer(data, stall_after=self.stall_after)

    def fetched(self) -> set[str]:
        """The files whose content was asked for."""
        requests = [*self.site.requests, *self.storage.requests]
        return {
            request.path.rpartition("/")[2]
            for request in requests
            if request.method == "GET" and not request.path.startswith("/api/")
        }


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def lfs(name: str, data: bytes) -> dict[str, Any]:
    if not name.endswith((".safetensors", ".gguf", ".bin")):
        return {}
    sha256 = hashlib.sha256(data).hexdigest()
    return {"lfs": {"size": len(data), "sha256": sha256, "pointerSize": 130}}


def as_json(value: Any) -> Answer:
    return Answer(json.dumps(value).encode(), headers={"Content-Type": "application/json"})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, for this process and for the child."""
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", "secret")
    folder = tmp_path / "hf" / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def fake(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub()
    with serve(fake.api) as fake.site, serve(fake.store) as fake.storage:
        monkeypatch.setenv("HF_ENDPOINT", fake.site.url)
        yield fake


def fetch(file: str | None = None, update: bool = False) -> Path:
    return hub.fetch(REPO, file, lambda progress: None, lambda: False, update)


def test_only_what_a_chat_needs_is_fetched_once(cache: Path, fake: FakeHub) -> None:
    folder = fetch()
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert fake.fetched() == names
    assert read_checkpoint(folder).weights["a"].tolist() == WEIGHTS["a"].tolist()
    asked = len(fake.site.requests)
    assert fetch() == hub.cached(REPO) == folder
    assert len(fake.site.requests) == asked
    assert list(hub.installed()) == [(REPO, folder)]
    assert not list(cache.rglob("*.incomplete"))


def test_the_token_goes_to_hugging_face_alone(cache: Path, fake: FakeHub) -> None:
    fetch()
    assert {r.headers.get("authorization") for r in fake.site.requests} == {"Bearer secret"}
    assert fake.storage.requests
    assert not any("authorization" in r.headers for r in fake.storage.requests)


def test_stopped_and_resumed_where_it_ended(cache: Path, fake: FakeHub) -> None:
    size = len(fake.files["model.safetensors"])
    fake.stall_after = size // 2
    heard: list[Progress] = []

    def stop() -> bool:
        return any(progress.done_bytes > 0 for progress in heard)

    with pytest.raises(Stopped):
        hub.fetch(REPO, None, heard.append, stop)
    assert heard[-1].total_bytes == size
    assert REPO in heard[-1].label
    assert hub.cached(REPO) is None
    assert list(hub.installed()) == []
    fake.stall_after = None
    fake.storage.requests.clear()
    folder = fetch()
    assert (folder / "model.safetensors").read_bytes() == fake.files["model.safetensors"]
    [request] = fake.storage.requests
    start = int(request.headers["range"].removeprefix("bytes=").rstrip("-"))
    assert 0 < start <= size // 2


def test_a_damaged_file_is_thrown_away(cache: Path, fake: FakeHub) -> None:
    fake.damaged = True
    with pytest.raises(ModelError, match="came damaged"):
        fetch()
    assert hub.cached(REPO) is None
    fake.damaged = False
    assert (fetch() / "model.safetensors").read_bytes() == fake.files["model.safetensors"]


def test_update_takes_the_newer_version_and_does_without_a_network(
    cache: Path, fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = fetch()
    fake.files["config.json"] = b'{"model_type": "llama", "new": 1}'
    assert fetch() == old
    new = fetch(update=True)
    assert new != old
    assert b"new" in (new / "config.json").read_bytes()
    assert fetch() == new
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch(update=True) == new


def test_what_is_only_partly_here_is_not_used(cache: Path, fake: FakeHub) -> None:
    folder = fetch()
    (folder / "tokenizer.json").unlink()
    assert hub.cached(REPO) is None
    assert fetch() == folder
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert hub.cached(REPO) is None


def test_a_large_text_file_may_be_stored_as_weights_are(cache: Path, fake: FakeHub) -> None:
    """Hugging Face keeps files above 10 MB apart, tokenizer.json too."""
    fake.files["tokenizer.json"] = b" " * 1000
    fake.files["model.safetensors.index.json"] = b'{"weight_map": {"a": "model.safetensors"}}'
    assert (fetch() / "tokenizer.json").read_bytes() == b" " * 1000


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ((403, "GatedRepo"), r"is gated: accept its terms on https://huggingface.co/.*HF_TOKEN"),
        ((401, "RepoNotFound"), r"no folder someone/small-model here and no model .*hf auth login"),
        ((500, ""), r"answered 500 for someone/small-model. Try again later"),
    ],
)
def test_what_the_server_refuses(
    cache: Path, fake: FakeHub, error: tuple[int, str], message: str
) -> None:
    fake.error = error
    with pytest.raises(ModelError, match=message):
        fetch()


def test_without_a_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"cannot be reached.*Check the network.*tqchat models"):
        fetch()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE is set, and someone/small-model"):
        fetch()


def test_not_enough_room(
    cache: Path, fake: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The child reads what the server says of the size: more than any disk holds.
    sizes = lfs("x.gguf", b"")["lfs"]
    monkeypatch.setitem(sizes, "size", 10**18)
    monkeypatch.setattr(
        "tests.models.test_hub.lfs",
        lambda name, data: {"lfs": sizes} if name == "model.safetensors" else {},
    )
    with pytest.raises(ModelError, match=r"takes 1000000000\.0 GB more.*make room.*HF_HOME"):
        fetch()


def test_gguf_files(cache: Path, fake: FakeHub) -> None:
    fake.files = {
        "README.md": b"",
        "small-Q4_K_M.gguf": b"GGUF k",
        "small-Q8_0.gguf": b"GGUF 8",
        "parts/small-F16-00001-of-00002.gguf": b"GGUF 1",
    }
    with pytest.raises(ModelError, match=rf"Name one of them, such as {REPO}/small-Q8_0.gguf"):
        fetch()
    for name, message in (
        ("small-Q4_K_M.gguf", "in a format"),
        ("parts/small-F16-00001-of-00002.gguf", "one part of several"),
        ("small-Q4_0.gguf", "has no file"),
    ):
        with pytest.raises(ModelError, match=rf"{message}.*{REPO}/small-Q8_0.gguf"):
            fetch(name)
    assert fake.fetched() == set()
    path = fetch("small-Q8_0.gguf")
    assert path.read_bytes() == b"GGUF 8"
    assert fake.fetched() == {"small-Q8_0.gguf"}
    assert hub.cached(REPO, "small-Q8_0.gguf") == path
    assert list(hub.installed()) == [(f"{REPO}/small-Q8_0.gguf", path)]


def test_a_repository_of_something_else(cache: Path, fake: FakeHub) -> None:
    del fake.files["model.safetensors"]
    with pytest.raises(ModelError, match=r"no config.json with model\*.safetensors"):
        fetch()


def test_one_process_at_a_time(cache: Path, fake: FakeHub) -> None:
    sha256 = hashlib.sha256(fake.files["model.safetensors"]).hexdigest()
    blobs = cache / "models--someone--small-model" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / f"{sha256}.incomplete").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="Another tqchat is fetching"):
            fetch()
    assert fetch() == hub.cached(REPO)


def test_the_child_ends_when_nobody_listens(cache: Path, fake: FakeHub, tmp_path: Path) -> None:
    """Closing a terminal's window must not leave a download of 40 GB behind, nor a file of ours."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    fake.stall_after = 1 << 20
    parent = (
        "import os; from tqchat.models import hub\n"
        f"hub.fetch({REPO!r}, None, lambda p: os._exit(0), lambda: False)"
    )
    environment = os.environ | {"TMPDIR": str(temporary)}
    subprocess.run([sys.executable, "-c", parent], check=True, env=environment)
    assert not list(temporary.iterdir())
    fake.stall_after = None
    deadline = time.monotonic() + 30
    part = next(cache.rglob("*.incomplete"))
    while time.monotonic() < deadline:
        with part.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.1)
    pytest.fail("the child still holds the file")


def test_a_plan_needs_the_config_and_the_sizes_alone(cache: Path, fake: FakeHub) -> None:
    fake.files["config.json"] = (CONFIGS / "llama-3.1-8b-4bit.json").read_bytes()
    command = [sys.executable, "-m", "tqchat", "plan", REPO, "--memory", "64GB", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["weights_bytes"] == len(fake.files["model.safetensors"])
    assert figures["rows"][-1]["kv_fp16_bytes"] == 16 << 30
    assert fake.fetched() == {"config.json"}
    fake.error = (401, "RepoNotFound")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("tqchat: There is no folder")
