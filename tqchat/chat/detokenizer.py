"""From token ids back to text, one token at a time."""

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from tqchat.chat.errors import ChatError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary, as GPT-2 chose them.

    Printable Latin-1 characters stand for their own byte; the bytes left over take the characters
    from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


@dataclass(frozen=True)
class Spelling:
    """How a vocabulary's pieces spell text: what tokenizer.json calls its decoder."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip_first_space: bool = False

    @classmethod
    def from_json(cls, decoder: Any) -> Self:
        """Raises ChatError for a decoder that is not of byte-level or SentencePiece BPE."""
        byte_level = byte_fallback = strip_first_space = False
        replacements = []
        steps = [decoder] if decoder is not None else []
        while steps:
            match steps.pop(0):
                case {"type": "Sequence", "decoders": list(inner)}:
                    steps[:0] = inner
                case {"type": "ByteLevel"}:
                    byte_level = True
                case {"type": "ByteFallback"}:
                    byte_fallback = True
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    replacements.append((old, new))
                case {"type": "Metaspace", "replacement": str(old), **options}:
                    replacements.append((old, " "))
                    strip_first_space = options.get("prepend_scheme") != "never"
                case {"type": "Strip", "content": " ", "start": int(start)}:
                    strip_first_space = start > 0
                case {"type": "Fuse"}:
                    pass
                case step:
                    kind = step.get("type") if isinstance(step, dict) else step
                    raise ChatError(
                        f"tokenizer.json asks for a decoder {kind!r}, which tqchat does not have: "
                        "use another model."
                    )
        return cls(byte_level, byte_fallback, tuple(replacements), strip_first_space)

    def bytes_of(self, piece: str) -> bytes:
        """The UTF-8 that one piece of the vocabulary stands for, maybe part of a character."""
        if self.byte_level and all(c in _BYTE_LEVEL for c in piece):
            return bytes(_BYTE_LEVEL[c] for c in piece)
        if self.byte_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        return self.bytes_of_added(piece)

    def bytes_of_added(self, token: str) -> bytes:
        """The same for an added token, which is spelled in text and not in bytes."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


class Detokenizer:
    """Text from token ids as they come, whole characters only."""

    def __init__(self, bytes_of: Callable[[int], bytes], strip_first_space: bool) -> None:
        self._bytes_of = bytes_of
        self._strip = strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """The text that is now complete. A character whose bytes are not all there waits."""
        piece = self._bytes_of(token)
        if self._strip and piece:
            piece = piece.removeprefix(b" ")
            self._strip = False
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What still waits: "", or U+FFFD for a character that never became whole."""
        return self._decoder.decode(b"", final=True)
