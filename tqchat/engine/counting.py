"""How many tokens texts take, on a thread of its own: it needs the tokenizer alone, not MLX."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from tqchat.chat.conversation import Message
from tqchat.chat.errors import ChatError
from tqchat.chat.template import ChatTemplate
from tqchat.chat.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Counting:
    """`tell` gets a text's number and its tokens, on the thread that counts.

    Texts that come before there is a model wait for nothing: they are not counted.
    """

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self._model: tuple[Tokenizer, ChatTemplate] | None = None
        self._tell = tell
        self._last = 0
        self._texts: queue.SimpleQueue[tuple[int, str | Sequence[Message]] | None]
        self._texts = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def use(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._model = tokenizer, template

    def forget(self) -> None:
        self._model = None

    def count(self, text: str | Sequence[Message]) -> int:
        """Queue a text, or messages with what the template puts around them; the number marks what
        is told of it."""
        if self._thread is None:
            # A daemon: nothing that it does needs an end.
            self._thread = threading.Thread(target=self._main, name="count", daemon=True)
            self._thread.start()
        self._last += 1
        self._texts.put((self._last, text))
        return self._last

    def close(self) -> None:
        self._texts.put(None)

    def _main(self) -> None:
        while (job := self._texts.get()) is not None:
            number, text = job
            if self._model is not None:
                tokenizer, template = self._model
                try:
                    if isinstance(text, str):
                        self._tell(number, tokenizer.count(text))
                    else:
                        self._tell(number, _in_template(tokenizer, template, text))
                except ChatError:
                    log.exception("A text was not counted")


def _in_template(tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message]) -> int:
    try:
        return len(template.prompt_ids(tokenizer, messages))
    except ChatError:
        # It takes no such conversation, so that nothing of it stands around the texts.
        return sum(tokenizer.count(message.content) for message in messages)
