"""Whatever comes from outside, nothing reaches the terminal but text."""

import dataclasses

import pytest
from textual import events

from tests.tui.conftest import Chat, chat
from tests.tui.fake_engine import MODEL, FakeEngine
from tqchat.tui.text import clean

ATTACKS = {
    "colour": "\x1b[31mred\x1b[0m",
    "cursor": "\x1b[2J\x1b[H\x1b[1;1Hgone",
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "link": "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "c1": "\x9b31mred\x9d0;t\x9c",
    "markup": "[bold red on blue]x[/] [@click=app.quit]y[/] [link=http://x]z[/link]",
    "bidi": "abc\u202edcba\u202c \u2066x\u2069",
    "hidden": "a\u200bb\u2060c\ufeff\U000e0041\U000e0042",
    "surrogate": "\ud800\udfff",
    "newlines": "a\r\nb\x0bc\x0cd\x85e\u2028f\u2029g",
    "fence": "```\nnever closed\n" * 3,
    "nested": ">" * 3000 + " deep\n" + "- " * 2000,
    "wide": "w" * 100_000,
    "marks": "e" + "\u0301" * 5000,
    "controls": "".join(map(chr, range(0x20))) + "".join(map(chr, range(0x7F, 0xA0))),
}


def drawn(chat: Chat) -> str:
    """All text in what would be written to the terminal."""
    strips = chat.app.screen._compositor.render_strips()
    return "\n".join(segment.text for strip in strips for segment in strip)


def assert_only_text(chat: Chat) -> None:
    text = drawn(chat)
    assert clean(text) == text
    assert not chat.app.clipboard


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
async def test_in_an_answer(engine: FakeEngine, attack: str) -> None:
    async with chat(engine) as screen:
        await screen.send("go")
        for start in range(0, len(attack), max(len(attack) // 7, 1)):
            engine.say(attack[start : start + max(len(attack) // 7, 1)])
            await screen.until(lambda: not engine.events)
            await screen.pilot.pause()
            assert_only_text(screen)
        engine.say_finished(attack)
        await screen.shows("first after")
        assert_only_text(screen)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
async def test_everywhere_else(engine: FakeEngine, attack: str) -> None:
    async with chat(engine, load=False) as screen:
        attack = attack[:3000]
        engine.say_loading(attack, 1, 2)
        await screen.shows("50%")
        assert_only_text(screen)
        engine.say_loaded(dataclasses.replace(MODEL, name=attack, device=attack, notes=(attack,)))
        await screen.until(lambda: not screen.app.busy)
        await screen.pilot.pause()
        assert_only_text(screen)
        await screen.send("go")
        engine.say_failed(attack, 5)
        await screen.until(lambda: screen.prompt.text)
        await screen.pilot.pause()
        assert_only_text(screen)
        screen.prompt.text = ""
        screen.app.post_message(events.Paste(f"/{attack[:1500]}"))
        await screen.pilot.pause()
        assert_only_text(screen)
        await screen.pilot.press("enter")
        await screen.pilot.pause()
        assert_only_text(screen)
