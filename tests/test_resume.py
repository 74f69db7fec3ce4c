"""`tqchat -p` on a conversation that is saved: it goes on, and nothing is read twice."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.folders import write_tiny
from tqchat.chat.sessions import Session

TQCHAT = [sys.executable, "-m", "tqchat"]
GREEDY = ["--temperature", "0", "--max-tokens", "8"]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def tqchat() -> Run:
    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        argv = [*TQCHAT, *map(str, arguments)]
        stdin = subprocess.DEVNULL
        return subprocess.run(argv, stdin=stdin, capture_output=True, text=True, timeout=60)

    return run


def said(session_id: str) -> list[tuple[str, str]]:
    with Session.open(session_id) as session:
        return [(m.role, m.content) for m in session.conversation.messages]


@pytest.fixture
def session_id(tiny: Path) -> str:
    with Session.create(str(tiny)) as session:
        return session.id


def test_a_conversation_goes_on(tqchat: Run, tiny: Path, session_id: str) -> None:
    """The model is the conversation's own, and the second question all that is read."""
    Session.create().close()
    first = tqchat("--resume", session_id, "-p", "Hello " * 50, *GREEDY)
    assert (first.returncode, first.stderr) == (0, "")
    second = json.loads(tqchat("--continue", "-p", "And?", "--json", *GREEDY).stdout)
    assert second["cached_tokens"] > 300
    assert second["prompt_tokens"] - second["cached_tokens"] < 60
    assert said(session_id) == [
        ("user", ("Hello " * 50).strip()),
        ("assistant", first.stdout.removesuffix("\n")),
        ("user", "And?"),
        ("assistant", second["text"]),
    ]
    off = json.loads(
        tqchat("--continue", "--disk-budget", "0", "-p", "x", "--json", *GREEDY).stdout
    )
    assert off["cached_tokens"] == 0


def test_an_answer_with_the_cache_is_the_answer_without(
    tqchat: Run, tiny: Path, session_id: str
) -> None:
    tqchat("--resume", session_id, "-p", "Hello " * 50, *GREEDY)
    with Session.open(session_id) as session:
        (session.cache_folder / "state.safetensors").write_bytes(b"damaged")
    done = tqchat("--resume", session_id, "-p", "And?", "--json", *GREEDY)
    assert done.returncode == 0
    assert done.stderr.startswith("tqchat: The saved cache of this conversation is damaged")
    assert json.loads(done.stdout)["cached_tokens"] == 0


def test_a_question_without_an_answer_is_taken_back(tqchat: Run, session_id: str) -> None:
    done = tqchat("--resume", session_id, "-p", "x" * 300, "--context", "100")
    assert done.returncode == 2
    assert "more than the context" in done.stderr
    assert said(session_id) == []
    assert tqchat("--resume", session_id, "./nowhere", "-p", "Hello").returncode == 2
    assert said(session_id) == []


def test_what_a_crash_left_unanswered_is_asked_with_the_next_question(
    tqchat: Run, session_id: str
) -> None:
    with Session.open(session_id) as session:
        session.add_user("One?")
    assert tqchat("--resume", session_id, "-p", "x" * 300, "--context", "100").returncode == 2
    assert said(session_id) == [("user", "One?")]
    assert tqchat("--resume", session_id, "-p", "Two?", *GREEDY).returncode == 0
    assert said(session_id)[0] == ("user", "One?\n\nTwo?")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_what_is_answered_before_it_ends_stays(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with Session.create(str(write_tiny(tmp_path / "tiny"))) as session:
        pass
    argv = [*TQCHAT, "--resume", session.id, "-p", "Hello", "--temperature", "0"]
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.read(200)
        time.sleep(0.1)
        process.send_signal(number)
        process.stdout.read()
        assert process.wait() == code
    (_, question), (role, text) = said(session.id)
    assert (question, role) == ("Hello", "assistant")
    assert text


def test_what_cannot_be_gone_on_with(tqchat: Run, tiny: Path) -> None:
    for arguments, words in (
        (["--continue"], "no saved conversation"),
        (["--resume", "20260101-000000-abcd"], "There is no conversation"),
        (["--resume"], "--continue"),
    ):
        done = tqchat(tiny, "-p", "Hello", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert words in done.stderr
    session = Session.create(str(tiny))
    done = tqchat("--continue", "-p", "Hello")
    session.close()
    assert done.returncode == 2
    assert "open in another tqchat" in done.stderr
