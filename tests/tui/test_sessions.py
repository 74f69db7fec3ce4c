"""Conversations on disk, as the screen writes them and goes on with them."""

import argparse
import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tui.conftest import Chat, chat
from tests.tui.fake_engine import FakeEngine
from tqchat import cli, paths
from tqchat.chat import sessions
from tqchat.chat.errors import ChatError
from tqchat.chat.sessions import Session, Transcript
from tqchat.engine.events import FinishReason, Sampling
from tqchat.settings import Settings
from tqchat.tui.app import ChatApp

LONG = "word " * 1000


def on_disk() -> list[tuple[str, str]]:
    """The newest conversation as a crash at this moment would leave it."""
    folder = sessions.summaries()[0].folder
    transcript = Transcript.read((folder / "conversation.jsonl").read_bytes())
    transcript.end_partial()
    return [(message.role, message.content) for message in transcript.conversation.messages]


def contents(engine: FakeEngine) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in engine.turns[-1]]


def saved(*turns: tuple[str, str], answered: bool = True) -> Session:
    session = Session.create("smollm2", "Be kind.")
    for question, answer in turns:
        session.add_user(question)
        if answered:
            session.finish(answer)
        elif answer:
            session.stream(answer)
    session.close()
    return Session.open(session.id)


async def test_the_first_message_makes_the_session_and_is_on_disk_before_it_is_read(
    engine: FakeEngine,
) -> None:
    async with chat(engine) as screen:
        assert not sessions.summaries()
        await screen.send("Where?")
        assert on_disk() == [("user", "Where?")]
        (summary,) = sessions.summaries()
        assert engine.folders == [summary.folder / "cache"]
        engine.say("In Par")
        await screen.until(lambda: on_disk()[1:] == [("assistant", "In Par")])
        engine.say_finished("In Paris.")
        await screen.until(lambda: on_disk()[1:] == [("assistant", "In Paris.")])
        assert sessions.summaries()[0].model == "SmolLM2-135M-Instruct"
        await screen.exchange("And?", "Berlin.")
        assert len(engine.folders) == 1
        with pytest.raises(ChatError):
            Session.open(summary.id)
    with Session.open(summary.id) as session:
        assert session.conversation.system == "Be brief."
        assert len(session.conversation.messages) == 4


async def test_clear_begins_a_new_session_and_the_old_one_stays(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.exchange("one", "1")
        old = sessions.summaries()[0].id
        await screen.command("/clear")
        await screen.shows("A new conversation", "is saved")
        await screen.exchange("two", "2")
        assert len(engine.folders) == len(sessions.summaries()) == 2
        with Session.open(old) as session:
            assert [m.content for m in session.conversation.messages] == ["one", "1"]


async def test_a_question_stopped_before_its_answer_is_kept_until_the_next(
    engine: FakeEngine,
) -> None:
    async with chat(engine) as screen:
        await screen.exchange("one", "1")
        await screen.send("two")
        engine.say_finished("", "stopped")
        await screen.until(lambda: screen.prompt.text == "two")
        assert on_disk()[2:] == [("user", "two")]
        await screen.send("two and more")
        assert on_disk()[2:] == contents(engine)[3:] == [("user", "two and more")]


async def test_retry_takes_the_answers_place_on_disk(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.exchange("one", "bad")
        await screen.command("/retry")
        await screen.until(lambda: engine.turn == 2)
        engine.say_finished("good")
        await screen.until(lambda: on_disk() == [("user", "one"), ("assistant", "good")])


async def test_a_disk_that_does_not_take_it_is_said_once_and_the_chat_goes_on(
    engine: FakeEngine,
) -> None:
    (paths.data_dir() / "sessions").touch()
    async with chat(engine) as screen:
        await screen.exchange("one", "1")
        await screen.shows("goes on without being saved")
        await screen.exchange("two", "2")
        assert screen.screen_text.count("without being saved") == 1
        assert engine.folders == []


async def test_a_conversation_is_shown_as_it_was_left(engine: FakeEngine) -> None:
    session = saved(("Where?", "In **Paris**."), (LONG, "Ah."))
    async with chat(engine, session=session) as screen:
        assert engine.folders == [session.cache_folder]
        assert engine.loads == ["smollm2"]
        await screen.shows("Where?", "In Paris.", "[pasted 1: ", "Ah.")
        await screen.send("more")
        assert contents(engine) == [
            ("system", "Be kind."),
            ("user", "Where?"),
            ("assistant", "In **Paris**."),
            ("user", LONG),
            ("assistant", "Ah."),
            ("user", "more"),
        ]
        assert len(engine.folders) == 1


async def test_what_was_attached_is_shown_as_it_was_sent(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        screen.prompt.attach("a.md", LONG)
        screen.prompt.insert(" Which, and ")
        screen.prompt.insert(screen.prompt.fold(f"{LONG}2"))
        screen.prompt.insert("?")
        await screen.settle()
        shown = screen.prompt.text
        assert shown.startswith("[a.md: ")
        await screen.pilot.press("enter")
        await screen.until(lambda: engine.turn == 1)
        text = contents(engine)[-1][1]
        engine.say_finished("That.")
        await screen.until(lambda: not screen.app.busy)
        session = screen.app.dialogue.record.session
        assert session is not None
        assert session.title == "Which, and ?"
    async with chat(engine, session=Session.open(session.id)) as screen:
        await screen.shows("[a.md: ", "KB] Which, and [pasted 1: ", "]?", "That.")
        # New pastes are none of those.
        assert screen.prompt.fold("x" * 3000).startswith("[pasted 2: ")
        await screen.command("/edit")
        await screen.pilot.press("end", "!", "enter")
        await screen.until(lambda: engine.turn == 2)
        assert contents(engine)[1:] == [("user", text + "!")]


async def test_a_document_without_a_question_gives_its_name_to_the_conversation(
    engine: FakeEngine,
) -> None:
    async with chat(engine) as screen:
        screen.prompt.attach("a.md", LONG)
        await screen.pilot.press("enter")
        await screen.until(lambda: engine.turn == 1)
        assert sessions.summaries()[0].title == "a.md"


@pytest.mark.parametrize(
    ("reason", "said"),
    [("length", "cut at max_tokens: /continue"), ("repetition", "only repeated"), ("stop", None)],
)
async def test_why_an_answer_ended_is_shown_again(
    engine: FakeEngine, reason: FinishReason, said: str | None
) -> None:
    async with chat(engine) as screen:
        await screen.send("Where?")
        engine.say("There")
        engine.say_finished("There", reason)
        await screen.until(lambda: not screen.app.busy)
        session = screen.app.dialogue.record.session
        assert session is not None
    async with chat(engine, session=Session.open(session.id)) as screen:
        await screen.shows("There", *([said] if said else []))
        assert ("/continue" in screen.screen_text) is (said is not None)


async def test_sampling_belongs_to_its_conversation_and_is_saved_with_it(
    engine: FakeEngine,
) -> None:
    other = saved(("Where?", "There."))
    other.close()
    async with chat(engine) as screen:
        await screen.command("/set top_k 5")
        await screen.exchange("one", "1")
        await screen.command("/set temperature 9")
        await screen.exchange("two", "2")
        assert engine.samplings[-1] == Sampling(temperature=9, top_k=5)
        session = screen.app.dialogue.record.session
        assert session is not None
        screen.app.keeping.go_on(other.id)
        await screen.until(lambda: not screen.app.busy)
        await screen.send("three")
        assert engine.samplings[-1] == Sampling()
    async with chat(engine, session=Session.open(session.id)) as screen:
        await screen.exchange("four", "4")
        assert engine.samplings[-1] == Sampling(temperature=9, top_k=5)
        await screen.command("/reset")
        await screen.exchange("five", "5")
        assert engine.samplings[-1] == Sampling()
    with Session.open(session.id) as session:
        assert session.conversation.sampling == {"temperature": 9, "top_k": 5}
        # The command line comes first.
        options = argparse.Namespace(temperature=1.0)
        cli._as_it_was(options, Settings(temperature=1.0), session)
        assert session.conversation.sampling == {"top_k": 5}
        session.set_sampling({"top_k": "many", "min_p": 0.5, "kv": "fp16"})
    async with chat(engine, session=Session.open(session.id)) as screen:
        await screen.exchange("six", "6")
        assert engine.samplings[-1] == Sampling(min_p=0.5)


@pytest.mark.parametrize(("answer", "said"), [("", "Not answered yet"), ("Half", "not finished")])
async def test_what_was_not_answered_is_shown_and_retried(
    engine: FakeEngine, answer: str, said: str
) -> None:
    session = saved(("Where?", answer), answered=False)
    async with chat(engine, session=session) as screen:
        await screen.shows("Where?", answer, said, "/retry")
        await screen.command("/retry")
        await screen.until(lambda: engine.turns)
        assert contents(engine) == [("system", "Be kind."), ("user", "Where?")]
        engine.say_finished("There.")
        await screen.until(lambda: on_disk() == [("user", "Where?"), ("assistant", "There.")])


async def test_what_must_be_read_again_counts(engine: FakeEngine) -> None:
    session = saved(("q" * 400, "a" * 800))
    async with chat(engine, session=session) as screen:
        await screen.pilot.press(*"12345678")
        await screen.shows("12 tokens", "≈ ", f"{8191 - 300 - 12:,} left")


async def test_an_unanswered_question_goes_with_the_next_one(engine: FakeEngine) -> None:
    session = saved(("Where?", ""), answered=False)
    async with chat(engine, session=session) as screen:
        await screen.send("And when?")
        assert contents(engine)[1:] == on_disk() == [("user", "Where?\n\nAnd when?")]
        engine.say_finished("", "stopped")
        await screen.until(lambda: screen.prompt.text == "And when?")
        await screen.send("When?")
        assert contents(engine)[1:] == on_disk() == [("user", "Where?\n\nWhen?")]


async def test_the_session_is_closed_after_the_engine(engine: FakeEngine, tmp_path: Path) -> None:
    session = saved(("Where?", "There."))
    locked: list[bool] = []

    def close() -> None:
        with pytest.raises(ChatError):
            Session.open(session.id)
        locked.append(True)

    engine.close = close  # type: ignore[method-assign]
    async with chat(engine, session=session):
        pass
    assert locked == [True]
    Session.open(session.id).close()


async def test_clear_in_the_middle_of_an_answer_keeps_what_came(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.send("one")
        for piece in ("Half", " an", " answer"):
            engine.say(piece)
        await screen.shows("Half an answer")
        await screen.command("/clear")
        await screen.until(lambda: on_disk() == [("user", "one"), ("assistant", "Half an answer")])


# Choosing, renaming, exporting


async def test_another_conversation_is_gone_on_with(engine: FakeEngine) -> None:
    saved(("Where?", "There.")).close()
    async with chat(engine) as screen:
        await screen.exchange("one", "1")
        await screen.command("/sessions")
        await screen.shows("Conversations", "Where?", "one", "just now")
        await screen.pilot.press("down", "enter")
        await screen.shows("There.")
        assert engine.folders[-1] == sessions.summaries()[0].folder / "cache"
        await screen.until(lambda: not screen.app.busy)
        await screen.send("And?")
        assert [text for _, text in contents(engine)[1:]] == ["Where?", "There.", "And?"]
        # The one that was left can be had back.
        engine.say_finished("Here.")
        await screen.until(lambda: not screen.app.busy)
        await screen.command("/sessions")
        await screen.pilot.press("down", "enter")
        await screen.until(lambda: len(engine.folders) == 3)
        await screen.send("two")
        assert [text for _, text in contents(engine)[1:]] == ["one", "1", "two"]


async def test_typing_searches_titles_and_text(engine: FakeEngine) -> None:
    saved(("Where?", "In a needle case.")).close()
    saved(("When?", "Now.")).close()
    async with chat(engine) as screen:
        await screen.command("/sessions")
        await screen.shows("Where?", "When?")
        await screen.pilot.press(*"needle")
        await screen.until(lambda: "When?" not in screen.screen_text)
        await screen.pilot.press("enter")
        await screen.shows("In a needle case.")


async def test_a_conversation_is_renamed_in_the_list_and_by_command(engine: FakeEngine) -> None:
    saved(("Where?", "There.")).close()
    async with chat(engine) as screen:
        await screen.command("/sessions")
        await screen.pilot.press("ctrl+r", "ctrl+u", *"Places", "enter")
        await screen.shows("Places")
        assert sessions.summaries()[0].title == "Places"
        await screen.pilot.press("enter")
        await screen.shows("There.")
        await screen.command("/rename")
        assert screen.prompt.text == "/rename "
        await screen.pilot.press(*"Far", "enter")
        await screen.shows("is called: Far")
        assert sessions.summaries()[0].title == "Far"


async def test_deleting_asks_first_and_spares_the_open_one(engine: FakeEngine) -> None:
    saved(("Where?", "There.")).close()
    async with chat(engine) as screen:
        await screen.exchange("one", "1")
        await screen.command("/sessions")
        await screen.pilot.press("ctrl+d", "ctrl+d")
        await screen.shows("close it there first")
        await screen.pilot.press("down", "ctrl+d")
        await screen.shows("Ctrl-D again deletes")
        assert len(sessions.summaries()) == 2
        await screen.pilot.press("ctrl+d")
        await screen.until(lambda: [s.title for s in sessions.summaries()] == ["one"])


@pytest.mark.parametrize(
    ("name", "begins", "kind"),
    [
        ("a.md", "# Where?", "Markdown"),
        ("a.txt", "# Where?", "Markdown"),
        ("a.JSON", "{", "JSON"),
    ],
)
async def test_a_conversation_is_exported_for_its_owner_alone(
    engine: FakeEngine, tmp_path: Path, name: str, begins: str, kind: str
) -> None:
    path = tmp_path / name
    async with chat(engine, session=saved(("Where?", "There."))) as screen:
        await screen.command(f"/export {path}")
        await screen.until(path.exists)
        await screen.shows(f"Written as {kind} to")
        assert path.read_text().startswith(begins)
        assert "There." in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600
        path.write_text("mine")
        await screen.command(f"/export {path}")
        await screen.shows("There is one already")
        assert path.read_text() == "mine"


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", ["a.md", "a.json"])
async def test_where_the_disk_is_full_an_export_leaves_nothing_and_the_chat_goes_on(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What is not saved can still be exported, to a disk that has room."""
    full = tmp_path / "full"
    full.mkdir()
    async with chat(engine, size=(160, 40)) as screen:
        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", full_disk)
            patch.setattr(os, "fsync", full_disk)
            await screen.exchange("Where?", "There.")
            assert screen.app.dialogue.record.session is None
            await screen.command(f"/export {full / name}")
            await screen.shows("cannot be written: No space left on device")
            assert list(full.iterdir()) == []
        await screen.exchange("And then?", "Here, \ud800.")
        await screen.command(f"/export {tmp_path / name}")
        await screen.until((tmp_path / name).exists)
        for text in ("There.", "Here, ?."):
            assert text in (tmp_path / name).read_text()


async def test_the_conversation_may_be_chosen_at_the_start(engine: FakeEngine) -> None:
    saved(("Where?", "There.")).close()
    app = ChatApp(engine.open, Settings(), choose=lambda session: Settings())
    async with app.run_test(size=(100, 40)) as pilot:
        screen = Chat(app, engine, pilot)
        await screen.shows("Where?")
        assert not engine.loads
        await pilot.press("enter")
        await screen.until(lambda: engine.loads == ["smollm2"])
        assert len(engine.folders) == 1
        await screen.shows("There.")
    app.close_engine()


@pytest.mark.parametrize(
    ("said", "model", "system"),
    [({}, "smollm2", "Be kind."), ({"model": "said", "system": "Say."}, "said", "Say.")],
)
@pytest.mark.parametrize("key", ["enter", "escape"])
async def test_what_one_chosen_at_the_start_is_held_with(
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    said: dict[str, str],
    model: str,
    system: str,
    key: str,
) -> None:
    """What the command line says, else as it was, else what the file says."""
    saved(("Where?", "There.")).close()
    apps: list[ChatApp] = []

    def run(
        settings: Settings, session: Session | None, choose: Callable[..., Settings] | None
    ) -> int:
        apps.append(ChatApp(engine.open, settings, session, choose))
        return 0

    monkeypatch.setattr("tqchat.tui.app.run", run)
    options = argparse.Namespace(resume="", newest=False, **said)
    cli._screen(options, Settings.of(said, {"model": "file", "system": "File."}))
    gc.enable()
    async with apps[0].run_test(size=(100, 40)) as pilot:
        screen = Chat(apps[0], engine, pilot)
        await screen.shows("Where?")
        await pilot.press(key)
        if key == "escape" and not said:
            model, system = "file", "File."
        await screen.until(lambda: engine.loads == [model])
        engine.say_loaded()
        await screen.send("And?")
        assert contents(engine)[0] == ("system", system)
        assert len(engine.turns[0]) == (4 if key == "enter" else 2)
    apps[0].close_engine()


async def test_thoughts_are_neither_copied_nor_exported_as_markdown(
    engine: FakeEngine, tmp_path: Path
) -> None:
    question, answer = "<think>Mine</think> Where?", "<think>\nHm.\n</think>\n\nThere."
    async with chat(engine, session=saved((question, answer))) as screen:
        await screen.command("/copy")
        assert screen.app.clipboard == "There."
        for name in ("a.md", "a.json"):
            await screen.command(f"/export {tmp_path / name}")
            await screen.until((tmp_path / name).exists)
        markdown = (tmp_path / "a.md").read_text()
        assert "Hm." not in markdown
        assert question in markdown
        assert "Hm." in (tmp_path / "a.json").read_text()
        await screen.exchange("And?", "<think>\nHm")
        screen.app.copy_to_clipboard("")
        await screen.command("/copy")
        await screen.shows("There is no answer to copy yet")
        assert not screen.app.clipboard
