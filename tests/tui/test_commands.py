"""Every command of the chat, the table they come from, and what the README makes of it."""

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.tui.conftest import Chat, chat
from tests.tui.fake_engine import MODEL, FakeEngine
from tqchat import library, settings
from tqchat.chat import sessions
from tqchat.engine.events import Finished, Sampling, Usage
from tqchat.library import Offer
from tqchat.settings import Settings
from tqchat.tui.app import ChatApp
from tqchat.tui.commands import COMMANDS, completions, readme_table
from tqchat.tui.screens.models import ModelPicker
from tqchat.tui.screens.text import TextView

ROOT = Path(__file__).parent.parent.parent


def said(screen: Chat) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in screen.engine.turns[-1]]


def test_the_readme_has_the_commands_as_they_are() -> None:
    assert readme_table() in (ROOT / "README.md").read_text()


def test_what_is_asked_of_the_commands_is_there() -> None:
    wanted = "help clear reset retry edit continue copy export file sessions rename system set"
    wanted += " model context theme stats plan quit view panel"
    assert set(wanted.split()) <= {command.name for command in COMMANDS}
    assert [one.typed for one in completions("/")] == [f"/{one.name}" for one in COMMANDS]


async def test_the_menu_has_descriptions_and_stays_small(engine: FakeEngine) -> None:
    async with chat(engine, size=(80, 24)) as screen:
        await screen.pilot.press("/")
        await screen.shows("/help", "show commands and keys", f"{len(COMMANDS) - 10} more")
        await screen.pilot.press("up")
        await screen.shows("/quit", "leave")
        assert "more" not in screen.screen_text
        await screen.pilot.press(*"mod", "tab")
        assert screen.prompt.text == "/model"


async def test_the_menu_leaves_room_for_the_prompt_on_a_tiny_screen(engine: FakeEngine) -> None:
    async with chat(engine, (40, 12)) as screen:
        await screen.pilot.press("/")
        await screen.shows("/help", "│ / ", "more", "choose")
        await screen.pilot.press("up")
        await screen.shows("/quit", "│ / ")


async def test_names_that_can_be_set_are_completed(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.pilot.press(*"/set top")
        await screen.shows("top_p", "0.95; 1 switches it off", "top_k")
        await screen.pilot.press("down", "enter")
        assert screen.prompt.text == "/set top_k "
        await screen.pilot.press(*"7", "enter")
        await screen.shows("top_k: 7")


# Editing and continuing


async def test_edit_asks_the_last_message_again_in_its_place(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.exchange("one", "1")
        await screen.exchange("two", "wrong answer")
        await screen.command("/edit")
        await screen.shows("Enter asks again")
        assert screen.prompt.text == "two"
        await screen.pilot.press(*" more")
        await screen.pilot.press("enter")
        await screen.until(lambda: engine.turn == 3)
        assert said(screen) == [
            ("system", "Be brief."),
            ("user", "one"),
            ("assistant", "1"),
            ("user", "two more"),
        ]
        assert "wrong answer" not in screen.screen_text
        assert "Enter asks again" not in screen.screen_text
        engine.say_finished("2")
        await screen.until(lambda: not screen.app.busy)
    kept = sessions.Session.open(sessions.summaries()[0].id)
    assert [message.content for message in kept.conversation.messages] == [
        "one",
        "1",
        "two more",
        "2",
    ]
    kept.close()


async def test_edit_can_be_left(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.exchange("one", "1")
        await screen.command("/edit")
        await screen.pilot.press("escape")
        assert screen.prompt.text == ""
        await screen.send("two")
        assert [text for _, text in said(screen)[1:]] == ["one", "1", "two"]


async def test_edit_says_why_it_cannot(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.command("/edit")
        await screen.shows("There is no message to edit")
        await screen.send("one")
        await screen.command("/edit")
        await screen.shows("Something is running")
        engine.say_finished("1")
        await screen.until(lambda: not screen.app.busy)
        screen.prompt.text = "a draft"
        screen.app.dialogue.edit()
        await screen.shows("what is in the prompt first")
        assert screen.prompt.text == "a draft"


@pytest.mark.parametrize("reason", ["stopped", "length", "repetition"])
async def test_continue_goes_on_with_the_answer(engine: FakeEngine, reason: str) -> None:
    async with chat(engine) as screen:
        await screen.send("count")
        engine.say("one, two,")
        engine.say_finished("one, two,", reason)  # type: ignore[arg-type]
        await screen.shows("one, two,", "/continue goes on")
        await screen.command("/continue")
        assert said(screen)[-2:] == [("user", "count"), ("assistant", "one, two,")]
        engine.say(" three")
        engine.say_finished(" three")
        await screen.shows("one, two, three")
        await screen.send("and?")
        assert said(screen)[-2:] == [("assistant", "one, two, three"), ("user", "and?")]
    kept = sessions.Session.open(sessions.summaries()[0].id)
    assert kept.conversation.messages[1].content == "one, two, three"
    kept.close()


async def test_a_continuation_that_fails_keeps_what_came(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.command("/continue")
        await screen.shows("There is no answer to go on with")
        await screen.exchange("count", "one,")
        await screen.command("/continue")
        await screen.pilot.press("escape")
        engine.say_finished("", "stopped")
        await screen.until(lambda: not screen.app.busy)
        assert screen.prompt.text == ""
        await screen.command("/continue")
        engine.say(" two")
        engine.say_failed("Out of memory.")
        await screen.shows("one, two", "not finished", "Out of memory")
        assert screen.prompt.text == ""
        await screen.send("and?")
        assert said(screen)[-2:] == [("assistant", "one, two"), ("user", "and?")]


# Settings of the conversation


async def test_system_shows_and_sets(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.command("/system")
        await screen.shows("System prompt", "Be brief.")
        await screen.exchange("one", "1")
        await screen.command("/system Be kind.")
        await screen.shows("is changed", "read again")
        await screen.send("two")
        assert said(screen)[0] == ("system", "Be kind.")
        engine.say_finished("2")
        await screen.until(lambda: not screen.app.busy)
        await screen.command("/system -")
        await screen.send("three")
        assert said(screen)[0] == ("user", "one")
        await screen.command("/reset")
        await screen.send("four")
        assert said(screen) == [("system", "Be brief."), ("user", "four")]
    kept = sessions.Session.open(sessions.summaries()[1].id)
    assert kept.conversation.system == ""
    kept.close()


async def test_set_shows_and_sets_and_puts_back(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.command("/set")
        await screen.shows("repetition_penalty", "max_tokens", "as long as there is room")
        told = {"temperature": 0.2, "top_p": 0.95}
        engine.say_loaded(replace(MODEL, sampling=told, suggested=frozenset(["temperature"])))
        await screen.until(lambda: screen.app.dialogue.figures.model != MODEL)
        await screen.command("/set")
        await screen.shows("0.2 (the model's)", "0.95 (tqchat's; the model says none)")
        await screen.command("/set temperature 0.25")
        await screen.shows("temperature: 0.25")
        await screen.command("/set top-k 5")
        await screen.send("one")
        assert engine.samplings[-1] == Sampling(temperature=0.25, top_k=5)
        engine.say_finished("1")
        await screen.until(lambda: not screen.app.busy)
        await screen.command("/set temperature default")
        await screen.command("/set max_tokens 7")
        await screen.send("two")
        assert engine.samplings[-1] == Sampling(top_k=5)
        assert engine.most_tokens[-1] == 7


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("/set temperature hot", "not a number from 0 to 100"),
        ("/set top_p 1.5", "from 0 to 1"),
        ("/set colour blue", "There is no colour"),
        ("/set seed", "seed is a new one each time now. /set seed VALUE: repeat"),
        ("/set kv fp16", "There is no kv"),
    ],
)
async def test_what_cannot_be_set_stays_in_the_prompt(
    engine: FakeEngine, typed: str, words: str
) -> None:
    async with chat(engine) as screen:
        await screen.command(typed)
        await screen.shows(words)
        assert screen.prompt.text == typed


def context_rows(screen: Chat) -> list[tuple[str, int]]:
    """What the last /context said."""
    text = screen.screen_text.rpartition("The context, ")[2]
    rows = re.findall(r"^ *(\w.*?) +([\d,]+) tokens +[\d.]+%", text, re.M)
    return [(name, int(count.replace(",", ""))) for name, count in rows]


async def context_is(screen: Chat, *rows: tuple[str, int]) -> None:
    await screen.command("/context")
    await screen.until(lambda: context_rows(screen) == list(rows))


async def test_context_agrees_with_the_panel_around_a_running_answer(engine: FakeEngine) -> None:
    """Its parts and what is free make up the context, whatever the model has read."""
    async with chat(engine, size=(120, 60)) as screen:
        said = [("system prompt", 3), ("your messages (1)", 1000), ("chat template", 10)]
        await screen.send("q" * 4000)
        await context_is(screen, *said, ("free", 8192 - 1013), ("of it not read yet", 1013))
        engine.say_stats(500)
        await screen.shows("500 of 8,192")
        await context_is(screen, *said, ("free", 8192 - 1013), ("of it not read yet", 513))
        for _ in range(50):
            engine.say("word ")
        engine.say_stats(1062)
        await screen.shows("1,062 of 8,192")
        await context_is(screen, *said, ("this answer so far", 50), ("free", 8192 - 1063))


async def test_what_was_read_and_taken_back_is_told_apart(engine: FakeEngine) -> None:
    async with chat(engine, size=(120, 60)) as screen:
        await screen.send("q" * 4000)
        engine.tokens = 700
        engine.say_finished("", "stopped")
        await screen.until(lambda: screen.prompt.text)
        screen.prompt.text = ""
        system = ("system prompt", 3)
        await context_is(screen, system, ("no longer used", 697), ("free", 8192 - 700))


async def test_stats_are_those_of_one_answer(engine: FakeEngine) -> None:
    def rows() -> dict[str, str]:
        return dict(re.findall(r"^ *(\w[\w ]*?)  +(\S.*?)  ", screen.screen_text, re.M))

    async with chat(engine, size=(120, 60)) as screen:
        await screen.exchange("one", "1")
        await screen.send("two")
        await screen.command("/stats")
        await screen.shows("This answer so far", "The KV cache now")
        assert (rows()["answer"], rows()["first token"], rows()["prompt"]) == ("-", "-", "-")
        engine.events.append(
            Finished(2, "stopped", "", Usage(9, 0, 0, 0.0, 0.0, 0.0), engine.cache, engine.memory)
        )
        await screen.until(lambda: not screen.app.busy)
        screen.prompt.text = ""
        await screen.command("/stats")
        # What was stopped before it said a word is no answer.
        await screen.shows("The last answer", "96 tokens", "412 tokens, 380 of them cached")


async def test_context_says_what_fills_it(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.exchange("q" * 40, "a" * 80)
        await screen.command("/context")
        # A token of the fake engine is four characters long: 3 + 10 + 20 of the 64 held.
        await screen.shows("The context, 8,192 tokens", "the longest")
        rows = re.findall(r"^ *(\w.*?) +([\d,]+) tokens +[\d.]+%", screen.screen_text, re.M)
        assert rows == [
            ("system prompt", "3"),
            ("your messages (1)", "10"),
            ("answers (1)", "20"),
            ("chat template", "31"),
            ("free", "8,128"),
        ]


@pytest.mark.parametrize("typed", ["/view", "/edit-token"])
async def test_without_a_token_that_is_said(engine: FakeEngine, typed: str) -> None:
    async with chat(engine) as screen:
        screen.prompt.attach("a.md", "long gone")
        screen.prompt.text = ""
        await screen.command(typed)
        await screen.shows("There is no token here")


async def test_what_was_sent_last_can_be_read(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        screen.prompt.attach("a.md", "A river runs by.")
        screen.prompt.insert("Which?")
        await screen.pilot.press("enter")
        await screen.until(lambda: engine.turn == 1)
        engine.say_finished("That.")
        await screen.until(lambda: not screen.app.busy)
        await screen.command("/view")
        await screen.shows("A river runs by.")


# Models


OFFERS = [
    Offer("smollm2", 93_000_000, 8192, is_here=True),
    Offer("org/small-4bit", 700_000_000, 131_072, False, "Apache-2.0", "quick answers"),
    Offer("org/huge-4bit", 40_000_000_000, 0, False, "MIT", "for 64 GB and more"),
]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "offers", lambda kv: OFFERS)


@pytest.mark.usefixtures("offered")
async def test_the_picker_shows_what_fits(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.command("/model")
        await screen.shows("smollm2", "88.7 MiB", "8,192 tokens fit", "on this machine")
        await screen.shows("org/small-4bit", "131,072 tokens fit", "to fetch", "quick answers")
        await screen.shows("does not fit here", "37.3 GiB")
        await screen.pilot.press(*"huge")
        await screen.until(lambda: "small-4bit" not in screen.screen_text)
        await screen.pilot.press("escape")
        await screen.until(lambda: not isinstance(screen.app.screen, ModelPicker))
        assert engine.loads == ["smollm2"]


@pytest.mark.parametrize("size", [(80, 24), (80, 20), (200, 60)])
async def test_a_long_list_leaves_room_for_what_is_said_below(
    engine: FakeEngine, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [Offer(f"org/model-{number}", 1, 1, is_here=True) for number in range(60)]
    monkeypatch.setattr(library, "offers", lambda kv: many)
    async with chat(engine, size=size) as screen:
        await screen.command("/model")
        await screen.shows("Models", "org/model-0", "Enter takes")
        await screen.pilot.press("up")
        await screen.shows("org/model-59")


@pytest.mark.usefixtures("offered")
async def test_another_model_takes_over_the_conversation(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "get", lambda name, progress, stop: (name, ""))
    async with chat(engine) as screen:
        await screen.exchange("one", "1")
        await screen.command("/model")
        await screen.shows("to fetch")
        await screen.pilot.press("down", "enter")
        await screen.until(lambda: engine.loads == ["smollm2", "org/small-4bit"])
        await screen.shows("loading")
        await screen.command("two")
        await screen.shows("waits for the model")
        engine.say_loaded()
        await screen.until(lambda: engine.turn == 2)
        assert [text for _, text in said(screen)[1:]] == ["one", "1", "two"]


@pytest.mark.usefixtures("offered")
async def test_fetching_shows_how_far_and_can_be_stopped(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()

    def get(
        name: str, progress: Callable[[str, int, int], None], stop: Callable[[], bool]
    ) -> tuple[str, str]:
        progress(f"Fetching {name}", 250_000_000, 1_000_000_000)
        while not stop():
            stopped.wait(0.01)
        stopped.set()
        return "", ""

    monkeypatch.setattr(library, "get", get)
    async with chat(engine) as screen:
        await screen.command("/model org/other")
        await screen.shows("Fetching org/other", "25%", "238 MB of 954 MB", "Esc stops")
        await screen.pilot.press("escape")
        await screen.until(stopped.is_set)
        await screen.shows("Stopped.", "smollm2")
        await screen.pilot.press("escape")
        assert engine.loads == ["smollm2"]


@pytest.mark.usefixtures("offered")
async def test_a_name_that_is_no_model_is_said_and_others_are_offered(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.command("/model nonsense")
        await screen.shows("There is no model 'nonsense'", "org/small-4bit")


async def test_the_model_is_not_changed_while_it_answers(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.send("one")
        await screen.command("/model org/other")
        await screen.shows("Something is running")
        assert screen.prompt.text == "/model org/other"


async def test_plan_is_a_screen(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "plan_text", lambda name, kv: f"{name}, {kv}: 12 GiB at 128K")
    async with chat(engine) as screen:
        await screen.command("/plan")
        await screen.until(lambda: isinstance(screen.app.screen, TextView))
        await screen.shows("Memory by context length", "int4: 12 GiB at 128K")


# What is said about commands and keys


async def test_a_wrong_command_stays_in_the_prompt_and_the_hint_is_whole(
    engine: FakeEngine,
) -> None:
    async with chat(engine, size=(80, 24)) as screen:
        await screen.command("/contnue with some more words")
        hint = "No command /contnue. Did you mean /continue? (A space before it sends it as text.)"
        await screen.until(lambda: hint in " ".join(screen.screen_text.split()))
        assert screen.prompt.text == "/contnue with some more words"


async def test_a_name_without_end_is_cut_in_the_hint(engine: FakeEngine) -> None:
    async with chat(engine, size=(120, 40)) as screen:
        await screen.command("/" + "x" * 3000)
        await screen.shows(f"No command /{'x' * 40}…. /help lists them all.")
        assert screen.prompt.text == "/" + "x" * 3000


async def test_a_hint_ends_with_the_next_command(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.command("/stats")
        await screen.shows("There are no figures yet")
        await screen.command("/help")
        await screen.shows("all commands, searchable")
        assert "There are no figures yet" not in screen.screen_text


def keys_end_with(screen: Chat, word: str) -> bool:
    return screen.screen_text.split("\n")[-1].endswith(f" {word}")


async def test_the_line_of_keys_ends_with_a_whole_word(engine: FakeEngine) -> None:
    async with chat(engine, size=(80, 24)) as screen:
        await screen.send("tell me")
        engine.say("line\n\n" * 60)
        await screen.until(lambda: screen.app.conversation.max_scroll_y > 30)
        await screen.pilot.press("pageup")
        await screen.shows("^End newest")
        for width, last in ((80, "figures"), (60, "line"), (40, "send"), (28, "newest")):
            await screen.pilot.resize_terminal(width, 24)
            await screen.until(partial(keys_end_with, screen, last))


async def test_ctrl_q_leaves(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.pilot.press("ctrl+q")
        await screen.until(lambda: not screen.app.is_running)
    assert screen.app.return_value == 0


async def test_keys_that_scroll(engine: FakeEngine) -> None:
    async with chat(engine, size=(100, 24)) as screen:
        await screen.exchange("tell me", "line\n\n" * 60)
        view = screen.app.conversation
        await screen.until(lambda: view.scroll_offset.y == view.max_scroll_y > 30)
        for key, moved in (
            ("pageup", lambda before, now: now < before),
            ("pagedown", lambda before, now: now > before),
            ("ctrl+home", lambda before, now: now == 0),
            ("ctrl+end", lambda before, now: now == view.max_scroll_y),
        ):
            before = view.scroll_offset.y
            await screen.pilot.press(key)
            await screen.until(partial(lambda b, m: m(b, view.scroll_offset.y), before, moved))


async def test_a_theme_is_remembered(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        screen.app.theme = "tq-light"
        await screen.until(lambda: settings.read() == {"theme": "tq-light"})


async def test_a_theme_is_chosen_by_its_name(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.command("/theme tq-light")
        assert screen.app.theme == "tq-light"
        await screen.command("/theme tq-lihgt")
        await screen.shows("There is no theme tq-lihgt")
        assert (screen.app.theme, screen.prompt.text) == ("tq-light", "/theme tq-lihgt")
        screen.prompt.text = "/theme tq-da"
        await screen.shows("tq-dark")
        await screen.pilot.press("enter")
        await screen.until(lambda: screen.app.theme == "tq-dark")
        assert not screen.prompt.text


def test_names_of_themes_complete() -> None:
    themes = {"tq-dark": "dark", "tq-light": "light"}
    assert [(one.typed, one.help) for one in completions("/theme TQ-l", themes)] == [
        ("/theme tq-light", "light")
    ]
    assert len(completions("/theme ", themes)) == 2
    assert not completions("/theme tq-light", themes)
    assert not completions("/set tq", themes)


async def test_a_theme_that_is_not_there_is_said(engine: FakeEngine) -> None:
    app = ChatApp(engine.open, Settings(theme="no-such-theme"))
    async with app.run_test(size=(100, 40)) as pilot:
        await Chat(app, engine, pilot).shows("There is no theme no-such-theme")
    app.close_engine()
