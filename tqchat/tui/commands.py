"""The commands of the chat: one table, from which help, completion, the palette and the README
come."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tqchat.settings import CHANGEABLE, TABLE

if TYPE_CHECKING:
    from tqchat.tui.app import ChatApp


_LONGEST_NAME = 40  # of an unknown command, as it is told


@dataclass(frozen=True, slots=True)
class Command:
    """`bare`: also understood without the slash, when it is all that was typed. `argument`: what
    may be written after the name, in brackets if it may be left out; `words`: what it may begin
    with, and what that means."""

    name: str
    help: str
    run: Callable[["ChatApp", str], None]
    bare: tuple[str, ...] = ()
    argument: str = ""
    words: Mapping[str, str] = field(default_factory=dict)

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()

    @property
    def needs_argument(self) -> bool:
        return self.argument != "" and not self.argument.startswith("[")


COMMANDS = (
    Command("help", "show commands and keys", lambda app, _: app.reports.help()),
    Command(
        "clear",
        "begin a new conversation and free the cache",
        lambda app, _: app.dialogue.clear(),
        ("clear",),
    ),
    Command(
        "reset",
        "clear, and put system prompt and sampling back",
        lambda app, _: app.dialogue.reset(),
        ("reset",),
    ),
    Command("retry", "answer the last message again", lambda app, _: app.dialogue.retry()),
    Command("edit", "change the last message and ask again", lambda app, _: app.dialogue.edit()),
    Command(
        "continue",
        "go on with an answer that was stopped or cut",
        lambda app, _: app.dialogue.go_on(),
    ),
    Command("copy", "copy the last answer", lambda app, _: app.copy_answer()),
    Command(
        "export",
        "write it all to a .json file, or without thoughts to .md",
        lambda app, name: app.keeping.export(name),
        argument="[FILE]",
    ),
    Command(
        "file", "attach a text file", lambda app, name: app.attaching.file(name), argument="PATH"
    ),
    Command(
        "view",
        "read the text that a token stands for (F3)",
        lambda app, _: app.attaching.view_token(),
    ),
    Command(
        "edit-token",
        "edit that text in $EDITOR (F4)",
        lambda app, _: app.attaching.edit_token(),
    ),
    Command("sessions", "go on with another conversation", lambda app, _: app.keeping.choose()),
    Command(
        "rename",
        "give the conversation a title",
        lambda app, title: app.keeping.rename(title),
        argument="TITLE",
    ),
    Command(
        "system",
        "show the system prompt, or set it (- for none)",
        lambda app, text: app.reports.system(text),
        argument="[TEXT]",
    ),
    Command(
        "set",
        "show how answers are sampled, or set one of it",
        lambda app, words: app.reports.set(words),
        argument="[NAME VALUE]",
        words={name: TABLE[name].metadata["help"] for name in CHANGEABLE},
    ),
    Command(
        "model",
        "choose another model; the conversation stays",
        lambda app, name: app.choosing.model(name),
        argument="[NAME]",
    ),
    Command("context", "show what fills the context", lambda app, _: app.reports.context()),
    Command(
        "theme", "choose the colours", lambda app, name: app.set_theme(name), argument="[NAME]"
    ),
    Command("stats", "show the figures of the last answer", lambda app, _: app.reports.stats()),
    Command(
        "plan",
        "show what memory the model needs by context length",
        lambda app, _: app.choosing.plan(),
    ),
    Command("panel", "show or hide the side panel", lambda app, _: app.action_toggle_panel()),
    Command("quit", "leave", lambda app, _: app.action_leave(), ("quit", "exit")),
)


def readme_table() -> str:
    """The commands as the README has them."""
    rows = [f"| `{command.usage}` | {command.help} |" for command in COMMANDS]
    return "\n".join(["| | |", "|---|---|", *rows])


@dataclass(frozen=True, slots=True)
class Call:
    command: Command
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Looks like a command, but is none."""

    name: str
    nearest: Command | None

    @property
    def message(self) -> str:
        instead = f"Did you mean /{self.nearest.name}?" if self.nearest else "/help lists them all."
        name = self.name if len(self.name) <= _LONGEST_NAME else f"{self.name[:_LONGEST_NAME]}…"
        return f"No command /{name}. {instead} (A space before it sends it as text.)"


def find(text: str) -> Call | Unknown | None:
    """The command that `text` is, or None if it is a message to the model."""
    typed = text.rstrip()
    for command in COMMANDS:
        if typed.lower() in command.bare:
            return Call(command)
    word = typed.removeprefix("/")
    if word == typed or "\n" in typed or "/" in word.split(" ")[0]:
        return None  # "/usr/bin/env: what is it?" is a question
    name, _, argument = word.partition(" ")
    name = name.lower()
    for command in COMMANDS:
        if command.name == name:
            return Call(command, argument.strip())
    names = [command.name for command in COMMANDS]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return Unknown(name, next((c for c in COMMANDS if c.name in close), None))


@dataclass(frozen=True, slots=True)
class Completion:
    """`typed`: the whole text it makes; `name` and `help` are shown. `is_whole`: it can be run."""

    typed: str
    name: str
    help: str
    is_whole: bool = True


def completions(text: str, themes: Mapping[str, str] = {}) -> list[Completion]:
    """What a command that is being typed may become. `themes`: their names, and what they are."""
    name, space, start = text[1:].lower().partition(" ")
    if not text.startswith("/") or any(character.isspace() for character in name + start):
        return []
    if not space:
        return [
            Completion(f"/{command.name}", f"/{command.name}", command.help)
            for command in COMMANDS
            if command.name.startswith(name)
        ]
    words = next((command.words for command in COMMANDS if command.name == name), {})
    if is_theme := name == "theme":
        words = themes
    # A setting's name has a _, a theme's a -.
    start = start.replace("-", "_")
    return [
        Completion(f"/{name} {word}" if is_theme else f"/{name} {word} ", word, help, is_theme)
        for word, help in words.items()
        if word.replace("-", "_").startswith(start) and word.replace("-", "_") != start
    ]
