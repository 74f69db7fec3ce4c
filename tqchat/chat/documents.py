"""Files as text for the model."""

from collections.abc import Sequence
from pathlib import Path

from tqchat.chat.errors import ChatError


def read_document(path: Path) -> str:
    """The text of a UTF-8 file (or UTF-16 with a byte order mark). Raises ChatError."""
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        raise ChatError(f"{path} is a folder: name a file in it.") from None
    except OSError as error:
        raise ChatError(f"{path} cannot be read: {error.strerror}.") from None
    utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        text = data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        raise ChatError(f"{path} is not text in UTF-8: convert it first.") from None
    if "\0" in text:
        raise ChatError(f"{path} is a binary file: give a text file.")
    return text


def with_documents(question: str, documents: Sequence[tuple[str, str]]) -> str:
    """One message of named documents, (name, text) each, and the question after them."""
    parts = [f"{name}:\n\n{text.rstrip()}" for name, text in documents]
    return "\n\n".join([*parts, question] if question else parts)
