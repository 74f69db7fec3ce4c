"""How the screen looks, in its main states, at three sizes, dark and light."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from tests.tui.conftest import Chat, Clock, chat, make_app
from tests.tui.fake_engine import MIB, MODEL, FakeEngine
from tqchat.chat.sessions import Summary
from tqchat.library import Offer
from tqchat.tui import themes

ANSWER = """Paris is the capital of **France**, on the river *Seine*. Some facts:

1. It has about **2.1 million** people.
2. It is home to the `Louvre`, the largest museum in the world, which gets some nine million \
visitors in a normal year.
3. It hosts:
   - the Eiffel Tower
   - Notre-Dame

```python
def bridges(city: str = "Paris") -> int:
    \"\"\"How many bridges cross the river.\"\"\"
    known = {"Paris": 37, "Lyon": 28}  # 2024
    return known.get(city, 0)
```

| City  | Bridges | River        |
|-------|--------:|--------------|
| Paris |      37 | Seine        |
| Lyon  |      28 | Rh\u00f4ne, Sa\u00f4ne |

> Fluctuat nec mergitur.

See [the city](https://paris.example) for more.
"""
QUESTION = "What is the capital of France?\nTell me a little about it, with a table and some code."
SIZES = ((80, 24), (120, 40), (200, 60))

State = Callable[[Chat, Clock], Awaitable[None]]


async def loading(chat: Chat, clock: Clock) -> None:
    chat.engine.say_loading("Reading smollm2", 0, 92 * MIB)
    await chat.shows("Reading smollm2")
    clock.now += 1.5
    chat.engine.say_loading("Reading smollm2", 57 * MIB, 92 * MIB)
    await chat.shows("62%")
    await chat.command("a question asked early")
    await chat.shows("waits for the model")


async def ready(chat: Chat, clock: Clock) -> None:
    chat.engine.say_loaded(replace(MODEL, notes=("The model has no chat template: plain text.",)))
    await chat.shows("ready", "plain text")


async def reading(chat: Chat, clock: Clock) -> None:
    await ready(chat, clock)
    await chat.send(QUESTION)
    chat.engine.say_prefilling(0, 2500)
    await chat.shows(" 0%")
    clock.now += 8
    chat.engine.say_prefilling(1024, 2500)
    await chat.shows("41%")


async def streaming(chat: Chat, clock: Clock) -> None:
    await ready(chat, clock)
    await chat.send(QUESTION)
    end = ANSWER.index("known.get")
    for number, start in enumerate(range(0, end, 6)):
        chat.engine.say(ANSWER[start : min(start + 6, end)])
        clock.now += 0.04 + 0.01 * (number % 5)
        await chat.until(lambda: not chat.engine.events)
    chat.engine.say_stats(1412)
    await chat.shows("1,412")


async def finished(chat: Chat, clock: Clock) -> None:
    await ready(chat, clock)
    await chat.exchange(QUESTION, ANSWER)
    await chat.shows("first after")


async def failed(chat: Chat, clock: Clock) -> None:
    await finished(chat, clock)
    await chat.send("a message that is much too long")
    chat.engine.say_failed("The message does not fit.", excess=1234)
    await chat.shows("1,234 tokens too long")
    await chat.pilot.press("escape")


async def menu(chat: Chat, clock: Clock) -> None:
    await finished(chat, clock)
    await chat.pilot.press("/")
    await chat.shows("show commands and keys")


async def helping(chat: Chat, clock: Clock) -> None:
    await ready(chat, clock)
    await chat.command("/help")
    await chat.shows("Ctrl-D")


async def thinking(chat: Chat, clock: Clock) -> None:
    await ready(chat, clock)
    await chat.exchange("How many?", "<think>\nLet me count them:\none, two.\n</think>\n\nTwo.")
    await chat.pilot.press("ctrl+t")
    await chat.send("And now?")
    chat.engine.say("<think>\nThere is one more of them, so it is")
    await chat.shows("Let me count", "▸ Thinking · 9 words")


async def still_box(chat: Chat) -> None:
    chat.app.screen.query_one(Input).cursor_blink = False
    await chat.pilot.pause()


async def choosing_a_session(chat: Chat, clock: Clock) -> None:
    await ready(chat, clock)
    await chat.command("/sessions")
    await chat.shows("What is the capital", "3 d ago")
    await still_box(chat)


async def choosing_a_model(chat: Chat, clock: Clock) -> None:
    await ready(chat, clock)
    await chat.command("/model")
    await chat.shows("does not fit here", "to fetch")
    await still_box(chat)


async def searching_the_history(chat: Chat, clock: Clock) -> None:
    await ready(chat, clock)
    for question in ("What is the capital of France?", "Write a poem.", "And of Spain?"):
        await chat.exchange(question, "So.")
    await chat.pilot.press("ctrl+r")
    await chat.shows("Earlier messages", "And of Spain?")
    await still_box(chat)


async def reading_a_token(chat: Chat, clock: Clock) -> None:
    await ready(chat, clock)
    chat.prompt.attach(
        "notes.txt", "\n".join(f"Line {number} of the notes." for number in range(90))
    )
    await chat.pilot.press("f3")
    await chat.shows("Line 5 of the notes.", "Esc closes")


async def making_room(chat: Chat, clock: Clock) -> None:
    await finished(chat, clock)
    await chat.send("a message that is much too long")
    chat.engine.say_failed("The message does not fit.", excess=100)
    await chat.shows("100 tokens too long", "Begin a new conversation")


STATES = (loading, ready, reading, streaming, finished, failed, menu, helping, thinking)
MODALS = (
    choosing_a_session,
    choosing_a_model,
    searching_the_history,
    reading_a_token,
    making_room,
)
CASES = [
    *[(state, size, themes.DARK) for state in (*STATES, *MODALS) for size in SIZES],
    *[(state, (120, 40), themes.LIGHT) for state in (loading, streaming, failed, menu)],
    *[(finished, (120, 40), theme) for theme in ("tq-16", "tq-contrast", "tq-paper")],
]


OFFERS = [
    Offer(MODEL.name, 92 * MIB, 8192, is_here=True, about="small"),
    Offer(
        "mlx-community/Llama-3.2-3B-Instruct-4bit", 1800 * MIB, 131072, False, "Llama 3.2", "good"
    ),
    Offer("mlx-community/Meta-Llama-3.1-70B-Instruct-4bit", 39_000 * MIB, 0, False, "Llama 3.1"),
]


@pytest.fixture(autouse=True)
def same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine has of its own."""
    now = 1_800_000_000.0
    found = [
        Summary("a", "What is the capital of France?", MODEL.name, now - 50, 12_345),
        Summary("b", "A very long title that goes on and on " * 4, MODEL.name, now - 5_000, 999),
        Summary("c", "\u4e16\u754c", MODEL.name, now - 260_000, 4_567_890),
    ]
    monkeypatch.setattr("tqchat.chat.sessions.summaries", lambda: found)
    monkeypatch.setattr("tqchat.tui.screens.sessions.time", lambda: now)
    monkeypatch.setattr("tqchat.library.offers", lambda kv: OFFERS)


@pytest.mark.parametrize(
    ("state", "end"),
    [
        (choosing_a_session, "Ctrl-D deletes   Esc closes"),
        (choosing_a_model, "a folder or a file"),
        (searching_the_history, "closes"),
        (reading_a_token, "Esc closes"),
        (making_room, "all as it is"),
    ],
)
async def test_on_a_tiny_screen_the_keys_are_told_to_their_end(
    engine: FakeEngine, still: Clock, state: State, end: str
) -> None:
    async with chat(engine, load=False) as screen:
        await state(screen, still)
        await screen.pilot.resize_terminal(40, 12)
        await screen.shows(end)


@pytest.mark.parametrize(
    ("state", "size", "theme"),
    CASES,
    ids=[f"{state.__name__}-{size[0]}-{theme}" for state, size, theme in CASES],
)
def test_screen(
    snap_compare: Callable[..., bool],
    engine: FakeEngine,
    still: Clock,
    state: State,
    size: tuple[int, int],
    theme: str,
) -> None:
    app = make_app(engine, theme)

    async def prepare(pilot: Pilot[int]) -> None:
        chat = Chat(app, engine, pilot)
        await chat.until(lambda: engine.loads)
        await state(chat, still)
        await chat.settle()

    assert snap_compare(app, terminal_size=size, run_before=prepare)
