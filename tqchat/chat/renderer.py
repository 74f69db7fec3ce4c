"""The line to the process that renders chat templates (render_worker.py)."""

import atexit
import json
import os
import subprocess
import sys
import threading
from typing import Any

from tqchat.chat.errors import ChatError

_SECONDS = 5

# The process needs no more of the environment than this; the rest may hold secrets.
_ENVIRONMENT = ("DYLD_LIBRARY_PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ")


class Renderer:
    """One process, for all templates and threads. It starts at the first request, or if lost.

    `seconds` of processor time are what one request may take.
    """

    def __init__(self, seconds: int = _SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._stop)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its reply. Raises ChatError."""
        with self._lock:
            try:
                return self._exchange(request)
            except (OSError, ValueError):
                self._stop()
                raise ChatError(
                    "The model's chat template cannot be used: its process broke off, after "
                    f"{self._seconds} seconds or for want of memory."
                ) from None
            except BaseException:
                # Interrupted: a reply that nobody read would answer the next request.
                self._stop()
                raise

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(encode_line(request))
        self._process.stdin.flush()
        return decode_line(self._process.stdout.readline())

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tqchat.chat.render_worker", str(self._seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C at the terminal is not for it.
        )

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            with self._process:  # Closes the pipes and waits.
                self._process = None


RENDERER = Renderer()


def encode_line(value: dict[str, Any]) -> bytes:
    """One line of JSON. Sealed characters are lone surrogates, which strict UTF-8 refuses."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def decode_line(line: bytes) -> dict[str, Any]:
    """Raises ValueError for what is not one line of JSON."""
    value: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
    return value
