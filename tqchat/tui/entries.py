"""The entries of a conversation on screen: each turns itself into rows for a width."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from textual.content import Content

from tqchat.tui.channels import Channel, Channels
from tqchat.tui.chunks import Chunk, Splitter
from tqchat.tui.markdown import CODE_FILL, code_line, render_chunk
from tqchat.tui.rows import EMPTY, Block, Line, Row, lines, rows_of
from tqchat.tui.text import clean, clean_line

_LONGEST_LIVE = 2_000
"""Characters of an unfinished paragraph that are still rendered again as each word comes in."""
_THOUGHT_BAR = Content.styled("│ ", "$rule")


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
    """The model's answer as it streams in. What it thinks before it answers is kept apart."""

    def __init__(self) -> None:
        self.thought: Thought | None = None
        self._text: list[str] = []
        self._held = ""
        self._channels = Channels()
        self._body = _Markdown()
        self._rows: list[Row] = []
        self._width = 0
        self._n_above = 0
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
        self._take(self._channels.feed(clean(text.removesuffix(self._held))))

    def finish(self, footer: str, style: str = "$text-muted") -> None:
        """The answer has ended; `footer` is a line about it."""
        self._held = ""
        self._take(self._channels.finish())
        if self.thought is not None:
            self.thought.ended = True
        self._body.finish()
        gap = [Line(EMPTY)] if self._body else []
        self._footer = [*gap, *lines(clean(footer), style)] if footer else []

    def _take(self, pieces: Sequence[tuple[Channel, str]]) -> None:
        for channel, text in pieces:
            if channel == "thought":
                self.thought = self.thought or Thought()
                self.thought.feed(text)
            else:
                if self.thought is not None:
                    self.thought.ended = True
                self._body.feed(text)

    def rows(self, width: int) -> Sequence[Row]:
        """The same list as before, with what has changed since."""
        above = [] if self.thought is None else self.thought.rows(width)
        if above and self._body:
            above = [*above, Row(EMPTY)]
        kept = self._body.n_kept if (width, len(above)) == (self._width, self._n_above) else 0
        self._width, self._n_above = width, len(above)
        self._rows[: len(above)] = above
        del self._rows[len(above) + kept :]
        self._rows += self._body.rows(width, kept)
        self._rows += rows_of(self._footer, width)
        return self._rows


class Thought:
    """What a model thinks before it answers: one line until the reader opens it."""

    def __init__(self) -> None:
        self.folded = True
        self.ended = False
        self._text = ""
        self._n_words = 0
        self._open = _Growing()
        self._width = 0

    def feed(self, text: str) -> None:
        goes_on_with_a_word = bool(text[:1].strip() and self._text[-1:].strip())
        self._n_words += len(text.split()) - goes_on_with_a_word
        self._text += text

    def rows(self, width: int) -> list[Row]:
        mark, what = "▸" if self.folded else "▾", "Thought" if self.ended else "Thinking"
        way = "opens" if self.folded else "folds"
        label = f"{mark} {what} · {self._n_words:,} words · Ctrl-T {way}"
        made = Line(Content.styled(label, "$text-muted")).rows(width)
        made = [replace(row, target=self) for row in made]
        if self.folded:
            return made
        if width != self._width:
            self._width, self._open = width, _Growing()
        chunk = Chunk(self._text.strip("\n"), "thought", gap=False)
        return made + self._open.rows(chunk, width)


class _Markdown:
    """Closed pieces of Markdown are rendered once, the open one is kept plain and light, so that a
    token costs the same however long the text is."""

    def __init__(self) -> None:
        self._splitter = Splitter()
        self._closed: list[Block] = []
        self._width = 0
        self._open = _Growing()
        # Rows of what is closed that were given out, and those that were not yet.
        self.n_kept = 0
        self._new: list[Row] = []
        self._empty = True

    def __bool__(self) -> bool:
        return not self._empty

    def feed(self, text: str) -> None:
        self._empty = self._empty and not text.strip()
        self._add(self._splitter.feed(text))

    def finish(self) -> None:
        self._add(self._splitter.finish())

    def _add(self, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        self._open = _Growing()
        for chunk in chunks:
            blocks = render_chunk(chunk)
            self._closed += blocks
            if self._width:
                self._new += rows_of(blocks, self._width)

    def rows(self, width: int, kept: int) -> list[Row]:
        """All rows but the first `kept`: n_kept as it was, if they are still known, or none."""
        if (width, kept) != (self._width, self.n_kept):
            self._width = width
            self._open = _Growing()
            self._new = rows_of(self._closed, width)
            self.n_kept = 0
        made, self._new = self._new, []
        self.n_kept += len(made)
        for chunk in self._splitter.open():
            if chunk.kind in ("text", "item") and len(chunk.text) <= _LONGEST_LIVE:
                made = made + rows_of(render_chunk(chunk), width)
            else:
                made = made + self._open.rows(chunk, width)
        return made


class _Growing:
    """The rows of one chunk that grows, plain: lines that are whole are not looked at again, nor
    what of a long line can change no more."""

    def __init__(self) -> None:
        self._kept: list[Row] = []
        self._n_lines = 0
        self._start = 0
        self._joint = "\n"

    def rows(self, chunk: Chunk, width: int) -> list[Row]:
        whole = chunk.text.split("\n")
        last = whole.pop()
        if not self._kept and chunk.gap:
            self._kept = rows_of([Line(EMPTY)], width)
        for text in whole[self._n_lines :]:
            self._kept += self._line(chunk, text, width)
            self._n_lines += 1
            self._start, self._joint = 0, "\n"
        rows = self._line(chunk, last, width)
        # Only the last break of a line may still move.
        for row, following in pairwise(rows[:-1]):
            self._kept.append(row)
            self._start += len(row.content.plain) - row.skip + len(following.joint)
            self._joint = following.joint
        return self._kept + rows[-2:]

    def _line(self, chunk: Chunk, text: str, width: int) -> list[Row]:
        if chunk.kind == "fence" and not self._n_lines:
            language = clean_line(text.lstrip(" `~")).split(" ")[0]
            return code_line(Content.styled(language, f"$text-muted {CODE_FILL}")).rows(width)
        body = text.expandtabs(4)[self._start :]
        match chunk.kind:
            case "fence":
                line = code_line(Content.styled(body, CODE_FILL))
            case "thought":
                line = Line(Content.styled(body, "$text-muted"), _THOUGHT_BAR, _THOUGHT_BAR)
            case _:
                line = Line(Content(body))
        first, *others = line.rows(width)
        return [replace(first, joint=self._joint), *others]
