"""A conversation as plain data."""

from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from tqchat.chat.errors import ChatError

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    content: str


@dataclass(slots=True)
class Conversation:
    """A system prompt ("" for none) and the turns after it, none of which is a system message."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)

    def prompt(self) -> list[Message]:
        """What the model reads: the system prompt, if there is one, and the turns."""
        return [Message("system", self.system), *self.messages] if self.system else self.messages[:]

    def add(self, role: Literal["user", "assistant"], content: str) -> None:
        """An answer right after an answer goes on with it."""
        if role == "assistant" and self.messages and self.messages[-1].role == role:
            self.replace_last(self.messages[-1].content + content)
        else:
            self.messages.append(Message(role, content))

    def replace_last(self, content: str) -> None:
        """Give the last message other text. Raises IndexError without one."""
        self.messages[-1] = Message(self.messages[-1].role, content)

    def clear(self) -> None:
        """Forget the turns. The system prompt stays."""
        self.messages.clear()

    def to_json(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "messages": [{"role": m.role, "content": m.content} for m in self.messages],
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
            return Message(role, content)  # type: ignore[arg-type]
    raise ChatError("This is not a conversation: each message needs a role and a content.")
