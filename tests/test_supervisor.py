"""The process around the screen: what it leaves behind when the screen's own dies."""

import fcntl
import os
import re
import signal
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.folders import write_tiny
from tests.terminal import Terminal
from tqchat import paths

ROOT = Path(__file__).parent.parent
FULL_SCREEN = (
    "\\x1b[?1049h\\x1b[?1000h\\x1b[?1003h\\x1b[?1015h\\x1b[?1006h\\x1b[?25l\\x1b[?1004h"
    "\\x1b[>25u\\x1b[?2004h\\x1b[?7l"
)
PROGRAM = f"""
import os, signal, sys, termios, time, tty
from tqchat.supervisor import supervise

def full_screen():
    tty.setraw(0)
    sys.stderr.write("{FULL_SCREEN}pid " + str(os.getpid()) + "\\n")

def until_key():
    return os.read(0, 1)

def run():
BODY

raise SystemExit(supervise(run))
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """A program on a terminal whose screen is the statements it is given."""
    terminals = []

    def start(body: str, before: str = "", shell: bool = False) -> Terminal:
        script = tmp_path / "program.py"
        lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
        script.write_text(before + PROGRAM.replace("BODY", lines))
        argv = [sys.executable, str(script)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PS1": "$ "}
        if shell:
            argv = ["bash", "--norc", "--noprofile", "-i"]
        terminals.append(Terminal(argv, environment))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.__exit__()


@pytest.mark.parametrize("body", ["return 3", "raise SystemExit(3)", "sys.exit(3)"])
def test_the_exit_code_is_the_childs(program: Callable[..., Terminal], body: str) -> None:
    terminal = program(body)
    assert terminal.wait_for_exit() == 3
    assert terminal.output == b""


AS_ON_A_MAC = "from tqchat import paths; import sys; sys.platform = 'darwin'"


@pytest.mark.parametrize("before", ["", AS_ON_A_MAC])
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL, signal.SIGBUS])
def test_after_a_native_failure_the_terminal_is_sane(
    program: Callable[..., Terminal], number: signal.Signals, before: str
) -> None:
    terminal = program(
        f"""
full_screen()
os.write(2, b"words of a library")
os.kill(os.getpid(), {int(number)})
time.sleep(60)
""",
        before,
    )
    assert terminal.wait_for_exit() == 128 + number
    terminal.assert_sane()
    assert b"words of a library" not in terminal.output
    last_words = terminal.output.rpartition(b"\x1b[0m")[2].decode()
    assert number.name in last_words
    assert str(paths.log_file()) in last_words
    assert "resume" not in last_words
    log = paths.log_file().read_text()
    assert "words of a library" in log
    if number != signal.SIGKILL:
        assert 'program.py", line' in log


def test_it_says_how_to_go_on_with_the_conversation(program: Callable[..., Terminal]) -> None:
    from tqchat.chat.sessions import Session

    with Session.create() as older:
        older.add_user("Older")
    os.utime(older.folder / "conversation.jsonl", (1, 1))
    terminal = program(
        """
from tqchat.chat.sessions import Session
session = Session.create()
session.add_user("Hello")
full_screen()
until_key()
os.abort()
"""
    )
    terminal.wait_for_output(rb"pid \d+")
    # A conversation of another process, newer still.
    with Session.create() as other:
        other.add_user("Other")
        terminal.type("x")
        assert terminal.wait_for_exit() == 128 + signal.SIGABRT
    (found,) = re.findall(rb"tqchat --resume (\S+)", terminal.output)
    assert found.decode() not in (older.id, other.id)
    with Session.open(found.decode()) as session:
        assert session.conversation.messages[0].content == "Hello"


def test_where_nothing_was_switched_on_nothing_is_switched_off(
    program: Callable[..., Terminal],
) -> None:
    terminal = program("os.abort()")
    assert terminal.wait_for_exit() == 128 + signal.SIGABRT
    assert b"\x1b" not in terminal.output
    assert b"SIGABRT" in terminal.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_go_on_to_the_child(
    program: Callable[..., Terminal], number: signal.Signals
) -> None:
    terminal = program(
        f"""
signal.signal({int(number)}, lambda *_: sys.exit(7))
full_screen()
time.sleep(60)
"""
    )
    terminal.wait_for_output(rb"pid \d+")
    terminal._process.send_signal(number)
    assert terminal.wait_for_exit() == 7


def test_ctrl_c_of_the_terminal_is_the_childs_alone(program: Callable[..., Terminal]) -> None:
    terminal = program(
        """
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.2)
    return 130
"""
    )
    terminal.wait_for("ready")
    terminal.type("\x03")
    assert terminal.wait_for_exit() == 130
    assert b"Traceback" not in terminal.output


def test_stopping_and_going_on_from_a_shell(
    program: Callable[..., Terminal], tmp_path: Path
) -> None:
    terminal = program(
        """
def go_on(*_):
    tty.setcbreak(0)
    print("going on", flush=True)
signal.signal(signal.SIGCONT, go_on)
tty.setcbreak(0)
print("running", flush=True)
while True:
    match until_key():
        case b"z": os.kill(os.getpid(), signal.SIGSTOP)
        case b"q": return 5
        case key: print(f"key {key}", flush=True)
""",
        shell=True,
    )
    terminal.wait_for(r"\$")
    terminal.type(f"{sys.executable} {tmp_path}/program.py\r")
    terminal.wait_for("running")
    for turn in range(1, 3):
        terminal.type("z")
        terminal.wait_for_output(rb"(?s)(Stopped.*){%d}" % turn)
        terminal.type("fg\r")
        terminal.wait_for_output(rb"(?s)(going on.*){%d}" % turn)
        terminal.type(f"{turn}")
        terminal.wait_for(f"key b'{turn}'")
    terminal.type("q")
    terminal.wait_for(r"\$\s*$")
    terminal.type("echo code $?\r")
    terminal.wait_for("code 5")
    terminal.type("exit\r")
    terminal.wait_for_exit()


def test_a_new_size_reaches_the_child(program: Callable[..., Terminal]) -> None:
    terminal = program(
        """
resized = lambda *_: print("size", *os.get_terminal_size(), flush=True)
signal.signal(signal.SIGWINCH, resized)
print("ready", flush=True)
until_key()
return 0
"""
    )
    terminal.wait_for("ready")
    fcntl.ioctl(terminal._master, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 70, 0, 0))
    terminal.wait_for("size 70 20")
    terminal.type("\r")
    assert terminal.wait_for_exit() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="finds the child in /proc")
def test_the_chat_itself(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny")
    with Terminal([sys.executable, "-m", "tqchat", str(model)], dict(os.environ)) as terminal:
        terminal.wait_for("● ready")
        parent = terminal._process.pid
        (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        assert terminal.wait_for_exit() == 128 + signal.SIGKILL
        terminal.assert_sane()
        assert "SIGKILL" in terminal.text
