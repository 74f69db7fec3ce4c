"""A program on a terminal of its own, and what its screen shows."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import pyte

ROWS, COLUMNS = 40, 120
# Sequences that pyte would show as text.
_UNKNOWN_TO_PYTE = re.compile(
    rb"\x1b\[[<>=][0-9;]*[a-zA-Z]|\x1b\[\?[0-9;]*\$p|\x1b[P_^][^\x1b]*\x1b\\"
)
_INCOMPLETE = re.compile(rb"\x1b(\[[0-9;?<>=$]*|[P_^][^\x1b]*)?$")

# Modes that a full-screen program may set, with what the terminal has of its own.
MODES = {
    1049: False,  # alternate screen
    25: True,  # cursor shown
    1000: False,  # mouse, and its variants
    1002: False,
    1003: False,
    1006: False,
    1015: False,
    1004: False,  # focus reports
    2004: False,  # bracketed paste
}


class Terminal:
    """Leaving the context ends the program if it still runs."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | None = None,
        term: str = "xterm-256color",
    ) -> None:
        self._master, self._slave = pty.openpty()
        os.set_blocking(self._master, False)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._settings = termios.tcgetattr(self._slave)
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self._pending = b""
        self.output = b""
        self._process = subprocess.Popen(
            argv,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**env, "TERM": term},
            cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._master)
        os.close(self._slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def paste(self, text: str) -> None:
        """As terminals do it in bracketed paste mode."""
        data = f"\x1b[200~{text}\x1b[201~".encode()
        while data:
            readable, writable, _ = select.select([self._master], [self._master], [])
            if readable:
                self.read()
            if writable:
                # None of it, at times: a terminal that is nearly full takes no piece.
                with contextlib.suppress(BlockingIOError):
                    data = data[os.write(self._master, data[:1024]) :]

    def read(self, timeout: float = 0.05) -> bool:
        """Take in what the program has written; False if that is nothing."""
        if not select.select([self._master], [], [], timeout)[0]:
            return False
        data = os.read(self._master, 1 << 16)
        self.output += data
        data = self._pending + data
        cut = _INCOMPLETE.search(data)
        self._pending = cut[0] if cut else b""
        self._stream.feed(_UNKNOWN_TO_PYTE.sub(b"", data[: len(data) - len(self._pending)]))
        return True

    @property
    def text(self) -> str:
        """The screen, one line a row."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    def wait_for(self, pattern: str, timeout: float = 60) -> re.Match[str]:
        """Until the screen matches."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            self.read()
            if match := re.search(pattern, self.text):
                return match
        raise AssertionError(f"{pattern!r} is not on the screen:\n{self.text}")

    def wait_for_output(self, pattern: bytes, timeout: float = 60) -> None:
        """Until what was written since the start matches."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            self.read()
            if re.search(pattern, self.output):
                return
        raise AssertionError(f"{pattern!r} was not written: {self.output!r}")

    def wait_for_exit(self, timeout: float = 60) -> int:
        """The exit code. The terminal is read meanwhile, for the program may wait for that."""
        end = time.monotonic() + timeout
        while self._process.poll() is None:
            self.read()
            assert time.monotonic() < end, f"still running:\n{self.text}"
        while self.read(0.1):
            pass
        return self._process.returncode

    def assert_sane(self) -> None:
        """All that the program switched on is off again: line settings and terminal modes."""
        assert termios.tcgetattr(self._slave) == self._settings
        for mode, expected in MODES.items():
            switched = re.findall(rb"\x1b\[\?(?:\d+;)*%d(?:;\d+)*([hl])" % mode, self.output)
            assert not switched or (switched[-1] == b"h") == expected, f"mode {mode}"
        pushed, popped = (len(re.findall(p, self.output)) for p in (rb"\x1b\[>\d+u", rb"\x1b\[<u"))
        assert pushed == popped, "the keyboard protocol stays changed"
