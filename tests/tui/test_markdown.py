"""Markdown in pieces: the same however it arrives, and the same as parsed in one go."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from textual.content import Content

from tqchat.tui.chunks import Splitter
from tqchat.tui.entries import Answer
from tqchat.tui.markdown import Table, render
from tqchat.tui.rows import Code, Row, rows_of
from tqchat.tui.text import clean

LINES = st.sampled_from(
    [
        "",
        "",
        "Some **bold** and *it* text",
        "more `code` here",
        "# Title",
        "### Smaller",
        "- one",
        "- two",
        "* star",
        "  - nested",
        "  continued",
        "   deeper",
        "1. first",
        "2. second",
        "7) other",
        "    indented code",
        "```python",
        "```",
        "~~~",
        "  ```",
        "> quote",
        "> - in quote",
        "| a | b |",
        "|---|--:|",
        "| 1 | 2 |",
        "---",
        "===",
        "***",
        "<b>html</b>",
        "[x]: http://a.b",
        "-",
        "1.",
        "text\twith\ttabs",
        "\u4e16\u754c\U0001f44d\u200d",
    ]
)
DOCUMENTS = st.lists(LINES, max_size=14).map("\n".join)


def shown(rows: Sequence[Row]) -> list[tuple[object, ...]]:
    return [(r.content.plain, r.content.spans, r.joint, r.skip, r.fill) for r in rows]


def leaves(text: str) -> list[tuple[str, str]]:
    """What a reader sees of a document: kind and text of every leaf block."""
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.disable(["reference", "html_block", "html_inline"])
    kinds = ("inline", "fence", "code_block", "hr")
    return [(t.type, t.content.rstrip()) for t in parser.parse(text) if t.type in kinds]


@given(DOCUMENTS, st.data())
@example("a\r\nb\r\n\r\n- c\r\n", None)
def test_streamed_equals_rendered_at_once(text: str, data: st.DataObject | None) -> None:
    whole, streamed = Answer(), Answer()
    whole.feed(text)
    whole.finish("")
    position = 0
    while position < len(text):
        step = data.draw(st.integers(1, 9)) if data else 1
        streamed.feed(text[position : position + step])
        streamed.rows(40)
        position += step
    streamed.finish("")
    assert shown(streamed.rows(40)) == shown(whole.rows(40))
    assert streamed.text == text


@given(DOCUMENTS)
@example("-\n\n  continued\n2. second")
def test_cuts_do_not_change_what_is_read(text: str) -> None:
    splitter = Splitter()
    chunks = [*splitter.feed(text), *splitter.finish()]
    assert [leaf for chunk in chunks for leaf in leaves(chunk.text)] == leaves(text)


@given(DOCUMENTS)
def test_open_text_is_shown_as_it_comes(text: str) -> None:
    """Before the end is known, every word that came is on the screen (bar a marker at the end)."""
    answer = Answer()
    answer.feed(text)
    seen = "".join(row.content.plain for row in answer.rows(500))
    for word in ("bold", "code", "Title", "nested", "second", "quote"):
        assert seen.count(word) >= text.count(word)


@given(st.text(max_size=300), st.integers(8, 60))
def test_any_text_renders_within_the_width(text: str, width: int) -> None:
    for row in rows_of(render(clean(text)), width):
        assert row.content.cell_length <= max(width, 12)


def plain(text: str, width: int = 60) -> list[str]:
    return [row.content.plain.rstrip() for row in rows_of(render(text), width)]


def test_list_items_keep_their_numbers_across_pieces() -> None:
    assert plain("1. a\n1. b\n1. c") == ["1. a", "2. b", "3. c"]
    assert plain("3. a\n\n4. b") == ["3. a", "", "4. b"]


def test_list_wraps_under_its_text() -> None:
    assert plain("- aa bb cc dd", 10) == ["\u2022 aa bb cc", "  dd"]


def test_an_item_goes_on_after_a_blank_line_once_it_has_text() -> None:
    assert plain("-\n  one\n\n  two") == ["\u2022 one", "", "  two"]
    assert plain("-\n\n  one") == ["\u2022", "", "one"]


def test_code_keeps_its_lines_and_shows_its_language() -> None:
    assert plain("```py\nif x:\n    y\n\nz\n```") == ["  py", "  if x:", "      y", "", "  z"]


def test_lines_of_a_paragraph_stay_lines_with_their_indent() -> None:
    assert plain("def f(x):\n    return **x**  \nend") == ["def f(x):", "    return x", "end"]


def test_table_columns_line_up() -> None:
    assert plain("| a | bb |\n|---|---:|\n| ccc | d |") == [
        "a    bb",
        "\u2500\u2500\u2500  \u2500\u2500",
        "ccc   d",
    ]


def test_wide_table_fits_and_loses_nothing() -> None:
    cells = [[Content("word " * 20)] * 3]
    table = Table([Content("one"), Content("two"), Content("three")], cells, [False] * 3)
    rows = table.rows(40)
    assert max(row.content.cell_length for row in rows) <= 40
    assert sum(row.content.plain.count("word") for row in rows) == 60
    assert sum(row.content.plain.count("word") for row in table.rows(9)) == 60


def test_markup_is_text() -> None:
    assert plain("[bold red]x[/] and [@click=app.quit]y[/]") == [
        "[bold red]x[/] and [@click=app.quit]y[/]"
    ]


def test_link_shows_where_it_leads() -> None:
    assert plain("[here](http://evil.example)") == ["here (http://evil.example)"]


@pytest.mark.parametrize("entity", ["&#27;[31m", "&#x202e;x", "&#x9b;31m"])
def test_entities_cannot_smuggle_control_characters(entity: str) -> None:
    text = "".join(plain(f"a {entity} b"))
    assert clean(text) == text


def test_an_endless_list_streams_at_a_bounded_cost() -> None:
    """Each item is closed by the next one, so what is rendered again stays small."""
    splitter = Splitter()
    for number in range(1000):
        splitter.feed(f"- item {number}\n")
        assert sum(len(chunk.text) for chunk in splitter.open()) < 40


FORMULAS = [
    r"the sum \(a_1 * b_2 * c_3\) is \[x\] and $E = m c^2$, $$\frac{a}{b}$$",
    "\\[\n- a_1 \\\\\n= b_2\n\\]",
    "$$\n\\begin{aligned}\nx &= 1 \\\\\n---\n\\end{aligned}\n$$",
]


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_stay_as_they_are_written(text: str) -> None:
    assert plain(text, 200) == text.split("\n")
    assert plain(f"Before\n{text}\n\n*after*", 200)[-1] == "after"


def test_dollars_are_not_all_formulas() -> None:
    assert plain("It costs $5 or *more* than $6.") == ["It costs $5 or more than $6."]
    assert plain("$$\nnever closed\n\n- an item") == ["$$", "never closed", "", "\u2022 an item"]


def test_a_block_of_code_can_be_copied() -> None:
    rows = rows_of(render("- see\n\n  ```py\n  x = 1\n\n  y\n  ```"), 30)
    (label,) = [row for row in rows if row.target is not None]
    assert label.target == Code("py", "x = 1\n\ny")
    assert label.tail.plain == "copy  "
