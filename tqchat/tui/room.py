"""When the context is full: a warning in time, then a choice of what goes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tqchat.chat.conversation import Conversation, Message
from tqchat.chat.sessions import subject
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
_NEXT = Message("user", "x")

_Turn = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class _Summary:
    """Of turns `start` to `stop`, in at most so many tokens; those before are dropped."""

    start: int
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
        if turns := self._turns():
            wanted = [(_NEXT,), self._begun(), *map(_as_older, turns)]
            self._app.draft.when_counted(wanted, partial(self._ask, turns, excess))

    def _ask(self, turns: Sequence[_Turn], excess: int) -> None:
        """Once the turns are counted, unless something else has happened since."""
        cache = self._dialogue.figures.cache
        if cache is None or self._dialogue.busy or turns != self._turns():
            return
        needed = excess or int(_ROOM * cache.context)
        tokens = self._tokens(turns)
        sums = [sum(tokens[:n]) for n in range(len(turns) + 1)]
        n_dropped = next((n for n, freed in enumerate(sums) if freed >= needed), 0)
        summary, why_none = self._summary(sums, cache.context, needed)
        answers = [("clear", "Begin a new conversation")]
        if summary is not None:
            n = summary.start
            first = f"Drop {_named(turns[:n])}, and have what follows" if n else "Have it"
            answers.insert(0, ("summary", f"{first} summarised, and go on with the summary"))
        if n_dropped and (excess or n_dropped < len(turns)):
            freed = f"that frees {sums[n_dropped]:,} tokens"
            answers.insert(0, ("drop", f"Drop {_named(turns[:n_dropped])} for good: {freed}"))
        if not excess and len(answers) == 1:
            # The end of the answer says so already.
            return
        question = (
            f"The message is {excess:,} tokens too long. It stays in the prompt."
            if excess
            else "The context is full: there is no room for more."
        )
        if n_dropped and summary is None:
            question += f"\n{why_none}"
        dropped = (n_dropped, sums[n_dropped])
        way = partial(self._make, turns, dropped, summary)
        self._app.push_screen(Choice(question, answers), way)

    def _make(
        self,
        turns: Sequence[_Turn],
        dropped: tuple[int, int],
        summary: _Summary | None,
        way: str | None,
    ) -> None:
        """`dropped`: how many turns may go, and the tokens that it frees."""
        prompt = self._app.prompt
        shown = prompt.text
        if way == "summary" and summary is not None:
            read = _messages(turns[summary.start : summary.stop])
            go_on = partial(self._go_on, _messages(turns[summary.stop :]))
            self._dialogue.ask_aside(read, _REQUEST, summary.tokens, go_on)
            return
        if way == "clear":
            self._dialogue.clear()
        elif way == "drop":
            n, freed = dropped
            self._drop(len(_messages(turns[:n])), freed)
        if way is not None:
            prompt.text = shown
            prompt.move_cursor(prompt.document.end)
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

    def _turns(self) -> list[_Turn]:
        """The conversation, cut before each question."""
        turns: list[_Turn] = []
        for message in self._dialogue.record.messages:
            if message.role == "user" or not turns:
                turns.append((message,))
            else:
                turns[-1] += (message,)
        return turns

    def _begun(self) -> _Turn:
        """What any conversation begins with here, and a message as short as can be."""
        return tuple(Conversation(self._dialogue.record.talk.system, [_NEXT]).prompt())

    def _count(self, messages: _Turn) -> int:
        draft = self._app.draft
        known = draft.known(messages)
        return sum(draft.guess(one.content) for one in messages) if known is None else known

    def _tokens(self, turns: Sequence[_Turn]) -> list[int]:
        """What each turn takes of a conversation that has gone on, with the template's part."""
        around = self._count((_NEXT,))
        return [max(self._count(_as_older(turn)) - around, 0) for turn in turns]

    def _summary(
        self, sums: Sequence[int], context: int, needed: int
    ) -> tuple[_Summary | None, str]:
        """Of as many turns as leave room to write it, the oldest ones if that can be; or why not.

        `sums`: the tokens of the first turns, none to all.
        """
        most = min(_LONGEST_SUMMARY, context // 8)
        begun, takes, last = self._count(self._begun()), most + _REQUEST_TOKENS, len(sums) - 1
        why_none = "There is no room to have it summarised."
        for start in range(last):
            for stop in range(last, start, -1):
                if begun + sums[stop] - sums[start] + takes > context:
                    continue
                if sums[stop] - takes >= needed:
                    return _Summary(start, stop, most), ""
                why_none = "A summary would not make enough room."
                break
        return None, why_none

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
        if (cache := dialogue.figures.cache) is not None:
            dialogue.figures.cache = replace(cache, tokens=dialogue.held)
            self._app.draw_figures()
        text = f"What came before was dropped, {freed:,} tokens: the model no longer sees it."
        conversation.insert(0, Notice(text))


def _as_older(turn: _Turn) -> _Turn:
    """As it stands before the next message; one without an answer becomes part of that."""
    return (*turn, _NEXT) if turn[-1].role == "assistant" else turn


def _messages(turns: Sequence[_Turn]) -> list[Message]:
    return [message for turn in turns for message in turn]


def _named(turns: Sequence[_Turn]) -> str:
    """How many turns go, and how each begins."""
    what = "the oldest turn" if len(turns) == 1 else f"the {len(turns)} oldest turns"
    shown = [f"“{subject(turn[0])}”" for turn in turns[:_MOST_NAMED]]
    more = ["…"] if len(turns) > _MOST_NAMED else []
    return f"{what}, {', '.join([*shown, *more])}"
