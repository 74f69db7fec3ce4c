"""The process around the screen: what it leaves behind when the screen's own dies."""

import contextlib
import fcntl
import os
import re
import signal
import struct
import sys
import termios
import time
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

    def start(
        body: str,
        before: str = "",
        shell: bool = False,
        term: str = "xterm-256color",
        **variables: str,
    ) -> Terminal:
        script = tmp_path / "program.py"
        lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
        script.write_text(before + PROGRAM.replace("BODY", lines))
        argv = [sys.executable, str(script)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PS1": "$ ", **variables}
        if shell:
            argv = ["bash", "--norc", "--noprofile", "-i"]
        terminal = Terminal(argv, environment, term=term)
        terminals.append(terminal)
        if shell:
            terminal.wait_for(r"\$")
            terminal.type(f"{sys.executable} {script}\r")
        return terminal

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


def test_where_a_signal_ended_it_as_asked_nothing_is_unexpected(
    program: Callable[..., Terminal],
) -> None:
    terminal = program("print('pid', flush=True); time.sleep(60)")
    terminal.wait_for("pid")
    terminal._process.send_signal(signal.SIGTERM)
    assert terminal.wait_for_exit() == 128 + signal.SIGTERM
    assert terminal.output == b"pid\r\n"
    terminal.assert_sane()


@pytest.mark.parametrize("before", ["", AS_ON_A_MAC])
def test_ctrl_c_of_the_terminal_comes_once(program: Callable[..., Terminal], before: str) -> None:
    terminal = program(
        """
times = []
signal.signal(signal.SIGINT, lambda *_: times.append(1))
print("ready", flush=True)
while not times:
    time.sleep(0.01)
time.sleep(0.3)
return len(times)
""",
        before,
    )
    terminal.wait_for("ready")
    terminal.type("\x03")
    assert terminal.wait_for_exit() == 1


@pytest.mark.parametrize("before", ["", AS_ON_A_MAC])
def test_without_its_parent_the_child_restores_the_terminal_and_ends(
    program: Callable[..., Terminal], tmp_path: Path, before: str
) -> None:
    alive = tmp_path / "alive"
    terminal = program(
        f"""
import fcntl
lock = open({str(alive)!r}, "w")
fcntl.flock(lock, fcntl.LOCK_EX)
full_screen()
sys.stderr.write(f"parent {{os.getppid()}} ")
while True:
    sys.stderr.write("drawn\\n")
""",
        before,
        shell=True,
    )
    terminal.wait_for_output(rb"parent \d+ drawn")
    os.kill(int(re.findall(rb"parent (\d+)", terminal.output)[0]), signal.SIGKILL)
    end = time.monotonic() + 60
    with alive.open() as lock:
        while True:
            terminal.read()
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            assert time.monotonic() < end, "the child lives on"
    while terminal.read(0.2):
        pass
    _, restored, after = terminal.output.rpartition(b"\x1b[?1049l")
    assert restored
    assert b"drawn" not in after
    terminal.type("exit\r")
    terminal.wait_for_exit()
    terminal.assert_sane()


SCREEN = """
from textual.app import App
from textual.widgets import Input, Static
from tqchat.tui.terminal import TerminalDriver
class Screen(App):
    def compose(self):
        yield Static("Everything")
        yield Input()
    def on_input_submitted(self):
        self.exit(5)
print("starting", os.getpid(), flush=True)
time.sleep(0.2)
code = Screen(driver_class=TerminalDriver).run()
print("ended in order", flush=True)
return code
"""


FAILING = """
from tests.tui.fake_engine import FakeEngine
from tqchat.settings import Settings
from tqchat.tui.app import ChatApp, run_app
from tqchat.tui.terminal import TerminalParser
def ask(app, event):
    text = event.text
    app.dialogue.record.ask(text, "tiny")
    raise RuntimeError("no way on")
def feed(parser, data):
    if b"\\r" in data.encode():
        raise RuntimeError("no way on")
    return known(parser, data)
known = TerminalParser.feed
WHAT
return run_app(ChatApp(FakeEngine().open, Settings()))
"""


@pytest.mark.parametrize("what", ["ChatApp.on_prompt_sent = ask", "TerminalParser.feed = feed"])
def test_after_an_error_of_the_screen_nothing_of_the_conversation_is_on_the_terminal(
    program: Callable[..., Terminal], what: str
) -> None:
    is_asked = what.endswith("ask")
    terminal = program(FAILING.replace("WHAT", what))
    terminal.wait_for("Ask anything")
    terminal.type("marigold")
    terminal.wait_for("marigold")
    terminal.type("\r")
    assert terminal.wait_for_exit() == os.EX_SOFTWARE
    terminal.assert_sane()
    last_words = terminal.output.rpartition(b"\x1b[?1049l")[2].decode()
    assert "Traceback" not in last_words
    assert "marigold" not in last_words
    assert f"What is known of it: {paths.log_file()}" in last_words
    assert last_words.count("\n") == 1 + is_asked
    assert ("tqchat --resume " in last_words) == is_asked
    log = paths.log_file().read_text()
    assert "RuntimeError: no way on" in log
    assert "marigold" not in log


def test_what_is_typed_early_is_in_the_prompt(program: Callable[..., Terminal]) -> None:
    terminal = program(SCREEN)
    terminal.wait_for("starting")
    terminal.type("early words")
    terminal.wait_for("▊ +early words")
    assert b"early" not in terminal.output.partition(b"\x1b[?1049h")[0]
    # Enter is Enter, not a new line.
    terminal.type("\r")
    assert terminal.wait_for_exit() == 5
    terminal.assert_sane()


def test_early_enter_is_enter(program: Callable[..., Terminal]) -> None:
    terminal = program(SCREEN)
    terminal.wait_for("starting")
    terminal.type("early words\r")
    assert terminal.wait_for_exit() == 5
    terminal.assert_sane()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM])
def test_signals_end_the_screen_in_order(
    program: Callable[..., Terminal], number: signal.Signals
) -> None:
    terminal = program(SCREEN)
    terminal.wait_for("Everything")
    terminal._process.send_signal(number)
    assert terminal.wait_for_exit() == 128 + number
    assert terminal.output.endswith(b"ended in order\r\n")
    terminal.assert_sane()


def test_an_interrupt_of_the_child_ends_the_screen_in_order(
    program: Callable[..., Terminal],
) -> None:
    terminal = program(SCREEN)
    terminal.wait_for("Everything")
    os.kill(int(re.findall(rb"starting (\d+)", terminal.output)[0]), signal.SIGINT)
    assert terminal.wait_for_exit() == 130
    assert terminal.output.endswith(b"ended in order\r\n")


def test_after_a_stop_all_of_the_screen_is_drawn(program: Callable[..., Terminal]) -> None:
    terminal = program(SCREEN, shell=True)
    terminal.wait_for("Everything")
    child = int(re.findall(rb"starting (\d+)", terminal.output)[0])
    # The second cannot be caught.
    for turn, number in enumerate((signal.SIGTSTP, signal.SIGSTOP), 1):
        os.kill(child, number)
        terminal.wait_for_output(rb"(?s)(Stopped.*){%d}" % turn)
        terminal.type("clear\r")
        terminal.wait_for(r"^\$ *\n")
        assert "Everything" not in terminal.text
        terminal.type("fg\r")
        terminal.wait_for("Everything")
        terminal.type(f"{turn}")
        terminal.wait_for("▊ +12" if turn == 2 else "▊ +1")
    terminal.type("\r")
    terminal.wait_for(r"in order[^\n]*\n\$ ")
    terminal.type("echo code $?; exit\r")
    terminal.wait_for_exit()
    assert b"code 5" in terminal.output
    terminal.assert_sane()


def test_where_the_locale_says_nothing_the_terminal_has_utf_8(
    program: Callable[..., Terminal],
) -> None:
    terminal = program("sys.stderr.write('a · b')", LC_ALL="POSIX", PYTHONUTF8="0")
    assert terminal.wait_for_exit() == 0
    assert terminal.output.decode() == "a · b"


def test_what_the_terminal_cannot_show_is_a_question_mark(program: Callable[..., Terminal]) -> None:
    terminal = program("sys.stderr.write('a · → b')", PYTHONIOENCODING="latin-1")
    assert terminal.wait_for_exit() == 0
    assert terminal.output == b"a \xb7 ? b"


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_without_a_cursor_is_refused(
    program: Callable[..., Terminal], term: str
) -> None:
    terminal = program("print('screen')", term=term)
    assert terminal.wait_for_exit() == 2
    assert terminal.output.count(b"\n") == 1
    assert b"ask with -p" in terminal.output


def test_stopping_and_going_on_from_a_shell(program: Callable[..., Terminal]) -> None:
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
