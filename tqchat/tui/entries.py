"""The entries of a conversation on screen: each turns itself into rows for a width."""

from collections.abc import Sequence
from typing import Protocol

from textual.content import Content

from tqchat.tui.chunks import Chunk, Splitter
from tqchat.tui.markdown import code_label, code_line, render_chunk
from tqchat.tui.rows import EMPTY, Block, Line, Row, lines, rows_of
from tqchat.tui.text import clean, clean_line

_LONGEST_LIVE = 2_000
"""Characters of an unfinished paragraph that are still rendered again as each word comes in."""


class Entry(Protocol):
    def rows(self, width: int) -> Sequence[Row]: ...


class Fixed:
    """An entry made once; its rows are kept for the last width asked for."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._width = 0
        self._rows: list[Row] = []

    def rows(self, width: int) -> Sequence[Row]:
        if width != self._width:
            self._width = width
            self._rows = rows_of(self._blocks, width)
        return self._rows


_USER_FILL = "on $user"
_USER_BAR = Content.styled("▌ ", f"$primary {_USER_FILL}")


class Question(Fixed):
    """What the person said, exactly as typed."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(self._lines(""))

    def waiting(self, note: str) -> None:
        """Says why the message is not answered yet; an empty note ends the wait."""
        self._blocks = self._lines(note)
        self._width = 0

    def _lines(self, note: str) -> list[Line]:
        made = lines(clean(self.text), _USER_FILL, _USER_BAR, _USER_BAR, _USER_FILL)
        if note:
            made += lines(note, f"$text-muted {_USER_FILL}", _USER_BAR, _USER_BAR, _USER_FILL)
        return made


class Notice(Fixed):
    """A line or more from the program itself. `mark` and `style` say of what kind."""

    def __init__(self, text: str, mark: str = "·", style: str = "$text-muted") -> None:
        first = Content.styled(f"{mark} ", style)
        super().__init__(lines(clean(text), style, first, Content("  ")))


class Fault(Notice):
    """Something went wrong; the text says what to do next."""

    def __init__(self, text: str) -> None:
        super().__init__(text, "✗", "$error")


class Listing(Fixed):
    """Two columns: a name and what it means."""

    def __init__(self, title: str, pairs: Sequence[tuple[str, str]]) -> None:
        width = max(len(name) for name, _ in pairs) + 3
        blocks: list[Block] = [Line(Content.styled(title, "bold $text-muted")), Line(EMPTY)]
        for name, meaning in pairs:
            first = Content.styled(name.ljust(width), "$primary")
            blocks.append(Line(Content.styled(meaning, "$text-muted"), first, Content(" " * width)))
        super().__init__(blocks)


class Answer:
    """The model's answer as it streams in: closed pieces of Markdown are rendered once, the open
    one is kept plain and light, so that a token costs the same however long the answer is."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._splitter = Splitter()
        self._held = ""
        self._closed: list[Block] = []
        self._closed_rows: list[Row] = []
        self._width = 0
        self._open = _Growing()
        self._rows: list[Row] | None = None
        self._footer: list[Line] = []

    @property
    def text(self) -> str:
        """The answer so far, as the model wrote it."""
        return "".join(self._text)

    def feed(self, text: str) -> None:
        self._text.append(text)
        text = self._held + text
        # CR LF may be cut between its two characters.
        self._held = "\r" if text.endswith("\r") else ""
        self._add(self._splitter.feed(clean(text.removesuffix(self._held))))

    def finish(self, footer: str, style: str = "$text-muted") -> None:
        """The answer has ended; `footer` is a line about it."""
        self._held = ""
        self._add(self._splitter.finish())
        gap = [Line(EMPTY)] if self._closed else []
        self._footer = [*gap, *lines(clean(footer), style)] if footer else []

    def _add(self, chunks: Sequence[Chunk]) -> None:
        self._rows = None
        if not chunks:
            return
        self._open = _Growing()
        for chunk in chunks:
            blocks = render_chunk(chunk)
            self._closed += blocks
            if self._width:
                self._closed_rows += rows_of(blocks, self._width)

    def rows(self, width: int) -> Sequence[Row]:
        if width != self._width:
            self._width = width
            self._closed_rows = rows_of(self._closed, width)
            self._open = _Growing()
            self._rows = None
        if self._rows is None:
            made = list(self._closed_rows)
            for chunk in self._splitter.open():
                if chunk.kind in ("text", "item") and len(chunk.text) <= _LONGEST_LIVE:
                    made += rows_of(render_chunk(chunk), width)
                else:
                    made += self._open.rows(chunk, width)
            self._rows = made + rows_of(self._footer, width)
        return self._rows


class _Growing:
    """The rows of one chunk that grows: lines that are whole are not looked at again."""

    def __init__(self) -> None:
        self._kept: list[Row] = []
        self._done = 0

    def rows(self, chunk: Chunk, width: int) -> list[Row]:
        whole = chunk.text.split("\n")
        last = whole.pop()
        if not self._done and chunk.gap:
            self._kept = rows_of([Line(EMPTY)], width)
        for number in range(self._done, len(whole)):
            self._kept += self._line(chunk, number, whole[number], width)
        self._done = len(whole)
        return self._kept + self._line(chunk, len(whole), last, width)

    def _line(self, chunk: Chunk, number: int, text: str, width: int) -> list[Row]:
        if chunk.kind != "fence":
            return Line(Content(text)).rows(width)
        if number:
            return code_line(Content.styled(text, "on $code")).rows(width)
        language = clean_line(text.lstrip(" `~")).split(" ")[0]
        return code_label(language).rows(width) if language else []
