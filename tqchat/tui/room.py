"""When the context is full: a warning in time, then a choice of what goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tqchat.chat.conversation import Message
from tqchat.chat.sessions import title_of
from tqchat.tui.entries import Notice, Question
from tqchat.tui.screens.choice import Choice

if TYPE_CHECKING:
    from tqchat.tui.app import ChatApp
    from tqchat.tui.dialogue import Dialogue

_NEARLY_FULL = 0.9
# The share of the context that is made free when an answer has filled it.
_ROOM = 0.25
_LONGEST_SUMMARY = 512
_MOST_NAMED = 3
_REQUEST = (
    "Summarise our conversation so far: what it is about, and every fact, name, number and "
    "decision that is needed to go on with it."
)
# More than it takes, with what the template puts around it.
_REQUEST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Summary:
    """Of the first `stop` messages, in at most so many tokens."""

    stop: int
    tokens: int


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

    def offer(self, excess: int = 0) -> None:
        """The person chooses what goes, if anything: a message was `excess` tokens too long, or the
        answer has filled the context."""
        messages, cache = self._dialogue.record.messages, self._app.dialogue.figures.cache
        if not messages or cache is None:
            return
        needed = excess or int(_ROOM * cache.context)
        stop = self._oldest(needed)
        freed = sum(self._tokens()[:stop])
        answers = [("clear", "Begin a new conversation")]
        if summary := self._summary(cache.context, needed):
            answers.insert(0, ("summary", "Have it summarised, and go on with the summary"))
        if freed >= needed and (excess or stop < len(messages)):
            turns = [message.content for message in messages[:stop] if message.role == "user"]
            answers.insert(0, ("drop", f"Drop {_named(turns)}: about {freed:,} tokens"))
        if not excess and len(answers) == 1:
            # The end of the answer says so already.
            return
        question = (
            f"The message is {excess:,} tokens too long. It stays in the prompt."
            if excess
            else "The context is full: there is no room for more."
        )
        self._app.push_screen(Choice(question, answers), partial(self._make, stop, freed, summary))

    def _make(self, stop: int, freed: int, summary: "_Summary | None", way: str | None) -> None:
        prompt = self._app.prompt
        shown = prompt.text
        if way == "summary" and summary is not None:
            dialogue = self._dialogue
            before = dialogue.record.messages[: summary.stop]
            kept = dialogue.record.messages[summary.stop :]
            dialogue.ask_aside(before, _REQUEST, summary.tokens, partial(self._go_on, kept))
            return
        if way == "clear":
            self._dialogue.clear()
        elif way == "drop":
            self._drop(stop, freed)
        if way is not None:
            prompt.text = shown
            self._say_there_is_room()

    def _say_there_is_room(self) -> None:
        enter = ": Enter sends the message" if self._app.prompt.text else ""
        self._app.hint(f"There is more room now{enter}.")

    def _go_on(self, kept: Sequence[Message], summary: str) -> None:
        """A new conversation that begins with the summary; the newest turns follow as they were."""
        saved = self._dialogue.record.session is not None
        begun = [Message("user", _REQUEST), Message("assistant", summary)]
        self._dialogue.begin_with([*begun, *kept])
        before = " That one is saved whole: /sessions has it." if saved else ""
        text = f"A new conversation: it begins with a summary of the one before.{before}"
        self._app.conversation.append(Notice(text))
        self._app.conversation.show_end()
        self._say_there_is_room()

    def _tokens(self) -> list[int]:
        """Of each message, so that they add up to what the engine holds."""
        guesses = [self._app.draft.guess(one.content) for one in self._dialogue.record.messages]
        scale = max(self._dialogue.held / max(sum(guesses), 1), 1.0)
        return [int(guess * scale) for guess in guesses]

    def _oldest(self, needed: int) -> int:
        """How many of the oldest messages go to free so many tokens; whole turns."""
        messages, tokens, stop = self._dialogue.record.messages, self._tokens(), 0
        while stop < len(messages) and (
            sum(tokens[:stop]) < needed or messages[stop].role != "user"
        ):
            stop += 1
        return stop

    def _summary(self, context: int, needed: int) -> "_Summary | None":
        """Of as many turns as leave room to write it; None if that would not help."""
        messages, tokens = self._dialogue.record.messages, self._tokens()
        most = min(_LONGEST_SUMMARY, context // 8)
        stop = len(messages)
        while stop and (
            sum(tokens[:stop]) + most + _REQUEST_TOKENS > context
            or (stop < len(messages) and messages[stop].role != "user")
        ):
            stop -= 1
        helps = stop > 0 and sum(tokens[:stop]) - most - _REQUEST_TOKENS >= needed
        return _Summary(stop, most) if helps else None

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


def _named(turns: Sequence[str]) -> str:
    """How many turns go, and how each begins."""
    what = "the oldest turn" if len(turns) == 1 else f"the {len(turns)} oldest turns"
    shown = [f"“{title_of(text)}”" for text in turns[:_MOST_NAMED]]
    more = ["…"] if len(turns) > _MOST_NAMED else []
    return f"{what}, {', '.join([*shown, *more])}"
