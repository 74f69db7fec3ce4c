"""The screen: how long after a key its character leaves for the terminal, how fast a model decodes
beside it, and how soon its first frame comes.

The screen runs in a child on a pseudo-terminal, as it does for a person.
"""

import fcntl
import json
import os
import pty
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle
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
from tqchat.tui.app import ChatApp, run, run_app
from tqchat.tui.engine import Opened

Load: TypeAlias = Literal["idle", "streaming", "fence", "list", "table", "prefill", "decode"]
LOADS: Sequence[Load] = get_args(Load)

KEYS = 100
MESSAGES = 200
TOKENS_PER_S = 100
DECODED = 256

_ROWS, _COLUMNS = 40, 120
_PAUSE_S = 0.05
_PATIENCE_S = 120.0
_QUESTION = "Write a long story of a town by the sea, in ten chapters."
# Cyrillic: nothing else on the screen is written in it, and each letter is typed once.
_FIRST_LETTER = 0x410
# More than any text that is waited for.
_LONGEST_WANTED = 1_000
# What an answer begins with, and what follows again and again.
_SCRIPTS: dict[Load, tuple[str, Sequence[str]]] = {
    "streaming": ("", ["some ", "words ", "and ", "*more* ", "that ", "make ", "a line.\n\n"]),
    "fence": ("```python\n" + "x = f(1)\n" * 300, ["y ", "= ", "g(", "'text'", ")  # note", "\n"]),
    "list": ("- an item\n" * 1000, ["- ", "one ", "more ", "*item*", "\n"]),
    "table": ("| a | b |\n|---|---|\n" + "| one | two |\n" * 200, ["| three ", "| *four* ", "|\n"]),
}
_EMPTY = """
from textual.app import App
from textual.widgets import Static
class Empty(App):
    def compose(self):
        yield Static("Hello.")
Empty().run()
"""
_TQCHAT = "from tqchat.cli import main; main([])"
# What the child's screen says once it does what is measured.
_SIGNS: dict[Load, bytes] = {
    "prefill": b"Reading",
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
    with _child(f"from tqchat.bench.ui import show; show({load!r})") as terminal:
        _read_until(terminal, b"ready")
        if load == "prefill":
            os.write(terminal, f"\x1b[200~{'word ' * 6_000}\x1b[201~".encode())
            _read_until(terminal, b"pasted 1")
            os.write(terminal, b"\r")
        elif load != "idle":
            os.write(terminal, f"{_QUESTION}\r".encode())
        if load != "idle":
            _read_until(terminal, _SIGNS.get(load, b"answering"))
        # What is there already is drawn once, before the first key that counts.
        letters = [chr(_FIRST_LETTER + number) for number in range(KEYS + 1)]
        times = [_time_of(terminal, letter) for letter in letters][1:]
    cuts = statistics.quantiles(times, n=100)
    return Row(load, KEYS, 1e3 * cuts[49], 1e3 * cuts[94], 1e3 * cuts[98])


@dataclass(frozen=True, slots=True)
class Rates:
    """Decoded tokens per second of the built-in model, medians of alternating rounds."""

    rounds: int
    headless: float
    screen: float


def measure_decode(rounds: int = 3) -> Rates:
    headless, screen = zip(*[(_headless(), _on_screen()) for _ in range(rounds)], strict=True)
    return Rates(rounds, statistics.median(headless), statistics.median(screen))


def _headless() -> float:
    argv = [sys.executable, "-m", "tqchat", "smollm2", "-p", _QUESTION, "--json"]
    argv += ["--temperature", "0", "--max-tokens", f"{DECODED}"]
    with tempfile.TemporaryDirectory(prefix="tqchat-") as home:
        done = subprocess.run(
            argv, env=_environment(home), capture_output=True, check=True, timeout=_PATIENCE_S
        )
    return float(json.loads(done.stdout)["decode_tps"])


def _on_screen() -> float:
    with _child(f"from tqchat.bench.ui import show; show('decode', {DECODED})") as terminal:
        _read_until(terminal, b"ready")
        os.write(terminal, f"{_QUESTION}\r".encode())
        return float(_read_until(terminal, rb"tokens \xc2\xb7 ([\d.]+) tok/s")[1])


@dataclass(frozen=True, slots=True)
class Starts:
    """Seconds from the command to the first frame, medians of alternating rounds."""

    rounds: int
    empty: float
    tqchat: float


def measure_start(rounds: int = 5) -> Starts:
    """Beside a Textual application with one line of text in it."""
    empty, tqchat = zip(*[(_start(_EMPTY), _start(_TQCHAT)) for _ in range(rounds)], strict=True)
    return Starts(rounds, statistics.median(empty), statistics.median(tqchat))


def _start(code: str) -> float:
    began = time.perf_counter()
    with _child(code) as terminal:
        _read_until(terminal, rb"Hello\.")
        return time.perf_counter() - began


def _environment(home: str) -> dict[str, str]:
    folders = {f"XDG_{kind}_HOME": f"{home}/{kind.lower()}" for kind in ("CONFIG", "DATA", "STATE")}
    return {**os.environ, **folders}


@contextmanager
def _child(code: str) -> Iterator[int]:
    """Runs Python code on a terminal of its own, with folders of its own."""
    with tempfile.TemporaryDirectory(prefix="tqchat-") as home:
        child, terminal = pty.fork()
        if child == 0:
            environment = {**_environment(home), "TERM": "xterm-256color"}
            os.execve(sys.executable, [sys.executable, "-c", code], environment)
        try:
            size = struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0)
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
            yield terminal
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(terminal)


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


def _read_until(terminal: int, wanted: bytes) -> re.Match[bytes]:
    seen, until = b"", time.monotonic() + _PATIENCE_S
    while (found := re.search(wanted, seen)) is None:
        if not select.select([terminal], [], [], max(until - time.monotonic(), 0))[0]:
            raise TimeoutError(f"{wanted.decode()!r} did not come on the screen")
        seen = seen[-_LONGEST_WANTED:] + os.read(terminal, 1 << 16)
    return found


def show(load: Load, max_tokens: int | None = None) -> None:
    """In the child: the screen with a conversation of MESSAGES, and what is to go on in it."""
    if load in ("prefill", "decode"):
        run(Settings(model="smollm2", temperature=0, max_tokens=max_tokens))
        return
    session = Session.create("scripted")
    for number in range(MESSAGES // 2):
        session.add_user(f"Question {number}: what is this about?")
        session.finish("Some *words* about it, in a list:\n\n- one\n- two\n\n" + "and more " * 60)
    engine = _Scripted(*_SCRIPTS.get(load, _SCRIPTS["streaming"]))
    run_app(ChatApp(lambda model: Opened(engine, "scripted"), Settings(), session=session))


class _Scripted:
    """An engine that answers with `begun` at once, then with TOKENS_PER_S and never ends."""

    alive = True

    def __init__(self, begun: str, repeated: Sequence[str]) -> None:
        self._begun, self._repeated = begun, repeated
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
        for number, word in enumerate(chain([self._begun], cycle(self._repeated))):
            self.events.append(Token(1, word))
            if number % (TOKENS_PER_S // 4) == 0:
                usage = Usage(5_000, 0, number, 1.0, 100.0, float(TOKENS_PER_S))
                self.events.append(Stats(usage, self._cache, self._memory))
            time.sleep(1 / TOKENS_PER_S)

    def count(self, text: str | Sequence[Message]) -> int:
        return 0

    def take_up(self, folder: Path) -> None: ...
    def stop(self) -> None: ...
    def clear(self) -> None: ...
    def close(self, timeout: float | None = None) -> bool:
        return True
