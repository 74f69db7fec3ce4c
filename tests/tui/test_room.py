"""When the context is full: what is said in time, and the ways to make room."""

from tests.tui.conftest import Chat, chat
from tests.tui.fake_engine import FakeEngine
from tests.tui.test_sessions import on_disk
from tqchat.chat import sessions
from tqchat.chat.sessions import Session


def contents(chat: Chat, turn: int = -1) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in chat.engine.turns[turn]]


async def test_nearly_full_is_said_once(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        for tokens in (7_000, 7_400, 7_500):
            await screen.send("more")
            engine.tokens = tokens
            engine.say_finished("and more")
            await screen.until(lambda: not screen.app.busy)
        await screen.shows("nearly full: 792 of 8,192 tokens left")
        assert screen.screen_text.count("nearly full") == 1


async def test_the_oldest_turns_are_dropped_if_the_person_says_so(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        for question, answer in (("one", "1" * 400), ("two", "2" * 400), ("three", "3")):
            await screen.exchange(question, answer)
        await screen.send("much")
        engine.say_failed("It does not fit.", excess=150)
        await screen.shows(
            "Drop the 2 oldest turns, “one”, “two” for good: that frees 222 tokens",
            "new conversation",
        )
        await screen.pilot.press("escape")
        assert screen.prompt.text == "much"
        await screen.send("much")
        assert len(contents(screen)) == 8
        engine.say_failed("It does not fit.", excess=150)
        await screen.shows("Drop the 2 oldest turns")
        await screen.pilot.press("enter")
        await screen.shows("What came before was dropped", "three", "Enter sends")
        assert "two" not in screen.screen_text
        figures, held = screen.app.dialogue.figures, screen.app.dialogue.held
        assert figures.cache is not None
        assert figures.cache.tokens == held
        await screen.pilot.press("enter")
        await screen.until(lambda: engine.turn == 6)
        assert [text for _, text in contents(screen)[1:]] == ["three", "3", "much"]


async def test_room_may_be_made_by_a_new_conversation(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.exchange("one", "1")
        await screen.send("much")
        engine.say_failed("It does not fit.", excess=150)
        await screen.shows("Begin a new conversation")
        assert "Drop" not in screen.screen_text
        await screen.pilot.press("enter")
        await screen.until(lambda: engine.clears == 1)
        assert screen.prompt.text == "much"


async def talk(screen: Chat, *exchanges: tuple[str, str]) -> None:
    for question, answer in exchanges:
        await screen.exchange(question, answer)


LONG = [(word, word[0] * 4000) for word in ("one", "two", "three")]


async def until_summarising(screen: Chat) -> str:
    """Chooses a summary when "much" is too long; returns what the model is asked for."""
    await screen.send("much")
    screen.engine.say_failed("It does not fit.", excess=150)
    await screen.shows("Have it summarised", "Begin a new conversation")
    turns = screen.engine.turn
    await screen.pilot.press("down", "enter")
    await screen.until(lambda: screen.engine.turn == turns + 1)
    role, request = contents(screen)[-1]
    assert role == "user"
    assert request.startswith("Summarise our conversation")
    return request


async def test_a_summary_begins_a_new_conversation_and_the_whole_one_stays(
    engine: FakeEngine,
) -> None:
    async with chat(engine) as screen:
        await talk(screen, *LONG)
        old = sessions.summaries()[0].id
        whole = on_disk()
        request = await until_summarising(screen)
        assert contents(screen)[1:-1] == whole
        engine.say("They said numbers.")
        await screen.shows("Summarise our conversation", "They said numbers.")
        engine.say_finished("They said numbers.")
        await screen.shows("begins with a summary", "/sessions has it", "Enter sends")
        assert "tttt" not in screen.screen_text
        begun = [("user", request), ("assistant", "They said numbers.")]
        await screen.until(lambda: on_disk() == begun)
        assert screen.prompt.text == "much"
        await screen.pilot.press("enter")
        await screen.until(lambda: contents(screen)[1:] == [*begun, ("user", "much")])
        assert len(engine.folders) == 2
        with Session.open(old) as session:
            kept = [(m.role, m.content) for m in session.conversation.messages]
            # And the message that did not fit, which is in the prompt as well.
            assert kept == [*whole, ("user", "much")]


async def test_a_summary_that_is_stopped_or_fails_changes_nothing(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await talk(screen, *LONG)
        whole = on_disk()
        for ends, said in (
            (lambda: engine.say_finished("They", "stopped"), "Not finished"),
            (lambda: engine.say_finished("They They", "repetition"), "only repeated itself"),
            (lambda: engine.say_failed("Out of memory.", 0), "Out of memory"),
        ):
            await until_summarising(screen)
            engine.say("They")
            await screen.shows("They")
            await screen.pilot.press("escape")
            assert engine.stops
            ends()
            await screen.shows(said, "ready")
            assert screen.prompt.text == "much"
            await screen.until(lambda: "Summarise" not in screen.screen_text)
            assert len(sessions.summaries()) == 1
        await screen.send("little")
        assert contents(screen)[1:] == [*whole, ("user", "little")]


async def test_when_an_answer_fills_the_context_the_newest_turns_are_kept_as_they_are(
    engine: FakeEngine,
) -> None:
    """A summary needs room to be written, so it cannot read them all."""
    long = 10_800
    async with chat(engine) as screen:
        await talk(screen, ("one", "o" * long), ("two", "t" * long))
        await screen.send("three")
        engine.tokens = 8_190
        engine.say_finished("t" * long, "context")
        await screen.shows("The context is full", "Drop the oldest turn, “one”", "Have it summ")
        await screen.pilot.press("down", "enter")
        await screen.until(lambda: contents(screen)[-1][1].startswith("Summarise"))
        request = contents(screen)[-1][1]
        assert [text for _, text in contents(screen)[1:-1]] == [
            "one",
            "o" * long,
            "two",
            "t" * long,
        ]
        engine.say_finished("Numbers.")
        begun = [request, "Numbers.", "three", "t" * long]
        await screen.until(lambda: [text for _, text in on_disk()] == begun)
        await screen.shows("begins with a summary", "tttt")


async def test_a_summary_is_offered_wherever_it_can_work(engine: FakeEngine) -> None:
    """What the oldest turns take is counted as the engine counts it, the template included; what
    cannot be read and summarised at once is dropped first."""
    async with chat(engine) as screen:
        await talk(screen, ("one", "1" * 24_000), ("two", "2" * 4_000))
        await screen.send("much")
        engine.say_failed("It does not fit.", excess=1_744)
        await screen.shows("that frees 6,011 tokens", "Have it summarised")
        await screen.pilot.press("escape")
        await screen.command("/clear")
        await talk(screen, ("one", "1" * 31_000), ("two", "2" * 1_000))
        await screen.send("much")
        engine.say_failed("It does not fit.", excess=18)
        await screen.shows("Drop the oldest turn, “one”, and have what follows summarised")
        await screen.pilot.press("down", "enter")
        await screen.until(lambda: contents(screen)[-1][1].startswith("Summarise"))
        assert [text for _, text in contents(screen)[1:-1]] == ["two", "2" * 1_000]


async def test_why_no_summary_is_offered_is_said(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await talk(screen, ("one", "1" * 31_500))
        await screen.send("much")
        engine.say_failed("It does not fit.", excess=18)
        await screen.shows("that frees 7,886 tokens", "There is no room to have it summarised.")
        await screen.pilot.press("escape")
        await screen.command("/clear")
        await talk(screen, ("one", "1" * 1_000))
        await screen.send("much")
        engine.say_failed("It does not fit.", excess=200)
        await screen.shows("that frees 261 tokens", "A summary would not make enough room.")


async def test_a_first_answer_that_fills_the_context_is_left_alone(engine: FakeEngine) -> None:
    async with chat(engine, size=(160, 40)) as screen:
        await screen.send("one")
        engine.tokens = 8_190
        engine.say_finished("1", "context")
        await screen.shows("/clear starts afresh")
        await screen.command("more")
        await screen.until(lambda: engine.turn == 2)


async def test_clear_gives_back_what_waits(engine: FakeEngine) -> None:
    async with chat(engine) as screen:
        await screen.send("one")
        await screen.command("two")
        await screen.shows("waits for the answer")
        await screen.command("/clear")
        await screen.shows("new conversation")
        assert screen.prompt.text == "two"
