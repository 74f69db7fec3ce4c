"""Pasting: of any size and content, without freezing, and nothing lost."""

import contextlib
import os
import stat
import sys
from pathlib import Path

import pytest
from textual import events

from tests.tui.conftest import Chat, chat
from tests.tui.fake_engine import FakeEngine
from tqchat import paths
from tqchat.tui import editor
from tqchat.tui.app import ChatApp
from tqchat.tui.history import History
from tqchat.tui.places import places
from tqchat.tui.widgets.prompt import CommandMenu
from tqchat.units import file_size_text

LONG = "x" * 2500


async def paste(chat: Chat, text: str) -> None:
    chat.app.post_message(events.Paste(text))
    await chat.pilot.pause()
    await chat.pilot.pause()
    if "[pasted" in chat.prompt.text:
        await chat.until(
            lambda: all(one.tokens for one in chat.prompt.attachments.inside(chat.prompt.text))
        )


async def test_a_short_paste_is_typed_text(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await paste(screen, "a\r\nb\rc \x1b[31mred\x1b[0m\u202e!")
        assert screen.prompt.text == "a\nb\nc red!"


@pytest.mark.parametrize("text", [LONG, "line\n" * 25])
async def test_a_long_paste_is_a_token_and_is_sent_whole(engine: FakeEngine, text: str) -> None:
    async with chat(engine) as screen:
        await screen.pilot.press(*"see ")
        await paste(screen, text)
        size = file_size_text(len(text))
        token = f"[pasted 1: {-(-len(text) // 4):,} tokens, {size}]"
        await screen.until(lambda: screen.prompt.text == f"see {token}")
        await screen.pilot.press("enter")
        await screen.until(lambda: engine.turns)
        assert engine.turns[0][-1].content == f"see {text}"
        await screen.shows(f"see {token}")


async def test_tokens_are_named_and_expand_to_their_own_text(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        # What is pasted may itself look like a token, or like a replacement pattern.
        texts = ["a" * 2500, "[pasted 1: 2.4 KB] \\1 $' " + "b" * 2500]
        for text in texts:
            await paste(screen, text)
            await screen.pilot.press("space")
        await screen.pilot.press("enter")
        await screen.until(lambda: engine.turns)
        assert engine.turns[0][-1].content == " ".join(texts)


async def test_one_backspace_takes_a_token_and_undo_brings_it_back(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.pilot.press("a")
        await paste(screen, LONG)
        whole = screen.prompt.text
        await screen.pilot.press("backspace")
        assert screen.prompt.text == "a"
        await screen.pilot.press("ctrl+z")
        assert screen.prompt.text == whole
        assert screen.prompt.full_text(whole) == f"a{LONG}"


@pytest.mark.parametrize(
    "keys",
    [
        ("left", "delete"),
        ("home", "delete"),
        ("ctrl+w",),
        ("home", "shift+right", "backspace"),
        ("home", "right", "left", "delete"),
    ],
)
async def test_a_token_is_never_cut(engine: FakeEngine, keys: tuple[str, ...]) -> None:
    async with chat(engine) as screen:
        await paste(screen, LONG)
        await screen.pilot.press(*keys)
        assert screen.prompt.text == ""


async def test_the_cursor_steps_over_a_token(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await paste(screen, LONG)
        await screen.pilot.press("b", "left", "left", "left", "a")
        assert screen.prompt.text == "a[pasted 1: 625 tokens, 2.4 KB] b"
        screen.prompt.move_cursor((0, 9))  # as a click would
        await screen.pilot.press("x")
        assert "[pasted 1: 625 tokens, 2.4 KB]" in screen.prompt.text


@pytest.mark.parametrize("key", ["ctrl+k", "ctrl+x", "ctrl+shift+k"])
async def test_the_last_line_can_be_deleted(engine: FakeEngine, key: str) -> None:
    async with chat(engine) as screen:
        await screen.pilot.press(key, *"hello", "home", key, key)
        assert screen.prompt.text == ""


async def test_text_that_looks_like_a_token_is_text(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.send("[pasted 7: 12 B]")
        assert engine.turns[0][-1].content == "[pasted 7: 12 B]"


async def test_a_recalled_message_still_has_its_paste(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await paste(screen, LONG)
        await screen.pilot.press("enter")
        await screen.until(lambda: engine.turns)
        engine.say_failed("Too long.", 7)
        await screen.until(lambda: screen.prompt.text)
        await screen.pilot.press("enter")
        await screen.until(lambda: engine.turn == 2)
        assert engine.turns[1][-1].content == LONG


@pytest.mark.parametrize(
    ("typed", "then"), [("sum", " sum"), (" sum", " sum"), ("?", "?"), ("@x", " @x")]
)
async def test_a_word_after_a_token_has_one_space_before_it(
    engine: FakeEngine, typed: str, then: str
) -> None:
    async with chat(engine) as screen:
        await paste(screen, LONG)
        token = screen.prompt.text
        await screen.pilot.press(*typed)
        assert screen.prompt.attachments.typed(screen.prompt.text) == then
        assert token.startswith("[pasted 1: ")


async def test_a_huge_paste_does_not_freeze(engine: FakeEngine) -> None:
    """One line of a megabyte: it would take seconds per key in the box, so it is a token there."""
    async with chat(engine) as screen:
        await paste(screen, "y" * 1_000_000)
        await screen.pilot.press("a", "b", "c")
        await screen.until(lambda: screen.prompt.text.endswith("abc"))
        await screen.until(lambda: "tokens" in screen.prompt.text)
        assert screen.prompt.text == "[pasted 1: 250,000 tokens, 977 KB] abc"


async def test_keys_that_come_in_one_burst_keep_their_order(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        for key in ("a", "b", "backspace", "c", "left", "x"):
            character = key if len(key) == 1 else None
            screen.app.post_message(events.Key(key, character))
        await screen.pilot.pause()
        await screen.until(lambda: screen.prompt.text == "axc")


# What people write with


@pytest.mark.parametrize(
    "letter",
    [
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",  # a family: three people and two joiners
        "e\u0301",  # e with an acute accent of its own
        "\u6f22",  # two cells wide
        "\u2764\ufe0f",  # a heart, as an emoji
        "\U0001f44d\U0001f3fd",  # a thumb with a colour of skin
        "\u0628",  # right to left
        "\u0928\u093f",  # a consonant and its vowel sign
    ],
)
async def test_a_letter_is_one_however_it_is_written(engine: FakeEngine, letter: str) -> None:
    async with chat(engine) as screen:
        await paste(screen, f"a{letter}b")
        await screen.pilot.press("left", "left", "x", "right", "y", "backspace", "backspace")
        assert screen.prompt.text == "axb"
        await screen.pilot.press("ctrl+z")
        assert screen.prompt.text == f"ax{letter}yb"
        await screen.pilot.press("home", "right", "right", "delete")
        assert screen.prompt.text == "axyb"


async def test_text_of_an_input_method_arrives_as_it_is(engine: FakeEngine) -> None:
    """Character by character, joiners too, which are no printable characters."""
    written = "\u306b\u307b\u3093\uff20\u0645\u06cc\u200c\u062e \U0001f468\u200d\U0001f467"
    async with chat(engine) as screen:
        for character in written:
            screen.app.post_message(events.Key(character, character))
        await screen.until(lambda: screen.prompt.text.endswith("\U0001f467"))
        assert not screen.app.query_one(CommandMenu).display
        await screen.pilot.press("enter")
        await screen.until(lambda: engine.turns)
        assert engine.turns[0][-1].content == written


@pytest.mark.parametrize(
    "text",
    [
        "\u6f22\u5b57 " * 60,
        "\u0645\u0631\u062d\u0628\u0627 hello " * 30,
        "\U0001f468\u200d\U0001f467" * 90,
    ],
)
async def test_wide_and_mixed_text_stays_in_the_box(engine: FakeEngine, text: str) -> None:
    async with chat(engine, size=(80, 24)) as screen:
        await paste(screen, text)
        await screen.pilot.press("home", "end", "up", "down", "x")
        assert screen.prompt.text.count("x") == 1
        strips = screen.app.screen._compositor.render_strips()
        assert {strip.cell_length for strip in strips} == {80}


# Earlier messages


async def test_messages_are_kept_from_one_start_to_the_next(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.exchange("two\nlines", "1")
        await paste(screen, LONG)
        await screen.pilot.press(*"sum up", "enter")
        await screen.until(lambda: engine.turn == 2)
    file = paths.state_file("history.jsonl")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert LONG not in file.read_text()
    async with chat(FakeEngine()) as screen:
        await screen.pilot.press("up")
        assert screen.prompt.text == "[pasted 1, no longer here] sum up"
        # Nothing is sent without the text that it was about.
        await screen.pilot.press("enter")
        await screen.shows("pasted 1 is no longer here: attach it again")
        assert not screen.engine.turns
        assert screen.prompt.text == "[pasted 1, no longer here] sum up"
        screen.prompt.clear()
        await screen.pilot.press("up", "up")
        assert screen.prompt.text == "two\nlines"


async def test_earlier_messages_are_searched(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        for text in ("a red house", "a green house", "a red car"):
            await screen.exchange(text, "1")
        await screen.pilot.press(*"red", "ctrl+r")
        await screen.shows("Earlier messages", "a red house", "a red car")
        await screen.pilot.press("space", *"hou")
        await screen.until(lambda: "a red car" not in screen.screen_text)
        await screen.pilot.press("enter")
        await screen.until(lambda: screen.prompt.text == "a red house")
        await screen.pilot.press("ctrl+r", *"nothing")
        await screen.shows("None has that in it")
        await screen.pilot.press("escape")
        await screen.until(lambda: screen.prompt.has_focus)
        assert screen.prompt.text == "a red house"


def test_a_damaged_history_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "state" / "history.jsonl"
    history = History(file)
    history.add("one", "one")
    with file.open("ab") as out:
        out.write(b'{"no": 1}\n\xff\n[[[\n7\n"\\u001b[31mred"\n')
    history.add("two", "two")
    again = History(file)
    again.read()
    assert again.entries == ["one", "red", "two"]
    assert again.search("E") == ["red", "one"]


def test_a_long_history_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    file.write_text("".join(f'"{number}"\n' for number in range(2_001)))
    history = History(file)
    history.read()
    assert (history.entries[0], history.entries[-1]) == ("1001", "2000")
    assert file.read_text().count("\n") == 1_000


def test_a_history_that_cannot_be_written_lasts_until_the_end() -> None:
    history = History(Path("/dev/null/history.jsonl"))
    history.read()
    history.add("one", "one")
    assert history.entries == ["one"]


# Files, counting, viewing, editing


async def test_a_file_is_a_token_and_the_model_is_told_its_name(
    engine: FakeEngine, tmp_path: Path
) -> None:
    (tmp_path / "a [b]: c.txt").write_bytes("Tomorrow, na\xefve".encode("latin-1"))
    async with chat(engine) as screen:
        await screen.command(f"/file {tmp_path}/a [b]: c.txt")
        await screen.until(lambda: "a _b__ c.txt" in screen.prompt.text)
        await screen.shows("not UTF-8")
        await screen.pilot.press(*"when?", "enter")
        await screen.until(lambda: engine.turns)
        assert engine.turns[0][-1].content == "a [b]: c.txt:\n\nTomorrow, na\xefve\n\n when?"


async def test_what_may_never_end_is_not_read(engine: FakeEngine, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    async with chat(engine) as screen:
        await screen.command(f"/file {pipe}")
        await screen.shows("is no regular file")
        assert screen.prompt.text == ""


async def test_the_home_of_nobody_is_no_fault_of_the_screen(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.pilot.press(*"@~nobody-has-this-name/a", "escape")
        await screen.command("/file ~nobody-has-this-name/a")
        await screen.shows("~nobody-has-this-name/a cannot be read")


async def test_a_file_that_cannot_be_read_is_said(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 8)
    async with chat(engine) as screen:
        await screen.command(f"/file {tmp_path}/binary")
        await screen.shows("is a binary file")
        await screen.command(f"/file {tmp_path}/none")
        await screen.shows("none")
        assert screen.prompt.text == ""


async def test_a_pdf_says_what_reads_it(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "paper.pdf").write_bytes(b"%PDF-1.7 and so on")
    monkeypatch.setitem(sys.modules, "pypdf", None)
    async with chat(engine, size=(160, 40)) as screen:
        await screen.command(f"/file {tmp_path}/paper.pdf")
        await screen.shows("tqchat[pdf]")
        assert screen.prompt.text == ""


async def test_the_box_says_what_would_be_sent_and_what_is_left(engine: FakeEngine) -> None:
    """With what the chat template puts around it: the system prompt and two messages' marks, and
    later those of the answer and the message. One token is for the answer."""
    async with chat(engine) as screen:
        await screen.pilot.press(*"12345678")
        await screen.shows(" 15 tokens", "8,176 left")
        screen.prompt.text = ""
        await screen.exchange("one", "1")
        await screen.pilot.press(*"12345678")
        await screen.shows(" 12 tokens", "8,115 left")
        await paste(screen, "z" * 40_000)
        await screen.shows("10,012 tokens", "1,885 too many")
        assert engine.texts.count("z" * 40_000) == 1


async def test_the_last_token_of_a_cut_answer_is_still_to_be_read(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.send("one")
        engine.say("1")
        engine.say_stats(64)
        engine.say_finished("1", "length")
        await screen.until(lambda: not screen.app.busy)
        await screen.pilot.press(*"12345678")
        await screen.shows(" 12 tokens", "8,114 left")


async def test_counts_are_marked_as_guesses_until_they_come(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        engine.count = lambda text: 1  # type: ignore[method-assign]
        await screen.pilot.press(*"12345678")
        await screen.shows("\u2248 2 tokens")


async def test_a_token_is_viewed_and_edited(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf 'new text\\n' > \"$1\"\n")
    editor.chmod(0o700)
    monkeypatch.setenv("VISUAL", str(editor))
    monkeypatch.setattr(ChatApp, "suspend", lambda self: contextlib.nullcontext())
    async with chat(engine) as screen:
        await paste(screen, "unlike \x1b[31many other\n" * 200)
        await screen.pilot.press("f3")
        await screen.shows("unlike any other", "Esc closes")
        await screen.pilot.press("escape", "f4")
        await screen.until(lambda: screen.prompt.text == "[pasted 1: 3 tokens, 9 B]")
        await screen.pilot.press("enter")
        await screen.until(lambda: engine.turns)
        assert engine.turns[0][-1].content == "new text\n"
        await screen.pilot.press(*"old", "ctrl+g")
        await screen.until(lambda: screen.prompt.text == "new text")


async def test_an_editor_that_fails_changes_nothing(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VISUAL", "false")
    monkeypatch.setattr(ChatApp, "suspend", lambda self: contextlib.nullcontext())
    async with chat(engine) as screen:
        await screen.pilot.press(*"text", "ctrl+g")
        await screen.shows("Set $EDITOR to an editor that works")
        assert screen.prompt.text == "text"


async def test_files_are_completed_after_an_at_sign(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    for name in ("docs/report one.txt", "docs/other.txt", "docs/.hidden", "notes.txt"):
        (tmp_path / name).write_text(f"This is {name}.")
    async with chat(engine) as screen:
        await screen.pilot.press(*"see @")
        await screen.shows("@docs/", "@notes.txt")
        await screen.shows("Enter open")
        await screen.pilot.press(*"do", "tab")
        assert screen.prompt.text == "see @docs/"
        await screen.shows("@docs/other.txt", "@docs/report one.txt")
        assert ".hidden" not in screen.screen_text
        await screen.shows("Enter attach")
        await screen.pilot.press(*"report", "enter")
        await screen.until(lambda: screen.prompt.text.startswith("see [report one.txt: 12 tokens"))
        await screen.pilot.press(*"and @not", "enter")
        await screen.until(lambda: "[notes.txt: " in screen.prompt.text)
        await screen.pilot.press(*"a@b", "enter")
        await screen.until(lambda: engine.turns)
        assert engine.turns[0][-1].content == (
            "see report one.txt:\n\nThis is docs/report one.txt.\n\n"
            " and notes.txt:\n\nThis is notes.txt.\n\n a@b"
        )


def test_hidden_files_need_their_dot_and_a_folder_need_not_be_there(tmp_path: Path) -> None:
    for name in (".secret", "open", "reopen"):
        (tmp_path / name).touch()
    assert [place.path.name for place in places(f"{tmp_path}/")] == ["open", "reopen"]
    assert [place.path.name for place in places(f"{tmp_path}/OP")] == ["open", "reopen"]
    assert [place.path.name for place in places(f"{tmp_path}/.")] == [".secret"]
    assert places(f"{tmp_path}/none/") == places("\0") == []


@pytest.mark.parametrize(
    ("visual", "chosen", "expected"),
    [("", "nano", "nano"), ("code -w", "nano", "code -w"), (" ", "", "vi"), (" ", " ed ", "ed")],
)
def test_a_blank_editor_is_none(
    monkeypatch: pytest.MonkeyPatch, visual: str, chosen: str, expected: str
) -> None:
    monkeypatch.setenv("VISUAL", visual)
    monkeypatch.setenv("EDITOR", chosen)
    assert editor.command() == expected
