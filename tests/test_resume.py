"""`tqchat -p` on a conversation that is saved: it goes on, and nothing is read twice."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.folders import write_tiny
from tqchat.chat.sessions import Session

TQCHAT = [sys.executable, "-m", "tqchat"]
GREEDY = ["--temperature", "0", "--max-tokens", "8"]
LONGER = [*GREEDY[:-1], "16"]
SOLD = [f"On day {n} the miller sold {13 * n % 29} sacks of barley." for n in range(1, 31)]
TEXT = " ".join([*SOLD[:10], "The magic number of Vienna is 7061.", *SOLD[10:]])
QUESTION = "What is the magic number of Vienna?"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [*TQCHAT, *map(str, arguments)]
    stdin = subprocess.DEVNULL
    return subprocess.run(argv, stdin=stdin, capture_output=True, text=True, timeout=60)


@pytest.fixture
def tqchat() -> Run:
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
    long = tqchat("--continue", "-p", "x", "--context", "300")
    assert (long.returncode, long.stdout) == (2, "")
    assert "leave out --continue" in long.stderr


@pytest.fixture(scope="module")
def read_once(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder of data with one conversation and its cache, and the conversation's id."""
    data = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_DATA_HOME", str(data))
        with Session.create(str(smollm2_gguf)) as session:
            pass
        assert run("--resume", session.id, "-p", TEXT, *LONGER).returncode == 0
    return data, session.id


@dataclass
class Again:
    """The answer to a second question, how much of the prompt was not read again, and messages."""

    text: str
    cached: int
    messages: str


def ask_again(
    read_once: tuple[Path, str], where: Path, change: Callable[[Path], object], *model: Path
) -> Again:
    """Goes on with a copy of the conversation whose saved cache was changed."""
    data, session_id = read_once
    shutil.copytree(data, where)
    change(where / "tqchat" / "sessions" / session_id / "cache")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_DATA_HOME", str(where))
        done = run(*model, "--resume", session_id, "-p", QUESTION, "--json", *LONGER)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return Again(answer["text"], answer["cached_tokens"], done.stderr)


@pytest.fixture(scope="module")
def sound(read_once: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Again:
    return ask_again(read_once, tmp_path_factory.mktemp("sound") / "data", lambda cache: None)


def flip(cache: Path) -> None:
    """One bit in the middle of the sealed blocks."""
    (segment,) = (file for file in cache.iterdir() if file.name != "state.safetensors")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 4
    segment.write_bytes(data)


def cut(cache: Path) -> None:
    state = cache / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-100])


def rewrite_version(cache: Path) -> None:
    state = cache / "state.safetensors"
    state.write_bytes(re.sub(rb'"version": "\d+"', b'"version": "0"', state.read_bytes()))


def test_what_was_read_is_not_read_again(sound: Again) -> None:
    assert "7061" in sound.text
    assert sound.cached > 350
    assert sound.messages == ""


@pytest.mark.parametrize(
    ("damage", "note"),
    [(flip, "is damaged"), (cut, "is damaged"), (rewrite_version, "another version of tqchat")],
)
def test_after_damage_the_answer_is_the_same_with_a_note(
    read_once: tuple[Path, str],
    sound: Again,
    tmp_path: Path,
    damage: Callable[[Path], None],
    note: str,
) -> None:
    again = ask_again(read_once, tmp_path / "data", damage)
    assert again.text == sound.text
    assert again.cached < 10
    assert again.messages.startswith("tqchat: The saved cache of this conversation")
    assert note in again.messages


def test_another_model_reads_for_itself(
    read_once: tuple[Path, str], tiny: Path, tmp_path: Path
) -> None:
    expected = ask_again(read_once, tmp_path / "without", shutil.rmtree, tiny)
    again = ask_again(read_once, tmp_path / "with", lambda cache: None, tiny)
    assert (again.text, again.cached) == (expected.text, 0)
    assert "of another model" in again.messages
    assert expected.messages == ""


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
