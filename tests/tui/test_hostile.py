"""Whatever comes from outside, nothing reaches the terminal but text."""

import dataclasses

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


def assert_only_text(chat: Chat, attack: str) -> None:
    text = drawn(chat)
    assert clean(text) == text, attack
    assert not chat.app.clipboard, attack


async def test_in_an_answer(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        for name, attack in ATTACKS.items():
            await screen.command("/clear")
            await screen.send("go")
            step = max(len(attack) // 3, 1)
            for start in range(0, len(attack), step):
                engine.say(attack[start : start + step])
                await screen.until(lambda: not engine.events)
                await screen.pilot.pause()
                assert_only_text(screen, name)
            engine.say_finished(attack)
            await screen.shows("first after")
            assert_only_text(screen, name)


async def test_everywhere_else(engine: FakeEngine) -> None:
    async with chat(engine, load=False) as screen:
        for name, attack in ATTACKS.items():
            attack = attack[:3000]
            engine.say_loading(attack, 1, 2)
            await screen.shows("50%")
            assert_only_text(screen, name)
            model = dataclasses.replace(MODEL, name=attack, device=attack, notes=(attack,))
            engine.say_loaded(model)
            await screen.until(lambda: not screen.app.busy)
            await screen.pilot.pause()
            assert_only_text(screen, name)
            await screen.send("go")
            engine.say_failed(attack, 5)
            await screen.until(lambda: screen.prompt.text)
            await screen.pilot.pause()
            assert_only_text(screen, name)
            screen.prompt.text = ""
            screen.app.post_message(events.Paste(f"/{attack[:1500]}\n"))
            await screen.pilot.pause()
            assert_only_text(screen, name)
            await screen.pilot.press("enter")
            await screen.pilot.pause()
            assert_only_text(screen, name)
            await screen.command("/clear")
