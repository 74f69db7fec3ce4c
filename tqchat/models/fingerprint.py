"""Which model a folder or file holds, told without reading all of it."""

import hashlib
import os
from pathlib import Path

from tqchat.models.folder import weight_files

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def fingerprint(path: Path) -> str:
    """A hash that differs between models, of the folder or .gguf file `path`.

    It covers config.json, and of each weight file the size, the time of its last change and 64
    samples spread over it: copies that keep the time, and changes that keep the size, are told
    apart by what they hold. Raises OSError, ModelError.
    """
    files = [path / "config.json", *weight_files(path)] if path.is_dir() else [path]
    digest = hashlib.sha256()
    for name in files:
        with name.open("rb") as file:
            status = os.fstat(file.fileno())
            digest.update(f"{status.st_size} {status.st_mtime_ns}\n".encode())
            for index in range(_SAMPLES):
                file.seek(status.st_size * index // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
