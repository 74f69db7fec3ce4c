"""When the context is full: a warning in time, then a choice of what goes."""

from functools import partial
from typing import TYPE_CHECKING

from tqchat.tui.entries import Notice, Question
from tqchat.tui.screens.choice import Choice

if TYPE_CHECKING:
    from tqchat.tui.app import ChatApp
    from tqchat.tui.dialogue import Dialogue

_NEARLY_FULL = 0.9


class Room:
    def __init__(self, app: "ChatApp", dialogue: "Dialogue") -> None:
        self._app = app
        self._dialogue = dialogue
        self._warned = False

    def warn_if_nearly_full(self, tokens: int, context: int) -> None:
        """Once, until there is room again."""
        nearly_full = tokens >= _NEARLY_FULL * context > 0
        if nearly_full and not self._warned:
            text = f"The context is nearly full: {context - tokens:,} of {context:,} tokens left."
            self._app.conversation.append(Notice(text, "!", "$warning"))
        self._warned = nearly_full

    def offer(self, excess: int) -> None:
        """The message did not fit: the person chooses what goes, if anything."""
        messages, freed, stop = self._dialogue.record.messages, 0, 0
        while stop < len(messages) and (freed < excess or messages[stop].role != "user"):
            freed += self._app.draft.guess(messages[stop].content)
            stop += 1
        answers = [("clear", "Begin a new conversation")]
        if freed >= excess:
            turns = sum(message.role == "user" for message in messages[:stop])
            what = "the oldest turn" if turns == 1 else f"the {turns} oldest turns"
            answers.insert(0, ("drop", f"Drop {what}: about {freed:,} tokens"))
        if messages:
            question = f"The message is {excess:,} tokens too long. It stays in the prompt."
            self._app.push_screen(Choice(question, answers), partial(self._make, stop, freed))

    def _make(self, stop: int, freed: int, way: str | None) -> None:
        prompt = self._app.prompt
        shown = prompt.text
        if way == "clear":
            self._dialogue.clear()
        elif way == "drop":
            self._drop(stop, freed)
        if way is not None:
            prompt.text = shown
            self._app.hint("There is more room now: Enter sends the message.")

    def _drop(self, stop: int, freed: int) -> None:
        """The oldest messages, `stop` of them, go from the conversation and the screen."""
        dialogue, conversation = self._dialogue, self._app.conversation
        dialogue.record.replace(0, stop)
        left = sum(message.role == "user" for message in dialogue.record.messages)
        entries = conversation.entries
        questions = [place for place, one in enumerate(entries) if isinstance(one, Question)]
        first = questions[-left] if left else len(entries)
        for entry in entries[:first]:
            conversation.remove_entry(entry)
        dialogue.held = max(dialogue.held - freed, 0)
        text = f"What came before was dropped, about {freed:,} tokens: the model no longer sees it."
        conversation.insert(0, Notice(text))
