"""Facts hidden in long documents: does int4 find what the 16-bit cache finds?

    python benchmarks/needle.py [MODEL] [--documents 20] [--tokens 6000] [--json RESULT.json]

A document is of sentences drawn by a seed, and says a fact at 10, 50 or 90% of its length. With
each cache it is read once and asked for the fact; a second question must be all that is read then.
20 documents of 6,000 tokens take SmolLM2-135M ten minutes on two cores.
"""

import argparse
import json
import os
import platform
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqchat.chat.conversation import Message
from tqchat.chat.tokenizer import Tokenizer
from tqchat.engine.events import EngineOptions, Finished, KVKind, Sampling
from tqchat.engine.generation import Session
from tqchat.engine.loading import LoadedModel, load

DEPTHS = (0.1, 0.5, 0.9)
KINDS: tuple[KVKind, ...] = ("fp16", "int4")
MOST_ANSWERED = 16

_PARTS = (
    "The miller|A carter|The old ferryman|My aunt|The baker's son|A tall stranger|The surveyor",
    "sold|carried|lost|counted|painted|repaired|borrowed|hid|weighed|described",
    "a sack of barley|two copper kettles|the church bell|a wooden wheel|seven lanterns|a map",
    "by the river|behind the inn|on the bridge|near the mill|at the market|in the long barn",
    "in spring|before dawn|after the storm|on a Tuesday|at harvest time|during the fair",
)
_CITIES = ("Oslo", "Lisbon", "Dublin", "Vienna", "Cairo", "Lima", "Kyoto", "Quito", "Tunis", "Riga")


@dataclass(frozen=True, slots=True)
class Needle:
    """A fact told at `depth` of a document, 0 to 1."""

    city: str
    number: str
    depth: float

    @property
    def fact(self) -> str:
        return f"The magic number of {self.city} is {self.number}."

    @property
    def question(self) -> str:
        return f"What is the magic number of {self.city}?"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`answer` to a question that was `prompt_tokens` with all before it, of which `cached_tokens`
    were not read again."""

    answer: str
    found: bool
    prompt_tokens: int
    cached_tokens: int


def needles(rng: random.Random, depths: Sequence[float]) -> list[Needle]:
    """One for each depth, of different cities."""
    cities = rng.sample(_CITIES, len(depths))
    return [
        Needle(city, str(rng.randrange(1000, 10_000)), depth)
        for city, depth in zip(cities, depths, strict=True)
    ]


def document(
    rng: random.Random, tokenizer: Tokenizer, n_tokens: int, hidden: Sequence[Needle]
) -> str:
    """A text of about `n_tokens`, with each fact at its depth."""
    waiting = sorted(hidden, key=lambda needle: needle.depth)
    sentences: list[str] = []
    length = 0
    while length < n_tokens:
        if waiting and length >= waiting[0].depth * n_tokens:
            sentences.append(waiting.pop(0).fact)
        else:
            sentences.append(" ".join(rng.choice(part.split("|")) for part in _PARTS) + ".")
        length += tokenizer.count(f" {sentences[-1]}")
    return " ".join(sentences)


class Reader:
    """A conversation about one document at a time."""

    def __init__(self, loaded: LoadedModel, kv: KVKind) -> None:
        self._loaded = replace(loaded, info=replace(loaded.info, kv=kv))
        self._session = Session(self._loaded)
        self._talk: list[Message] = []

    def read(self, text: str) -> None:
        self._talk = [Message("user", text), Message("assistant", "I have read the text.")]

    def ask(self, needle: Needle) -> Outcome:
        self._talk.append(Message("user", needle.question))
        prompt = self._loaded.template.prompt_ids(self._loaded.tokenizer, self._talk)
        greedy = Sampling(temperature=0, repetition_penalty=1)
        *_, end = self._session.turn(1, prompt, greedy, MOST_ANSWERED, lambda: False)
        if not isinstance(end, Finished):
            raise SystemExit(f"A question was not answered: {end}")
        self._talk.append(Message("assistant", end.text))
        usage = end.usage
        found = needle.number in end.text
        return Outcome(end.text, found, usage.prompt_tokens, usage.cached_tokens)


def trial(loaded: LoadedModel, seed: int, n_tokens: int) -> dict[str, Any]:
    """One document with one fact, with each cache. `read_again`: tokens of the second question."""
    rng = random.Random(seed)
    (needle,) = needles(rng, [DEPTHS[seed % len(DEPTHS)]])
    text = document(rng, loaded.tokenizer, n_tokens, [needle])
    result: dict[str, Any] = {"seed": seed, **asdict(needle)}
    for kv in KINDS:
        reader = Reader(loaded, kv)
        reader.read(text)
        first, second = reader.ask(needle), reader.ask(needle)
        read_again = second.prompt_tokens - second.cached_tokens
        result["tokens"] = first.prompt_tokens
        result[kv] = {"found": first.found, "answer": first.answer, "read_again": read_again}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", help="the last one used, else the built-in one")
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load_average = os.getloadavg()[0]
    loaded = load(options.model, EngineOptions(), lambda event: None, lambda: False)
    trials = []
    for seed in range(options.documents):
        trials.append(trial(loaded, seed, options.tokens))
        print(json.dumps(trials[-1]), flush=True)
    found = {kv: sum(one[kv]["found"] for one in trials) for kv in KINDS}
    lost = [one["seed"] for one in trials if one["fp16"]["found"] and not one["int4"]["found"]]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "backend": loaded.backend.name,
        "load_average_before": round(load_average, 2),
        "model": loaded.info.name,
        "versions": {name: version(name) for name in ("mlx", "tqchat")},
        "documents": len(trials),
        "found": found,
        "found_by_fp16_alone": lost,
        "most_read_for_the_second_question": max(
            one[kv]["read_again"] for one in trials for kv in KINDS
        ),
        "trials": trials,
    }
    print(f"fp16 finds {found['fp16']}, int4 {found['int4']}; by fp16 alone: {len(lost)}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
