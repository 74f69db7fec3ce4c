"""Key to screen: how long after a key its character leaves for the terminal.

The screen runs in a child on a pseudo-terminal, as it does for a person.
"""

import fcntl
import itertools
import os
import pty
import select
import signal
import statistics
import struct
import sys
import tempfile
import termios
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from tqchat.chat.conversation import Message
from tqchat.chat.sessions import Session
from tqchat.engine.events import (
    CacheUse,
    Event,
    Loaded,
    Memory,
    ModelInfo,
    Sampling,
    Stats,
    Token,
    Usage,
)
from tqchat.settings import Settings
from tqchat.tui.app import ChatApp
from tqchat.tui.engine import Opened, open_engine

Load: TypeAlias = Literal["idle", "streaming", "prefill", "decode"]
LOADS: Sequence[Load] = get_args(Load)

KEYS = 100
MESSAGES = 200
TOKENS_PER_S = 100

_ROWS, _COLUMNS = 40, 120
_PAUSE_S = 0.05
_PATIENCE_S = 120.0
_QUESTION = "Write a long story of a town by the sea, in ten chapters."
# Cyrillic: nothing else on the screen is written in it, and each letter is typed once.
_FIRST_LETTER = 0x410
# What the child's screen says once it does what is measured.
_SIGNS: dict[Load, bytes] = {
    "streaming": b"answering",
    "prefill": b"Reading",
    "decode": b"answering",
}


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds from key to screen while the screen does `load`."""

    load: Load
    keys: int
    p50: float
    p95: float
    p99: float


def measure(load: Load) -> Row:
    """Raises TimeoutError where a key never shows."""
    with tempfile.TemporaryDirectory(prefix="tqchat-") as home:
        child, terminal = pty.fork()
        if child == 0:
            kinds = ("CONFIG", "DATA", "STATE")
            os.environ.update({f"XDG_{kind}_HOME": f"{home}/{kind.lower()}" for kind in kinds})
            os.environ["TERM"] = "xterm-256color"
            code = f"from tqchat.bench.ui import show; show({load!r})"
            os.execv(sys.executable, [sys.executable, "-c", code])
        try:
            size = struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0)
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
            _read_until(terminal, b"ready")
            if load == "prefill":
                os.write(terminal, f"\x1b[200~{'word ' * 6_000}\x1b[201~".encode())
                _read_until(terminal, b"pasted 1")
                os.write(terminal, b"\r")
            elif load != "idle":
                os.write(terminal, f"{_QUESTION}\r".encode())
            if load != "idle":
                _read_until(terminal, _SIGNS[load])
            times = [_time_of(terminal, chr(_FIRST_LETTER + number)) for number in range(KEYS)]
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(terminal)
    cuts = statistics.quantiles(times, n=100)
    return Row(load, KEYS, 1e3 * cuts[49], 1e3 * cuts[94], 1e3 * cuts[98])


def _time_of(terminal: int, letter: str) -> float:
    """Seconds; the pause before it is part of no figure."""
    until = time.perf_counter() + _PAUSE_S
    while (left := until - time.perf_counter()) > 0:
        if select.select([terminal], [], [], left)[0]:
            os.read(terminal, 1 << 16)
    began = time.perf_counter()
    os.write(terminal, letter.encode())
    _read_until(terminal, letter.encode())
    return time.perf_counter() - began


def _read_until(terminal: int, wanted: bytes) -> None:
    seen, until = b"", time.monotonic() + _PATIENCE_S
    while wanted not in seen:
        if not select.select([terminal], [], [], max(until - time.monotonic(), 0))[0]:
            raise TimeoutError(f"{wanted.decode()!r} did not come on the screen")
        seen = seen[-len(wanted) :] + os.read(terminal, 1 << 16)


def show(load: Load) -> None:
    """In the child: the screen with a conversation of MESSAGES, and what is to go on in it."""
    if load in ("prefill", "decode"):
        settings = Settings(model="smollm2", temperature=0)
        ChatApp(partial(open_engine, settings), settings).run()
        return
    session = Session.create("scripted")
    for number in range(MESSAGES // 2):
        session.add_user(f"Question {number}: what is this about?")
        session.finish("Some *words* about it, in a list:\n\n- one\n- two\n\n" + "and more " * 60)
    engine = _Scripted()
    ChatApp(lambda model: Opened(engine, "scripted"), Settings(), session=session).run()


class _Scripted:
    """An engine that answers with TOKENS_PER_S and never ends."""

    alive = True

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self._cache = CacheUse(5_000, 131_072, 10 << 20, 10 << 20, 32 << 20)
        self._memory = Memory(1 << 30, 10 << 20, 1 << 28, 8 << 30, 16 << 30)

    def load(self, model: str) -> None:
        info = ModelInfo(model, "llama", 131_072, 1 << 30, "none", "none", "int4")
        self.events.append(Loaded(info, self._cache, self._memory))

    def generate(
        self, messages: Sequence[Message], sampling: Sampling, max_tokens: int | None = None
    ) -> int:
        threading.Thread(target=self._write, daemon=True).start()
        return 1

    def _write(self) -> None:
        words = itertools.cycle(
            [
                *["some", "words", "and", "*more*", "words", "that", "make", "a", "line"],
                "of text.\n\n",
            ]
        )
        for number, word in enumerate(words):
            self.events.append(Token(1, f"{word} "))
            if number % (TOKENS_PER_S // 4) == 0:
                usage = Usage(5_000, 0, number, 1.0, 100.0, float(TOKENS_PER_S))
                self.events.append(Stats(usage, self._cache, self._memory))
            time.sleep(1 / TOKENS_PER_S)

    def count(self, text: str) -> int:
        return 0

    def take_up(self, folder: Path) -> None: ...
    def stop(self) -> None: ...
    def clear(self) -> None: ...
    def close(self, timeout: float | None = None) -> bool:
        return True
