"""What a model thinks, told apart from what it answers, while both stream in.

Models that think do so before they answer, between marks: <think> and </think> (DeepSeek-R1, Qwen
3), or as the analysis channel of OpenAI's harmony format. Where the prompt ends in <think>, the
answer has the closing mark alone, on a line of its own: what came before it was thought.
"""

import re
from typing import Literal, TypeAlias

Channel: TypeAlias = Literal["thought", "answer", "none"]

_OPENING = ("<think>", "<|channel|>analysis<|message|>")
_CLOSING = ("</think>", "<|end|>")
_FINAL = re.compile(r"\s*(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>")
_CLOSED_ALONE = re.compile(r"^</think>$", re.MULTILINE)


class Channels:
    """Marks count where they are expected: the opening one before anything else, the closing one
    after it. Elsewhere they are text."""

    def __init__(self) -> None:
        self._state: Literal["begin", "thought", "after", "answer"] = "begin"
        self._held = ""
        self._closing = ""
        # What was said, until it is clear that it is the answer.
        self._said: list[str] = []

    def feed(self, text: str) -> list[tuple[Channel, str]]:
        """Takes more text and returns what can be said of it, in order; "none" takes back all."""
        self._held += text
        made: list[tuple[Channel, str]] = []
        while (state := self._state) != "answer":
            if state == "begin":
                self._begin()
            elif state == "thought":
                self._think(made)
            else:
                self._after()
            if self._state == state:
                return made
        if self._held:
            self._answer(made)
        return made

    def finish(self) -> list[tuple[Channel, str]]:
        """The text has ended: what was held is what it seems."""
        held, self._held = self._held, ""
        return [("thought" if self._state == "thought" else "answer", held)] if held else []

    def _begin(self) -> None:
        text = self._held.lstrip()
        for opening, closing in zip(_OPENING, _CLOSING, strict=True):
            if text.startswith(opening):
                self._state, self._closing = "thought", closing
                self._held = text.removeprefix(opening)
                return
        if text and not any(opening.startswith(text) for opening in _OPENING):
            self._state = "after"

    def _think(self, made: list[tuple[Channel, str]]) -> None:
        thought, closed, rest = self._held.partition(self._closing)
        if not closed:
            kept = next(
                size
                for size in range(len(self._closing) - 1, -1, -1)
                if thought.endswith(self._closing[:size])
            )
            rest = thought[len(thought) - kept :]
            thought = thought[: len(thought) - kept]
        if thought:
            made.append(("thought", thought))
        self._held = rest
        if closed:
            self._state = "after"

    def _answer(self, made: list[tuple[Channel, str]]) -> None:
        text, self._held = self._held, ""
        if not self._closing:
            # Lines are looked at once they are whole.
            self._said.append(text)
            if "\n" in text:
                lines = "".join(self._said)
                if found := _CLOSED_ALONE.search(lines, 0, lines.rindex("\n")):
                    self._closing = found.group()
                    self._said.clear()
                    self._state, self._held = "after", lines[found.end() :]
                    made += [("none", ""), ("thought", lines[: found.start()])]
                    made += self.feed("")
                    return
        made.append(("answer", text))

    def _after(self) -> None:
        """What comes before the answer: blank lines, and the mark of harmony's final channel."""
        if found := _FINAL.match(self._held):
            self._held = self._held[found.end() :]
            self._state = "answer"
        elif (text := self._held.lstrip()) and not _may_become_final(text):
            self._held = text if self._closing else self._held
            self._state = "answer"


def _may_become_final(text: str) -> bool:
    marks = ("<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>")
    return any(mark.startswith(text) for mark in marks)
