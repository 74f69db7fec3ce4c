"""How many tokens texts take: guessed until the engine has counted them."""

from collections import OrderedDict

from tqchat.chat.conversation import Message

Countable = str | tuple[Message, ...]

_MOST_KEPT = 1_000
_CHARACTERS_PER_TOKEN = 4


class Counts:
    """Each text, or group of messages, is asked for once."""

    def __init__(self) -> None:
        self._known: OrderedDict[Countable, int] = OrderedDict()
        self._asked: dict[int, Countable] = {}

    def known(self, text: Countable) -> int | None:
        return self._known.get(text) if text else 0

    def guess(self, text: str) -> int:
        """What is known, or what is likely."""
        known = self.known(text)
        return -(-len(text) // _CHARACTERS_PER_TOKEN) if known is None else known

    def is_asked(self, text: Countable) -> bool:
        return text in self._asked.values()

    def ask(self, number: int, text: Countable) -> None:
        """The engine was asked for `text`, under `number`."""
        self._asked[number] = text

    def answer(self, number: int, tokens: int) -> None:
        text = self._asked.pop(number, None)
        if text is not None:
            self._known[text] = tokens
            if len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)

    def forget(self) -> None:
        """Another model counts otherwise."""
        self._known.clear()
        self._asked.clear()
