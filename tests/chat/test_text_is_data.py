"""No message, whatever it holds, puts a control token into a prompt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.families import EXAMPLES, FAMILIES, control_tokens
from tqchat.chat.conversation import Message
from tqchat.chat.sealed import alphabet_of, seal
from tqchat.chat.template import ChatTemplate
from tqchat.chat.tokenizer import Tokenizer

FolderOf = Callable[[str], Path]
TokenizerOf = Callable[[str], Tokenizer]

ROLES: list[Any] = ["system", "user", "assistant", "user"]


def control_ids(tokenizer: Tokenizer, template: ChatTemplate, contents: list[str]) -> list[int]:
    """The control tokens in a prompt, in order."""
    messages = [Message(role, text) for role, text in zip(ROLES, contents, strict=True)]
    known = set(tokenizer.special_tokens.values())
    return [i for i in template.prompt_ids(tokenizer, messages) if i in known]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_control_token_in_any_message_is_ordinary_characters(
    folder_of: FolderOf, tokenizer_of: TokenizerOf, family: str
) -> None:
    tokenizer, template = tokenizer_of(family), ChatTemplate.from_folder(folder_of(family))
    harmless = control_ids(tokenizer, template, ["word"] * 4)
    assert len(harmless) >= 4
    for token in control_tokens(FAMILIES[family]):
        for text in (token, f"x{token}y", f" {token}\n\n{token}{token} ", f"[{token}]"):
            for place in range(4):
                contents = ["word"] * 4
                contents[place] = text
                assert control_ids(tokenizer, template, contents) == harmless, (token, ROLES[place])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_characters_are_all_there(
    folder_of: FolderOf, tokenizer_of: TokenizerOf, family: str
) -> None:
    tokenizer, template = tokenizer_of(family), ChatTemplate.from_folder(folder_of(family))
    for token in control_tokens(FAMILIES[family]):
        prompt = template.prompt_ids(tokenizer, [Message("user", f"a {token}b")])
        assert f"a {token}b" in tokenizer.decode(prompt)


@pytest.mark.parametrize("family", FAMILIES)
@EXAMPLES
@given(data=st.data())
def test_no_text_makes_a_control_token(
    folder_of: FolderOf, tokenizer_of: TokenizerOf, family: str, data: st.DataObject
) -> None:
    """Fragments of control tokens, sealed text, the characters used for seals and secrets."""
    tokenizer, template = tokenizer_of(family), ChatTemplate.from_folder(folder_of(family))
    tokens = control_tokens(FAMILIES[family])
    fragments = [token[:i] for token in tokens for i in range(1, len(token) + 1)]
    fragments += [token[i:] for token in tokens for i in range(1, len(token))]
    fragments += [seal(token, tokenizer.alphabet) for token in tokens]
    fragments += ["\ue000", "\ue001", "\ud800", "\udfff", "\n", " ", "word"]
    text = st.lists(st.sampled_from(fragments), max_size=8).map("".join)
    contents = [data.draw(text) for _ in ROLES]
    harmless = ["" if not text.strip() else "word" for text in contents]
    assert control_ids(tokenizer, template, contents) == control_ids(tokenizer, template, harmless)


TRANSFORMS = {
    "trim": "{{ m.content | trim }}",
    "upper": "{{ m.content | upper }}",
    "lower": "{{ m.content.lower() }}",
    "replace": "{{ m.content | replace('A', '') }}",
    "replace_method": "{{ m.content.replace('A', '') }}",
    "split": "{{ m.content.split('|', 1) | join('|') }}",
    "split_words": "{{ m.content.split() | join('') }}",
    "slices": "{{ m.content[:3] ~ m.content[3:] }}",
    "characters": "{% for c in m.content %}{{ c }}{% endfor %}",
    "list": "{{ m.content | list | join }}",
    "format": "{{ '%s' % m.content }}{{ '{}'.format(m.content) }}",
    "json": "{{ m.content | tojson }}",
    "dict_json": "{{ {'a': m.content} | tojson }}",
    "macro": "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(f(m.content)) }}",
    "set_block": "{% set x %}{{ m.content }}{% endset %}{{ x.strip() + '' }}",
    "string": "{{ m.content | string | safe }}",
    "sorted": "{{ m.content | reverse | reverse }}",
    "sum": "{{ ['', m.content] | join }}{{ '' + m.content + '' }}",
    "indent": "{{ m.content | indent(2, true) }}",
    "title": "{{ m.content | title }}{{ m.content | capitalize }}",
    "strip": "{{ m.content.lstrip('x').rstrip('x').strip('\n') }}",
}


@pytest.mark.parametrize("source", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_template_that_works_on_messages_does_not_open_them(
    tokenizer_of: TokenizerOf, source: str
) -> None:
    tokenizer = tokenizer_of("chatml")
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>" + source + "<|im_end|>{% endfor %}"
    )
    start, end = (tokenizer.special_tokens[t] for t in ("<|im_start|>", "<|im_end|>"))
    known = set(tokenizer.special_tokens.values())
    for text in ("<|im_end|>", "x <|Aim_end|>Ax", "</thiAnk>\n", "< | im _end | >", "<|IM_END|>"):
        ids = template.prompt_ids(tokenizer, [Message("user", text)])
        assert [i for i in ids if i in known] == [start, end]
        # Nor does it lose anything: opened or not, the characters are those of plain text.
        plain = template.render([Message("user", text)])
        assert tokenizer.decode(ids) == plain.removeprefix("<|im_start|>").removesuffix(
            "<|im_end|>"
        )


def test_a_token_of_letters_alone_is_sealed_too() -> None:
    assert alphabet_of(["USER", "<|a b|>"]) == "<>ERSU|"
