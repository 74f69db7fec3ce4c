"""What reaches us from the terminal: pasted text stays one paste, whatever bytes are in it.

Textual's parser takes an escape character inside a bracketed paste for the start of a key, and what
follows for keys, a carriage return among them: a paste could press Enter. (Most terminals filter
escapes out of a paste; tmux, ssh and web terminals may not.)
"""

from collections.abc import Generator, Iterable

from textual import events
from textual._xterm_parser import (
    BRACKETED_PASTE_END,
    BRACKETED_PASTE_START,
    XTermParser,
)
from textual.message import Message

_MODIFIED_ENTER = {
    "\x1b\r": "alt+enter",
    "\x1b[27;2;13~": "shift+enter",
    "\x1b[27;3;13~": "alt+enter",
}


class TerminalParser(XTermParser):
    """Takes everything between the marks of a bracketed paste as it is, and knows the ways in which
    terminals send Enter with a modifier."""

    def __init__(self, debug: bool = False) -> None:
        self._seen = ""
        self._pasted: list[str] | None = None
        super().__init__(debug)

    def feed(self, data: str) -> Iterable[Message]:
        if not data:
            yield from super().feed(data)
            return
        while data:
            if self._pasted is None:
                data = yield from self._outside(data)
            else:
                data = yield from self._inside(data, self._pasted)

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[events.Key]:
        if key := _MODIFIED_ENTER.get(sequence):
            return [events.Key(key, None)]
        return super()._sequence_to_key_events(sequence, alt)

    def _outside(self, data: str) -> Generator[Message, None, str]:
        """Parses up to the mark that starts a paste; returns what comes after it."""
        seen = self._seen + data
        at = seen.find(BRACKETED_PASTE_START)
        if at < 0:
            self._seen = seen[-len(BRACKETED_PASTE_START) + 1 :]
            yield from super().feed(data)
            return ""
        end = at + len(BRACKETED_PASTE_START) - len(self._seen)
        yield from super().feed(data[:end])
        self._seen = ""
        self._pasted = []
        return data[end:]

    def _inside(self, data: str, pasted: list[str]) -> Generator[Message, None, str]:
        """Collects up to the mark that ends the paste; returns what comes after it."""
        kept = len(BRACKETED_PASTE_END) - 1
        overlap = pasted.pop() if pasted else ""
        data = overlap + data
        at = data.find(BRACKETED_PASTE_END)
        if at < 0:
            pasted += [data[:-kept], data[-kept:]]
            return ""
        pasted.append(data[:at])
        self._pasted = None
        # The parser ends its own, empty paste; ours goes out instead.
        for message in super().feed(BRACKETED_PASTE_END):
            if not isinstance(message, events.Paste):
                yield message
        yield events.Paste("".join(pasted))
        return data[at + len(BRACKETED_PASTE_END) :]


def use_terminal_parser() -> None:
    """Makes Textual's terminal drivers use `TerminalParser`."""
    from textual.drivers import linux_driver

    linux_driver.XTermParser = TerminalParser  # type: ignore[attr-defined]
