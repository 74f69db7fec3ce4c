"""For terminals without Unicode: everything drawn in ASCII, cell by cell."""

import os
import unicodedata
from collections.abc import Mapping

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

_DRAWN = {
    **dict.fromkeys("─━▁⎯▔", "-"),
    **dict.fromkeys("│▏▎▌┃▐▕", "|"),
    **dict.fromkeys("╭╮╰╯┌┐└┘", "+"),
    **dict.fromkeys("●■•◦▪", "*"),
    **dict.fromkeys("▂▃", "."),
    **dict.fromkeys("▄▅", "o"),
    **dict.fromkeys("▆▇█", "#"),
    **dict.fromkeys("⠋⠙⠸⠴⠦⠇", "~"),
    "·": "-",
    "✗": "x",
    "…": ".",
    "▸": ">",
    "▾": "v",
    "↑": "^",
    "↓": "v",
    "≈": "~",
    "–": "-",  # noqa: RUF001
    "—": "-",
    "‘": "'",  # noqa: RUF001
    "’": "'",  # noqa: RUF001
    "“": '"',
    "”": '"',
}


def has_unicode(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the locale has it. One that is not set says nothing: most terminals do."""
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        if locale := environment.get(name):
            return "utf8" in locale.lower().replace("-", "")
    return True


def to_ascii(text: str) -> str:
    """As many cells wide as `text`: letters without accents, "?" for what has no likeness."""
    return text if text.isascii() else "".join(map(_likeness, text))


def _likeness(character: str) -> str:
    if character.isascii():
        return character
    if found := _DRAWN.get(character):
        return found
    letter = unicodedata.normalize("NFKD", character)[0]
    width = cell_len(character)
    return letter if letter.isascii() and width == 1 else "?" * width


class AsciiFilter(LineFilter):
    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(to_ascii(text), style, control) for text, style, control in segments]
