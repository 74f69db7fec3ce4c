"""What a model thinks, where special tokens mark it: spelled <think> and </think> in text.

Most models that think write these two tags themselves, as text. OpenAI's harmony format
(https://cookbook.openai.com/articles/openai-harmony) and Gemma 4 have channels instead, whose marks
are special tokens and so no text:

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel>thought
    ...<channel|>...

Here both become <think>...</think> before the answer. Some templates write the first tag
themselves, at the end of the prompt (DeepSeek-R1, QwQ, Qwen 3 Thinking): there it is put before
what the model writes. Back in a prompt, an answer goes without what was thought, as all want it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

THINK, END_OF_THOUGHT = "<think>", "</think>"
_THOUGHT = re.compile(rf"(\s*{THINK})(.*?)({END_OF_THOUGHT}\s*|\Z)", re.DOTALL)
# Tokens; each may be a byte.
_LONGEST_OPENING = 16
_OPENED = re.compile(rf"{THINK}\s*\Z")
_CLOSING_LINE = re.compile(rf"^{END_OF_THOUGHT}$", re.MULTILINE)
_CLOSING = f"{END_OF_THOUGHT}\n\n"
_ANSWER_CHANNEL = "final"


class TokenStream(Protocol):
    """Text from token ids as they come; `finish` gives what still waits."""

    def add(self, token: int) -> str: ...
    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Marks:
    """Ids. A channel's name comes after `channel`, and ends with `message` or, if that is None,
    with its line. `end` ends what a channel holds; after `start` comes a role, which is no text.
    """

    channel: int
    end: int
    message: int | None = None
    start: int | None = None

    @classmethod
    def of(cls, special_tokens: Mapping[str, int]) -> "Marks | None":
        """The marks that a vocabulary has, if it is of one of the two formats."""
        find = special_tokens.get
        channel, end, message, start = map(
            find, ("<|channel|>", "<|end|>", "<|message|>", "<|start|>")
        )
        if channel is not None and end is not None and message is not None and start is not None:
            return cls(channel, end, message, start)
        channel, end = find("<|channel>"), find("<channel|>")
        if channel is not None and end is not None:
            return cls(channel, end)
        return None

    @property
    def within_an_answer(self) -> frozenset[int]:
        """What ends other messages, but of an answer only a part."""
        return frozenset() if self.message is None else frozenset({self.end})

    def begun(self, answer: str, encode: Callable[[str], list[int]]) -> list[int]:
        """An answer that is to be gone on with, after a prompt that asks for one."""
        if self.message is None:
            return encode(without_thought(answer))
        text = without_thought(answer)
        if not text and (thought := _THOUGHT.match(answer)):
            return [self.channel, *encode("analysis"), self.message, *encode(thought[2])]
        return [self.channel, *encode(_ANSWER_CHANNEL), self.message, *encode(text)]


def without_thought(answer: str) -> str:
    """An answer without what was thought before it."""
    found = _THOUGHT.match(answer)
    return answer[found.end() :] if found else answer


def with_opening(answer: str) -> str:
    """An answer as it is kept now, of one that was saved without the first tag, which its template
    wrote: the second has a line of its own."""
    found = _CLOSING_LINE.search(answer)
    return f"{THINK}\n{answer}" if found and THINK not in answer[: found.start()] else answer


def opened_thought(prompt: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """What of an answer stands at the end of a prompt that opens a thought, or ""."""
    found = _OPENED.search(decode(prompt[-_LONGEST_OPENING:]))
    return found[0] if found else ""


def spelled(answer: str, opened: str, plain: Callable[[str], str]) -> str:
    """An answer that is to be gone on with, after a prompt that ends in `opened`.

    The tags of its thought are what they were when the model wrote them; the rest is `plain` text.
    """
    found = _THOUGHT.match(answer)
    if found is None:
        return (_CLOSING if opened else "") + plain(answer)
    opening, thought, closing = found.groups()
    if opened:
        begun = opening + thought
        opening, thought = "", begun[len(opened) :] if begun.startswith(opened) else thought
    return opening + plain(thought) + closing + plain(answer[found.end() :])


class Told:
    """`stream` with channels told apart: thoughts come between tags, other marks are left out."""

    def __init__(self, stream: TokenStream, marks: Marks) -> None:
        self._stream = stream
        self._marks = marks
        # The channel's name as far as it is written, None where text is.
        self._name: str | None = None
        # Whether a thought is told and its closing tag is not; what comes before the next text.
        self._thinking = False
        self._before = ""

    def add(self, token: int) -> str:
        marks = self._marks
        if token not in (marks.channel, marks.start, marks.message, marks.end):
            return self._put(self._stream.add(token))
        text = self._put(self._stream.finish())
        if token == marks.message:
            self._begin(self._name or "")
        elif token != marks.end:
            self._name = ""
        elif marks.message is None:
            self._begin(_ANSWER_CHANNEL)
        return text

    def finish(self) -> str:
        return self._put(self._stream.finish())

    def _put(self, text: str) -> str:
        if self._name is not None:
            self._name += text
            if self._marks.message is not None or "\n" not in self._name:
                return ""
            name, _, text = self._name.partition("\n")
            self._begin(name)
        if not text:
            return ""
        before, self._before = self._before, ""
        self._thinking = before != _CLOSING and (self._thinking or before == THINK)
        return before + text

    def _begin(self, name: str) -> None:
        self._name = None
        thought = name.split()[:1] not in ([], ["assistant"], [_ANSWER_CHANNEL])
        if thought:
            self._before = "\n\n" if self._thinking else THINK
        else:
            self._before = _CLOSING if self._thinking else ""
