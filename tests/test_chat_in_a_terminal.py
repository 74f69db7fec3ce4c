"""The chat as one person has it: the program on a terminal, keys going in, a screen coming out."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.folders import write_tiny
from tests.terminal import Terminal

TQCHAT = [sys.executable, "-m", "tqchat"]
CHAT = r"● ready"


@pytest.fixture
def chat(own_folders: Path) -> Iterator[Callable[..., Terminal]]:
    """Starts the program; its folders are the test's, but for what is fetched only once."""
    terminals: list[Terminal] = []

    def start(*arguments: str | Path) -> Terminal:
        argv = [*TQCHAT, *map(str, arguments), "--temperature", "0"]
        terminals.append(Terminal(argv, dict(os.environ)))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.__exit__()


# The slow model's answer goes on for thousands of tokens, which do not repeat themselves.
LASTING = ("--temperature", "0", "--repetition-penalty", "1.3")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that takes its time."""
    return write_tiny(
        tmp_path_factory.mktemp("models") / "slow",
        num_hidden_layers=24,
        max_position_embeddings=131_072,
    )


def ask(terminal: Terminal, text: str) -> None:
    terminal.type(text)
    terminal.wait_for(re.escape(text))
    terminal.type("\r")


def kv_bytes(terminal: Terminal) -> float:
    """What the panel shows, 0 where it shows none."""
    panel = terminal.wait_for(r"KV cache · int4[^\n]*\n[^\n]*? ((-)|([\d.]+) ([KM])iB)")
    return 0.0 if panel[2] else float(panel[3]) * {"K": 2**10, "M": 2**20}[panel[4]]


def empty_the_box(terminal: Terminal, backspaces: int = 1) -> None:
    terminal.type("\x7f" * backspaces)
    terminal.wait_for("│ Ask anything")


def leave(terminal: Terminal, keys: str = "/quit\r") -> None:
    terminal.type(keys)
    assert terminal.wait_for_exit() == 0
    terminal.assert_sane()
    assert b"\x1b[?1049h" in terminal.output
    assert b"Traceback" not in terminal.output


def test_the_first_conversation(chat: Callable[..., Terminal], smollm2_gguf: Path) -> None:
    terminal = chat()
    terminal.wait_for(r"smollm2.*\n(.*\n)*.*" + "mlx-community/")
    terminal.wait_for(CHAT)
    assert kv_bytes(terminal) == 0
    assert re.search(r"Speed.*\n.* - tok/s", terminal.text)

    ask(terminal, "What is the capital of France?")
    terminal.wait_for(r"Paris")
    terminal.wait_for(CHAT)
    first = kv_bytes(terminal)
    assert first > 0
    terminal.wait_for(r"[1-9][\d.]* tok/s")
    terminal.wait_for(r"smaller|in fp16 +[\d.]+ [KM]iB")
    tokens = int(terminal.wait_for(r"(\d+) of 8,192")[1])
    terminal.wait_for(r"[\d.]+ [KMG]iB free")

    ask(terminal, "What about Germany?")
    terminal.wait_for(r"Berlin")
    terminal.wait_for(CHAT)
    assert kv_bytes(terminal) > first
    assert int(terminal.wait_for(r"(\d+) of 8,192")[1]) > tokens

    terminal.type("/clear\r")
    terminal.wait_for("new conversation")
    terminal.wait_for(r" 0 of 8,192")
    assert kv_bytes(terminal) == 0
    assert "Paris" not in terminal.text

    ask(terminal, "What is the capital of France?")
    terminal.wait_for(r"Paris")
    terminal.wait_for(CHAT)
    assert kv_bytes(terminal) == first
    leave(terminal)


def test_ctrl_c_before_the_screen_is_there(
    chat: Callable[..., Terminal], own_folders: Path, slow: Path
) -> None:
    terminal = chat(slow)
    begun = own_folders / "state" / "tqchat" / "tqchat.log"
    while not begun.exists():
        assert terminal._process.poll() is None
        time.sleep(0.01)
    terminal.type("\x03")
    assert terminal.wait_for_exit() == 130
    terminal.assert_sane()
    assert b"Traceback" not in terminal.output


def test_ctrl_c_while_the_model_is_read(chat: Callable[..., Terminal], smollm2_gguf: Path) -> None:
    terminal = chat(smollm2_gguf)
    terminal.wait_for(r"Reading .*%")
    terminal.type("\x03")
    terminal.wait_for(r"● no model")
    terminal.type("/retry\r")
    terminal.wait_for(CHAT)
    leave(terminal)


def test_ctrl_c_while_the_prompt_is_read(chat: Callable[..., Terminal], slow: Path) -> None:
    terminal = chat(slow)
    terminal.wait_for(CHAT)
    terminal.paste("A line of text.\n" * 480)
    terminal.wait_for(r"\[pasted 1: 7,680 tokens, 7.5 KB\]")
    terminal.type("\r")
    terminal.wait_for(r"Reading .*tokens")
    terminal.type("\x03")
    terminal.wait_for(CHAT)
    # Not answered: it is in the box again.
    terminal.wait_for(r"│ \[pasted 1: 7,680 tokens, 7.5 KB\]")
    empty_the_box(terminal)
    leave(terminal)


def test_a_paste_presses_no_keys(chat: Callable[..., Terminal], slow: Path) -> None:
    terminal = chat(slow)
    terminal.wait_for(CHAT)
    # An escape, Enter, and Ctrl-Q.
    terminal.paste("one\x1b[31m\rtwo\x11\rthree")
    terminal.wait_for(r"│ one *│.*\s+│ two\S* *│.*\s+│ three *│")
    empty_the_box(terminal, backspaces=20)
    leave(terminal)


def test_ctrl_c_while_an_answer_is_written(chat: Callable[..., Terminal], slow: Path) -> None:
    terminal = chat(slow, *LASTING)
    terminal.wait_for(CHAT)
    ask(terminal, "Hello")
    terminal.wait_for(r"● answering")
    terminal.type("\x03")
    terminal.wait_for(CHAT)
    terminal.wait_for("stopped")
    # The conversation goes on.
    ask(terminal, "And now?")
    terminal.wait_for(r"● answering")
    terminal.type("\x1b")
    terminal.wait_for(CHAT)
    # Once nothing runs, it does not leave.
    terminal.type("\x03")
    terminal.wait_for("Nothing to stop")
    leave(terminal, "\x04")


def test_leaving_in_the_middle_of_an_answer(chat: Callable[..., Terminal], slow: Path) -> None:
    terminal = chat(slow, *LASTING)
    terminal.wait_for(CHAT)
    ask(terminal, "Hello")
    terminal.wait_for(r"● answering")
    leave(terminal)


def test_a_message_longer_than_the_context(chat: Callable[..., Terminal], slow: Path) -> None:
    terminal = chat(slow, "--context", "1000", "--max-tokens", "5")
    terminal.wait_for(CHAT)
    terminal.paste("x" * 2500)
    # What the box says is what the refusal says.
    excess = terminal.wait_for(r"─ 2,\d+ tokens · (1,\d+) too many")[1]
    terminal.type("\r")
    terminal.wait_for(rf"that is {excess} more\b")
    terminal.wait_for(r"│ \[pasted 1: 2,500 tokens, 2.4 KB\]")
    empty_the_box(terminal)
    ask(terminal, "Hello")
    terminal.wait_for("cut at max_tokens")
    held = terminal.wait_for(r"(\d+) of 1,000")[1]
    terminal.paste("x" * 3000)
    terminal.wait_for(r"\[pasted 2: 3,000 tokens, 2.9 KB\]")
    terminal.type("\r")
    excess = terminal.wait_for(r"([\d,]+) tokens too long")[1]
    assert 2000 < int(excess.replace(",", "")) < 2200
    terminal.type("\x1b")
    terminal.wait_for(rf"that is {excess} more\b")
    terminal.wait_for(r"│ \[pasted 2: 3,000 tokens, 2.9 KB\]")
    assert terminal.wait_for(r"(\d+) of 1,000")[1] == held
    # Taken out again, the conversation goes on.
    empty_the_box(terminal)
    ask(terminal, "And now?")
    terminal.wait_for(rf"(?!{held} )\b\d+ of 1,000")
    leave(terminal)


def test_a_model_that_cannot_be_read(chat: Callable[..., Terminal], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    terminal = chat(empty)
    terminal.wait_for(r"● no model")
    terminal.wait_for(r"so it is not a model")
    ask(terminal, "Hello")
    terminal.wait_for(r"No model is loaded")
    terminal.wait_for(r"│ Hello")
    empty_the_box(terminal, 5)
    leave(terminal)


def test_going_on_with_an_answer_and_with_another_model(
    chat: Callable[..., Terminal], slow: Path, tmp_path: Path
) -> None:
    other = write_tiny(tmp_path / "another")
    terminal = chat(slow, "--max-tokens", "8")
    terminal.wait_for(CHAT)
    ask(terminal, "Hello there")
    terminal.wait_for(r"cut at max_tokens: /continue goes on")
    held = int(terminal.wait_for(r"(\d+) of [\d,]+")[1])
    terminal.type("/continue\r")
    terminal.wait_for(rf" (?!{held} )\d+ of [\d,]+")
    terminal.wait_for(CHAT)
    terminal.type(f"/model {other}\r")
    terminal.wait_for(r"tqchat +[^\n]*another")
    terminal.wait_for(CHAT)
    ask(terminal, "Again")
    terminal.wait_for(r"[1-9]\d* of [\d,]+")
    terminal.wait_for(CHAT)
    leave(terminal)
