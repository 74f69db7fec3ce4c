"""A screen with a scripted engine, on a clock that tests move themselves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from textual.pilot import Pilot

from tests.tui.fake_engine import FakeEngine
from tqchat.chat.sessions import Session
from tqchat.settings import Settings
from tqchat.tui import themes
from tqchat.tui.app import ChatApp
from tqchat.tui.widgets.bars import Activity
from tqchat.tui.widgets.prompt import Prompt


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("app", "dialogue", "draft", "state"):
        monkeypatch.setattr(f"tqchat.tui.{module}.monotonic", clock)
    return clock


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Clock:
    """Nothing on the screen moves by itself."""
    monkeypatch.setattr(Activity, "tick", lambda self: None)
    monkeypatch.setattr(Prompt, "cursor_blink", False)
    return clock


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def make_app(
    engine: FakeEngine,
    theme: str = themes.DARK,
    session: Session | None = None,
    system: str | None = "Be brief.",
) -> ChatApp:
    return ChatApp(engine.open, Settings(system=system, theme=theme), session)


async def wait_until(pilot: Pilot[int], condition: Callable[[], object]) -> None:
    """Waits for something the screen does on its timer. Fails after half a minute."""
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen")


@dataclass
class Chat:
    """An application under test, with shorthands."""

    app: ChatApp
    engine: FakeEngine
    pilot: Pilot[int]

    @property
    def prompt(self) -> Prompt:
        return self.app.query_one(Prompt)

    @property
    def screen_text(self) -> str:
        """All that can be read on the screen."""
        size, compositor = self.app.size, self.app.screen._compositor
        # A modal screen keeps what it has drawn, so it must see what lies behind it here too.
        lines = compositor.render_inline(size, self.app._background_screens).strips
        return "\n".join(strip.crop(0, size.width).text.rstrip() for strip in lines)

    async def until(self, condition: Callable[[], object]) -> None:
        await wait_until(self.pilot, condition)

    async def shows(self, *texts: str) -> None:
        try:
            await self.until(lambda: all(text in self.screen_text for text in texts))
        except AssertionError:
            raise AssertionError(f"{texts} not in:\n{self.screen_text}") from None

    async def settle(self) -> None:
        """Waits until the timer has nothing more to draw. Its ticks are given here: an idle screen
        has them too seldom to wait for."""
        seen, same = "", 0
        while same < 4 or not self.app.is_drawn:
            self.app._tick()
            await self.pilot.pause(0.02)
            same = same + 1 if self.screen_text == seen else 0
            seen = self.screen_text

    async def send(self, text: str) -> None:
        """Types a message and waits until the engine has it."""
        turns = self.engine.turn
        self.prompt.text = text
        await self.pilot.press("enter")
        await self.until(lambda: self.engine.turn == turns + 1)

    async def exchange(self, question: str, answer: str) -> None:
        await self.send(question)
        self.engine.say(answer)
        self.engine.say_stats(64)
        self.engine.say_finished(answer)
        await self.until(lambda: not self.app.busy)

    async def command(self, text: str) -> None:
        self.prompt.text = text
        await self.pilot.pause()
        await self.pilot.press("enter")
        await self.pilot.pause()


@asynccontextmanager
async def chat(
    engine: FakeEngine,
    size: tuple[int, int] = (100, 40),
    load: bool = True,
    session: Session | None = None,
) -> AsyncIterator[Chat]:
    app = make_app(engine, session=session, system=None if session else "Be brief.")
    async with app.run_test(size=size) as pilot:
        chat = Chat(app, engine, pilot)
        await chat.until(lambda: engine.loads)
        if load:
            engine.say_loaded()
            await chat.shows("ready")
        yield chat
    app.close_engine()
