"""How the screen looks, in its main states, at three sizes, dark and light."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from textual.pilot import Pilot

from tests.tui.conftest import Chat, Clock, make_app
from tests.tui.fake_engine import MIB, MODEL, FakeEngine
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
    chat.engine.say_failed("The message does not fit. Shorten it, or /clear.", excess=1234)
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


CASES = [
    *[(state, size, themes.DARK) for state in (loading, streaming, finished) for size in SIZES],
    *[(state, (80, 24), themes.DARK) for state in (reading, menu, failed)],
    *[(state, (120, 40), themes.DARK) for state in (ready, helping)],
    *[(state, (120, 40), themes.LIGHT) for state in (loading, streaming, failed, menu)],
]


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
