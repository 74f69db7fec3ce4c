"""A terminal without Unicode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.tui.conftest import chat
from tests.tui.fake_engine import FakeEngine
from tqchat.tui.ascii import has_unicode, to_ascii
from tqchat.tui.text import clean


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({"LANG": "C"}, False),
        ({"LANG": "POSIX"}, False),
        ({"LANG": "en_US.ISO-8859-1"}, False),
        ({"LANG": "en_US.UTF-8"}, True),
        ({"LANG": "C.utf8"}, True),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "C"}, False),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, True),
    ],
)
def test_the_locale_says(environment: dict[str, str], expected: bool) -> None:
    assert has_unicode(environment) == expected


@given(st.text())
def test_cells_stay_where_they_are(text: str) -> None:
    text = clean(text).replace("\n", " ").replace("\t", " ")
    made = to_ascii(text)
    assert made.isascii()
    assert len(made) == sum(map(cell_len, text))


def test_letters_stay_readable() -> None:
    assert to_ascii("Café, naïve — “No” 世界") == 'Cafe, naive - "No" ????'


async def test_the_screen_is_in_ascii(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    async with chat(engine, size=(120, 40)) as screen:
        await screen.exchange("Où?", "- À *Paris*\n\n```py\nx = 1\n```")
        await screen.shows("| Ou?", "* A Paris", "x = 1", "+---", "tok/s")
        assert screen.screen_text.isascii()
