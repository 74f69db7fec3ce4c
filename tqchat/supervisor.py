"""A process that stays outside the screen, for faults inside it that nothing catches.

MLX ends the process when the GPU fails or is out of memory. So the screen runs in a child, and this
parent, which does nothing but wait, restores the terminal, says where the log is and how to go on.
Should the parent be the one that dies, the child restores the terminal and ends.
"""

import codecs
import contextlib
import faulthandler
import os
import signal
import sys
import termios
import threading
import time
import traceback
from ast import literal_eval
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
# What the terminal sends to parent and child alike, unless the screen has switched that off.
_OF_THE_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_PASSED_ON = (*_OF_THE_TERMINAL, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# In the environment of a child that was started anew: what `_in_child` is given.
_CHILD = "TQCHAT_SUPERVISED"
_BAD_INPUT = 2

# The indices of what termios.tcgetattr returns.
_IFLAG, _LFLAG, _CC = 0, 3, 6
_Settings = list[Any]


def supervise(run: Callable[[], int]) -> int:
    """`run` in a child process; returns its exit code, os.EX_SOFTWARE if it raised an exception, or
    128 and the signal that ended it.

    To be called before anything large is imported, from the main thread, with a terminal at stdin
    and stdout.
    """
    if given := os.environ.pop(_CHILD, None):
        return _in_child(run, *literal_eval(given))
    if (kind := os.environ.get("TERM", "")) in ("", "dumb"):
        text = f"The screen needs a terminal that can place the cursor (TERM={kind}); ask with -p."
        print(f"tqchat: {text}", file=sys.stderr)
        return _BAD_INPUT
    with contextlib.suppress(OSError):
        # In the background this stops us; until then the settings are those of the shell's prompt.
        os.tcsetpgrp(0, os.getpgrp())
    settings, began = termios.tcgetattr(0), time.time()
    # What comes while there is no child yet, and what comes while the child cannot yet handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    alive, held = os.pipe()
    termios.tcsetattr(0, termios.TCSANOW, _waiting(settings))
    if sys.platform == "darwin":
        # There, system libraries refuse to work in a fork that executes nothing.
        os.set_inheritable(alive, True)
        environment = {**os.environ, _CHILD: repr((alive, settings))}
        arguments = [sys.executable, *sys.orig_argv[1:]]
        child = os.posix_spawn(sys.executable, arguments, environment)
    elif (child := os.fork()) == 0:
        os.close(held)
        return _in_child(run, alive, settings)
    status, passed_on = _wait(child, settings)
    _restore(settings, _screen_is_on())
    if os.WIFEXITED(status):
        code = os.WEXITSTATUS(status)
        if code == os.EX_SOFTWARE:
            print(_report("an error of its own", began), file=sys.stderr)
        return code
    ended_by = os.WTERMSIG(status)
    if ended_by not in passed_on:
        name = f"{signal.Signals(ended_by).name}: {signal.strsignal(ended_by)}"
        print(_report(name, began), file=sys.stderr)
    return 128 + ended_by


def _in_child(run: Callable[[], int], alive: int, settings: _Settings) -> int:
    """What native code writes to stderr goes to the log file, and so does the traceback of what
    nobody caught; Python keeps the terminal.

    `alive` is the end of a pipe to read from; the other end closes with the parent.
    """
    with contextlib.suppress(OSError):
        log = os.open(paths.log_file(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        encoding = sys.stderr.encoding
        if codecs.lookup(encoding).name == "ascii":
            # The POSIX locale says nothing of the terminal.
            encoding = "utf-8"
        terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding=encoding, errors="replace")
        os.dup2(log, 2)
        os.close(log)
        sys.stderr = sys.__stderr__ = terminal  # type: ignore[misc]
        faulthandler.enable(2)
    threading.Thread(target=_end_with_parent, args=(alive, settings), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    try:
        return run()
    except Exception:
        with open(2, "w", errors="replace", closefd=False) as file:
            traceback.print_exc(file=file)
        return os.EX_SOFTWARE


def _end_with_parent(alive: int, settings: _Settings) -> None:
    # A signal that this thread got would not wake the one that has to handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.read(alive, 1)
    try:
        # What the screen still draws goes nowhere.
        if sys.__stderr__ is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno())
        _restore(settings, switch_off=True)
    finally:
        # The engine may be where nothing can interrupt it.
        os._exit(128 + signal.SIGHUP)


def _wait(child: int, settings: _Settings) -> tuple[int, set[int]]:
    """The status the child ended with, and the signals that came for it meanwhile.

    They go on to it, and where it stops so do we.
    """
    passed_on: set[int] = set()

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed_on.add(number)
        # Else the child has it from the terminal, and a second one would come amid its ending.
        if number not in _OF_THE_TERMINAL or _screen_is_on():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    while True:
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return status, passed_on
        _restore(settings, _screen_is_on())
        # The shell waits for this process. It wakes the whole job.
        os.kill(os.getpid(), signal.SIGSTOP)


def _waiting(settings: _Settings) -> _Settings:
    """What is typed is neither shown nor changed, and waits for the screen to be there. Ctrl-C
    sends its signal all the while."""
    waiting = [*settings]
    waiting[_IFLAG] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)
    waiting[_LFLAG] &= ~(termios.ECHO | termios.ICANON)
    waiting[_CC] = [*settings[_CC]]
    waiting[_CC][termios.VMIN], waiting[_CC][termios.VTIME] = 1, 0
    return waiting


def _screen_is_on() -> bool:
    """Whether Ctrl-C is a key, as it is for the screen alone."""
    try:
        return not termios.tcgetattr(0)[_LFLAG] & termios.ISIG
    except termios.error:
        return True


def _restore(settings: _Settings, switch_off: bool) -> None:
    # The terminal may be another's by now, but nobody else knows what to put right.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    with contextlib.suppress(OSError, termios.error):
        if switch_off:
            os.write(1, _RESTORE.encode())
        if _screen_is_on():
            termios.tcflush(0, termios.TCIFLUSH)
        elif termios.tcgetattr(0) != _waiting(settings):
            # Those of a shell that goes on already.
            return
        termios.tcsetattr(0, termios.TCSANOW, settings)


def _report(why: str, began: float) -> str:
    text = f"tqchat ended unexpectedly ({why})."
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
