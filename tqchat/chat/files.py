"""A model's small text files, which come from strangers."""

import json
import stat
from pathlib import Path
from typing import Any

from tqchat.chat.errors import ChatError


def read_text(path: Path) -> str | None:
    """A UTF-8 file without its byte order mark, or None if there is none. Raises ChatError."""
    try:
        # A pipe or a device would wait or act when it is opened.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ChatError(f"{path} is not a regular file, so it is not read.")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise ChatError(f"{path} is not text in UTF-8: fetch the model again.") from None
    except OSError as error:
        raise ChatError(f"{path} cannot be read: {error.strerror}.") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file. Raises ChatError."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ChatError(f"{path} does not hold a JSON object: fetch the model again.")
    return value
