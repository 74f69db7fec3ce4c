"""Files as text for the model."""

import codecs
import os
import stat
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqchat.chat.errors import ChatError

LARGEST_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20

_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    # UTF-32's mark begins with UTF-16's.
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_ALLOWED_CONTROLS = "\t\n\r\f\v\x1b\x85"


@dataclass(frozen=True, slots=True)
class Document:
    """`note` says what was guessed about the file, or is empty."""

    name: str
    text: str
    note: str = ""


def read_document(path: Path) -> Document:
    """The text of a file, as `decode` does. Raises ChatError, also for what cannot be read."""
    return decode(path.name, str(path), _bytes(path))


def decode(name: str, where: str, data: bytes) -> Document:
    """A file's text; `where` names it in errors. Raises ChatError: too large, binary, no text.

    UTF-8, UTF-16 and UTF-32 with a byte order mark, PDF where pypdf is installed; what is none of
    these but looks like text is taken as Windows-1252, the common superset of Latin-1.
    """
    if len(data) > LARGEST_BYTES:
        raise ChatError(f"{where} is larger than {LARGEST_BYTES >> 20} MiB: give a part of it.")
    if data.startswith(b"%PDF-"):
        return Document(name, _pdf_text(where, data))
    encoding = next((name for mark, name in _BOMS if data.startswith(mark)), "utf-8")
    note = ""
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        if encoding != "utf-8":
            raise ChatError(f"{where} begins as {encoding.upper()} text but is not.") from None
        # Five bytes have no meaning in Windows-1252; in text they do not occur.
        text = data.decode("cp1252", errors="replace")
        note = f"{name} is not UTF-8: read as Windows-1252 (Latin-1)."
    if _looks_binary(text):
        raise ChatError(f"{where} is a binary file: give a text file.")
    return Document(name, text.removeprefix("\ufeff"), note)


def with_documents(question: str, documents: Sequence[Document]) -> str:
    """One message of the documents, each under its name, and the question after them."""
    parts = [f"{document.name}:\n\n{document.text.rstrip()}" for document in documents]
    return "\n\n".join([*parts, question] if question else parts)


def _bytes(path: Path) -> bytes:
    """Up to one byte more than is allowed, without ever waiting for one to come."""
    parts: list[bytes] = []
    left = LARGEST_BYTES + 1
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                raise ChatError(f"{path} is a folder: name a file in it.")
            if not stat.S_ISREG(mode):
                raise ChatError(f"{path} is no regular file: give one that is, or pipe it in.")
            while left and (part := os.read(descriptor, min(left, _PIECE_BYTES))):
                parts.append(part)
                left -= len(part)
        finally:
            os.close(descriptor)
    except BlockingIOError:
        raise ChatError(f"{path} has no end: give a file with a part of it.") from None
    except OSError as error:
        raise ChatError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise ChatError(f"{str(path)!r} is not a file name.") from None
    return b"".join(parts)


def _looks_binary(text: str) -> bool:
    """NULs, or more control characters and undecodable bytes than a text would have."""
    if "\0" in text:
        return True
    start = text[:100_000]
    odd = sum(
        character == "\ufffd"
        or (unicodedata.category(character) == "Cc" and character not in _ALLOWED_CONTROLS)
        for character in start
    )
    return odd * 50 > len(start)


def _pdf_text(where: str, data: bytes) -> str:
    try:
        import pypdf
    except ImportError:
        raise ChatError(
            f"{where} is a PDF: install 'tqchat[pdf]' to read it, or convert it to text."
        ) from None
    import io
    import logging

    logging.getLogger("pypdf").setLevel(logging.ERROR)
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        text = "\n\n".join(page.extract_text() for page in reader.pages)
    except Exception as error:
        # What pypdf raises for a damaged file is of many kinds.
        raise ChatError(f"{where} is a PDF that cannot be read ({error}).") from None
    if not text.strip():
        raise ChatError(f"{where} is a PDF without text, perhaps a scan: convert it to text.")
    return text
