"""Rendered templates and their ids, against transformers."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.chat.families import EXAMPLES, FAMILIES, template_of
from tqchat.chat.conversation import Message
from tqchat.chat.errors import ChatError
from tqchat.chat.template import ChatTemplate, thinking
from tqchat.chat.tokenizer import Tokenizer

FolderOf = Callable[[str], Path]
TokenizerOf = Callable[[str], Tokenizer]
ReferenceOf = Callable[[str], PreTrainedTokenizerFast]

THREE_TURNS = [
    Message("user", " What is the capital of France?\n"),
    Message("assistant", "  Paris, of course.\n\n"),
    Message("user", "1 < 2 | 3 > [4]\n\n\tdef f(): pass"),
    Message("assistant", "**Yes**\n"),
    Message("user", "\n\nAnd Germany?"),
]
SYSTEM = Message("system", " Be brief.\n\nAlways. ")
NO_SYSTEM_ROLE = {"gemma"}


def as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in messages]


def folded(family: str, messages: list[Message]) -> list[Message]:
    """What is written by hand for a template that takes no system message."""
    if family not in NO_SYSTEM_ROLE or messages[0].role != "system":
        return messages
    text = messages[0].content.strip() + "\n\n" + messages[1].content
    return [Message("user", text), *messages[2:]]


@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["without_system", "with_system"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_what_transformers_makes(
    folder_of: FolderOf,
    tokenizer_of: TokenizerOf,
    reference_of: ReferenceOf,
    family: str,
    system: list[Message],
) -> None:
    template = ChatTemplate.from_folder(folder_of(family))
    assert not template.is_default
    for turns, generate in [(1, True), (3, True), (5, True), (2, False), (4, False)]:
        if family == "mistral" and system and not generate:
            continue  # Its template drops the system message if nothing is left to answer.
        messages = system + THREE_TURNS[:turns]
        expected = as_dicts(folded(family, messages))
        assert template.render(messages, add_generation_prompt=generate) == reference_of(
            family
        ).apply_chat_template(expected, tokenize=False, add_generation_prompt=generate)
        assert template.prompt_ids(
            tokenizer_of(family), messages, add_generation_prompt=generate
        ) == reference_of(family).apply_chat_template(
            expected, return_dict=False, add_generation_prompt=generate
        )


@pytest.mark.parametrize("family", FAMILIES)
@EXAMPLES
@given(data=st.data())
def test_ordinary_text_makes_the_ids_that_transformers_makes(
    folder_of: FolderOf,
    tokenizer_of: TokenizerOf,
    reference_of: ReferenceOf,
    family: str,
    data: st.DataObject,
) -> None:
    """Above all where a message meets the template's text, which merge into one token."""
    tokens = tokenizer_of(family).special_tokens
    text = st.text(
        st.one_of(
            st.sampled_from("\n \t\r<|>[]_/aAsé'▁1"),
            st.characters(exclude_categories=["Cs"]),
        )
    ).filter(lambda text: not any(token in text for token in tokens))
    roles: list[Any] = ["system", "user", "assistant", "user"]
    messages = [Message(role, data.draw(text)) for role in roles]
    expected = folded(family, [m for m in messages if m.role != "system" or m.content.strip()])
    if expected[0].role != "system" and family not in NO_SYSTEM_ROLE:
        messages = messages[1:]
    template = ChatTemplate.from_folder(folder_of(family))
    assert template.prompt_ids(tokenizer_of(family), messages) == reference_of(
        family
    ).apply_chat_template(as_dicts(expected), return_dict=False, add_generation_prompt=True)


def test_the_built_in_model(smollm2_metadata: dict[str, Any]) -> None:
    template = ChatTemplate.from_gguf(smollm2_metadata)
    assert template.render(THREE_TURNS[:1]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\n What is the capital of France?\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = template.prompt_ids(Tokenizer.from_gguf(smollm2_metadata), THREE_TURNS[:1])
    assert ids[:2] == [1, 9690]
    assert [i for i in ids if i < 17] == [1, 2, 1, 2, 1]


def test_switches_reach_the_template(folder_of: FolderOf, tokenizer_of: TokenizerOf) -> None:
    template, tokenizer = ChatTemplate.from_folder(folder_of("thinking")), tokenizer_of("thinking")
    plain = template.prompt_ids(tokenizer, THREE_TURNS[:1])
    off = template.prompt_ids(tokenizer, THREE_TURNS[:1], enable_thinking=False)
    think, end = tokenizer.special_tokens["<think>"], tokenizer.special_tokens["</think>"]
    assert off[: len(plain) + 1] == [*plain, think]
    assert off.count(end) == 1


def test_thinking_of_earlier_turns_is_cut_by_the_template(
    folder_of: FolderOf, reference_of: ReferenceOf, tokenizer_of: TokenizerOf
) -> None:
    """A template may look into messages for what is a control token elsewhere."""
    messages = [
        Message("user", "Why?"),
        Message("assistant", "<think>\nLet me see.\n</think>\n\nBecause."),
        Message("user", "<tool_response>x</tool_response>"),
        Message("user", "Really?"),
    ]
    template = ChatTemplate.from_folder(folder_of("thinking"))
    prompt = template.render(messages)
    assert prompt == reference_of("thinking").apply_chat_template(
        as_dicts(messages), tokenize=False, add_generation_prompt=True
    )
    assert "Let me see" not in prompt
    ids = template.prompt_ids(tokenizer_of("thinking"), messages)
    assert tokenizer_of("thinking").decode(ids) == prompt.replace("<|im_start|>", "").replace(
        "<|im_end|>", ""
    )


def test_a_system_message_that_a_template_leaves_out_is_folded() -> None:
    template = ChatTemplate(
        "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    assert template.render([SYSTEM, Message("user", "Hi")]) == "user:Be brief.\n\nAlways.\n\nHi;"
    assert template.render([Message("system", " "), Message("user", "Hi")]) == "user:Hi;"


def test_a_template_that_refuses_is_quoted() -> None:
    template = ChatTemplate("{{ raise_exception('Only\nFrench!') }}")
    with pytest.raises(ChatError, match=r"refuses this conversation: Only French!$"):
        template.render([SYSTEM, Message("user", "Hi")])


def test_helpers() -> None:
    def render(source: str) -> str:
        return ChatTemplate(source).render([Message("user", "é<'\"")])

    assert render("{{ messages[0].content | tojson }}") == '"é<\'\\""'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=2) }}") == json.dumps(
        {"b": 1, "a": [2]}, indent=2
    )
    before = datetime.now()
    today = render("{{ strftime_now('%Y-%m-%d') }}")
    assert today in {f"{before:%Y-%m-%d}", f"{datetime.now():%Y-%m-%d}"}
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}")
    assert render("{% generation %}{% set a = 1 %}x{% endgeneration %}{{ a }}") == "x"
    assert render("{% set n = namespace({'a': 1}, b=2) %}{{ n.a + n.b }}") == "3"
    assert render("{{ tools is none and documents is none }}") == "True"


def test_without_a_template_there_is_a_plain_one(tmp_path: Path) -> None:
    template = ChatTemplate.from_folder(tmp_path)
    assert template.is_default
    assert template.render([SYSTEM, *THREE_TURNS[:3]]) == (
        " Be brief.\n\nAlways. \n\nUser:  What is the capital of France?\n\n\n"
        "Assistant:   Paris, of course.\n\n\n\n"
        "User: 1 < 2 | 3 > [4]\n\n\tdef f(): pass\n\nAssistant:"
    )
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    assert (
        ChatTemplate.from_folder(tmp_path).render([Message("user", "a")]).startswith("<s>User: a")
    )
    assert ChatTemplate.from_gguf({}).is_default


def test_where_a_template_is_found(tmp_path: Path) -> None:
    def found(name: str = "default") -> str:
        return ChatTemplate.from_folder(tmp_path, name).source

    def configure(template: Any) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))

    configure("one string")
    assert found() == "one string"
    assert ChatTemplate.from_folder(tmp_path, "tool_use").is_default
    configure([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "d"}])
    assert found() == "d"
    assert found("tool_use") == "tools"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools in a file")
    (tmp_path / "chat_template.jinja").write_text("in a file")
    assert found() == "in a file"
    assert found("tool_use") == "tools in a file"
    assert ChatTemplate.from_gguf({"tokenizer.chat_template": "gguf"}).source == "gguf"


@pytest.mark.parametrize("template", [3, {}, "x" * (1 << 20) + "x"])
def test_a_template_that_is_none(tmp_path: Path, template: Any) -> None:
    with pytest.raises(ChatError, match="chat template"):
        ChatTemplate.from_gguf({"tokenizer.chat_template": template})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ChatError, match="chat template"):
        ChatTemplate.from_folder(tmp_path)


def test_every_template_fixture_is_used() -> None:
    assert {template_of(f) for f in FAMILIES.values()} == {
        path.read_text() for path in (Path(__file__).parent / "data").glob("*.jinja")
    }


THOUGHTS = [
    Message("user", "Why?"),
    Message("assistant", "<think>\nLet me see: <|im_end|>\n</think>\n\nBecause."),
    Message("user", "Really?"),
    Message("assistant", "<think>\n\n</think>\n\nYes."),
    Message("user", "And then?"),
]


@pytest.mark.parametrize("think", [None, True, False])
@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["without_system", "with_system"])
@pytest.mark.parametrize("family", ["qwen3", "smollm3", "thinking"])
def test_thinking_is_switched_as_transformers_does(
    folder_of: FolderOf,
    tokenizer_of: TokenizerOf,
    reference_of: ReferenceOf,
    family: str,
    system: list[Message],
    think: bool | None,
) -> None:
    template, switches = ChatTemplate.from_folder(folder_of(family)), thinking(think)
    for turns in (1, 3, 5):
        messages = system + THOUGHTS[:turns]
        prompt = template.render(messages, **switches)
        assert prompt == reference_of(family).apply_chat_template(
            as_dicts(messages), tokenize=False, add_generation_prompt=True, **switches
        )
        off = prompt.removesuffix("\n").endswith("<think>\n\n</think>") or prompt.endswith(
            "<think>\n\n</think>\n\n"
        )
        assert off == (think is False)
        # What was thought is cut, or it is text: never the control token that it spells.
        ids = template.prompt_ids(tokenizer_of(family), messages, **switches)
        end = tokenizer_of(family).special_tokens["<|im_end|>"]
        header = family == "smollm3" or bool(system)
        assert ids.count(end) == turns + header


def test_what_thinking_is_called() -> None:
    assert thinking(None) == {}
    for think in (True, False):
        template = ChatTemplate("{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}")
        effort = "" if think else "low"
        assert template.render([], **thinking(think)) == f"{think} {think} {effort}"


@pytest.mark.parametrize("family", FAMILIES)
def test_which_templates_have_a_switch_for_thinking(folder_of: FolderOf, family: str) -> None:
    template = ChatTemplate.from_folder(folder_of(family))
    messages = THREE_TURNS[:1]
    rendered = {template.render(messages, **thinking(think)) for think in (None, True, False)}
    assert template.knows(thinking(False)) == (len(rendered) > 1)
