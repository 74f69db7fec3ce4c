"""The terminal: starting, stopping and ending on it, and what reaches us from it.

Pasted text stays one paste, whatever bytes are in it. Textual's parser takes an escape character
inside a bracketed paste for the start of a key, and what follows for keys, a carriage return among
them: a paste could press Enter. (Most terminals filter escapes out of a paste; tmux, ssh and web
terminals may not.)
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Generator, Iterable

from textual import events
from textual._xterm_parser import (
    BRACKETED_PASTE_END,
    BRACKETED_PASTE_START,
    XTermParser,
)
from textual.app import ScreenStackError
from textual.drivers import linux_driver
from textual.drivers.linux_driver import LinuxDriver
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


class TerminalDriver(LinuxDriver):
    """Reads nothing before there is a prompt to take it, draws all of the screen after a stop, and
    ends the application when a signal asks for that: its exit code is 128 and the signal."""

    _is_on = False
    _has_prompt = False

    def start_application_mode(self) -> None:
        super().start_application_mode()  # type: ignore[no-untyped-call]
        self._is_on = True
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
            loop.add_signal_handler(number, self._app.exit, 128 + number)

    def stop_application_mode(self) -> None:
        self._is_on = False
        super().stop_application_mode()

    def run_input_thread(self) -> None:
        linux_driver.XTermParser = TerminalParser  # type: ignore[attr-defined]
        while not self._has_prompt and not self.exit_event.wait(0.01):
            with contextlib.suppress(ScreenStackError):
                self._has_prompt = self._app.focused is not None
        try:
            super().run_input_thread()
        except Exception as error:
            # Textual would show it on the terminal alone, and not fail.
            self._app.call_later(self._app._handle_exception, error)

    def _sigtstp_application(self, *_: object) -> None:
        if self._is_on:
            super()._sigtstp_application()
        else:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _sigcont_application(self, *_: object) -> None:
        if self._is_on:
            # Stopped by what cannot be caught; the parent process has restored the terminal.
            self.disable_input()
            self.close()
        elif not self._must_signal_resume:
            return
        self.resume_application_mode()
        asyncio.get_running_loop().call_soon_threadsafe(self._draw_all)

    def _draw_all(self) -> None:
        self._app.screen.refresh()
