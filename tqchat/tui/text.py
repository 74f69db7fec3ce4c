"""Text from outside (model, clipboard, file names, error messages) made safe to show, and wrapped.

Whatever reaches the terminal goes through `clean` first. A terminal obeys control characters, so
none may get through; invisible format characters can reorder or hide text, so they go as well.
What people write with stays: joiners (emoji, Persian, Indic), variation selectors, tabs, newlines.
"""

import re
import unicodedata

from rich.cells import cell_len, chop_cells

_KEPT_FORMAT = {
    0x200C,  # zero-width non-joiner
    0x200D,  # zero-width joiner
    # Arabic and Syriac signs that are drawn, though Unicode counts them as format characters.
    *range(0x0600, 0x0606),
    0x06DD,
    0x070F,
    0x0890,
    0x0891,
    0x08E2,
    0x110BD,
    0x110CD,
}
_NEWLINES = {0x0B, 0x0C, 0x0D, 0x85, 0x2028, 0x2029}
_REPLACEMENT = "\ufffd"


class _Shown(dict[int, str | None]):
    """What each character is shown as, filled in as characters turn up (for `str.translate`)."""

    def __missing__(self, code: int) -> str | None:
        shown = self[code] = _shown(code)
        return shown


def _shown(code: int) -> str | None:
    if code in (0x09, 0x0A):
        return chr(code)
    if code in _NEWLINES:
        return "\n"
    if code < 0x20:
        return chr(0x2400 + code)  # the control pictures: ESC is shown as ␛
    if code == 0x7F:
        return "\u2421"
    if 0xE0100 <= code <= 0xE01EF:  # variation selectors that only ever hide data in a terminal
        return None
    if code & 0xFFFE == 0xFFFE:
        return _REPLACEMENT
    match unicodedata.category(chr(code)):
        case "Cc" | "Cs":
            return _REPLACEMENT
        case "Cf" if code not in _KEPT_FORMAT:
            return None
    return chr(code)


_SHOWN = _Shown()
_ESCAPE_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor moves
    r"|\x1b[\]PX^_][^\x1b\x07]*(?:\x07|\x1b\\)"  # OSC, DCS and the like, up to their terminator
    r"|\x1b[ -/]*[0-~]"
)


def clean(text: str) -> str:
    """`text` with every character safe to show; works on any cut of a text except inside CR LF.

    All ways to end a line become a newline (form feeds too: text taken from PDFs is full of them).
    """
    if text.isascii() and text.isprintable():
        return text
    return text.replace("\r\n", "\n").translate(_SHOWN)


def clean_line(text: str) -> str:
    """`clean`, on one line: for names and messages that must not take more."""
    return " ".join(clean(text).split())


def clean_paste(text: str) -> str:
    """`clean` for the clipboard: escape sequences (copied terminal colours) go altogether."""
    return clean(_ESCAPE_SEQUENCE.sub("", text.replace("\x00", "")))


# CJK text breaks between any two characters, but a line does not begin with closing punctuation.
_CJK = (
    "\u2e80-\u2fff\u3003-\u3007\u3012-\u9fff\uac00-\ud7af\uf900-\ufaff\uff10-\uff60"
    "\U00020000-\U0003ffff"
)
_CLOSING = (
    "\u3001\u3002\u3009\u300b\u300d\u300f\u3011\u3015\u30fc\uff01\uff09\uff0c\uff0e\uff1a\uff1b"
    "\uff1f\uff5d\uff5e,.!?:;)\\]"
)
_UNIT = re.compile(rf"[{_CJK}][{_CLOSING}]*\s*|[^\s{_CJK}]+[{_CLOSING}]*\s*|\s+")


def wrap_offsets(text: str, width: int) -> list[int]:
    """Where to break one line of text so that each piece fits `width` cells, spaces at ends aside.

    Breaks fall after spaces and between CJK characters; a longer word is folded between
    graphemes. Greedy, so the last piece alone depends on what follows.
    """
    if len(text) <= width and text.isascii():
        return []
    offsets: list[int] = []
    used = 0
    for match in _UNIT.finditer(text):
        unit = match.group()
        word = unit.rstrip()
        word_width = cell_len(word)
        if used + word_width <= width:
            used += cell_len(unit)
        elif word_width <= width:
            if match.start():
                offsets.append(match.start())
            used = cell_len(unit)
        else:
            position = match.start()
            for piece in _fold(unit, width):
                if position:
                    offsets.append(position)
                position += len(piece)
                used = cell_len(piece)
    return offsets


def _fold(word: str, width: int) -> list[str]:
    if word.isascii():
        return [word[at : at + width] for at in range(0, len(word), width)]
    return chop_cells(word, max(width, 2))
