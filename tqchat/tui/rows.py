"""What the conversation is made of: lines of styled text that become rows at a given width.

A row is exactly one line of the screen. Rows remember how they were joined in the text they come
from, so that copying them gives that text back, without the margins drawn and the breaks added.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from textual.content import Content

from tqchat.tui.text import wrap_offsets

EMPTY = Content("")
_LEAST_ROOM = 8
"""Cells for a text itself, however deep it is nested."""


def _within(margin: Content, width: int) -> Content:
    most = max(width - _LEAST_ROOM, 0)
    return margin if margin.cell_length <= most else margin[:most]


@dataclass(frozen=True, slots=True)
class Code:
    """A block of code, as it is copied."""

    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """`joint` stood between this row and the one before it; `skip` leading characters are drawn
    but not part of the text; `fill` is the style of the row's unused right side, at whose end
    `tail` stands, no part of the text either. `target` is what a click on the row is meant for."""

    content: Content
    joint: str = "\n"
    skip: int = 0
    fill: str = ""
    tail: Content = EMPTY
    target: object = None


class Block(Protocol):
    """Something that takes rows: how many depends on the width."""

    def rows(self, width: int) -> list[Row]: ...


@dataclass(frozen=True, slots=True)
class Line:
    """One line of text, wrapped with a hanging indent: `first` before its first row, `rest` before
    the others."""

    body: Content
    first: Content = EMPTY
    rest: Content = EMPTY
    fill: str = ""

    def rows(self, width: int) -> list[Row]:
        first, rest = _within(self.first, width), _within(self.rest, width)
        room = width - max(first.cell_length, rest.cell_length)
        body = self.body.expand_tabs(4)
        pieces = body.divide(wrap_offsets(body.plain, room))
        rows: list[Row] = []
        joint = "\n"
        for number, piece in enumerate(pieces):
            margin = rest if number else first
            # A row that broke at a space ends in it; the text that it came from keeps it.
            text = piece.plain
            end = len(text.rstrip()) if number < len(pieces) - 1 else len(text)
            content = piece if end == len(text) else piece[:end]
            rows.append(Row(margin + content if margin else content, joint, len(margin), self.fill))
            joint = text[end:]
        return rows


@dataclass(frozen=True, slots=True)
class Label:
    """The line over a block of code: its language, and at the right what a click does."""

    code: Code
    margin: Content
    fill: str

    def rows(self, width: int) -> list[Row]:
        tail = Content.styled("copy  ", f"$text-muted {self.fill}")
        margin = _within(self.margin, width)
        room = max(width - margin.cell_length - tail.cell_length - 1, 0)
        language = Content(self.code.language).truncate(room, ellipsis=True)
        content = margin + language.stylize(f"$text-muted {self.fill}")
        return [Row(content, "\n", len(margin), self.fill, tail, self.code)]


@dataclass(frozen=True, slots=True)
class Rule:
    """A horizontal line."""

    margin: Content = EMPTY

    def rows(self, width: int) -> list[Row]:
        margin = _within(self.margin, width)
        line = Content.styled("─" * (width - margin.cell_length), "$rule")
        return [Row(margin + line, skip=len(margin))]


def lines(
    text: str, style: str = "", first: Content = EMPTY, rest: Content = EMPTY, fill: str = ""
) -> list[Line]:
    """Plain text as lines, all in one style. `first` is the margin of the very first row."""
    return [
        Line(
            Content.styled(line, style) if style else Content(line),
            rest if n else first,
            rest,
            fill,
        )
        for n, line in enumerate(text.split("\n"))
    ]


def rows_of(blocks: Iterable[Block], width: int) -> list[Row]:
    return [row for block in blocks for row in block.rows(width)]
