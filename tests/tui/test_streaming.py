"""What it costs to draw an answer that grows: counted in work done, not in time."""

from collections.abc import Iterator

import pytest
from rich.cells import cell_len
from textual.content import Content

from tqchat.tui import entries, markdown
from tqchat.tui.chunks import Chunk
from tqchat.tui.entries import Answer
from tqchat.tui.rows import Block, Line, Row

WIDTH = 80
LONG = {
    "fence": [
        "```python\n",
        *(f"value_{n} = f({n}, 'text')  # note\n" for n in range(300)),
        "```\n",
    ],
    "table": ["| a | b |\n|---|---|\n", *(f"| cell {n} | *text* {n} |\n" for n in range(200))],
    "list": [f"- item {n} has **some** words\n" for n in range(1000)],
    "paragraphs": [f"Paragraph {n} has *some* words.\n\n" for n in range(1000)],
    "line": [f"word{n} " for n in range(5000)],
    "thought": ["<think>\n", *(f"A thought of number {n}.\n" for n in range(500))],
}


class Work:
    """How many rows were made of lines, and how many characters were parsed as Markdown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = self.parsed = 0
        rows, chunk = Line.rows, markdown.render_chunk

        def count_rows(line: Line, width: int) -> list[Row]:
            made = rows(line, width)
            self.rows += len(made)
            return made

        def count_parsed(one: Chunk) -> list[Block]:
            self.parsed += len(one.text)
            return chunk(one)

        monkeypatch.setattr(Line, "rows", count_rows)
        monkeypatch.setattr(entries, "render_chunk", count_parsed)

    def take(self) -> tuple[int, int]:
        done = self.rows, self.parsed
        self.rows = self.parsed = 0
        return done


def stream(kind: str, work: Work) -> Iterator[tuple[int, int]]:
    """The work of each line that streams in."""
    answer = Answer()
    for piece in LONG[kind]:
        answer.feed(piece)
        if answer.thought is not None:
            answer.thought.folded = False
        answer.rows(WIDTH)
        yield work.take()


@pytest.mark.parametrize("kind", LONG)
def test_a_line_costs_the_same_however_long_the_block(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    work = Work(monkeypatch)
    costs = list(stream(kind, work))
    # A block that ends is rendered once, whole.
    closing = 1 if kind == "fence" else 0
    steps = costs[: len(costs) - closing]
    most_rows = max(rows for rows, _ in steps)
    most_parsed = max(parsed for _, parsed in steps)
    assert most_rows <= 2_000 // WIDTH * 2
    assert most_parsed <= 2 * 2_000
    middle, end = steps[len(steps) // 2], steps[-1]
    assert end[0] <= max(middle[0], 4)
    assert sum(rows for rows, _ in costs) < 30 * len(costs)


def test_a_very_long_line_wraps_as_it_would_at_once() -> None:
    text = " ".join(["word", "longer_words", "\u4e16\u754c", "x" * 200] * 200)
    grown = Answer()
    for at in range(0, len(text), 37):
        grown.feed(text[at : at + 37])
        rows = grown.rows(WIDTH)
    once = Line(Content(text)).rows(WIDTH)
    assert [row.content.plain for row in rows] == [row.content.plain for row in once]
    assert [row.joint for row in rows] == [row.joint for row in once]
    assert max(cell_len(row.content.plain) for row in rows) <= WIDTH
