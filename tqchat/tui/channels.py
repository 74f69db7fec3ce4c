"""What a model thinks, told apart from what it answers, while both stream in.

Models that think do so before they answer, between <think> and </think>.
"""

from typing import Literal, TypeAlias

from tqchat.chat.marks import END_OF_THOUGHT, THINK

Channel: TypeAlias = Literal["thought", "answer"]


class Channels:
    """Marks count where they are expected: the opening one before anything else, the closing one
    after it. Elsewhere they are text."""

    def __init__(self) -> None:
        self._state: Literal["begin", "thought", "after", "answer"] = "begin"
        self._held = ""

    def feed(self, text: str) -> list[tuple[Channel, str]]:
        """Takes more text and returns what can be said of it, in order."""
        self._held += text
        made: list[tuple[Channel, str]] = []
        if self._state == "begin":
            self._begin()
        if self._state == "thought":
            self._think(made)
        if self._state == "after":
            # Blank lines before the answer are left out.
            self._held = self._held.lstrip()
            if self._held:
                self._state = "answer"
        if self._state == "answer" and self._held:
            made.append(("answer", self._held))
            self._held = ""
        return made

    def finish(self) -> list[tuple[Channel, str]]:
        """The text has ended: what was held is what it seems."""
        held, self._held = self._held, ""
        return [("thought" if self._state == "thought" else "answer", held)] if held else []

    def _begin(self) -> None:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._state = "thought"
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
