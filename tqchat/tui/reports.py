"""What a command answers with a list: the commands, figures, what fills the context, settings."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tqchat.chat.conversation import Message
from tqchat.settings import CHANGEABLE, TABLE
from tqchat.tui.entries import Listing
from tqchat.tui.figures import rate_text, seconds_text
from tqchat.tui.text import clean_line

if TYPE_CHECKING:
    from tqchat.tui.app import ChatApp


# Tokens by which the cache may differ from what is counted: an answer's end is not in it yet.
_SLACK = 16
_UNSET = {"seed": "a new one each time", "max_tokens": "as long as there is room"}


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
        """The figures of the answer that is written, or else of the last one; and the cache's."""
        dialogue = self._app.dialogue
        turn, cache = dialogue.turn, dialogue.figures.cache
        usage = dialogue.last_usage if turn is None else turn.usage
        if usage is None:
            self._app.hint("There are no figures yet: ask something first.")
            return
        read = f"{usage.prompt_tokens:,} tokens, {usage.cached_tokens:,} of them cached"
        pairs = [
            ("prompt", read if usage.prompt_tokens else "-"),
            ("answer", f"{usage.completion_tokens:,} tokens" if usage.completion_tokens else "-"),
            ("first token", f"after {seconds_text(usage.ttft_s)}" if usage.ttft_s else "-"),
            ("reading", f"{rate_text(usage.prefill_tps)} tokens/s"),
            ("writing", f"{rate_text(usage.decode_tps)} tokens/s"),
        ]
        self._show("The last answer" if turn is None else "This answer so far", pairs)
        if cache is not None:
            pairs = [
                ("tokens", f"{cache.tokens:,} of {cache.context:,}"),
                ("size", f"{cache.kv_bytes:,} bytes, {cache.kv_bytes_allocated:,} allocated"),
                ("in fp16", f"{cache.kv_bytes_fp16:,} bytes"),
            ]
            self._show("The KV cache now", pairs)

    def context(self) -> None:
        """What fills the context, once it is counted."""
        talk = self._app.dialogue.record.talk
        texts = [talk.system, *(message.content for message in talk.messages)]
        whole = tuple(talk.prompt()) if talk.messages else ()
        self._app.draft.when_counted([*texts, whole], partial(self._show_context, whole))

    def _show_context(self, whole: tuple[Message, ...]) -> None:
        """`whole`: the conversation as it was counted, with what the template puts around it."""
        dialogue, tokens = self._app.dialogue, self._app.draft.guess
        talk, cache, turn = dialogue.record.talk, dialogue.figures.cache, dialogue.turn
        if cache is None:
            self._app.hint("No model is loaded yet.")
            return
        parts = [("system prompt", tokens(talk.system))] if talk.system else []
        names = {"user": "your messages", "assistant": "answers"}
        for role, name in names.items():
            found = [message.content for message in talk.messages if message.role == role]
            if found:
                parts.append((f"{name} ({len(found)})", sum(map(tokens, found))))
        said = sum(count for _, count in parts)
        used = max(self._app.draft.known(whole) or 0, said)
        if abs(used - cache.tokens) <= _SLACK:
            used = max(cache.tokens, said)
        if used > said:
            parts.append(("chat template", used - said))
        written = 0 if turn is None else turn.tokens
        if written:
            parts.append(("this answer so far", written))
        used += written
        if (over := cache.tokens - used) > _SLACK:
            parts.append(("no longer used", over))
        parts.append(("free", max(cache.context - max(cache.tokens, used), 0)))
        if (unread := used - cache.tokens) > _SLACK and not written:
            parts.append(("of it not read yet", unread))
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
            now = f"{name} is {self._value(name)} now."
            self._refuse(words, f"{now} /set {name} VALUE: {TABLE[name].metadata['help']}.")
        elif name:
            try:
                values = {**dialogue.record.talk.sampling}
                values.pop(name, None)
                if value != "default":
                    values[name] = TABLE[name].metadata["check"].parse(value)
            except ValueError as error:
                self._refuse(words, f"{name}: {error}.")
            else:
                dialogue.record.set_sampling(values)
                self._app.hint(f"{name}: {self._value(name)}, from the next answer on.")
        else:
            pairs = [(one, self._value(one)) for one in CHANGEABLE]
            self._show("Sampling: /set NAME VALUE, or default for VALUE", pairs)

    def _value(self, name: str) -> str:
        value = getattr(self._app.dialogue.settings, name)
        if value is not None:
            return f"{value:g}" if isinstance(value, float) else f"{value}"
        model = self._app.dialogue.figures.model
        if model is not None and name in model.sampling:
            whose = "the model's" if name in model.suggested else "tqchat's; the model says none"
            return f"{model.sampling[name]:g} ({whose})"
        return _UNSET.get(name, "as the model suggests")

    def _refuse(self, words: str, why: str) -> None:
        self._app.prompt.put_back(f"/set {words}")
        self._app.hint(clean_line(why))
