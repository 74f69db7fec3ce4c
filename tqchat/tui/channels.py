"""What a model thinks, told apart from what it answers, while both stream in.

Models that think do so before they answer, between <think> and </think>. Where the prompt ends in
<think> (DeepSeek-R1), the answer has the closing mark alone, on a line of its own: what came before
it was thought.
"""

import re
from typing import Literal, TypeAlias

from tqchat.chat.marks import END_OF_THOUGHT, THINK

Channel: TypeAlias = Literal["thought", "answer", "none"]

_CLOSED_ALONE = re.compile(rf"^{END_OF_THOUGHT}$", re.MULTILINE)


class Channels:
    """Marks count where they are expected: the opening one before anything else, the closing one
    after it. Elsewhere they are text."""

    def __init__(self) -> None:
        self._state: Literal["begin", "thought", "after", "answer"] = "begin"
        self._held = ""
        self._has_thought = False
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
        if text.startswith(THINK):
            self._state, self._has_thought = "thought", True
            self._held = text.removeprefix(THINK)
        elif text and not THINK.startswith(text):
            self._state = "answer"

    def _think(self, made: list[tuple[Channel, str]]) -> None:
        thought, closed, rest = self._held.partition(END_OF_THOUGHT)
        if not closed:
            kept = next(
                size
                for size in range(len(END_OF_THOUGHT) - 1, -1, -1)
                if thought.endswith(END_OF_THOUGHT[:size])
            )
            rest = thought[len(thought) - kept :]
            thought = thought[: len(thought) - kept]
        if thought:
            made.append(("thought", thought))
        self._held = rest
        if closed:
            self._state = "after"

    def _after(self) -> None:
        """Blank lines before the answer are left out."""
        self._held = self._held.lstrip()
        if self._held:
            self._state = "answer"

    def _answer(self, made: list[tuple[Channel, str]]) -> None:
        text, self._held = self._held, ""
        if not self._has_thought:
            # Lines are looked at once they are whole.
            self._said.append(text)
            if "\n" in text:
                lines = "".join(self._said)
                if found := _CLOSED_ALONE.search(lines, 0, lines.rindex("\n")):
                    self._has_thought = True
                    self._said.clear()
                    self._state, self._held = "after", lines[found.end() :]
                    made += [("none", ""), ("thought", lines[: found.start()])]
                    made += self.feed("")
                    return
        made.append(("answer", text))
