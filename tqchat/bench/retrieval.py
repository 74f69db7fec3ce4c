"""Whether what was said far back in a long text is still found: int4 next to fp16.

Tasks in the manner of RULER (arXiv:2404.06654), made from a seed: a fact to find at a depth,
several facts, variables to trace, words to count. A small model fails some of them with any cache,
so an answer counts against int4 only where fp16 has it.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tqchat.bench.caches import MakeCache, fp16_cache, int4_cache
from tqchat.bench.predictions import make_caches
from tqchat.bench.progress import Progress
from tqchat.engine.loading import LoadedModel
from tqchat.engine.sampler import token_id

CITIES = ("Oslo", "Lisbon", "Dublin", "Vienna", "Cairo", "Lima", "Kyoto", "Quito", "Tunis", "Riga")
N_FACTS = 4
N_VARIABLES = 4
N_COMMON, COMMON_TIMES, RARE_TIMES = 3, 12, 2

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt of at most `length` tokens, and what the answer should name.

    depth: where the fact lies, 0 at the start and 1 at the end; None where it lies everywhere.
    """

    name: str
    length: int
    depth: float | None
    prompt: list[int]
    expected: tuple[str, ...]
    max_answer: int


@dataclass(frozen=True, slots=True)
class Found:
    """Shares of what was expected that the answers name, and whether both say the same."""

    task: str
    length: int
    depth: float | None
    fp16: float
    int4: float
    same: bool


def measure(
    loaded: LoadedModel, tasks: Sequence[Task], progress: Progress = lambda share: None
) -> list[Found]:
    found, done = [], 0
    total = 2 * sum(len(task.prompt) for task in tasks)
    for task in tasks:
        answers = []
        for make in (fp16_cache, int4_cache):
            answers.append(_answer(loaded, make, task))
            done += len(task.prompt)
            progress(done / total)
        fp16, int4 = (_recall(answer, task.expected) for answer in answers)
        same = answers[0] == answers[1]
        found.append(Found(task.name, task.length, task.depth, fp16, int4, same))
    return found


def _answer(loaded: LoadedModel, make: MakeCache, task: Task) -> str:
    """Decoded greedily, to the end of the line at most."""
    caches = make_caches(loaded.model, loaded.backend, make)
    chunk = loaded.backend.prefill_chunk
    for start in range(0, len(task.prompt), chunk):
        logits = loaded.model(task.prompt[start : start + chunk], caches)
    stream, text = loaded.tokenizer.stream(), ""
    for _ in range(task.max_answer):
        token = token_id(logits[-1].argmax())
        text += stream.add(token)
        if token in loaded.tokenizer.stop_ids or "\n" in text:
            break
        logits = loaded.model([token], caches)
    return text


def _recall(answer: str, expected: Sequence[str]) -> float:
    words = set(re.findall(r"\w+", answer))
    return sum(word in words for word in expected) / len(expected)


class Tasks:
    """Makes tasks of any length; the same seed and the same sentences make the same ones.

    sentences: what the facts are hidden among, drawn from again and again.
    """

    def __init__(self, encode: Encode, sentences: Sequence[str], seed: int) -> None:
        self._encode = encode
        self._sentences = list(sentences)
        self._random = random.Random(seed)

    def needle(self, length: int, depth: float) -> Task:
        """One fact, `depth` of the way through the text."""
        (city, code), *_ = self._facts(1)
        question = f"Question: What is the door code of {city}?\nAnswer: The door code of {city} is"
        prompt = self._hidden({depth: _fact(city, code)}, length, question)
        return Task("needle", length, depth, prompt, (code,), 12)

    def needles(self, length: int) -> Task:
        """Several facts, spread over the text; all are asked for."""
        facts = self._facts(N_FACTS)
        placed = {(i + 0.5) / N_FACTS: _fact(*fact) for i, fact in enumerate(facts)}
        cities = ", ".join(city for city, _ in facts)
        question = f"Question: What are the door codes of {cities}?\nAnswer: The door code of"
        prompt = self._hidden(placed, length, f"{question} {facts[0][0]} is")
        return Task("several needles", length, None, prompt, tuple(c for _, c in facts), 60)

    def variables(self, length: int) -> Task:
        """A value handed from variable to variable; all of them are asked for."""
        names = self._names(2 * N_VARIABLES)
        (example, example_end), (chain, end) = (
            self._chain(names[:N_VARIABLES]),
            self._chain(names[N_VARIABLES:]),
        )
        start = f"{' '.join(example)}\n\n{example_end} {', '.join(names[:N_VARIABLES])}.\n\n"
        placed = {(i + 0.5) / N_VARIABLES: step for i, step in enumerate(chain)}
        prompt = self._hidden(placed, length, end, start)
        return Task("variable tracking", length, None, prompt, tuple(names[N_VARIABLES:]), 40)

    def _names(self, n: int) -> list[str]:
        names: dict[str, None] = {}
        while len(names) < n:
            names["".join(self._random.choices("ABCDEFGHJKLMNPRSTUVWXYZ", k=3))] = None
        return list(names)

    def _chain(self, names: Sequence[str]) -> tuple[list[str], str]:
        """The steps from a value to the last of `names`, and the question about it."""
        value = str(self._random.randrange(10_000, 100_000))
        steps = [
            f"Set {name} = {source}." for name, source in zip(names, (value, *names), strict=False)
        ]
        question = (
            f"Question: Which variables hold {value}, directly or through another?\n"
            f"Answer: The variables that hold {value} are"
        )
        return steps, question

    def word_count(self, length: int) -> Task:
        """A list of words, a few of them much more frequent; those are asked for."""
        text = " ".join(self._sentences).lower()
        words = sorted(set(re.findall(r"\b[a-z]{5,9}\b", text)))
        self._random.shuffle(words)
        example, common, rare = words[:9], words[9 : 9 + N_COMMON], words[9 + N_COMMON :]
        question = (
            f"\n\nQuestion: Which {N_COMMON} words are the most frequent in the list?\n"
            f"Answer: The {N_COMMON} most frequent words are"
        )
        shown = [*example, *example[:N_COMMON] * 4]
        self._random.shuffle(shown)
        answer = ", ".join(example[:N_COMMON])
        start = self._encode(f"{' '.join(shown)}{question} {answer}.\n\n")
        end = self._encode(question)
        items = [*common * COMMON_TIMES]
        n_tokens = len(start) + sum(len(self._encode(f" {word}")) for word in items) + len(end)
        for word in rare:
            n_tokens += RARE_TIMES * len(self._encode(f" {word}"))
            if n_tokens > length:
                break
            items += [word] * RARE_TIMES
        self._random.shuffle(items)
        prompt = start + self._encode(" ".join(items)) + end
        return Task("word counting", length, None, prompt, tuple(common), 24)

    def _facts(self, n: int) -> list[tuple[str, str]]:
        """Cities and their codes."""
        cities = self._random.sample(CITIES, n)
        return [(city, str(self._random.randrange(10_000, 100_000))) for city in cities]

    def _hidden(
        self, facts: dict[float, str], length: int, question: str, start: str = ""
    ) -> list[int]:
        """`start`, sentences with each fact at its depth, and the question at the end."""
        ids, end = self._encode(start), self._encode(f"\n\n{question}")
        pieces = [(depth, self._encode(f" {fact}")) for depth, fact in sorted(facts.items())]
        room = length - len(ids) - len(end) - sum(len(ids) for _, ids in pieces)
        noise = self._noise()
        written = 0
        upcoming = next(noise)
        while written + len(upcoming) <= room:
            while pieces and written >= pieces[0][0] * room:
                ids += pieces.pop(0)[1]
            ids += upcoming
            written += len(upcoming)
            upcoming = next(noise)
        for _, fact in pieces:
            ids += fact
        return ids + end

    def _noise(self) -> Iterator[list[int]]:
        while True:
            self._random.shuffle(self._sentences)
            for sentence in self._sentences:
                yield self._encode(f" {sentence}")


def _fact(city: str, code: str) -> str:
    return f"Keep in mind that the door code of {city} is {code}."
