"""Conversations on disk: what is written is there, whatever ends the program and wherever."""

import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tqchat.chat import sessions
from tqchat.chat.conversation import Message
from tqchat.chat.errors import ChatError
from tqchat.chat.sessions import Session

ROOT = Path(__file__).parents[2]
NASTY = "café \u2028 \x00\x1b[31m \ud800 \r\n\f\u0085 end"


def contents(session: Session) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in session.conversation.messages]


def reopened(session: Session) -> Session:
    session.close()
    return Session.open(session.id)


def test_a_conversation_comes_back_as_it_was() -> None:
    session = Session.create("some/model", "Be brief.")
    session.add_user("Hello")
    session.stream("Good ")
    session.stream("day")
    session.finish("Good day")
    session.add_user(NASTY)
    session.finish("")
    session.use_model("other/model")
    session.set_system("Be long.")
    before = contents(session)
    session = reopened(session)
    assert contents(session) == before
    assert before == [
        ("user", "Hello"),
        ("assistant", "Good day"),
        ("user", NASTY),
        ("assistant", ""),
    ]
    assert (session.model, session.conversation.system) == ("other/model", "Be long.")
    assert not session.unfinished
    session.close()


@pytest.mark.parametrize(
    ("saved", "taken_up"),
    [
        ("Hm, hm.\n</think>\n\nYes.", "<think>\nHm, hm.\n</think>\n\nYes."),
        ("</think>\n\nYes.", "<think>\n</think>\n\nYes."),
        ("The tag </think> ends it.", "The tag </think> ends it."),
        ("```\n<think>\n</think>\n```", "```\n<think>\n</think>\n```"),
    ],
)
def test_a_thought_that_was_saved_without_its_opening_tag_is_one(saved: str, taken_up: str) -> None:
    session = Session.create()
    session.add_user(saved)
    session.finish(saved)
    session = reopened(session)
    assert contents(session) == [("user", saved), ("assistant", taken_up)]
    session.close()


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        session = Session.create()
        session.add_user("Hello")
    finally:
        os.umask(before)
    for path in session.folder.parent.rglob("*"):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    session.close()


messages = st.lists(
    st.builds(Message, st.sampled_from(["user", "assistant"]), st.text()), max_size=3
)
act = st.one_of(
    st.tuples(st.just("add_user"), st.text()),
    st.tuples(st.just("stream"), st.text()),
    st.tuples(st.just("finish"), st.text()),
    st.tuples(st.just("replace"), st.integers(0, 5), st.integers(0, 5), messages),
    st.tuples(st.just("replace"), st.integers(0, 5), st.none(), messages),
    st.tuples(st.just("rename"), st.text()),
)


@settings(max_examples=40, deadline=None)
@given(acts=st.lists(act, max_size=12))
def test_reading_gives_what_was_seen_while_writing(
    acts: list[tuple[str, ...]],
) -> None:
    session = Session.create()
    for name, *arguments in acts:
        getattr(session, name)(*arguments)
    session.close()
    session._transcript.end_partial()
    title = session.title
    with Session.open(session.id) as again:
        assert contents(again) == contents(session)
        assert again.title == title


def test_edits_and_turns_taken_back() -> None:
    session = Session.create()
    for text in ("one", "two", "three"):
        session.add_user(text)
        session.finish(text.upper())
    session.replace(4)
    session.add_user("drei")
    session.stream("half an")
    session.replace(4)
    session.replace(0, 2, [Message("user", "so far: one")])
    session = reopened(session)
    assert contents(session) == [
        ("user", "so far: one"),
        ("user", "two"),
        ("assistant", "TWO"),
    ]
    session.close()


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_torn_last_line_never_happened_and_what_follows_is_whole(cut: int) -> None:
    session = Session.create()
    session.add_user("Hello")
    session.finish("An answer that the crash cuts.")
    session.close()
    log = session.folder / "conversation.jsonl"
    log.write_bytes(log.read_bytes()[:-cut])
    session = Session.open(session.id)
    assert contents(session) == [("user", "Hello")]
    assert session.unanswered
    session.finish("Another answer.")
    session = reopened(session)
    assert contents(session) == [("user", "Hello"), ("assistant", "Another answer.")]
    session.close()


@pytest.mark.parametrize(
    "line",
    [
        b"\0" * 40,
        b"[]",
        b"7",
        b"{",
        b'{"type": "user"}',
        b'{"type": "user", "text": 3}',
        b'{"type": "from the future", "text": "x"}',
        b'{"type": "replace", "start": 0, "stop": 9, "messages": [{"role": "x"}]}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_damaged_line_is_left_out(line: bytes) -> None:
    session = Session.create()
    session.add_user("Hello")
    session.close()
    with (session.folder / "conversation.jsonl").open("ab") as log:
        log.write(line + b"\n")
    with Session.open(session.id) as session:
        session.finish("Good day")
        assert contents(session) == [("user", "Hello"), ("assistant", "Good day")]


def test_a_full_disk_leaves_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session.create()
    session.add_user("Hello")
    write = os.write
    room = [20]

    def full(descriptor: int, data: bytes) -> int:
        if descriptor != session._descriptor:
            return write(descriptor, data)
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        session.stream("Good")
        with pytest.raises(ChatError, match="No space"):
            session.finish("Good day")
    assert contents(session) == [("user", "Hello")]
    session.finish("Good day")
    session = reopened(session)
    assert contents(session) == [("user", "Hello"), ("assistant", "Good day")]
    session.close()


def test_a_conversation_that_cannot_be_begun_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = Session.create()
    session.close()
    folders, descriptors = session.folder.parent, Path("/dev/fd")

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    n_open = len(list(descriptors.iterdir()))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(ChatError, match="No space"):
            Session.create("a/model", "Be brief.")
    assert list(folders.iterdir()) == [session.folder]
    assert len(list(descriptors.iterdir())) == n_open


def test_the_size_in_the_list_is_what_deleting_frees() -> None:
    session = Session.create()
    session.add_user("Hello")
    session.close()
    before = sessions.summaries()[0].size
    assert before == sum(file.stat().st_size for file in session.folder.iterdir())
    deep = session.cache_folder / "layers"
    deep.mkdir(parents=True)
    (deep / "0").write_bytes(b"0" * 5000)
    (deep / "elsewhere").symlink_to("/")
    assert sessions.summaries()[0].size == before + 5000


def test_one_process_at_a_time() -> None:
    session = Session.create()
    session.add_user("Hello")
    code = (
        "import sys; from tqchat.chat.sessions import Session\n"
        "Session.open(sys.argv[1]).add_user('')"
    )
    argv = [sys.executable, "-c", code, session.id]
    other = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert "open in another tqchat" in other.stderr
    with pytest.raises(ChatError, match="open in another"):
        sessions.delete(session.id)
    session.close()
    assert subprocess.run(argv, capture_output=True, cwd=ROOT).returncode == 0
    assert contents(reopened_by_id(session.id)) == [("user", "Hello"), ("user", "")]


def reopened_by_id(session_id: str) -> Session:
    with Session.open(session_id) as session:
        return session


def test_a_newer_version_is_refused_with_what_to_do() -> None:
    session = Session.create()
    session.close()
    log = session.folder / "conversation.jsonl"
    log.write_text('{"type": "session", "version": 99, "created": 1.0}\n')
    with pytest.raises(ChatError, match="upgrade"):
        Session.open(session.id)
    assert sessions.summaries() == []


@pytest.mark.parametrize("first", ["", "{}", "[]", "7", "[" * 100_000])
def test_a_file_of_something_else(first: str) -> None:
    session = Session.create()
    session.close()
    (session.folder / "conversation.jsonl").write_text(f"{first}\n")
    with pytest.raises(ChatError, match="not a conversation"):
        Session.open(session.id)
    assert sessions.summaries() == []


@pytest.mark.parametrize("name", ["", "..", "../..", "20260101-000000-abcd", "x", "/etc"])
def test_names_that_are_no_conversation(name: str) -> None:
    with pytest.raises(ChatError, match="no conversation"):
        Session.open(name)
    with pytest.raises(ChatError, match="no conversation"):
        sessions.delete(name)


def test_list_search_rename_delete(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for title, text in [("Canals", "Lock gates of oak"), ("Tides", "The moon"), ("", "Bread\nrye")]:
        session = Session.create("a/model")
        session.add_user(text)
        session.finish("Of course: " + text * 3)
        if title:
            session.rename(title)
        session.close()
        os.utime(session.folder / "conversation.jsonl", (len(made), len(made)))
        made.append(session.id)
    listed = sessions.summaries()
    assert [s.id for s in listed] == made[::-1]
    assert [s.title for s in listed] == ["Bread rye", "Tides", "Canals"]
    assert {s.model for s in listed} == {"a/model"}
    found = list(sessions.search("GATES of"))
    assert [(s.id, "Lock gates of oak" in excerpt) for s, excerpt in found] == [(made[0], True)]
    assert [s.id for s, _ in sessions.search("tides")] == [made[1]]
    assert list(sessions.search(".*")) == []
    sessions.delete(made[1])
    assert [s.id for s in sessions.summaries()] == [made[2], made[0]]
    assert not listed[1].folder.exists()


def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    for call in (sessions.summaries, Session.create, lambda: Session.open("20260101-000000-abcd")):
        with pytest.raises(ChatError, match=r"cannot be used: .* \(.*file"):
            call()


def test_titles() -> None:
    session = Session.create()
    assert session.title == ""
    session.add_user("  Taken\x1b[2J back \n" * 100)
    assert session.title.startswith("Taken[2J back Taken")
    assert len(session.title) == 60
    session.replace(0)
    session.add_user("Kept")
    assert sessions.summaries()[0].title == session.title == "Kept"
    session.rename("By hand")
    session.replace(0)
    session.add_user("Other")
    session = reopened(session)
    assert sessions.summaries()[0].title == session.title == "By hand"
    session.close()


def test_export() -> None:
    session = Session.create("a/model", "Be brief.")
    session.add_user("What is 1 < 2?\n")
    session.finish("# True\n\nIndeed, it is.")
    assert session.transcript.to_markdown().startswith("# What is 1 < 2?\n\n*a/model, 20")
    order = ["## System prompt", "Be brief.", "## You", "1 < 2?", "## Answer", "Indeed, it is."]
    text = session.transcript.to_markdown().split("*\n\n")[1]
    assert sorted(order, key=text.index) == order
    value = json.loads(session.transcript.to_json(session.id))
    assert (value["id"], value["model"], value["system"]) == (session.id, "a/model", "Be brief.")
    assert [m["role"] for m in value["messages"]] == ["user", "assistant"]
    session.close()


@pytest.mark.parametrize("created", ["NaN", "Infinity", "-1e300", "1e300", "253402300800.0"])
def test_times_that_cannot_be_and_titles_that_nothing_can_show(created: str) -> None:
    session = Session.create()
    session.close()
    log = session.folder / "conversation.jsonl"
    log.write_text(
        f'{{"type": "session", "version": 1, "created": {created}}}\n'
        '{"type": "title", "text": "Tides\\ud800\\u001b"}\n'
    )
    session = Session.open(session.id)
    assert session.transcript.to_markdown().startswith("# Tides\n\n*tqchat, 1")
    session.add_user("Hello")
    assert session.title == "Tides"
    session.close()


KILLS = 50
ANSWER = [f"word{i} " for i in range(200)]


def talk(session_id: str, acknowledge: int) -> None:
    """Asks and answers for ever; tells of each question that is on the disk."""
    session = Session.open(session_id)
    while True:
        n = sum(m.role == "user" for m in session.conversation.messages)
        session.add_user(f"question {n} " + "x" * 5000)
        os.write(acknowledge, b"q")
        for word in ANSWER:
            session.stream(word)
            os.write(acknowledge, b".")
        session.finish("".join(ANSWER))


def kill_again_and_again() -> None:
    sessions.PARTIAL_INTERVAL_S = 0.0
    rng = random.Random(5)
    session = Session.create()
    session.close()
    asked = 0
    for _ in range(KILLS):
        read_end, write_end = os.pipe()
        if (child := os.fork()) == 0:
            talk(session.id, write_end)
        os.close(write_end)
        time.sleep(rng.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        told = b""
        while part := os.read(read_end, 1 << 16):
            told += part
        os.close(read_end)
        with Session.open(session.id) as again:
            said = contents(again)
        questions = [text.split()[1] for role, text in said if role == "user"]
        asked += told.count(b"q")
        # One more than it could tell of, at most.
        assert len(questions) in (asked, asked + 1)
        assert questions == [str(n) for n in range(len(questions))]
        asked = len(questions)
        words = told.rpartition(b"q")[2].count(b".") if b"q" in told else 0
        if said and said[-1][0] == "assistant":
            assert "".join(ANSWER).startswith(said[-1][1])
            assert said[-1][1].count(" ") >= words or said[-1][1].count(" ") == len(ANSWER)
        else:
            assert words in (0, len(ANSWER))
        for role, text in said[:-1]:
            assert role == "user" or "".join(ANSWER).startswith(text)
        assert [s.id for s in sessions.summaries()] == [session.id]
    print(asked)


def test_kill_9_at_random_moments() -> None:
    code = "from tests.chat.test_sessions import kill_again_and_again as run; run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > KILLS / 5
