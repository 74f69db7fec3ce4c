"""What a command answers with a list: the commands, figures, what fills the context, settings."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tqchat.settings import CHANGEABLE, TABLE
from tqchat.tui.entries import Listing
from tqchat.tui.figures import rate_text, seconds_text
from tqchat.tui.text import clean_line

if TYPE_CHECKING:
    from tqchat.tui.app import ChatApp


class Reports:
    def __init__(self, app: "ChatApp") -> None:
        self._app = app

    def _show(self, title: str, pairs: Sequence[tuple[str, str]]) -> None:
        self._app.conversation.append(Listing(title, pairs))
        self._app.conversation.show_end()

    def help(self) -> None:
        from tqchat.tui.commands import COMMANDS

        self._show("Commands", [(command.usage, command.help) for command in COMMANDS])
        self._show("Keys", self._app.KEYS)

    def stats(self) -> None:
        """The figures of the last answer."""
        usage, cache = self._app.dialogue.last_usage, self._app.dialogue.figures.cache
        if usage is None:
            self._app.hint("There are no figures yet: ask something first.")
            return
        pairs = [
            ("prompt", f"{usage.prompt_tokens:,} tokens, {usage.cached_tokens:,} of them cached"),
            ("answer", f"{usage.completion_tokens:,} tokens"),
            ("first token", f"after {seconds_text(usage.ttft_s)}"),
            ("reading", f"{rate_text(usage.prefill_tps)} tokens/s"),
            ("writing", f"{rate_text(usage.decode_tps)} tokens/s"),
        ]
        if cache is not None:
            pairs += [
                ("KV cache", f"{cache.kv_bytes:,} bytes, {cache.kv_bytes_allocated:,} allocated"),
                ("in fp16", f"{cache.kv_bytes_fp16:,} bytes"),
                ("context", f"{cache.tokens:,} of {cache.context:,} tokens"),
            ]
        self._show("The last answer", pairs)

    def context(self) -> None:
        """What fills the context, once it is counted."""
        talk = self._app.dialogue.record.talk
        texts = [talk.system, *(message.content for message in talk.messages)]
        self._app.draft.when_counted(texts, self._show_context)

    def _show_context(self) -> None:
        dialogue, tokens = self._app.dialogue, self._app.draft.guess
        talk, cache = dialogue.record.talk, dialogue.figures.cache
        if cache is None:
            self._app.hint("No model is loaded yet.")
            return
        parts = [("system prompt", tokens(talk.system))] if talk.system else []
        names = {"user": "your messages", "assistant": "answers"}
        for role, name in names.items():
            found = [message.content for message in talk.messages if message.role == role]
            if found:
                parts.append((f"{name} ({len(found)})", sum(map(tokens, found))))
        if (around := dialogue.held - sum(held for _, held in parts)) > 0:
            parts.append(("chat template", around))
        parts.append(("free", max(cache.context - max(dialogue.held, 0), 0)))
        largest = max((message.content for message in talk.messages), key=tokens, default="")
        pairs = [(name, f"{held:>9,} tokens  {held / cache.context:>6.1%}") for name, held in parts]
        if largest:
            start = clean_line(largest[:60])
            pairs.append(("the longest", f"{tokens(largest):>9,} tokens  {start} …"))
        self._show(f"The context, {cache.context:,} tokens", pairs)

    def system(self, text: str) -> None:
        """Shows the system prompt, or sets it."""
        if text:
            self._app.dialogue.set_system(text)
            return
        system = self._app.dialogue.record.talk.system
        self._show("System prompt", [("", system)] if system else [("", "There is none.")])

    def set(self, words: str) -> None:
        """Shows how answers are sampled, or sets one of it for this conversation."""
        name, _, value = words.partition(" ")
        name, value = name.replace("-", "_").lower(), value.strip()
        dialogue = self._app.dialogue
        if name and name not in CHANGEABLE:
            self._refuse(words, f"There is no {name}. /set lists what there is.")
        elif name and not value:
            self._refuse(words, f"A value is missing: {TABLE[name].metadata['help']}; or default.")
        elif name:
            try:
                chosen = (
                    getattr(dialogue.given, name)
                    if value == "default"
                    else TABLE[name].metadata["check"].parse(value)
                )
            except ValueError as error:
                self._refuse(words, f"{name}: {error}.")
            else:
                dialogue.settings = replace(dialogue.settings, **{name: chosen})
                self._app.hint(f"{name}: {self._value(name)}, from the next answer on.")
        else:
            pairs = [(one, self._value(one)) for one in CHANGEABLE]
            self._show("Sampling: /set NAME VALUE, or default for VALUE", pairs)

    def _value(self, name: str) -> str:
        value = getattr(self._app.dialogue.settings, name)
        return "as the model suggests" if value is None else f"{value}"

    def _refuse(self, words: str, why: str) -> None:
        self._app.prompt.put_back(f"/set {words}")
        self._app.hint(clean_line(why))
