"""Text from outside, made safe and wrapped."""

import re
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tqchat.tui.text import clean, clean_line, clean_paste, wrap_offsets

HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f\u2028]")


@given(st.text(st.characters()))
def test_no_harmful_character_survives(text: str) -> None:
    shown = clean(text)
    assert not HARMFUL.search(shown)
    shown.encode()  # no lone surrogate


def test_every_unicode_control_is_shown_or_dropped() -> None:
    for code in range(0x110000):
        shown = clean(chr(code))
        assert all(unicodedata.category(c) not in ("Cc", "Cs") or c in "\n\t" for c in shown), hex(
            code
        )


@pytest.mark.parametrize(
    "text",
    [
        "\U0001f469\u200d\U0001f469\u200d\U0001f467 family",
        "\u2764\ufe0f heart",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 Persian with a non-joiner",
        "\u05e9\u05dc\u05d5\u05dd",
        "e\u0301 combining",
        "\u06dd verse mark",
        "a\tb\nc",
    ],
)
def test_what_people_write_stays(text: str) -> None:
    assert clean(text) == text


@pytest.mark.parametrize("end", ["\r\n", "\r", "\x0b", "\x0c", "\x85", "\u2028", "\u2029"])
def test_all_line_ends_are_newlines(end: str) -> None:
    assert clean(f"a{end}b") == "a\nb"


def test_escape_is_shown_in_a_message_and_goes_from_a_paste() -> None:
    assert clean("a\x1b[31mb") == "a\u241b[31mb"
    assert (
        clean_paste("a\x1b[31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x07\x00") == "ared link"
    )


def test_clean_line_is_one_line() -> None:
    assert clean_line("a\n\x1b]0;title\x07 b") == "a \u241b]0;title\u2407 b"


@given(st.text(max_size=200), st.integers(2, 40))
def test_wrapping_fits_and_keeps_the_text(text: str, width: int) -> None:
    text = clean(text).replace("\n", " ").replace("\t", " ")
    cuts = [0, *wrap_offsets(text, width), len(text)]
    assert cuts == sorted(set(cuts)) or not text
    for start, end in pairwise(cuts):
        assert cell_len(text[start:end].rstrip()) <= width


def test_wrapping_breaks_at_words_and_between_cjk() -> None:
    def pieces(text: str, width: int) -> list[str]:
        cuts = [0, *wrap_offsets(text, width), len(text)]
        return [text[a:b].rstrip() for a, b in pairwise(cuts)]

    assert pieces("the quick brown fox", 10) == ["the quick", "brown fox"]
    assert pieces("abcdefghij", 4) == ["abcd", "efgh", "ij"]
    assert pieces("ab \u4e16\u754c\u4e16\u754c", 7) == ["ab \u4e16\u754c", "\u4e16\u754c"]
    assert pieces("\u4e16\u754c\u3002", 4) == ["\u4e16", "\u754c\u3002"]


@given(st.text(max_size=120), st.text(max_size=20), st.integers(4, 20))
def test_only_the_last_piece_depends_on_what_follows(text: str, more: str, width: int) -> None:
    text = clean(text).replace("\n", " ")
    before = wrap_offsets(text, width)
    after = wrap_offsets(text + more.replace("\n", " "), width)
    assert after[: max(len(before) - 1, 0)] == before[:-1]
