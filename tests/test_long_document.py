"""A long document, as one person has it: pasted, read, stopped, read on, and come back to."""

from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase

import pytest
from tokenizers import Tokenizer

from tests.folders import write_tiny
from tests.terminal import Terminal
from tests.test_chat_in_a_terminal import CHAT, chat, leave
from tqchat.chat import sessions
from tqchat.chat.sessions import Session

__all__ = ["chat"]

CONTEXT = 32_768
LINES = [ascii_lowercase[7 * n % 26] * 64 for n in range(9_450)]
DOCUMENT = "\n".join(LINES)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with room for a long document, which takes it some seconds to read."""
    return write_tiny(
        tmp_path_factory.mktemp("models") / "roomy",
        doublings=6,
        max_position_embeddings=CONTEXT,
        num_hidden_layers=6,
    )


def number(text: str) -> int:
    return int(text.replace(",", ""))


def stats(terminal: Terminal) -> tuple[int, int]:
    """Tokens of the last prompt, and how many of them were not read again."""
    terminal.type("/stats\r")
    found = terminal.wait_for(r"prompt +([\d,]+) tokens, ([\d,]+) of them cached")
    return number(found[1]), number(found[2])


def test_a_long_paste_is_read_stopped_and_read_on(
    chat: Callable[..., Terminal], roomy: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(roomy / "tokenizer.json"))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    terminal = chat(roomy, "--max-tokens", "4")
    terminal.wait_for(CHAT)

    terminal.type("Before ")
    terminal.paste(DOCUMENT)
    label = rf"\[pasted 1: {count(DOCUMENT):,} tokens, 600 KB\]"
    terminal.wait_for(rf"│ Before {label}")
    terminal.type(" after")
    terminal.wait_for(rf"{label} after")
    said = f"Before {DOCUMENT} after"
    draft = count(f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n")
    terminal.wait_for(rf" {draft:,} tokens · {CONTEXT - 1 - draft:,} left")

    terminal.type("\r")
    terminal.wait_for(r"Reading.* [1-9]\d?% · [\d,]+ of [\d,]+ tokens")
    terminal.type("And now")
    terminal.wait_for("│ And now")
    done = number(terminal.wait_for(r"Reading.*?([\d,]+) of [\d,]+ tokens")[1])
    terminal.type("\x1b")
    terminal.wait_for(CHAT)
    # Not answered: it is in the box again, before what was typed since.
    terminal.wait_for(rf"│ Before {label} after *│[^\n]*\n│ And now")
    held = number(terminal.wait_for(r"([\d,]+) of 32,768")[1])
    assert done <= held < count(DOCUMENT)

    terminal.type("\r")
    terminal.wait_for(r"cut at ")
    terminal.wait_for(CHAT)
    # And a new line.
    assert stats(terminal) == (draft + len(" And now"), held)
    leave(terminal)


def test_what_was_read_is_come_back_to(
    chat: Callable[..., Terminal], roomy: Path, own_folders: Path
) -> None:
    """Answering again reads one token; and after damage all of it, to the same answer."""
    first = chat(roomy, "--max-tokens", "8")
    first.wait_for(CHAT)
    first.paste("\n".join(LINES[:100]))
    first.wait_for(r"\[pasted 1: ")
    first.type("\r")
    first.wait_for("cut at ")
    leave(first)
    answers = [answer()]

    for change, note in ((None, ""), (flip, "The saved cache of this conversation is damaged")):
        if change is not None:
            change(own_folders)
        again = chat("--continue", "--max-tokens", "8")
        again.wait_for(CHAT)
        again.wait_for(note)
        again.type("/retry\r")
        again.wait_for(r"cut at .* · 8 tokens")
        prompt, cached = stats(again)
        assert prompt - cached == (1 if change is None else prompt)
        leave(again)
        answers.append(answer())
    assert answers[0] == answers[1] == answers[2]


def answer() -> str:
    (summary,) = sessions.summaries()
    with Session.open(summary.id) as session:
        return session.conversation.messages[-1].content


def flip(data: Path) -> None:
    """One bit of the saved cache, where its tokens are told."""
    (state,) = data.glob("data/tqchat/sessions/*/cache/state.safetensors")
    content = bytearray(state.read_bytes())
    content[-100] ^= 1
    state.write_bytes(content)
