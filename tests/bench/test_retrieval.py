"""Tasks are made as they say, and answers are judged by what they name."""

import re
from collections import Counter

import pytest

from tqchat.bench import retrieval
from tqchat.bench.retrieval import Task, Tasks

WORDS = [f"{letter}word{ending}" for letter in "abcdefgh" for ending in ("s", "ed", "ing")]
SENTENCES = [f"Sentence {word} says little." for word in WORDS]


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def text(task: Task) -> str:
    return "".join(map(chr, task.prompt))


def tasks(seed: int = 1) -> Tasks:
    return Tasks(encode, SENTENCES, seed)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_the_needle_lies_at_its_depth(depth: float) -> None:
    task = tasks().needle(3000, depth)
    assert 3000 - 60 <= len(task.prompt) <= 3000
    document, _, question = text(task).partition("\n\n")
    code = task.expected[0]
    fact = re.search(rf"Keep in mind that the door code of (\w+) is {code}\.", document)
    assert fact is not None
    room = len(document) - len(fact[0])
    assert fact.start() == pytest.approx(depth * room, abs=40)
    assert document.count(code) == 1
    assert fact[1] in question
    assert code not in question


def test_several_needles_are_all_there_and_all_asked_for() -> None:
    task = tasks().needles(3000)
    document, _, question = text(task).partition("\n\n")
    facts = dict(re.findall(r"door code of (\w+) is (\d+)\.", document))
    assert tuple(facts.values()) == task.expected
    assert len(facts) == retrieval.N_FACTS
    assert all(city in question for city in facts)


def test_variables_lead_back_to_the_value() -> None:
    task = tasks().variables(3000)
    assert len(task.prompt) <= 3000
    *_, document, question = text(task).split("\n\n")
    value = re.search(r"hold (\d+), directly", question)
    assert value is not None
    steps = re.findall(r"Set (\w+) = (\w+)\.", document)
    assert [name for name, _ in steps] == list(task.expected)
    assert [source for _, source in steps] == [value[1], *task.expected[:-1]]


def test_the_most_frequent_words_are_asked_for() -> None:
    task = tasks().word_count(900)
    assert len(task.prompt) <= 900
    listed = text(task).split("\n\n")[2]
    most = Counter(listed.split()).most_common(retrieval.N_COMMON)
    assert {word for word, _ in most} == set(task.expected)
    assert {n for _, n in most} == {retrieval.COMMON_TIMES}


def test_a_seed_makes_the_same_tasks() -> None:
    assert tasks(2).needle(1000, 0.5) == tasks(2).needle(1000, 0.5)
    assert tasks(2).needle(1000, 0.5) != tasks(3).needle(1000, 0.5)
