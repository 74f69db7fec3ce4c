"""Pasting: of any size and content, without freezing, and nothing lost."""

import time

import pytest
from textual import events

from tests.tui.conftest import Chat, chat
from tests.tui.fake_engine import FakeEngine

LONG = "x" * 2500


async def paste(chat: Chat, text: str) -> None:
    chat.app.post_message(events.Paste(text))
    await chat.pilot.pause()
    await chat.pilot.pause()


async def test_a_short_paste_is_typed_text(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await paste(screen, "a\r\nb\rc \x1b[31mred\x1b[0m\u202e!")
        assert screen.prompt.text == "a\nb\nc red!"


@pytest.mark.parametrize("text", [LONG, "line\n" * 25])
async def test_a_long_paste_is_a_token_and_is_sent_whole(engine: FakeEngine, text: str) -> None:
    async with chat(engine) as screen:
        await screen.pilot.press(*"see ")
        await paste(screen, text)
        token = f"[pasted 1: {len(text):,} chars]"
        assert screen.prompt.text == f"see {token}"
        await screen.pilot.press("enter")
        await screen.until(lambda: engine.turns)
        assert engine.turns[0][-1].content == f"see {text}"
        await screen.shows(f"see {token}")


async def test_tokens_are_named_and_expand_to_their_own_text(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        # What is pasted may itself look like a token, or like a replacement pattern.
        texts = ["a" * 2500, "[pasted 1: 2,500 chars] \\1 $' " + "b" * 2500]
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
        await screen.pilot.press("b", "left", "left", "a")
        assert screen.prompt.text == "a[pasted 1: 2,500 chars]b"
        screen.prompt.move_cursor((0, 9))  # as a click would
        await screen.pilot.press("x")
        assert "[pasted 1: 2,500 chars]" in screen.prompt.text


async def test_text_that_looks_like_a_token_is_text(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.send("[pasted 7: 12 chars]")
        assert engine.turns[0][-1].content == "[pasted 7: 12 chars]"


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


async def test_a_huge_paste_does_not_freeze(engine: FakeEngine) -> None:
    """One line of a megabyte: seconds per key if it went into the box."""
    async with chat(engine) as screen:
        began = time.monotonic()
        await paste(screen, "y" * 1_000_000)
        await screen.pilot.press("a", "b", "c")
        assert screen.prompt.text == "[pasted 1: 1,000,000 chars]abc"
        assert time.monotonic() - began < 5


async def test_keys_that_come_in_one_burst_keep_their_order(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        for key in ("a", "b", "backspace", "c", "left", "x"):
            character = key if len(key) == 1 else None
            screen.app.post_message(events.Key(key, character))
        await screen.pilot.pause()
        await screen.until(lambda: screen.prompt.text == "axc")
