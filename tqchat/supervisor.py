"""A process that stays outside the screen, for faults inside it that nothing can catch.

MLX ends the process when the GPU fails or is out of memory. So the screen runs in a child, and this
parent, which does nothing but wait, restores the terminal, says where the log is and how to go on.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import termios
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from tqchat import paths

# What a full-screen program may have switched on. The keyboard protocol is kept per screen, so it
# goes before the alternate screen does.
_RESTORE = (
    "\x1b[?2026l"  # synchronised output
    "\x1b[<u"  # kitty's keyboard protocol
    "\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1016l"  # mouse
    "\x1b[?1004l\x1b[?2004l\x1b[?2048l"  # focus, pasting and size reports
    "\x1b[?1049l"  # alternate screen
    "\x1b[?7h\x1b[?25h\x1b[0m"  # line wrap, cursor, colours
)
_OF_THE_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# In the environment of a child that was started anew.
_CHILD = "TQCHAT_SUPERVISED"


def supervise(run: Callable[[], int]) -> int:
    """`run` in a child process; returns its exit code, or 128 and the signal that ended it.

    To be called before anything large is imported, from the main thread, with a terminal at stdin.
    """
    if os.environ.pop(_CHILD, None):
        return _in_child(run)
    settings, began = termios.tcgetattr(0), time.time()
    # The terminal sends these to parent and child; the child alone acts on them.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _OF_THE_TERMINAL}
    if sys.platform == "darwin":
        # There, system libraries refuse to work in a fork that executes nothing.
        environment = {**os.environ, _CHILD: "1"}
        arguments = [sys.executable, *sys.orig_argv[1:]]
        child = os.posix_spawn(sys.executable, arguments, environment, setsigdef=_OF_THE_TERMINAL)
    elif (child := os.fork()) == 0:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return _in_child(run)
    status = _wait(child)
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    ended_by = os.WTERMSIG(status)
    _restore(settings)
    print(_report(ended_by, began), file=sys.stderr)
    return 128 + ended_by


def _in_child(run: Callable[[], int]) -> int:
    """What native code writes to stderr goes to the log file; Python keeps the terminal."""
    with contextlib.suppress(OSError):
        log = os.open(paths.log_file(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        terminal = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        os.dup2(log, 2)
        os.close(log)
        sys.stderr = sys.__stderr__ = terminal  # type: ignore[misc]
        faulthandler.enable(2)
    return run()


def _wait(child: int) -> int:
    """The status the child ended with. Signals go on to it, and where it stops so do we."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    while True:
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return status
        # The shell waits for this process. It wakes the whole job.
        os.kill(os.getpid(), signal.SIGSTOP)


def _restore(settings: list[Any]) -> None:
    # The terminal may be another's by now, but nobody else knows what to put right.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with contextlib.suppress(OSError, termios.error):
        if termios.tcgetattr(0) != settings:
            os.write(2, _RESTORE.encode())
            termios.tcsetattr(0, termios.TCSAFLUSH, settings)


def _report(number: int, began: float) -> str:
    name = signal.Signals(number).name
    text = f"tqchat ended unexpectedly ({name}: {signal.strsignal(number)})."
    with contextlib.suppress(OSError):
        text += f" What is known of it: {paths.log_file()}"
    if session_id := _last_session(began):
        text += f"\nThe conversation is saved. To go on with it: tqchat --resume {session_id}"
    return text


def _last_session(began: float) -> str | None:
    """The conversation that the child had: changed since it began, and open in no process now."""
    from tqchat.chat import sessions
    from tqchat.chat.errors import ChatError

    with contextlib.suppress(OSError, ChatError):
        for summary in sessions.summaries():
            if summary.modified < began:
                break
            with contextlib.suppress(ChatError), sessions.locked(summary.folder):
                return summary.id
    return None
