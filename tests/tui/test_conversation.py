"""The conversation under keys and mouse, and how much of it is drawn."""

import pytest
from textual.screen import Screen

from tests.tui.conftest import Chat, Clock, chat
from tests.tui.fake_engine import FakeEngine
from tqchat.chat.sessions import Session
from tqchat.tui.app import ChatApp
from tqchat.tui.widgets.conversation import Conversation
from tqchat.tui.widgets.panels import MemoryPanel, SidePanel

CODE = "First:\n\n```py\nx = 1\n```\n\nThen:\n\n```sh\nls -l\n\ncd\n```\n"


async def click(chat: Chat, text: str) -> None:
    """In the middle of where `text` is on the screen."""
    await chat.shows(text)
    lines = chat.screen_text.split("\n")
    row = next(n for n, line in enumerate(lines) if text in line)
    column = lines[row].index(text) + len(text) // 2
    await chat.pilot.click(offset=(column, row))


async def test_code_is_copied_by_key_newest_first(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.pilot.press("ctrl+o")
        await screen.shows("no block of code")
        await screen.exchange("code?", CODE)
        for copied in ("ls -l\n\ncd", "x = 1", "ls -l\n\ncd"):
            await screen.pilot.press("ctrl+o")
            assert screen.app.clipboard == copied


async def test_code_is_copied_by_a_click(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.exchange("code?", CODE)
        await click(screen, "copy")
        await screen.until(lambda: screen.app.clipboard == "x = 1")
        await screen.shows("5 characters")


async def test_thoughts_fold_while_they_stream_and_open_by_key_and_click(
    engine: FakeEngine,
) -> None:
    async with chat(engine) as screen:
        await screen.pilot.press("ctrl+t")
        await screen.shows("not thought aloud")
        await screen.send("why?")
        engine.say("<think>\nLet me see about that.")
        await screen.shows("▸ Thinking · 5 words")
        assert "Let me see" not in screen.screen_text
        await screen.pilot.press("ctrl+t")
        await screen.shows("▾ Thinking", "│ Let me see about that.")
        engine.say(" So.\n</think>\n\nBecause.")
        await screen.shows("▾ Thought · 6 words", "about that. So.", "Because.")
        await click(screen, "Thought")
        await screen.until(lambda: "Let me see" not in screen.screen_text)
        await click(screen, "Thought")
        await screen.shows("Let me see", "Because.")


async def test_a_panel_folds_by_a_click_and_opens_again(engine: FakeEngine) -> None:
    async with chat(engine, size=(120, 40)) as screen:
        await click(screen, "Memory")
        await screen.until(lambda: "weights" not in screen.screen_text)
        await screen.shows("Memory …", "KV cache")
        await click(screen, "Memory")
        await screen.shows("weights")


async def test_hidden_figures_are_right_when_they_show_again(engine: FakeEngine) -> None:
    async with chat(engine, size=(120, 40)) as screen:
        await screen.pilot.press("ctrl+b")
        await screen.exchange("Hi", "Hello.")
        await screen.pilot.press("ctrl+b")
        await screen.shows("64 of 8,192", "21.4 tok/s")
        await screen.pilot.resize_terminal(80, 24)
        await screen.shows("64 of 8,192", "21.4 tok/s", "memory")


async def test_figures_and_text_that_grow_cost_no_layout(
    engine: FakeEngine, still: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with chat(engine, size=(120, 40)) as screen:
        await screen.send("go")
        engine.say("Some words.\n\n" * 40)
        await screen.settle()
        layouts: list[Screen[object]] = []
        lay_out = Screen._refresh_layout

        def count(one: Screen[object], *rest: object, **named: object) -> None:
            layouts.append(one)
            lay_out(one, *rest, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(Screen, "_refresh_layout", count)
        for tokens in range(100, 2_000, 300):
            engine.say("More words.\n\n- item\n")
            engine.say_stats(tokens)
            screen.app.draw_figures()
            await screen.settle()
        await screen.shows("1,900 of 8,192")
        assert not layouts


@pytest.fixture
def long_session() -> Session:
    session = Session.create("scripted")
    for number in range(250):
        session.add_user(f"Question {number}?")
        session.finish(f"An answer of *some* words, number {number}.\n\n- one\n- two\n")
    return session


async def test_500_messages_are_one_widget_that_draws_what_is_in_sight(
    engine: FakeEngine, long_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    draw = Conversation._draw

    def count(self: Conversation, row: object, y: int, selected: object) -> object:
        drawn.append(y)
        return draw(self, row, y, selected)  # type: ignore[arg-type]

    monkeypatch.setattr(Conversation, "_draw", count)
    async with chat(engine, size=(120, 40), session=long_session) as screen:
        await screen.shows("number 249")
        conversation = screen.app.query_one(Conversation)
        assert len(conversation.children) == 0
        assert len(screen.app.screen.walk_children()) < 40
        await screen.settle()
        drawn.clear()
        conversation.scroll_up(animate=False)
        await screen.settle()
        assert len(drawn) <= 3
        drawn.clear()
        await screen.pilot.press("pageup")
        await screen.settle()
        assert conversation.size.height // 2 <= len(drawn) <= conversation.size.height + 3
        await screen.pilot.press("ctrl+home")
        await screen.shows("Question 0?")


async def test_memory_warns_before_it_is_full(engine: FakeEngine) -> None:
    async with chat(engine, size=(120, 40)) as screen:
        panel = screen.app.query_one(MemoryPanel)

        def colours(free: float) -> str:
            figures = screen.app.dialogue.figures
            memory = figures.memory
            assert memory is not None
            figures.memory = type(memory)(
                memory.weights, memory.kv, memory.other, int(free * memory.limit), memory.limit
            )
            screen.app.query_one(SidePanel).draw(figures)
            return str(panel.content.spans)  # type: ignore[union-attr]

        assert "$warning" not in colours(0.5)
        assert "$warning" in colours(0.15)
        assert "$error" in colours(0.05)


def test_the_keys_are_in_the_help() -> None:
    keys = " ".join(key for key, _ in ChatApp.KEYS)
    assert "Ctrl-O" in keys
    assert "Ctrl-T" in keys
