"""Where tqchat keeps its files, and how it writes them: private and whole."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from platformdirs import PlatformDirs

_DIRS = PlatformDirs("tqchat", appauthor=False)


def config_dir() -> Path:
    """Themes, written by the user."""
    return private_dir(_DIRS.user_config_path)


def settings_file() -> Path:
    """Settings, written by the user; it need not be there."""
    return _DIRS.user_config_path / "settings.toml"


def cache_dir() -> Path:
    """What can be fetched again."""
    return private_dir(_DIRS.user_cache_path)


def data_dir() -> Path:
    """Conversations."""
    return private_dir(_DIRS.user_data_path)


def state_dir() -> Path:
    """What is remembered from one start to the next."""
    return private_dir(_DIRS.user_state_path)


def state_file(name: str) -> Path:
    """One that need not be there."""
    return _DIRS.user_state_path / name


def log_file() -> Path:
    return state_dir() / "tqchat.log"


def private_dir(path: Path) -> Path:
    """`path`, made for its owner alone if it is missing. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def write_private(path: Path, data: bytes | str) -> None:
    """Write `path` for its owner alone: after a crash it holds the old bytes or the new ones.

    A symbolic link stays one; what it points to is written. Raises OSError.
    """
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """`write_private` for what is written piece by piece."""
    target = Path(os.path.realpath(path))
    private_dir(target.parent)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
