"""The conversation as a person sees it: every command, every key, every ending."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
from textual import events

from tests.tui.conftest import Chat, Clock, chat
from tests.tui.fake_engine import MODEL, FakeEngine
from tqchat.engine.events import Note, TakenUp
from tqchat.settings import Settings
from tqchat.tui.app import ChatApp
from tqchat.tui.commands import COMMANDS, find
from tqchat.tui.engine import Opened
from tqchat.tui.widgets.conversation import Conversation


def contents(chat: Chat, turn: int = -1) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in chat.engine.turns[turn]]


# Loading


async def test_first_frame_does_not_wait_for_the_engine() -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()
    engine = FakeEngine()

    def open_slowly(model: str | None) -> Opened:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        return engine.open()

    app = ChatApp(open_slowly, Settings())
    async with app.run_test() as pilot:
        slow = Chat(app, engine, pilot)
        await slow.shows("Hello.", "loading", "Starting")
        await pilot.press(*"typed")
        assert slow.prompt.text == "typed"
        release.set()
        await slow.until(lambda: engine.loads == ["smollm2"])


async def test_loading_says_how_far_and_how_long(engine: FakeEngine, clock: Clock) -> None:
    async with chat(engine, (140, 40), load=False) as screen:
        engine.say_loading("Fetching smollm2", 0, 100 * 1024**2)
        await screen.shows("Fetching smollm2")
        clock.now += 2
        engine.say_loading("Fetching smollm2", 50 * 1024**2, 100 * 1024**2)
        await screen.shows("50%", "50.0 MiB of 100 MiB", "25.0 MiB/s", "2 s left")


async def test_a_message_waits_for_the_model(engine: FakeEngine) -> None:
    async with chat(engine, load=False) as screen:
        await screen.command("first question")
        await screen.shows("first question", "waits for the model")
        assert not engine.turns
        engine.say_loaded()
        await screen.until(lambda: engine.turns)
        assert contents(screen) == [("system", "Be brief."), ("user", "first question")]
        await screen.until(lambda: "waits for the model" not in screen.screen_text)


async def test_notes_of_the_model_are_said(engine: FakeEngine) -> None:
    async with chat(engine, load=False) as screen:
        noted = replace(MODEL, notes=("No chat template: a plain one is used.",))
        engine.say_loaded(noted)
        await screen.shows("No chat template", MODEL.name, "int4 KV cache")


async def test_the_built_in_model_says_how_to_get_a_larger_one() -> None:
    engine = FakeEngine()
    app = ChatApp(lambda model: Opened(engine, "smollm2", suggest_larger=True), Settings())
    async with app.run_test(size=(100, 40)) as pilot:
        screen = Chat(app, engine, pilot)
        await screen.until(lambda: engine.loads)
        engine.say_loaded()
        await screen.shows("start with a larger one", "tqchat mlx-community/")


async def test_a_load_that_failed_gives_messages_back_and_can_be_tried_again(
    engine: FakeEngine,
) -> None:
    async with chat(engine, load=False) as screen:
        await screen.command("my question")
        engine.say_load_failed("The file is cut short: fetch it again.")
        await screen.shows("The file is cut short", "/retry", "no model")
        assert screen.prompt.text == "my question"
        await screen.pilot.press("enter")
        await screen.shows("No model is loaded")
        assert screen.prompt.text == "my question"
        await screen.command("/retry")
        assert engine.loads == ["smollm2", "smollm2"]


async def test_an_engine_that_does_not_start_is_said() -> None:
    def broken(model: str | None) -> Opened:
        raise ImportError("no backend")

    app = ChatApp(broken, Settings())
    async with app.run_test() as pilot:
        screen = Chat(app, FakeEngine(), pilot)
        await screen.shows("did not start", "ImportError: no backend")
        await screen.command("/quit")
    assert app.return_value == 0


async def test_notes_and_a_cache_taken_up_are_shown(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        engine.tokens = 777
        engine.events.append(TakenUp(engine.cache, engine.memory))
        engine.events.append(Note("The disk is full: the cache is not saved."))
        await screen.shows("777 of 8,192", "The disk is full")


# A turn


async def test_turns_carry_the_conversation(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.exchange("Capital of France?", "Paris.")
        await screen.send("And Germany?")
        assert contents(screen) == [
            ("system", "Be brief."),
            ("user", "Capital of France?"),
            ("assistant", "Paris."),
            ("user", "And Germany?"),
        ]
        await screen.shows("96 tokens", "21.4 tok/s", "first after 1.3 s")


async def test_panels_show_the_figures(engine: FakeEngine) -> None:
    async with chat(engine, size=(120, 40)) as screen:
        await screen.exchange("Hi", "Hello.")
        text = screen.screen_text
        for figure in ("21.4 tok/s", "1.3 s", "64 of 8,192", "490 KiB", "1.4 MiB", "2.9x smaller"):
            assert figure in text
        for figure in ("11.0 GiB free", "of 15.0 GiB", "92.0 MiB", "310 MiB", "148 tok/s"):
            assert figure in text


async def test_narrow_screens_have_two_lines_of_figures(engine: FakeEngine) -> None:
    async with chat(engine, size=(80, 24)) as screen:
        await screen.exchange("Hi", "Hello.")
        await screen.shows("21.4 tok/s", "KV 490 KiB of 1.4 MiB in fp16", "64 of 8,192", "11.0 GiB")


async def test_reading_says_how_far_and_how_long(engine: FakeEngine, clock: Clock) -> None:
    async with chat(engine, (140, 40)) as screen:
        await screen.send("long")
        engine.say_planned(2_000, 14.0)
        engine.say_prefilling(500, 2500, cached=500, seconds_left=14.0)
        await screen.shows("2,000 tokens to read, about 14 s", "0 of 2,000 tokens", "14 s left")
        clock.now += 2
        engine.say_prefilling(1500, 2500, cached=500, seconds_left=8.5)
        await screen.shows("50%", "1,000 of 2,000 tokens", "500 tok/s", "9 s left")
        # The engine speaks once a chunk; the time goes on until it does.
        for seconds, left in ((4.0, "5 s left"), (10.0, "1 s left")):
            clock.now += seconds
            await screen.shows(left)


async def test_what_a_long_reading_takes_is_said_before_it_begins(engine: FakeEngine) -> None:
    async with chat(engine, (140, 40)) as screen:
        await screen.send("long")
        engine.say_planned(100_000, None)
        await screen.shows("100,000 tokens to read · 3.0 GiB of memory at most, 8.0 GiB stays free")
        engine.say_planned(100_000, 95.0)
        await screen.shows("100,000 tokens to read, about 1 min 35 s · 3.0 GiB of memory")
        engine.say("Read")
        await screen.until(lambda: "to read" not in screen.screen_text)


@pytest.mark.parametrize(("tokens", "seconds"), [(500, None), (100_000, 2.0)])
async def test_a_short_reading_is_not_announced(
    engine: FakeEngine, tokens: int, seconds: float | None
) -> None:
    async with chat(engine) as screen:
        await screen.send("short")
        engine.say_planned(tokens, seconds)
        engine.say_prefilling(1, tokens)
        await screen.shows(f"of {tokens:,} tokens")
        assert "to read" not in screen.screen_text


async def test_the_rate_of_reading_follows_how_it_changes(engine: FakeEngine, clock: Clock) -> None:
    async with chat(engine, (140, 40)) as screen:
        await screen.send("long")
        engine.say_prefilling(0, 20_000)
        await screen.shows("0 of 20,000")
        done = 0
        for rate in (1000, *[200] * 20):
            clock.now += 1
            done += rate
            engine.say_prefilling(done, 20_000)
            await screen.shows(f"{done:,} of 20,000")
        # By the average it would be 238.
        await screen.shows("215 tok/s", "1 min 10 s left")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("stopped", "stopped: /continue goes on"),
        ("length", "max_tokens"),
        ("repetition", "repeated itself: /continue goes on"),
        ("context", "/clear starts afresh"),
    ],
)
async def test_endings_are_said(engine: FakeEngine, reason: str, said: str) -> None:
    async with chat(engine, size=(160, 40)) as screen:
        await screen.send("Go on")
        engine.say("Part of")
        engine.say_finished("Part of", reason)  # type: ignore[arg-type]
        await screen.shows("Part of", said)
        await screen.send("more")
        assert contents(screen)[-2:] == [("assistant", "Part of"), ("user", "more")]


async def test_a_message_too_long_is_refused_with_the_count(engine: FakeEngine) -> None:
    async with chat(engine, size=(160, 40)) as screen:
        await screen.send("a long one")
        engine.say_failed("That is 1,234 tokens too many.", excess=1234)
        await screen.shows("1,234 tokens", "Shorten the message", "/model", "ready")
        assert screen.prompt.text == "a long one"
        await screen.exchange("short", "fine")
        assert contents(screen) == [("system", "Be brief."), ("user", "short")]
        await screen.send("another long one")
        engine.say_failed("That is 2 tokens too many.", excess=2)
        await screen.shows("2 tokens too long")
        await screen.pilot.press("escape")
        await screen.shows("2 tokens too many. Shorten the message, or begin a new one: /clear.")


async def test_a_turn_that_failed_half_way_loses_nothing(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.send("question")
        engine.say("Half an ans")
        engine.say_failed("Out of memory. Use a shorter text.")
        await screen.shows("Half an ans", "not finished", "Out of memory")
        assert screen.prompt.text == "question"


async def test_an_engine_that_dies_is_said_and_does_not_hang(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.send("question")
        engine.say("Half")
        engine.alive = False
        await screen.shows("Half", "The engine has ended", "/quit")
        assert screen.prompt.text == "question"
        await screen.pilot.press("enter")
        await screen.shows("No model is loaded")
        await screen.command("/quit")
    assert screen.app.return_value == 0


async def test_late_events_of_another_turn_are_not_shown(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.send("one")
        engine.say("visible")
        await screen.shows("visible")
        await screen.command("/clear")
        engine.say("ghost")
        engine.say_finished("ghost", "stopped")
        await screen.shows("new conversation")
        await screen.send("two")
        assert "ghost" not in screen.screen_text
        assert contents(screen) == [("system", "Be brief."), ("user", "two")]


async def test_messages_sent_meanwhile_wait_for_the_answer(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.send("one")
        engine.say("first answer")
        await screen.command("two")
        await screen.shows("waits for the answer")
        assert engine.turn == 1
        engine.say_finished("first answer")
        await screen.until(lambda: engine.turn == 2)
        assert contents(screen)[-2:] == [("assistant", "first answer"), ("user", "two")]
        lines = screen.screen_text
        assert lines.index("first answer") < lines.index("two")


# Keys


async def test_escape_stops_and_gives_back_what_waits(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.send("one")
        await screen.command("two")
        await screen.pilot.press("escape")
        assert engine.stops == 1
        assert screen.prompt.text == "two"


async def test_stopped_before_the_first_word_gives_the_message_back(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.send("one")
        await screen.pilot.press("escape")
        engine.say_finished("", "stopped")
        await screen.until(lambda: screen.prompt.text == "one")
        await screen.send("changed")
        assert contents(screen) == [("system", "Be brief."), ("user", "changed")]


async def test_escape_stops_loading(engine: FakeEngine) -> None:
    async with chat(engine, load=False) as screen:
        await screen.pilot.press("escape")
        assert engine.stops == 1


async def test_ctrl_c_copies_stops_clears_or_says_how_to_leave(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.pilot.press("ctrl+c")
        await screen.shows("To leave: Ctrl-Q, /quit")
        await screen.pilot.press(*"some words", "shift+home")
        await screen.pilot.press("ctrl+c")
        assert screen.app.clipboard == "some words"
        await screen.pilot.press("end", "ctrl+c")
        assert screen.prompt.text == ""
        await screen.pilot.press("ctrl+z")
        assert screen.prompt.text == "some words"
        screen.prompt.text = ""
        await screen.send("question")
        await screen.pilot.press("ctrl+c")
        assert engine.stops == 1


async def test_ctrl_d_deletes_and_leaves_only_when_empty(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.pilot.press(*"ab", "home", "ctrl+d")
        assert screen.prompt.text == "b"
        await screen.pilot.press("ctrl+d", "ctrl+d")
        await screen.until(lambda: not screen.app.is_running)
    assert screen.app.return_value == 0


@pytest.mark.parametrize("key", ["ctrl+j", "shift+enter", "alt+enter"])
async def test_new_lines(engine: FakeEngine, key: str) -> None:
    async with chat(engine) as screen:
        await screen.pilot.press("a", key, "b")
        assert screen.prompt.text == "a\nb"
        assert not engine.turns


async def test_typed_ahead_of_enter_is_sent_whole(engine: FakeEngine) -> None:
    """Enter that arrives in the same breath as the text must not overtake it."""
    async with chat(engine) as screen:
        for character in "hello":
            screen.app.post_message(events.Key(character, character))
        screen.app.post_message(events.Key("enter", "\r"))
        await screen.until(lambda: engine.turns)
        assert contents(screen)[-1] == ("user", "hello")


async def test_the_prompt_grows_to_ten_lines(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        for lines, height in ((1, 1), (4, 4), (30, 10)):
            screen.prompt.text = "x\n" * (lines - 1)
            await screen.until(partial(lambda tall: screen.prompt.size.height == tall, height))


async def test_history_goes_up_and_down_and_keeps_the_draft(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.exchange("one", "1")
        await screen.exchange("two", "2")
        await screen.pilot.press(*"draft")
        await screen.pilot.press("up")
        assert screen.prompt.text == "two"
        await screen.pilot.press("up", "up")
        assert screen.prompt.text == "one"
        await screen.pilot.press("end", "down", "end", "down")
        assert screen.prompt.text == "draft"


async def test_the_view_stays_where_the_reader_is(engine: FakeEngine) -> None:
    async with chat(engine, size=(100, 24)) as screen:
        conversation = screen.app.query_one(Conversation)
        await screen.send("tell me")
        engine.say("line\n\n" * 60)
        await screen.until(lambda: conversation.max_scroll_y > 50)
        assert conversation.scroll_offset.y == conversation.max_scroll_y
        await screen.pilot.press("pageup")
        await screen.shows("newest")
        place = conversation.scroll_offset.y
        engine.say("more\n\n" * 60)
        before = conversation.max_scroll_y
        await screen.until(lambda: conversation.max_scroll_y > before)
        assert conversation.scroll_offset.y == place
        await screen.pilot.press("ctrl+end")
        before = conversation.max_scroll_y
        engine.say("again\n\n" * 60)
        await screen.until(lambda: conversation.max_scroll_y > before)
        assert conversation.scroll_offset.y == conversation.max_scroll_y


async def test_resizing_keeps_the_end_in_sight(engine: FakeEngine) -> None:
    async with chat(engine, size=(120, 40)) as screen:
        await screen.exchange("tell me", "word " * 800 + "the end")
        for size in ((80, 24), (200, 60), (30, 10)):
            await screen.pilot.resize_terminal(*size)
            await screen.shows("the end" if size[0] > 30 else "first after")


async def test_ctrl_b_hides_the_figures(engine: FakeEngine) -> None:
    async with chat(engine, size=(120, 40)) as screen:
        await screen.shows("Memory")
        await screen.pilot.press("ctrl+b")
        await screen.until(lambda: "Memory" not in screen.screen_text)
        await screen.pilot.press("f2")
        await screen.shows("Memory")


# Commands


async def test_help_lists_every_command_and_key(engine: FakeEngine) -> None:
    async with chat(engine, size=(120, 60)) as screen:
        await screen.command("/help")
        await screen.shows(*[f"/{command.name}" for command in COMMANDS], "Ctrl-J", "Esc", "Ctrl-D")
        assert not engine.turns


@pytest.mark.parametrize("typed", ["/clear", "clear", "/CLEAR", "/clear "])
async def test_clear_forgets_and_frees(engine: FakeEngine, typed: str) -> None:
    async with chat(engine) as screen:
        await screen.exchange("Remember me", "I do.")
        await screen.command(typed)
        await screen.shows("new conversation", "0 of 8,192")
        assert "Remember me" not in screen.screen_text
        assert engine.clears == 1
        await screen.send("new")
        assert contents(screen) == [("system", "Be brief."), ("user", "new")]


async def test_clear_stops_an_answer(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.send("one")
        await screen.command("/clear")
        assert (engine.stops, engine.clears) == (1, 1)


@pytest.mark.parametrize("typed", ["/reset", "reset"])
async def test_reset_clears_and_puts_settings_back(engine: FakeEngine, typed: str) -> None:
    async with chat(engine) as screen:
        await screen.exchange("one", "1")
        await screen.command(typed)
        await screen.shows("as at the start")
        assert engine.clears == 1
        await screen.send("new")
        assert contents(screen) == [("system", "Be brief."), ("user", "new")]
        assert engine.samplings[0] == engine.samplings[1]


@pytest.mark.parametrize("typed", ["/quit", "quit", "exit"])
async def test_quit_leaves_with_zero(engine: FakeEngine, typed: str) -> None:
    async with chat(engine) as screen:
        await screen.command(typed)
        await screen.until(lambda: not screen.app.is_running)
    assert screen.app.return_value == 0
    screen.app.close_engine()
    assert engine.closed


async def test_retry_answers_again(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.exchange("question", "bad answer")
        await screen.command("/retry")
        await screen.until(lambda: engine.turn == 2)
        assert contents(screen) == [("system", "Be brief."), ("user", "question")]
        engine.say("good answer")
        engine.say_finished("good answer")
        await screen.shows("good answer")
        assert "bad answer" not in screen.screen_text


async def test_copy_takes_the_last_answer_as_written(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.command("/copy")
        await screen.shows("no answer to copy")
        await screen.exchange("one", "**bold** answer")
        await screen.command("/copy")
        assert screen.app.clipboard == "**bold** answer"


async def test_stats_shows_the_last_turn(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.command("/stats")
        await screen.shows("no figures yet")
        await screen.exchange("one", "1")
        await screen.command("/stats")
        await screen.shows("412 tokens, 380 of them cached", "21.4 tokens/s", "1,474,560 bytes")


async def test_panel_and_theme(engine: FakeEngine) -> None:
    async with chat(engine, size=(120, 40)) as screen:
        await screen.command("/panel")
        await screen.until(lambda: "Memory" not in screen.screen_text)
        await screen.command("/theme")
        await screen.shows("tq-light")
        await screen.pilot.press(*"tq-light")
        await screen.pilot.press("enter")
        await screen.until(lambda: screen.app.theme == "tq-light")


async def test_an_unknown_command_offers_the_nearest_and_stays(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.command("/clera")
        await screen.shows("No command /clera", "/clear")
        assert screen.prompt.text == "/clera"
        assert not engine.turns


@pytest.mark.parametrize(
    "text", ["/usr/bin/env: what is it?", " /clear", "clear the table", "a/b", "/x\nmore"]
)
def test_these_are_messages(text: str) -> None:
    assert find(text) is None


async def test_the_menu_completes_with_tab_and_runs_with_enter(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.pilot.press(*"/st")
        await screen.shows("show the figures of the last answer")
        await screen.pilot.press("tab")
        assert screen.prompt.text == "/stats"
        await screen.pilot.press(*["backspace"] * 6)
        await screen.pilot.press("/", "down", "enter")
        await screen.shows("new conversation")


async def test_the_palette_has_every_command(engine: FakeEngine) -> None:
    async with chat(engine, size=(100, 90)) as screen:
        await screen.pilot.press("ctrl+p")
        await screen.shows(*[f"/{command.name}" for command in COMMANDS])
        await screen.pilot.press(*"clear")
        await screen.until(lambda: "/help" not in screen.screen_text)
        await screen.pilot.press("down", "enter")
        await screen.until(lambda: engine.clears == 1)


# Selecting


async def test_selected_text_comes_without_margins_and_breaks(engine: FakeEngine) -> None:
    async with chat(engine, size=(60, 30)) as screen:
        sentence = "one two three four five six seven eight nine ten eleven twelve thirteen"
        await screen.exchange("tell me", f"- {sentence}\n\n```py\nif x:\n    y\n```")
        screen.app.screen.set_focus(None)
        conversation = screen.app.query_one(Conversation)
        conversation.text_select_all()
        selected = screen.app.screen.get_selected_text()
        assert selected is not None
        assert sentence in selected
        assert "if x:\n    y" in selected
        assert "tell me" in selected
        await screen.pilot.press("ctrl+c")
        assert screen.app.clipboard == selected


async def test_dragging_selects_and_the_prompt_keeps_the_keys(engine: FakeEngine) -> None:
    async with chat(engine, size=(100, 30)) as screen:
        await screen.exchange("tell me", "alpha beta gamma")
        row = screen.screen_text.split("\n").index(
            next(line for line in screen.screen_text.split("\n") if "alpha beta" in line)
        )
        conversation = screen.app.query_one(Conversation)
        top = conversation.region.y
        await screen.pilot.mouse_down(Conversation, offset=(8, row - top))
        await screen.pilot.hover(Conversation, offset=(11, row - top))
        await screen.pilot.mouse_up(Conversation, offset=(11, row - top))
        await screen.pilot.press("ctrl+c")
        assert screen.app.clipboard == "beta"
        await screen.pilot.press("x")
        assert screen.prompt.text == "x"


async def test_commands_are_not_in_the_history(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.exchange("one", "1")
        await screen.command("/help")
        await screen.pilot.press("up")
        assert screen.prompt.text == "one"
