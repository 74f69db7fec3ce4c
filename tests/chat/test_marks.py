"""Thoughts that special tokens mark, in what a model writes and in what it reads again."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chat.families import FAMILIES
from tqchat.chat.conversation import Message
from tqchat.chat.marks import opened_thought
from tqchat.chat.template import ChatTemplate
from tqchat.chat.tokenizer import Tokenizer

TokenizerOf = Callable[[str], Tokenizer]
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"

# What a model writes after the prompt, and what is told of it.
HARMONY = {
    f"{ANALYSIS}Easy: é.{NEXT}{FINAL}Paris.": "<think>Easy: é.</think>\n\nParis.",
    f"{ANALYSIS}One.{NEXT}{ANALYSIS}Two.{NEXT}{FINAL}Yes": "<think>One.\n\nTwo.</think>\n\nYes",
    f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}{NEXT}{FINAL}No": (
        "<think>{}</think>\n\nNo"
    ),
    f"{ANALYSIS}{NEXT}{FINAL}Nothing was thought.": "Nothing was thought.",
    f"{FINAL}At once.": "At once.",
    "No channel at all.": "No channel at all.",
    f"<|message|>A name is missing.{NEXT}<|message|> Twice.": "A name is missing. Twice.",
    f"{ANALYSIS}Stopped in the mid": "<think>Stopped in the mid",
    f"{ANALYSIS}Stopped.{NEXT}<|channel|>fin": "<think>Stopped.",
    f"{FINAL}It writes <think> as text.": "It writes <think> as text.",
}
GEMMA4 = {
    "<|channel>thought\nEasy.\n<channel|>Paris.": "<think>Easy.\n</think>\n\nParis.",
    "<|channel>thought\n<channel|>Paris.": "Paris.",
    "Paris.": "Paris.",
    "<|channel>thought\nStopped": "<think>Stopped",
    "<|channel>thou": "",
    "A <|channel>thought\nB<channel|>C": "A <think>B</think>\n\nC",
}
CASES = [("harmony", *case) for case in HARMONY.items()]
CASES += [("gemma4", *case) for case in GEMMA4.items()]


def ids_of(tokenizer: Tokenizer, written: str) -> list[int]:
    """Ids of text in which control tokens are spelled."""
    tokens = "|".join(map(re.escape, sorted(tokenizer.special_tokens, key=len, reverse=True)))
    ids: list[int] = []
    for part in re.split(f"({tokens})", written):
        known = tokenizer.special_tokens.get(part)
        ids += tokenizer.encode(part) if known is None else [known]
    return ids


@pytest.mark.parametrize(("family", "written", "told"), CASES)
def test_channels_are_told_apart(
    tokenizer_of: TokenizerOf, family: str, written: str, told: str
) -> None:
    tokenizer = tokenizer_of(family)
    assert tokenizer.decode(ids_of(tokenizer, written)) == told


def test_text_comes_as_soon_as_it_is_there(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("harmony")
    stream = tokenizer.stream()
    pieces = [stream.add(token) for token in ids_of(tokenizer, f"{ANALYSIS}abc{NEXT}{FINAL}xyz")]
    assert "".join(pieces).startswith("<think>abc")
    assert pieces[-1]
    assert stream.finish() == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_have_no_marks(tokenizer_of: TokenizerOf, family: str) -> None:
    assert (tokenizer_of(family).marks is not None) == (family in ("harmony", "gemma4"))


def test_an_answer_goes_on_after_the_end_of_a_thought(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("harmony")
    tokens = tokenizer.special_tokens
    assert tokens["<|end|>"] not in tokenizer.stop_ids
    assert tokens["<|return|>"] in tokenizer.stop_ids
    assert tokenizer_of("gemma4").special_tokens["<turn|>"] in tokenizer_of("gemma4").stop_ids


@pytest.mark.parametrize("family", ["harmony", "gemma4"])
@pytest.mark.parametrize("thought", ["<think>Hm.</think>\n\n", "<think>Hm, <think>.\n</think>"])
def test_an_answer_is_read_without_what_was_thought(
    folder_of: Callable[[str], Path], tokenizer_of: TokenizerOf, family: str, thought: str
) -> None:
    template, tokenizer = ChatTemplate.from_folder(folder_of(family)), tokenizer_of(family)
    question = [Message("user", "<think>Mine</think>?")]
    more = [Message("user", "And?")]
    turns = [
        template.prompt_ids(tokenizer, [*question, Message("assistant", answer), *more])
        for answer in (f"{thought}Paris.", "Paris.", f"{thought}Rome.")
    ]
    assert turns[0] == turns[1] != turns[2]


def test_an_answer_that_is_gone_on_with(
    folder_of: Callable[[str], Path], tokenizer_of: TokenizerOf
) -> None:
    template, tokenizer = ChatTemplate.from_folder(folder_of("harmony")), tokenizer_of("harmony")
    question = [Message("user", "Where?")]
    asked = template.prompt_ids(tokenizer, question)
    for answer, begun in {
        "<think>Hm.</think>\n\nIn Par": f"{FINAL}In Par",
        "In Par": f"{FINAL}In Par",
        "<think>Hm, wh": f"{ANALYSIS}Hm, wh",
    }.items():
        ids = template.prompt_ids(tokenizer, [*question, Message("assistant", answer)])
        assert ids == asked + ids_of(tokenizer, begun)
    gemma = tokenizer_of("gemma4")
    template = ChatTemplate.from_folder(folder_of("gemma4"))
    ids = template.prompt_ids(gemma, [*question, Message("assistant", "<think>Hm.</think>In Par")])
    assert ids == template.prompt_ids(gemma, question) + gemma.encode("In Par")


def test_gemma_4_thinks_when_it_is_told_to(
    folder_of: Callable[[str], Path], tokenizer_of: TokenizerOf
) -> None:
    template, tokenizer = ChatTemplate.from_folder(folder_of("gemma4")), tokenizer_of("gemma4")
    question = [Message("user", "Where?")]
    tokens = tokenizer.special_tokens
    off = template.prompt_ids(tokenizer, question, enable_thinking=False)
    on = template.prompt_ids(tokenizer, question, enable_thinking=True)
    assert off == template.prompt_ids(tokenizer, question)
    assert off[-1] == tokens["<channel|>"]
    assert tokens["<|think|>"] in on
    assert tokens["<channel|>"] not in on


@pytest.mark.parametrize("family", ["harmony", "gemma4"])
def test_a_later_prompt_goes_on_from_where_the_answer_began(
    folder_of: Callable[[str], Path], tokenizer_of: TokenizerOf, family: str
) -> None:
    """What was thought is not read again, and nothing before it is either."""
    template, tokenizer = ChatTemplate.from_folder(folder_of(family)), tokenizer_of(family)
    turns = [Message("system", "Be brief."), Message("user", "Where?")]
    first = template.prompt_ids(tokenizer, turns, enable_thinking=True)
    turns += [Message("assistant", "<think>Hm.</think>\n\nIn Paris."), Message("user", "Why?")]
    later = template.prompt_ids(tokenizer, turns, enable_thinking=True)
    assert later[: len(first)] == first


@pytest.mark.parametrize("family", ["qwen3", "thinking"])
@pytest.mark.parametrize("opening", ["", "<think>", "<think>\n"])
def test_an_answer_is_gone_on_with_as_it_was_written(
    folder_of: Callable[[str], Path], tokenizer_of: TokenizerOf, family: str, opening: str
) -> None:
    """Its tags are the tokens that they were, whoever wrote the first; what spells others, text."""
    written = "{{- '<|im_start|>assistant\\n"
    source = ChatTemplate.from_folder(folder_of(family)).source
    assert source.count(f"{written}' }}}}") == 1
    escaped = opening.replace("\n", "\\n")
    template = ChatTemplate(source.replace(written, written + escaped))
    tokenizer = tokenizer_of(family)
    question = [Message("user", "Where? <think>\n")]
    asked = template.prompt_ids(tokenizer, question)
    think, end = tokenizer.special_tokens["<think>"], tokenizer.special_tokens["</think>"]
    assert asked.count(think) == bool(opening)
    assert opened_thought(asked, tokenizer.decode) == opening
    for answer in ("<think>\nHm, wh", "<think>\nHm.\n</think>\n\nIn Par"):
        ids = template.prompt_ids(tokenizer, [*question, Message("assistant", answer)])
        rest = answer.removeprefix(opening)
        assert ids == asked + ids_of(tokenizer, rest)
        assert (ids.count(think), ids.count(end)) == (1, answer.count("</think>"))
    ids = template.prompt_ids(tokenizer, [*question, Message("assistant", "In Par</think>")])
    closing = "</think>\n\n" if opening else ""
    assert ids == asked + ids_of(tokenizer, closing) + tokenizer.encode("In Par</think>")
