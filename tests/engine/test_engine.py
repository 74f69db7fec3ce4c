"""The engine's thread, on a tiny model: what it tells, in which order, and how it stops."""

import random
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.folders import FORGETFUL, write_tiny
from tqchat.chat.conversation import Message
from tqchat.engine.engine import Engine
from tqchat.engine.events import (
    EngineOptions,
    Event,
    Failed,
    Finished,
    Loaded,
    Loading,
    Planned,
    Prefilling,
    Sampling,
    Stats,
    Token,
)

GREEDY = Sampling(temperature=0)
LONG = "Sixteen letters." * 100  # 1,600 tokens: several chunks of prefill
PATIENCE_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def started() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start(folder: Path | None, **options: object) -> Engine:
        engine = Engine(EngineOptions(**options))  # type: ignore[arg-type]
        engines.append(engine)
        engine.start()
        if folder is not None:
            engine.load(str(folder))
            assert isinstance(until(engine, Loaded, Failed)[-1], Loaded)
        return engine

    yield start
    for engine in engines:
        engine.close()
        assert not engine._thread.is_alive()


class Watched(deque[Event]):
    """Calls `react` on the engine's own thread with each event, the moment it is told."""

    def __init__(self, react: Callable[[Event], None]) -> None:
        super().__init__()
        self._react = react

    def append(self, event: Event) -> None:
        super().append(event)
        self._react(event)


def once(kind: type[Event], act: Callable[[], object], after: int = 1) -> Watched:
    """Events that do `act` when the `after`-th of `kind` is told."""
    left = [after]

    def react(event: Event) -> None:
        if isinstance(event, kind):
            left[0] -= 1
            if left[0] == 0:
                act()

    return Watched(react)


def until(engine: Engine, *kinds: type[Event]) -> list[Event]:
    """Events up to the first of one of `kinds`."""
    events: list[Event] = []
    while True:
        event = engine.wait(PATIENCE_S)
        assert event is not None, f"nothing came after {events[-3:]}"
        events.append(event)
        if isinstance(event, kinds):
            return events


def said(text: str, *more: str) -> list[Message]:
    roles = ("user", "assistant")
    return [Message(roles[i % 2], content) for i, content in enumerate((text, *more))]


def ask(engine: Engine, *texts: str, max_tokens: int | None = 12) -> Finished:
    engine.generate(said(*texts), GREEDY, max_tokens)
    finished = until(engine, Finished, Failed)[-1]
    assert isinstance(finished, Finished), finished
    return finished


def test_loading_goes_up_to_the_whole(folder: Path, started: Callable[..., Engine]) -> None:
    engine = started(None)
    engine.load(str(folder))
    *loading, loaded = until(engine, Loaded, Failed)
    assert isinstance(loaded, Loaded)
    assert loading
    assert all(isinstance(event, Loading) for event in loading)
    done = [event.done for event in loading if isinstance(event, Loading)]
    assert done == sorted(done)
    assert isinstance(loading[-1], Loading)
    assert loading[-1].done == loading[-1].total > 0
    assert loaded.model.weights_bytes == loading[-1].total
    assert (loaded.model.context, loaded.cache.tokens) == (8192, 0)
    assert loaded.memory.free > 0


def test_a_turn_in_events(folder: Path, started: Callable[..., Engine]) -> None:
    """Prefilling up to the whole prompt, then tokens, then one Finished that sums them up."""
    engine = started(folder)
    turn = engine.generate(said(LONG), GREEDY, 12)
    events = [
        event for event in until(engine, Finished, Failed) if not isinstance(event, Stats | Planned)
    ]
    kinds = [type(event) for event in events]
    n_chunks = kinds.count(Prefilling)
    assert kinds == [Prefilling] * n_chunks + [Token] * (len(kinds) - n_chunks - 1) + [Finished]
    assert all(event.turn == turn for event in events if not isinstance(event, Loading | Loaded))
    chunks = [event for event in events if isinstance(event, Prefilling)]
    assert n_chunks > 1
    assert [event.done for event in chunks] == sorted({event.done for event in chunks})
    assert chunks[-1].done == chunks[-1].total > len(LONG)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.reason == "length"
    assert finished.text == "".join(event.text for event in events if isinstance(event, Token))
    assert (finished.usage.completion_tokens, finished.usage.cached_tokens) == (12, 0)
    assert finished.usage.prompt_tokens == chunks[-1].total
    assert finished.usage.ttft_s > 0
    assert finished.usage.prefill_tps > 0
    assert finished.usage.decode_tps > 0
    # The last token was drawn, and may have been fed ahead.
    assert finished.cache.tokens - chunks[-1].total in (11, 12)
    assert not engine.events


def test_the_next_turn_prefills_only_what_is_new(
    folder: Path, started: Callable[..., Engine]
) -> None:
    engine = started(folder)
    first = ask(engine, LONG)
    second = ask(engine, LONG, first.text, "And now?")
    assert second.usage.prompt_tokens - second.usage.cached_tokens < 80
    assert second.usage.cached_tokens >= first.usage.prompt_tokens


@pytest.mark.parametrize("kv", ["int4", "fp16"])
def test_stop_during_prefill(folder: Path, started: Callable[..., Engine], kv: str) -> None:
    engine = started(folder, kv=kv)
    engine.events = once(Prefilling, engine.stop, after=3)
    engine.generate(said(LONG), GREEDY, 12)
    events = until(engine, Finished, Failed)
    stopped = events[-1]
    assert isinstance(stopped, Finished)
    assert (stopped.reason, stopped.text) == ("stopped", "")
    # One says where it starts, two that a chunk is done.
    assert [type(event) for event in events].count(Prefilling) == 3
    assert 0 < stopped.cache.tokens < len(LONG)
    # What was read counts, and changes nothing about the answer.
    again = ask(engine, LONG)
    assert again.usage.cached_tokens == stopped.cache.tokens
    assert again.text == ask(started(folder, kv=kv), LONG).text


def test_stop_during_decode(folder: Path, started: Callable[..., Engine]) -> None:
    engine = started(folder)
    engine.events = once(Token, engine.stop, after=5)
    engine.generate(said("Hello"), GREEDY, 100)
    stopped = until(engine, Finished, Failed)[-1]
    assert isinstance(stopped, Finished)
    assert (stopped.reason, stopped.usage.completion_tokens) == ("stopped", 5)
    whole = ask(started(folder), "Hello", max_tokens=100)
    assert whole.text.encode().startswith(stopped.text.rstrip("\ufffd").encode())
    assert ask(engine, "Hello", max_tokens=100).text == whole.text


def test_stop_during_load(folder: Path, started: Callable[..., Engine]) -> None:
    engine = started(None)
    engine.events = once(Loading, engine.stop, after=2)
    engine.load(str(folder))
    failed = until(engine, Loaded, Failed)[-1]
    assert isinstance(failed, Failed)
    assert failed.turn is None
    engine.generate(said("Hello"), GREEDY, 5)
    without_model = until(engine, Finished, Failed)[-1]
    assert isinstance(without_model, Failed)
    assert "No model" in without_model.message
    engine.load(str(folder))
    assert isinstance(until(engine, Loaded, Failed)[-1], Loaded)
    assert ask(engine, "Hello").usage.completion_tokens == 12


def test_stop_reaches_turns_that_wait(folder: Path, started: Callable[..., Engine]) -> None:
    """Everything asked for before the stop ends; what is asked for later runs."""
    engine = started(folder)
    later: list[int] = []

    def stop_and_ask() -> None:
        engine.stop()
        later.append(engine.generate(said("Later"), GREEDY, 3))

    engine.events = once(Token, stop_and_ask)
    turns = [engine.generate(said(text), GREEDY, 50) for text in ("One", "Two", "Three")]
    ends = [until(engine, Finished, Failed)[-1] for _ in range(4)]
    finished = [end for end in ends if isinstance(end, Finished)]
    assert [end.turn for end in finished] == [*turns, *later]
    assert [end.reason for end in finished] == ["stopped"] * 3 + ["length"]
    assert [end.usage.completion_tokens for end in finished] == [1, 0, 0, 3]


def test_stop_with_nothing_to_stop(folder: Path, started: Callable[..., Engine]) -> None:
    engine = started(folder)
    engine.stop()
    assert ask(engine, "Hello").reason == "length"


def test_what_a_long_conversation_takes(folder: Path, started: Callable[..., Engine]) -> None:
    cache = ask(started(folder), "x" * 4096).cache
    assert cache.tokens > 4096
    assert cache.kv_bytes <= 0.34 * cache.kv_bytes_fp16
    assert cache.kv_bytes_allocated <= 0.37 * cache.kv_bytes_fp16


@pytest.mark.parametrize("kv", ["int4", "fp16"])
def test_clear_frees_the_cache(folder: Path, started: Callable[..., Engine], kv: str) -> None:
    engine = started(folder, kv=kv)
    held = ask(engine, LONG).cache
    engine.clear()
    cleared = until(engine, Stats)[-1]
    assert isinstance(cleared, Stats)
    assert (cleared.cache.tokens, cleared.cache.kv_bytes, cleared.cache.kv_bytes_fp16) == (0, 0, 0)
    assert cleared.cache.kv_bytes_allocated < held.kv_bytes_allocated / 2
    assert ask(engine, "Hello").usage.cached_tokens == 0


def test_a_prompt_longer_than_the_context(folder: Path, started: Callable[..., Engine]) -> None:
    engine = started(folder, context=400)
    first = ask(engine, "Hello")
    engine.generate(said("Hello", first.text, "x" * 500), GREEDY, 5)
    events = until(engine, Finished, Failed)
    failed = events[-1]
    assert isinstance(failed, Failed)
    assert len(events) == 1
    # ChatML puts 12 characters and 2 control tokens around what the user says, and so on.
    around = 2 * len("\x01user\n\x02\n") + 2 * len("\x01assistant\n") + len("\x02\n")
    prompt = len("Hello") + len(first.text.encode()) + 500 + around
    assert failed.excess_tokens == prompt + 1 - 400
    assert f"{failed.excess_tokens:,}" in failed.message
    # The conversation goes on as if it had not been asked.
    second = ask(engine, "Hello", first.text, "y")
    assert second.usage.cached_tokens >= first.usage.prompt_tokens
    assert second.text == ask(started(folder, context=400), "Hello", first.text, "y").text


def test_a_full_context_ends_the_answer(folder: Path, started: Callable[..., Engine]) -> None:
    finished = ask(started(folder, context=100), "Hello", max_tokens=None)
    assert finished.reason == "context"
    assert finished.usage.prompt_tokens + finished.usage.completion_tokens == 100


def test_a_failed_load_says_why_and_the_next_one_works(
    folder: Path, tmp_path: Path, started: Callable[..., Engine]
) -> None:
    engine = started(None)
    engine.load(str(tmp_path / "nowhere"))
    failed = until(engine, Loaded, Failed)[-1]
    assert isinstance(failed, Failed)
    assert failed.turn is None
    assert "nowhere" in failed.message
    assert "\n" not in failed.message
    engine.load(str(folder))
    assert isinstance(until(engine, Loaded, Failed)[-1], Loaded)


def test_an_edited_message_is_answered_as_if_new(
    folder: Path, started: Callable[..., Engine]
) -> None:
    engine = started(folder, kv="fp16")
    first = ask(engine, LONG)
    ask(engine, LONG, first.text, "And now?")
    edited = ask(engine, LONG, first.text, "And then?")
    assert edited.usage.cached_tokens > len(LONG)
    assert edited.text == ask(started(folder, kv="fp16"), LONG, first.text, "And then?").text
    changed = LONG[:1000] + "X" + LONG[1001:]
    rewritten = ask(engine, changed)
    assert 1000 <= rewritten.usage.cached_tokens < 1100
    assert rewritten.text == ask(started(folder, kv="fp16"), changed).text


def test_a_template_that_rewrites_what_was_said(
    tmp_path: Path, started: Callable[..., Engine]
) -> None:
    folder = write_tiny(tmp_path / "forgetful", FORGETFUL)
    engine = started(folder, kv="fp16")
    texts = ["Hello"]
    for question in ("And now?", "Go on.", "And then?"):
        texts += [ask(engine, *texts).text, question]
    last = ask(engine, *texts)
    assert last.usage.cached_tokens > 0
    assert last.text == ask(started(folder, kv="fp16"), *texts).text


def test_a_seed_repeats_an_answer(folder: Path, started: Callable[..., Engine]) -> None:
    engine = started(folder)

    def answer(seed: int) -> str:
        engine.generate(said("Hello"), Sampling(temperature=2.0, seed=seed), 40)
        finished = until(engine, Finished, Failed)[-1]
        assert isinstance(finished, Finished)
        return finished.text

    assert answer(1) == answer(1) != answer(2)


def test_close_joins_in_the_middle_of_a_turn(folder: Path) -> None:
    engine = Engine()
    begun = threading.Event()
    engine.events = once(Token, begun.set)
    engine.start()
    engine.load(str(folder))
    engine.generate(said("Hello"), GREEDY)
    assert begun.wait(PATIENCE_S)
    engine.close()
    assert not engine._thread.is_alive()
    # Once more does no harm.
    engine.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls(folder: Path, started: Callable[..., Engine], seed: int) -> None:
    """Each turn ends once, in the order asked, whatever else is called in between."""
    rng = random.Random(seed)
    engine = started(folder, context=600)
    turns: list[int] = []
    events: list[Event] = []
    for _ in range(25):
        match rng.choice(["generate", "generate", "stop", "clear", "wait", "load"]):
            case "generate":
                text = "abcdefgh" * rng.choice([1, 20, 60, 100])
                turns.append(engine.generate(said(text), GREEDY, rng.randrange(1, 8)))
            case "stop":
                engine.stop()
            case "clear":
                engine.clear()
            case "load":
                engine.load(str(folder))
            case "wait":
                events += [event for event in [engine.wait(0.05)] if event is not None]
    engine.load(str(folder))
    turns.append(engine.generate(said("last"), GREEDY, 3))
    while not (events and isinstance(events[-1], Finished) and events[-1].turn == turns[-1]):
        event = engine.wait(PATIENCE_S)
        assert event is not None
        events.append(event)
    ends = [e for e in events if isinstance(e, Finished) or (isinstance(e, Failed) and e.turn)]
    assert [end.turn for end in ends] == turns
    for event in events:
        if isinstance(event, Failed):
            assert event.excess_tokens or "topped" in event.message or "No model" in event.message
    ended: set[int] = set()
    for event in events:
        if isinstance(event, Token | Prefilling):
            assert event.turn not in ended
        if isinstance(event, Finished):
            ended.add(event.turn)
            assert event.cache.tokens <= 600
    last = ends[-1]
    assert isinstance(last, Finished)
    assert (last.reason, last.usage.cached_tokens) == ("length", 0)


LIFE = """
import sys
from tests.engine.test_engine import GREEDY, said
from tqchat.engine.engine import Engine
from tqchat.engine.events import EngineOptions, Finished, Token

folder, how = sys.argv[1:]
engine = Engine(EngineOptions())
engine.start()
engine.load(folder)
engine.generate(said("Hello" * 100), GREEDY, 20 if how == "finished" else None)
until = {"finished": Finished, "decoding": Token}.get(how)
while until and not isinstance(engine.wait(60), until):
    pass
engine.close()
"""


@pytest.mark.parametrize("how", ["finished", "decoding", "at once"])
def test_a_process_that_used_the_engine_ends_well(folder: Path, tmp_path: Path, how: str) -> None:
    """MLX aborts at exit if a thread that had streams did not let go of them."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", LIFE, str(folder), how],
            env={"HOME": str(tmp_path), "PATH": ""},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert (done.returncode, done.stderr) == (0, "")
