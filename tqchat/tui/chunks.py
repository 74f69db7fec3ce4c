"""Cutting Markdown, as it streams in, into pieces that can be rendered one by one.

A cut never goes through a block, and depends on whole lines already seen, so a text gives the same
pieces however it arrives. Items of a top-level list are pieces of their own: a list of a thousand
items costs as much to stream as a thousand paragraphs.
"""

import re
from copy import copy
from dataclasses import dataclass
from typing import Literal

from tqchat.tui.parser import parser

Kind = Literal["text", "item", "fence", "table", "math", "thought"]

_FENCE = re.compile(r"( {0,3})(`{3,}(?=[^`]*$)|~{3,})")
_ITEM = re.compile(r"( {0,3})([-+*]|(\d{1,9})[.)])( {1,4}(?=\S)|(?=\s|$))")
_RULE = re.compile(r" {0,3}([-_*])[ \t]*(?:\1[ \t]*){2,}$")
# Markers that could still become anything: shown once it is clear what they are.
_UNDECIDED = re.compile(r"\s*(?:[-=+*_#>]{1,3}|\d{1,3}[.)]?|`{1,2}|~{1,2})\s*")
# A formula that begins here and does not end on the same line.
_MATH = re.compile(r" {0,3}(?:(\\\[)|(\$\$))(?!.*(?(1)\\\]|\$\$)\s*$)")
_QUOTE = re.compile(r" {0,3}>")
_HEADING = re.compile(r" {0,3}#{1,6}(\s|$)")
_ENDING = re.compile(rf" {{0,3}}(?:=+|-+)\s*$|{_RULE.pattern}|{_HEADING.pattern}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """`gap`: a blank line goes before it. `number`: of an item in a numbered list, counted from the
    list's first one."""

    text: str
    kind: Kind
    gap: bool = True
    number: int | None = None


def _starts_block(line: str) -> bool:
    return any(start.match(line) for start in (_FENCE, _HEADING, _RULE, _QUOTE, _MATH))


class Splitter:
    def __init__(self) -> None:
        self._partial = ""
        self._lines: list[str] = []
        self._kind: Kind = "text"
        self._gap = False
        self._number: int | None = None
        self._blank = False  # a blank line was just seen
        self._fence = ""  # the marker that opened the fence we are in
        self._math = ""  # what ends the formula we are in
        self._indent = 0  # columns an item's content is indented by
        self._marker = ""  # the last item's bullet, or the delimiter after its number
        self._lazy = False  # the last line goes on with a paragraph it is not marked to be in
        self._started = False
        self._closed: list[Chunk] = []

    def open(self) -> list[Chunk]:
        """What has no end yet, as the chunks it would be if the text ended here."""
        ahead = copy(self)
        ahead._lines = [*self._lines]
        ahead._closed = []
        if _UNDECIDED.fullmatch(self._partial) and not self._fence:
            ahead._partial = ""
        return ahead.finish()

    def feed(self, text: str) -> list[Chunk]:
        """Takes more text and returns the chunks it closed."""
        *whole, self._partial = (self._partial + text).split("\n")
        for line in whole:
            self._line(line)
        return self._take()

    def finish(self) -> list[Chunk]:
        """Closes what is open and returns the chunks left."""
        if self._partial:
            self._line(self._partial)
            self._partial = ""
        self._close()
        return self._take()

    def _take(self) -> list[Chunk]:
        closed, self._closed = self._closed, []
        return closed

    def _close(self) -> None:
        while self._lines and not self._lines[-1].strip() and self._kind != "fence":
            self._lines.pop()
        if self._lines:
            text = "\n".join(self._lines)
            self._closed.append(Chunk(text, self._kind, self._gap, self._number))
        self._lines = []
        self._blank = False

    def _line(self, line: str) -> None:
        if self._fence:
            self._lines.append(line)
            if self._ends_fence(line):
                self._close()
                self._fence = ""
        elif self._math and line.strip():
            self._lines.append(line)
            if line.rstrip().endswith(self._math):
                self._close()
                self._math = ""
        elif not line.strip():
            self._math = ""
            if self._lines:
                self._lines.append(line)
                self._blank = True
        elif self._continues(line):
            self._lines.append(line)
            self._blank = False
        else:
            self._start(line)

    def _ends_fence(self, line: str) -> bool:
        stripped = line.strip()
        return (
            len(line) - len(line.lstrip(" ")) <= 3
            and stripped.startswith(self._fence)
            and not stripped.strip(self._fence[0])
        )

    def _continues(self, line: str) -> bool:
        """Whether the line belongs to the open chunk, so far as can be told without parsing it."""
        if not self._lines:
            return False
        indent = len(line.expandtabs(4)) - len(line.expandtabs(4).lstrip(" "))
        in_quote = bool(_QUOTE.match(self._lines[0]))
        if self._kind == "item" and self._blank and self._is_empty_item():
            return False
        if self._kind == "item" or in_quote:
            if _QUOTE.match(line) if in_quote else indent >= self._indent:
                self._lazy = False
                return not self._blank or not in_quote
            if self._blank or _ITEM.match(line) or _starts_block(line):
                return False
            self._lazy = self._lazy or self._is_lazy(line)
            return self._lazy
        if self._kind == "math" or self._is_complete():
            return False
        if self._blank:
            # Indented code goes on over blank lines.
            return indent >= 4 and self._lines[0].startswith(("    ", "\t"))
        if _RULE.match(line):
            return True  # it may underline a heading
        if (item := _ITEM.match(line)) and item.group(4) and item.group(3) in (None, "1"):
            return False  # the items that may interrupt a paragraph
        return not _starts_block(line)

    def _is_empty_item(self) -> bool:
        """Whether the open item has no text yet: it takes one blank line (its own), not two."""
        item = _ITEM.match(self._lines[0])
        return item is not None and not "\n".join(self._lines)[item.end() :].strip()

    def _is_complete(self) -> bool:
        """Whether the open chunk ends in a heading or a rule, which takes one line."""
        if not _ENDING.match(self._lines[-1]):
            return False
        return parser().parse("\n".join(self._lines))[-1].type in ("heading_close", "hr")

    def _is_lazy(self, line: str) -> bool:
        """Whether a line goes on with a paragraph of the open item or quote, unmarked."""
        tokens = parser().parse("\n".join([*self._lines, line]))
        return tokens[-1].type.endswith(("list_close", "blockquote_close"))

    def _start(self, line: str) -> None:
        previous, blank, marker, number = self._kind, self._blank, self._marker, self._number
        had_lines = bool(self._lines)
        self._close()
        self._gap = self._started
        self._number = None
        self._kind = "text"
        self._lazy = False
        self._lines = [line]
        if fence := _FENCE.match(line):
            self._kind = "fence"
            self._fence = fence.group(2)
        elif math := _MATH.match(line):
            self._kind = "math"
            self._math = "\\]" if math.group(1) else "$$"
        elif (item := _ITEM.match(line)) and not _RULE.match(line):
            self._kind = "item"
            self._marker = item.group(2)[-1]
            self._indent = len(item.group(1)) + len(item.group(2)) + max(len(item.group(4)), 1)
            follows = had_lines and previous == "item" and marker == self._marker
            self._gap = self._started and (blank or not follows)
            if item.group(3):
                counted = number + 1 if follows and number is not None else None
                self._number = int(item.group(3)) if counted is None else counted
        elif line.lstrip().startswith("|"):
            self._kind = "table"
        self._started = True
