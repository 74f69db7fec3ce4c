"""A conversation as plain data."""

from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from tqchat.chat.errors import ChatError

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Span:
    """Characters of a message that were attached to it, and what the screen calls them."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Message:
    """`attached` and `ended`, why an answer ended if not by itself, are for people: to the model
    two messages are the same without."""

    role: Role
    content: str
    attached: tuple[Span, ...] = field(default=(), compare=False)
    ended: str = field(default="", compare=False)

    @property
    def typed(self) -> str:
        """The text without what was attached."""
        parts, end = [], 0
        for span in self.attached:
            parts.append(self.content[end : span.start])
            end = span.stop
        return "".join([*parts, self.content[end:]])

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.attached:
            value["attached"] = spans_to_json(self.attached)
        if self.ended:
            value["ended"] = self.ended
        return value


def spans_to_json(spans: tuple[Span, ...]) -> list[tuple[str, int, int]]:
    return [(span.name, span.start, span.stop) for span in spans]


def spans_from_json(value: Any, text: str) -> tuple[Span, ...]:
    """From what `spans_to_json` gave; none where they do not fit the text."""
    spans, end = [], 0
    for one in value if isinstance(value, list) else []:
        match one:
            case [str(name), int(start), int(stop)] if name and end <= start < stop <= len(text):
                spans.append(Span(name, start, stop))
                end = stop
            case _:
                return ()
    return tuple(spans)


@dataclass(slots=True)
class Conversation:
    """A system prompt ("" for none) and the turns after it, none of which is a system message.
    `sampling`: settings that were chosen for this conversation alone, by name."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict, compare=False)

    def prompt(self) -> list[Message]:
        """What the model reads: the system prompt, if there is one, and the turns."""
        return [Message("system", self.system), *self.messages] if self.system else self.messages[:]

    def add(
        self,
        role: Literal["user", "assistant"],
        content: str,
        attached: tuple[Span, ...] = (),
        ended: str = "",
    ) -> None:
        """An answer right after an answer goes on with it."""
        if role == "assistant" and self.messages and self.messages[-1].role == role:
            content = self.messages.pop().content + content
        self.messages.append(Message(role, content, attached, ended))

    def replace_last(self, content: str) -> None:
        """Give the last message other text. Raises IndexError without one."""
        self.messages[-1] = Message(self.messages[-1].role, content)

    def clear(self) -> None:
        """Forget the turns. The system prompt stays."""
        self.messages.clear()

    def to_json(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "messages": [message.to_json() for message in self.messages],
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """From what `to_json` gave. Raises ChatError for anything else."""
        match value:
            case {"system": str(system), "messages": list(entries)}:
                return cls(system, [_message(entry) for entry in entries])
        raise ChatError("This is not a conversation: it needs a system prompt and messages.")


def _message(entry: Any) -> Message:
    match entry:
        case {"role": str(role), "content": str(content)} if role in get_args(Role)[1:]:
            spans = spans_from_json(entry.get("attached"), content)
            ended = entry.get("ended")
            return Message(role, content, spans, ended if isinstance(ended, str) else "")  # type: ignore[arg-type]
    raise ChatError("This is not a conversation: each message needs a role and a content.")
