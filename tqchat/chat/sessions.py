"""Conversations on disk, each in a folder of its own, written as they happen.

`conversation.jsonl` holds events, one JSON object a line, and only ever grows: a crash can cut
nothing but its last line, which then never happened. `title` repeats the title, so that a list need
not read everything. `cache` belongs to whoever keeps there what can be computed again.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tqchat import paths
from tqchat.chat.conversation import (
    Conversation,
    Message,
    Span,
    spans_from_json,
    spans_to_json,
)
from tqchat.chat.errors import ChatError
from tqchat.chat.marks import with_opening, without_thought

VERSION = 1
PARTIAL_INTERVAL_S = 2.0

_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
_TITLE_LENGTH = 60
# The end of the year 9999: past it there are no dates.
_LAST_TIME = 253_402_300_799
_EXCERPT_MARGIN = 40
# How long to wait for a lock: who only looks holds it for a moment.
_LOCK_TRIES, _LOCK_PAUSE_S = 10, 0.05


@dataclass(frozen=True, slots=True)
class Summary:
    """A conversation in a list. `modified` is Unix time, `model` the one it began with, `size` the
    bytes of all its files, which deleting it frees."""

    id: str
    title: str
    model: str | None
    modified: float
    size: int

    @property
    def folder(self) -> Path:
        return _root() / self.id


@dataclass(slots=True)
class Transcript:
    """What events add up to.

    `title` is one that was given by hand, `partial` the text so far of an answer under way.
    """

    created: float = 0.0
    model: str | None = None
    title: str | None = None
    conversation: Conversation = field(default_factory=Conversation)
    partial: list[str] = field(default_factory=list)

    def apply(self, event: Any) -> None:
        """Take in one event; one of a kind not known here changes nothing. Raises ChatError."""
        if event.get("type") not in ("partial", "answer"):
            self.end_partial()
        match event:
            case {"type": "session", "created": float(created)} if 0 <= created < _LAST_TIME:
                self.created = created
            case {"type": "system", "text": str(text)}:
                self.conversation.system = text
            case {"type": "sampling", "values": dict(values)}:
                self.conversation.sampling = values
            case {"type": "model", "name": str(name)}:
                self.model = name
            case {"type": "title", "text": str(text)}:
                self.title = title_of(text)
            case {"type": "user", "text": str(text)}:
                spans = spans_from_json(event.get("attached"), text)
                self.conversation.add("user", text, spans)
            case {"type": "partial", "text": str(text)}:
                self.partial.append(text)
            case {"type": "answer", "text": str(text)}:
                self.partial.clear()
                ended = event.get("ended")
                ended = ended if isinstance(ended, str) else ""
                self.conversation.add("assistant", text, ended=ended)
            case {"type": "replace", "start": int(start), "stop": int(stop), "messages": messages}:
                given = {"system": "", "messages": messages}
                self.conversation.messages[start:stop] = Conversation.from_json(given).messages

    def end_partial(self) -> None:
        """An answer that was not finished stays, as far as it came."""
        if self.partial:
            self.conversation.add("assistant", "".join(self.partial))
            self.partial.clear()

    @property
    def shown_title(self) -> str:
        messages = self.conversation.messages
        return self.title or (subject(messages[0]) if messages else "")

    def to_json(self, session_id: str | None) -> str:
        """`session_id`: the one that it is saved under."""
        value = {
            "version": VERSION,
            "id": session_id,
            "title": self.shown_title,
            "model": self.model,
            "created": self.created,
            **self.conversation.to_json(),
        }
        return json.dumps(value, ensure_ascii=False, indent=1) + "\n"

    def to_markdown(self) -> str:
        """Without what was thought before answers."""
        day = time.strftime("%Y-%m-%d", time.localtime(self.created))
        parts = [f"# {self.shown_title}", f"*{self.model or 'tqchat'}, {day}*"]
        for message in self.conversation.prompt():
            name = {"user": "You", "assistant": "Answer", "system": "System prompt"}[message.role]
            is_answer = message.role == "assistant"
            text = without_thought(message.content) if is_answer else message.content
            parts += [f"## {name}", text.strip()]
        return "\n\n".join(parts) + "\n"

    @classmethod
    def read(cls, data: bytes) -> Self:
        """From a file's whole lines; one that is damaged is left out. Raises ChatError."""
        first, *lines = data.split(b"\n")[:-1] or [b""]
        transcript = cls()
        try:
            start = json.loads(first)
            version = start["version"] if start["type"] == "session" else None
        except (ValueError, RecursionError, KeyError, TypeError):
            version = None
        if not isinstance(version, int):
            raise ChatError("This is not a conversation of tqchat's.")
        if version > VERSION:
            raise ChatError("This conversation was written by a newer tqchat: upgrade to open it.")
        transcript.apply(start)
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError, AttributeError, ChatError):
                transcript.apply(json.loads(line))
        messages = transcript.conversation.messages
        for place, message in enumerate(messages):
            if message.role == "assistant":
                messages[place] = replace(message, content=with_opening(message.content))
        return transcript


class Session:
    """One conversation on disk, open for writing and locked against other processes.

    What writes raises ChatError where the disk does not take it; `stream` alone never does.
    """

    def __init__(self, session_id: str, descriptor: int, transcript: Transcript) -> None:
        self.id = session_id
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._transcript = transcript
        self._unwritten: list[str] = []
        self._written_at = 0.0
        self.unfinished = bool(transcript.partial)
        transcript.end_partial()

    @classmethod
    def create(cls, model: str | None = None, system: str = "") -> Self:
        """A new conversation. Raises ChatError."""
        with _errors():
            root = _root()
            while True:
                name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
                with contextlib.suppress(FileExistsError):
                    (root / name).mkdir(mode=0o700)
                    break
            session = cls(name, _open_locked(root / name, os.O_CREAT), Transcript())
            start: list[dict[str, Any]] = [
                {"type": "session", "version": VERSION, "created": time.time()}
            ]
            if model is not None:
                start.append({"type": "model", "name": model})
            if system:
                start.append({"type": "system", "text": system})
            try:
                session._write(*start)
            except BaseException:
                session.close()
                shutil.rmtree(session.folder, ignore_errors=True)
                raise
        return session

    @classmethod
    def open(cls, session_id: str) -> Self:
        """Go on with a conversation. Raises ChatError: there is none, or it is open elsewhere."""
        folder = _existing(session_id)
        with _errors():
            descriptor = _open_locked(folder, 0)
            try:
                data = _log(folder).read_bytes()
                transcript = Transcript.read(data)
                os.ftruncate(descriptor, data.rfind(b"\n") + 1)
            except BaseException:
                os.close(descriptor)
                raise
        return cls(session_id, descriptor, transcript)

    @property
    def folder(self) -> Path:
        return _root() / self.id

    @property
    def cache_folder(self) -> Path:
        return self.folder / "cache"

    @property
    def transcript(self) -> Transcript:
        """To be read; what changes it are the calls below."""
        return self._transcript

    @property
    def conversation(self) -> Conversation:
        """That of the transcript."""
        return self._transcript.conversation

    @property
    def model(self) -> str | None:
        """The name of the model used last."""
        return self._transcript.model

    @property
    def title(self) -> str:
        return self._transcript.shown_title

    @property
    def unanswered(self) -> bool:
        """Whether the last message is the user's."""
        messages = self.conversation.messages
        return bool(messages) and messages[-1].role == "user"

    def add_user(self, text: str, attached: tuple[Span, ...] = ()) -> None:
        """The user's turn, on the disk when this returns."""
        event: dict[str, Any] = {"type": "user", "text": text}
        if attached:
            event["attached"] = spans_to_json(attached)
        self._append(event)
        if len(self.conversation.messages) == 1:
            self._show_title()

    def stream(self, text: str) -> None:
        """A piece of the answer under way; what has come is written every few seconds."""
        self._unwritten.append(text)
        if time.monotonic() - self._written_at >= PARTIAL_INTERVAL_S:
            with contextlib.suppress(ChatError):
                self._flush()

    def finish(self, text: str, ended: str = "") -> None:
        """The whole answer; `ended`: why, if not by itself."""
        self._unwritten.clear()
        event = {"type": "answer", "text": text}
        if ended:
            event["ended"] = ended
        self._append(event)
        self.unfinished = False

    def replace(
        self, start: int, stop: int | None = None, messages: Sequence[Message] = ()
    ) -> None:
        """Put `messages` in the place of those from `start` to `stop` (None: to the end)."""
        self._flush()
        self._append(
            {
                "type": "replace",
                "start": start,
                "stop": 1 << 30 if stop is None else stop,
                "messages": Conversation("", list(messages)).to_json()["messages"],
            }
        )

    def use_model(self, name: str) -> None:
        if name != self.model:
            self._append({"type": "model", "name": name})

    def set_system(self, text: str) -> None:
        self._append({"type": "system", "text": text})

    def set_sampling(self, values: dict[str, Any]) -> None:
        """All that this conversation is sampled with, where that is its own."""
        self._append({"type": "sampling", "values": values})

    def rename(self, title: str) -> None:
        self._append({"type": "title", "text": title_of(title)})
        self._show_title()

    def close(self) -> None:
        """Write what is not yet written, and let others open the conversation."""
        with contextlib.suppress(ChatError):
            self._flush()
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show_title(self) -> None:
        with _errors():
            paths.write_private(self.folder / "title", self.title)

    def _flush(self) -> None:
        """Write the pieces that wait. Without fsync: a crash of the program loses nothing."""
        if self._unwritten:
            event = {"type": "partial", "text": "".join(self._unwritten)}
            self._unwritten.clear()
            self._written_at = time.monotonic()
            with _errors():
                self._write(event)

    def _append(self, event: dict[str, Any]) -> None:
        with _errors():
            self._write(event)
            os.fsync(self._descriptor)

    def _write(self, *events: dict[str, Any]) -> None:
        data = "".join(json.dumps(event) + "\n" for event in events).encode()
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            # Half a line must not run into the next one.
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)
        for event in events:
            self._transcript.apply(event)


def summaries() -> list[Summary]:
    """All conversations, the one changed last first. Raises ChatError."""
    found = []
    with _errors():
        folders = list(_root().iterdir())
    for folder in folders:
        if _ID.fullmatch(folder.name):
            with contextlib.suppress(OSError, ChatError):
                with _log(folder).open("rb") as file:
                    # What comes before the first message.
                    start = Transcript.read(file.read(4096))
                    status = os.fstat(file.fileno())
                title, size = _title(folder) or folder.name, _size(folder)
                found.append(Summary(folder.name, title, start.model, status.st_mtime, size))
    return sorted(found, key=lambda summary: summary.modified, reverse=True)


def search(query: str) -> Iterator[tuple[Summary, str]]:
    """Conversations that have `query` in title or text, in any case, with what is around it."""
    pattern = re.compile(re.escape(query), re.IGNORECASE)
    for summary in summaries():
        with contextlib.suppress(OSError, ChatError):
            transcript = Transcript.read(_log(summary.folder).read_bytes())
            transcript.end_partial()
            for text in (*(m.content for m in transcript.conversation.messages), summary.title):
                if match := pattern.search(text):
                    begin = max(0, match.start() - _EXCERPT_MARGIN)
                    excerpt = text[begin : match.end() + _EXCERPT_MARGIN]
                    yield summary, " ".join(excerpt.split())
                    break


def delete(session_id: str) -> None:
    """Remove a conversation for good. Raises ChatError: there is none, or it is open."""
    folder = _existing(session_id)
    with _errors(), locked(folder):
        # What names the folder a conversation goes first: half a removal leaves none.
        _log(folder).unlink()
        shutil.rmtree(folder)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a conversation's folder. Raises ChatError while it is open, OSError without one."""
    descriptor = _open_locked(folder, 0)
    try:
        yield
    finally:
        os.close(descriptor)


def subject(message: Message) -> str:
    """What a message is called: by what was typed, or else by the document."""
    if typed := title_of(message.typed):
        return typed
    name = message.attached[0].name if message.attached else ""
    is_file = name and message.content.startswith(f"{name}:")
    return title_of(name if is_file else message.content)


def title_of(text: str) -> str:
    """The first words of a text, in one line without control characters."""
    words = " ".join(text[: 20 * _TITLE_LENGTH].split())
    line = "".join(c for c in words if c.isprintable())
    return line if len(line) <= _TITLE_LENGTH else line[: _TITLE_LENGTH - 1].rstrip() + "…"


def _root() -> Path:
    return paths.private_dir(paths.data_dir() / "sessions")


def _log(folder: Path) -> Path:
    return folder / "conversation.jsonl"


def _title(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return title_of((folder / "title").read_text("utf-8", "replace"))
    return ""


def _size(folder: Path) -> int:
    """Bytes of all files in it; one that goes meanwhile has none."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            size += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return size


def _existing(session_id: str) -> Path:
    with _errors():
        folder = _root() / session_id
    if not _ID.fullmatch(session_id) or not _log(folder).exists():
        raise ChatError(f"There is no conversation {session_id!r}.")
    return folder


def _open_locked(folder: Path, flags: int) -> int:
    descriptor = os.open(_log(folder), os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
    for attempt in range(_LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if attempt < _LOCK_TRIES - 1:
                time.sleep(_LOCK_PAUSE_S)
        except OSError:
            # A file system without locks.
            return descriptor
    os.close(descriptor)
    raise ChatError("This conversation is open in another tqchat: close it there first.")


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise ChatError(
            f"The conversation's files cannot be used: {error.strerror or error}{where}. Make room "
            "on the disk, or see to it that you may write there."
        ) from None
