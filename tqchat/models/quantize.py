"""A model in 16 bits, made into one of 4 or 8 bits once and kept in the cache folder."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx

from tqchat import paths
from tqchat.models.download import Progress, disk_error
from tqchat.models.errors import Stopped
from tqchat.models.fingerprint import fingerprint
from tqchat.models.folder import INDEX, read_config, read_json, weight_files
from tqchat.models.multimodal import text_name

_FLOATS = (mx.float16, mx.bfloat16, mx.float32)
_GROUPS = (64, 32)
# A small part of a model, and where rounding costs most: SmolLM2's KL divergence from 16 bits falls
# from 0.47 to 0.28 with these in 8 bits and all else in 4.
_IN_8_BITS = ("embed_tokens.weight", "lm_head.weight")
# Small, and which expert a token goes to hangs by little.
_KEPT = (".mlp.gate.weight", ".router.weight", ".router.proj.weight")
_COPIED = (".json", ".jinja", ".model", ".txt")
_LARGEST_COPIED = 64 << 20
_WORK_PREFIX = "quantize-"
_TICK_SECONDS = 0.1


def quantized(
    path: Path,
    name: str,
    bits: int,
    progress: Callable[[Progress], None],
    stop: Callable[[], bool],
) -> Path:
    """The folder of the same model, its matrices in `bits` bits and groups of 64 or 32; those
    that take tokens in and give them out have 8.

    `path` itself for a .gguf file and for what is quantised already. One tensor in 16 bits is in
    memory at a time. Raises ModelError, Stopped.
    """
    if not path.is_dir() or read_config(path).get("quantization"):
        return path
    try:
        target = paths.cache_dir() / "quantized" / f"{fingerprint(path)[:32]}-{bits}bit"
        if target.is_dir():
            return target
        with _alone(paths.private_dir(target.parent), progress, stop):
            if target.is_dir():
                return target
            work = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX, dir=target.parent))
            try:
                _write(path, work, bits, _Counted(path, f"Quantising {name}", progress, stop))
                work.rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            return target
    except OSError as error:
        raise disk_error(error, "the cache folder") from None


@contextlib.contextmanager
def _alone(
    folder: Path, progress: Callable[[Progress], None], stop: Callable[[], bool]
) -> Iterator[None]:
    """Hold `folder`, once no other process does; what one that was killed left in it goes.

    Raises OSError, Stopped.
    """
    path = folder.with_suffix(".lock")
    path.touch(0o600)
    with path.open("ab") as lock:
        while not _locks(lock):
            if stop():
                raise Stopped
            progress(Progress(0, 1, "Waiting for another tqchat that quantises"))
            time.sleep(_TICK_SECONDS)
        for work in folder.glob(f"{_WORK_PREFIX}*"):
            shutil.rmtree(work, ignore_errors=True)
        yield


def _locks(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Counted:
    """Tells the bytes read of a folder's weights."""

    def __init__(
        self,
        folder: Path,
        label: str,
        progress: Callable[[Progress], None],
        stop: Callable[[], bool],
    ) -> None:
        self._total = sum(file.stat().st_size for file in weight_files(folder))
        self._done = 0
        self._label, self._progress, self._stop = label, progress, stop

    def add(self, n: int) -> None:
        """Raises Stopped."""
        if self._stop():
            raise Stopped
        self._done += n
        self._progress(Progress(min(self._done, self._total), self._total, self._label))


def _write(folder: Path, work: Path, bits: int, counted: _Counted) -> None:
    files = weight_files(folder)
    for number, file in enumerate(files, 1):
        tensors = mx.load(str(file))
        assert isinstance(tensors, dict)
        written: dict[str, mx.array] = {}
        while tensors:
            # Whoever else refers to a tensor would keep it in 16 bits.
            name, tensor = tensors.popitem()
            if text_name(name) is not None:
                written |= _quantized(name, tensor, bits)
            counted.add(tensor.nbytes)
        target = work / f"model-{number:05}-of-{len(files):05}.safetensors"
        _save(target, written)
        _finish(target)
    for file in folder.iterdir():
        if (
            file.suffix in _COPIED
            and file.name != INDEX
            and file.is_file()
            and file.stat().st_size <= _LARGEST_COPIED
        ):
            _finish(Path(shutil.copyfile(file, work / file.name)))
    config = read_json(folder / "config.json")
    config["quantization"] = {"group_size": _GROUPS[0], "bits": bits}
    paths.write_private(work / "config.json", json.dumps(config))


def _save(target: Path, tensors: dict[str, mx.array]) -> None:
    """Raises OSError."""
    try:
        mx.save_safetensors(str(target), tensors, metadata={"format": "mlx"})
    except RuntimeError as error:
        if "[write]" not in str(error):
            raise
        # MLX does not say why a write was cut short: as it is with a full disk.
        raise OSError(errno.ENOSPC, str(error), str(target)) from None


def _quantized(name: str, tensor: mx.array, bits: int) -> dict[str, mx.array]:
    """The tensor as it is stored, computed."""
    matrix = name.endswith(".weight") and tensor.ndim == 2 and tensor.dtype in _FLOATS
    groups = [group for group in _GROUPS if matrix and tensor.shape[1] % group == 0]
    if not groups or name.endswith(_KEPT):
        return {name: tensor}
    # Scales have the tensor's type, and 16 bits are enough for them.
    bits = 8 if name.endswith(_IN_8_BITS) else bits
    half = tensor.astype(mx.bfloat16) if tensor.dtype == mx.float32 else tensor
    parts = mx.quantize(half, group_size=groups[0], bits=bits)
    mx.eval(parts)
    stem = name.removesuffix("weight")
    return {stem + part: x for part, x in zip(("weight", "scales", "biases"), parts, strict=True)}


def _finish(file: Path) -> None:
    """For its owner alone, and on the disk."""
    file.chmod(0o600)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
