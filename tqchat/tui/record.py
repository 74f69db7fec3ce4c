"""The conversation, written to a session on disk as it happens."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import time
from typing import Any

from tqchat.chat.conversation import Conversation, Message, Span
from tqchat.chat.errors import ChatError
from tqchat.chat.sessions import Session, Transcript
from tqchat.settings import sampling


class Record:
    """The first message makes the session.

    Where the disk does not take it, `notice` is told once and the conversation goes on unsaved.
    """

    def __init__(self, system: str | None, notice: Callable[[str], None]) -> None:
        self.talk = Conversation(system or "")
        self.session: Session | None = None
        self._notice = notice
        self._saving = True
        # What the last question took the place of, from which message on.
        self._start = 0
        self._before: list[Message] = []
        self._taken_back = False
        # Sessions that the engine may still save a cache for.
        self._left: list[Session] = []

    @property
    def messages(self) -> list[Message]:
        """To be read; what changes them are the calls below."""
        return self.talk.messages

    @property
    def unanswered(self) -> bool:
        return bool(self.messages) and self.messages[-1].role == "user"

    def transcript(self, model: str | None) -> Transcript:
        """All that was said, saved or not; an unsaved conversation is held with `model`."""
        if self.session is not None:
            return self.session.transcript
        return Transcript(time(), model, conversation=self.talk)

    def ask(self, text: str, model: str, attached: tuple[Span, ...] = ()) -> Path | None:
        """The person's turn, on the disk when this returns.

        A question that was left without an answer is asked again, with this one. Returns the folder
        for the cache if a session begins with it.
        """
        self._start = len(self.messages) - self.unanswered
        self._before = self.messages[self._start :]
        asked = _joined([*self._before, Message("user", text, attached)])
        self.talk.messages[self._start :] = [asked]
        begins = self._saving and self.session is None
        with self._or_unsaved():
            if begins:
                self.session = Session.create(model, self.talk.system)
            if self.session is not None:
                if begins and self.talk.sampling:
                    self.session.set_sampling(self.talk.sampling)
                self.session.use_model(model)
                if self._before or self._taken_back:
                    self.session.replace(self._start)
                self.session.add_user(asked.content, asked.attached)
        self._taken_back = False
        return self.session.cache_folder if begins and self.session is not None else None

    def stream(self, text: str) -> None:
        if self.session is not None:
            self.session.stream(text)

    def finish(self, text: str, ended: str = "") -> None:
        self.talk.add("assistant", text, ended=ended)
        with self._or_unsaved():
            if self.session is not None:
                self.session.finish(text, ended)

    def take_back(self) -> None:
        """The last question goes. On the disk it stays until the next one: it might be the last
        thing said before the program ends, and an hour may have gone into reading it."""
        self.talk.messages[self._start :] = self._before
        self._taken_back = True

    def replace(self, start: int, stop: int | None = None, messages: list[Message] = []) -> None:  # noqa: B006
        """Put `messages` in the place of those from `start` to `stop` (None: to the end)."""
        self.talk.messages[start:stop] = messages
        with self._or_unsaved():
            if self.session is not None:
                if self._taken_back:
                    self.session.replace(self._start, None, self._before)
                self.session.replace(start, stop, messages)
        self._taken_back = False

    def set_system(self, text: str) -> None:
        self.talk.system = text
        with self._or_unsaved():
            if self.session is not None:
                self.session.set_system(text)

    def set_sampling(self, values: dict[str, Any]) -> None:
        self.talk.sampling = values
        with self._or_unsaved():
            if self.session is not None:
                self.session.set_sampling(values)

    def rename(self, session_id: str, title: str) -> None:
        """Give this or another session a title. Raises ChatError."""
        if self.session is not None and self.session.id == session_id:
            self.session.rename(title)
        else:
            with Session.open(session_id) as session:
                session.rename(title)

    def open(self, session_id: str) -> Session:
        """A session to go on with; one that was just left may still be open. Raises ChatError."""
        for session in self._left:
            if session.id == session_id:
                self._left.remove(session)
                return session
        return Session.open(session_id)

    def go_on(self, session: Session, system: str | None) -> None:
        """Leave the conversation for the one in `session`, with another system prompt if given."""
        self.leave()
        self.session = session
        if system is not None and system != session.conversation.system:
            with self._or_unsaved():
                session.set_system(system)
        self.talk.system = session.conversation.system if system is None else system
        self.talk.messages[:] = session.conversation.messages
        self.talk.sampling = sampling(session.conversation.sampling)

    def leave(self) -> None:
        """Begin anew. What was said stays on disk."""
        if self.session is not None:
            self._left.append(self.session)
        self.session = None
        self._saving = True
        self._taken_back = False
        self.talk.clear()

    def let_go(self) -> None:
        """The engine has done with the sessions that were left."""
        while self._left:
            self._left.pop().close()

    def close(self) -> None:
        self.leave()
        self.let_go()

    @contextlib.contextmanager
    def _or_unsaved(self) -> Iterator[None]:
        try:
            yield
        except ChatError as error:
            if self.session is not None:
                self._left.append(self.session)
            self.session = None
            self._saving = False
            self._notice(f"{error} This conversation goes on without being saved.")


def _joined(messages: Sequence[Message]) -> Message:
    """Several questions as one."""
    text, spans = "", list[Span]()
    for message in messages:
        text += "\n\n" if text else ""
        spans += [
            Span(one.name, one.start + len(text), one.stop + len(text)) for one in message.attached
        ]
        text += message.content
    return Message("user", text, tuple(spans))
