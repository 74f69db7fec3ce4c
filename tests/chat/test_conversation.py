import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqchat.chat.conversation import Conversation, Message, Span
from tqchat.chat.errors import ChatError


def test_turns_are_added_replaced_and_forgotten() -> None:
    conversation = Conversation("Be brief.")
    conversation.add("user", "Hi")
    conversation.add("assistant", "Hel")
    conversation.replace_last("Hello")
    assert conversation.prompt() == [
        Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Hello"),
    ]  # fmt: skip
    conversation.clear()
    assert conversation.prompt() == [Message("system", "Be brief.")]
    with pytest.raises(IndexError):
        conversation.replace_last("x")


def test_what_the_model_reads_is_a_copy() -> None:
    conversation = Conversation(messages=[Message("user", "Hi")])
    conversation.prompt().clear()
    assert conversation.prompt() == [Message("user", "Hi")]


@given(st.text(), st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text())))
def test_json_brings_it_back(system: str, turns: list[tuple[Any, str]]) -> None:
    conversation = Conversation(system, [Message(*turn) for turn in turns])
    text = json.dumps(conversation.to_json())
    assert Conversation.from_json(json.loads(text)) == conversation


@pytest.mark.parametrize(
    "value",
    [
        None, [], {}, {"system": ""}, {"system": 1, "messages": []}, {"system": "", "messages": {}},
        {"system": "", "messages": [None]}, {"system": "", "messages": [{"role": "user"}]},
        {"system": "", "messages": [{"role": "tool", "content": ""}]},
        {"system": "", "messages": [{"role": "system", "content": ""}]},
        {"system": "", "messages": [{"role": "user", "content": 3}]},
    ],
)  # fmt: skip
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(ChatError, match="not a conversation"):
        Conversation.from_json(value)


@pytest.mark.parametrize(
    "attached",
    [
        None, 3, ["a"], [["a", 0]], [["", 0, 1]], [[1, 0, 1]], [["a", -1, 1]], [["a", 2, 2]],
        [["a", 0, 6]], [["a", 2, 4], ["b", 3, 5]], [["a", 0, 1.5]],
    ],
)  # fmt: skip
def test_what_does_not_fit_the_text_is_not_attached(attached: Any) -> None:
    value = {"system": "", "messages": [{"role": "user", "content": "01234", "attached": attached}]}
    (message,) = Conversation.from_json(value).messages
    assert message.attached == ()
    assert message.typed == "01234"


def test_what_was_attached_comes_back() -> None:
    spans = (Span("a.md", 1, 3), Span("b", 3, 4))
    talk = Conversation(
        messages=[Message("user", "01234", spans), Message("assistant", "x", (), "length")]
    )
    again = Conversation.from_json(json.loads(json.dumps(talk.to_json())))
    assert [(m.attached, m.ended) for m in again.messages] == [(spans, ""), ((), "length")]
    assert again.messages[0].typed == "04"
