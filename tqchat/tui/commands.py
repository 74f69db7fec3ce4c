"""The commands of the chat: one table, from which help, completion, the palette and the README
come."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqchat.tui.app import ChatApp


@dataclass(frozen=True, slots=True)
class Command:
    """`bare`: also understood without the slash, when it is all that was typed."""

    name: str
    help: str
    run: Callable[["ChatApp"], None]
    bare: tuple[str, ...] = ()


COMMANDS = (
    Command("help", "show commands and keys", lambda app: app.show_help()),
    Command(
        "clear", "begin a new conversation and free the cache", lambda app: app.clear(), ("clear",)
    ),
    Command(
        "reset",
        "clear, and put system prompt and sampling back",
        lambda app: app.reset(),
        ("reset",),
    ),
    Command("retry", "answer the last message again", lambda app: app.retry()),
    Command("copy", "copy the last answer", lambda app: app.copy_answer()),
    Command("stats", "show the figures of the last answer", lambda app: app.show_stats()),
    Command("theme", "choose the colours", lambda app: app.action_change_theme()),
    Command("panel", "show or hide the side panel", lambda app: app.action_toggle_panel()),
    Command("quit", "leave", lambda app: app.action_leave(), ("quit", "exit")),
)


@dataclass(frozen=True, slots=True)
class Unknown:
    """Looks like a command, but is none."""

    name: str
    nearest: Command | None

    @property
    def message(self) -> str:
        instead = f"Did you mean /{self.nearest.name}?" if self.nearest else "/help lists them all."
        return f"No command /{self.name}. {instead} (A space before it sends it as text.)"


def find(text: str) -> Command | Unknown | None:
    """The command that `text` is, or None if it is a message to the model."""
    typed = text.rstrip()
    for command in COMMANDS:
        if typed.lower() in command.bare:
            return command
    word = typed.removeprefix("/")
    if word == typed or "\n" in typed or "/" in word.split(" ")[0]:
        return None  # "/usr/bin/env: what is it?" is a question
    name = word.split(" ")[0].lower()
    for command in COMMANDS:
        if command.name == name:
            return command
    names = [command.name for command in COMMANDS]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return Unknown(name, next((c for c in COMMANDS if c.name in close), None))


def completions(text: str) -> list[Command]:
    """The commands that what is typed so far may become."""
    if not text.startswith("/") or any(character.isspace() for character in text):
        return []
    return [command for command in COMMANDS if command.name.startswith(text[1:].lower())]
