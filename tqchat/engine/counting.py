"""How many tokens texts take, on a thread of its own: it needs the tokenizer alone, not MLX."""

import logging
import queue
import threading
from collections.abc import Callable

from tqchat.chat.errors import ChatError
from tqchat.chat.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Counting:
    """`tell` gets a text's number and its tokens, on the thread that counts.

    Texts that come before there is a `tokenizer` wait for nothing: they are not counted.
    """

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self.tokenizer: Tokenizer | None = None
        self._tell = tell
        self._last = 0
        self._texts: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def count(self, text: str) -> int:
        """Queue a text; its number marks what is told of it."""
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
            if (tokenizer := self.tokenizer) is not None:
                try:
                    self._tell(number, tokenizer.count(text))
                except ChatError:
                    log.exception("A text was not counted")
