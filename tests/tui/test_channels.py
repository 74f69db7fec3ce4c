"""Thought and answer told apart, however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqchat.tui.channels import Channels
from tqchat.tui.entries import Answer

PIECES = ("<think>", "</think>", "<th", "ink>", "</", "a word ", "\n", "</think>\n")
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def split(*pieces: str) -> tuple[str, str]:
    """The thought and the answer."""
    channels = Channels()
    parts = {"thought": "", "answer": ""}
    for made in [*map(channels.feed, pieces), channels.finish()]:
        for channel, text in made:
            parts[channel] += text
    return parts["thought"], parts["answer"]


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", "\nHm.\n", "Yes."),
        ("\n<think>Hm", "Hm", ""),
        ("Hm.\nI see.\n</think>\n\nYes.", "", "Hm.\nI see.\n</think>\n\nYes."),
        ("<|channel|>final<|message|>Yes.", "", "<|channel|>final<|message|>Yes."),
        ("<think>Hm, </th", "Hm, </th", ""),
        ("\n <thi", "", "\n <thi"),
        ("Say <think> and </think> here.", "", "Say <think> and </think> here."),
        ("<think>a</think>b</think>\nc\n</think>\n", "a", "b</think>\nc\n</think>\n"),
        ("<thinking>", "", "<thinking>"),
        ("    indented", "", "    indented"),
        ("", "", ""),
    ],
)  # fmt: skip
def test_thought_and_answer(text: str, thought: str, answer: str) -> None:
    assert split(text) == (thought, answer)
    assert split(*text) == (thought, answer)


@given(TEXTS, st.integers(1, 9))
def test_cuts_change_nothing_and_nothing_is_lost(text: str, step: int) -> None:
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    assert split(*pieces) == split(text)
    assert "".join(split(text)).count("a word") == text.count("a word")


@given(TEXTS, st.integers(1, 9))
def test_rows_are_those_of_the_whole_text(text: str, step: int) -> None:
    streamed, whole = Answer(), Answer()
    for at in range(0, len(text), step):
        streamed.feed(text[at : at + step])
        if streamed.thought is not None:
            streamed.thought.folded = at % 2 == 0
        streamed.rows(30)
    whole.feed(text)
    for answer in (streamed, whole):
        answer.finish("the end")
        if answer.thought is not None:
            answer.thought.folded = False
    shown = [[row.content.plain for row in answer.rows(30)] for answer in (streamed, whole)]
    assert shown[0] == shown[1]
    assert streamed.text == text


def test_a_thought_is_one_line_until_it_is_opened() -> None:
    answer = Answer()
    answer.feed("<think>\nFirst one thing.\n\nThen ano")
    answer.feed("ther.")
    assert [row.content.plain for row in answer.rows(60)] == ["▸ Thinking · 5 words · Ctrl-T opens"]
    answer.feed("</think>\n\nSo be it.")
    plain = [row.content.plain for row in answer.rows(60)]
    assert plain == ["▸ Thought · 5 words · Ctrl-T opens", "", "So be it."]
    assert answer.thought is not None
    answer.thought.folded = False
    plain = [row.content.plain for row in answer.rows(60)]
    assert plain[0] == "▾ Thought · 5 words · Ctrl-T folds"
    assert plain[1:4] == ["│ First one thing.", "│ ", "│ Then another."]
    assert plain[-1] == "So be it."
