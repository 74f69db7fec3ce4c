"""What would be sent: its tokens, counted once typing pauses, and the room it leaves."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from tqchat.chat.conversation import Conversation, Message
from tqchat.tui.counts import Countable, Counts

if TYPE_CHECKING:
    from tqchat.tui.app import ChatApp

_PAUSE_S = 0.3
# A message's text, where any would do.
_ANY = "x"


class Draft:
    """Says on the prompt's frame how much is in it."""

    def __init__(self, app: "ChatApp") -> None:
        self._app = app
        self._counts = Counts()
        self._seen = ""
        self._count_at = 0.0
        self._awaited: list[tuple[Sequence[Countable], Callable[[], None]]] = []

    def known(self, text: Countable) -> int | None:
        """The tokens of a text, or of messages in the template; None until they are counted."""
        return self._counts.known(text)

    def guess(self, text: str) -> int:
        """The tokens of a text: as counted, else what is likely."""
        return self._counts.guess(text)

    def forget(self) -> None:
        """Another model counts otherwise."""
        self._counts.forget()
        self._awaited.clear()

    def counted(self, number: int, tokens: int) -> None:
        """The engine's answer to a question for tokens."""
        self._counts.answer(number, tokens)
        prompt = self._app.prompt
        self._call_back()
        for one in prompt.attachments.inside(prompt.text):
            one.tokens = self._counts.known(one.text)
        prompt.relabel()

    def when_counted(self, texts: Sequence[Countable], then: Callable[[], None]) -> None:
        """Has texts counted and calls `then`: at once if nobody is there to count them."""
        self._ask(texts)
        self._awaited.append((texts, then))
        self._call_back()

    def _call_back(self) -> None:
        for one in self._awaited[:]:
            texts, then = one
            if not any(map(self._counts.is_asked, texts)):
                self._awaited.remove(one)
                then()

    def count(self) -> None:
        """Has the prompt's texts counted, once it is left alone for a moment."""
        prompt = self._app.prompt
        shown = prompt.text
        if shown != self._seen:
            self._seen, self._count_at = shown, monotonic() + _PAUSE_S
        texts = [one.text for one in prompt.attachments.inside(shown)]
        typed = prompt.attachments.typed(shown)
        if monotonic() >= self._count_at:
            texts.append(typed)
        self._ask([*texts, *(self._framed() if shown else ())])
        self._draw(shown, typed)

    def _ask(self, texts: Sequence[Countable]) -> None:
        dialogue = self._app.dialogue
        if dialogue.figures.model is not None and (engine := dialogue.engine) is not None:
            for text in texts:
                if self._counts.known(text) is None and not self._counts.is_asked(text):
                    self._counts.ask(engine.count(text), text)

    def _framed(self) -> list[Countable]:
        """A message in the chat template, and what of it is not the template's: the first one with
        the system prompt, or a later one, in a conversation as short as can be."""
        first, talk = Message("user", _ANY), self._app.dialogue.record.talk
        if talk.messages:
            return [(first, Message("assistant", _ANY), first), (first,), _ANY, _ANY]
        return [tuple(Conversation(talk.system, [first]).prompt()), _ANY]

    def _frame(self) -> int | None:
        """Tokens of the template around the message; None until they are counted."""
        counted = [self._counts.known(one) for one in self._framed()]
        known = [tokens for tokens in counted if tokens is not None]
        return known[0] - sum(known[1:]) if len(known) == len(counted) else None

    def _draw(self, shown: str, typed: str) -> None:
        subtitle, full = "", False
        dialogue, box = self._app.dialogue, self._app.box
        cache = dialogue.figures.cache
        if shown and cache is not None and cache.context and not shown.startswith("/"):
            attachments = self._app.prompt.attachments
            texts = [*(one.text for *_, one in attachments.spans(shown)), typed]
            frame = self._frame()
            tokens = sum(map(self._counts.guess, texts)) + (frame or 0)
            # A conversation that was taken up without its cache is read with the message.
            unread = [] if dialogue.held else [one.content for one in dialogue.record.messages]
            counted = [frame, *map(self._counts.known, [*texts, *unread])]
            about = "≈ " if None in counted else ""
            held = dialogue.held + sum(map(self._counts.guess, unread))
            # One is for the answer.
            left = cache.context - 1 - held - tokens
            full = left < 0
            rest = f"{-left:,} too many" if full else f"{left:,} left"
            subtitle = f"{about}{tokens:,} tokens · {rest}"
        if subtitle != box.border_subtitle:
            box.border_subtitle = subtitle
            box.set_class(full, "-full")
