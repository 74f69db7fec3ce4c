"""The cache on disk: taken up, it holds what it held, bit for bit, or the start of that."""

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.engine.test_engine import ask, once, until
from tests.engine.test_generation import GREEDY, Letters, run
from tests.folders import write_tiny
from tests.tiny import LLAMA, build_model, llama_weights
from tqchat.chat import sessions
from tqchat.engine import saved
from tqchat.engine.engine import NO_USAGE, Engine
from tqchat.engine.events import (
    EngineOptions,
    Event,
    Finished,
    Loaded,
    Loading,
    ModelInfo,
    Note,
    Prefilling,
    TakenUp,
)
from tqchat.engine.generation import Session
from tqchat.engine.loading import LoadedModel
from tqchat.kernels import SINK, Backend, select, tile_words
from tqchat.kernels.layout import tile_bytes

N_LAYERS, N_KV_HEADS, HEAD_DIM = 3, 2, 32
TIDES = Path(__file__).parents[2] / "tqchat" / "bench" / "texts" / "tides.txt"
BLOCK_BYTES = N_LAYERS * N_KV_HEADS * tile_bytes(HEAD_DIM)
MODELS = {
    name: build_model(LLAMA, llama_weights(LLAMA), backend)
    for name, backend in {
        "float32": Backend(mx.float32),
        "bfloat16": Backend(mx.bfloat16),
        "here": select(mx.float16),
    }.items()
}


def session(
    name: str = "here", model: str = "tiny", tokenizer: str = "letters", kv: str = "int4"
) -> Session:
    info = ModelInfo("tiny", "llama", 4096, 0, "CPU", name, kv)  # type: ignore[arg-type]
    letters = Letters()
    letters.fingerprint = tokenizer  # type: ignore[attr-defined]
    backend = {"float32": Backend(mx.float32), "bfloat16": Backend(mx.bfloat16)}.get(name)
    backend = backend or select(mx.float16, kv_bits=3 if kv == "int3" else 4)
    return Session(LoadedModel(MODELS[name], backend, letters, None, info, model))  # type: ignore[arg-type]


def take_up(one: Session, folder: Path, budget: int = 1 << 40) -> str:
    return one.take_up(folder, budget, lambda done, total: None)


def save(one: Session, gives_way_after: int = 1 << 30) -> str:
    asked = iter(range(1 << 30))
    return one.save(lambda: next(asked) >= gives_way_after)


def held(one: Session) -> list[np.ndarray]:
    """All K and V in order, per layer: dequantised where sealed, so prefixes can be compared."""
    oracle = Backend(mx.float32)
    parts = []
    for cache in one._caches:
        sealed = oracle.unseal(cache.blocks(0, cache.n_blocks))  # type: ignore[attr-defined]
        for sink, blocks, tail in zip(cache.sink(), sealed, cache.tail(), strict=True):  # type: ignore[attr-defined]
            whole = mx.concatenate([x.astype(mx.float32) for x in (sink, blocks, tail)], axis=1)
            parts.append(np.array(whole))
    return parts


def assert_holds_start_of(one: Session, tokens: Sequence[int], whole: list[np.ndarray]) -> None:
    n = one.cache_use().tokens
    assert one._held == list(tokens[:n])
    for ours, theirs in zip(held(one), whole, strict=True):
        assert ours.shape[1] == n
        np.testing.assert_array_equal(ours, theirs[:, :n])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sessions" / "one" / "cache"


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "SEGMENT_BLOCKS", 4)


def numbers(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(127), k=n)


def saved_session(folder: Path, n: int = 700, **options: str) -> Session:
    one = session(**options)
    assert take_up(one, folder) == ""
    run(one, numbers(n))
    assert save(one) == ""
    return one


def test_codes_of_3_bits_are_taken_up_by_a_cache_of_3_bits_alone(folder: Path) -> None:
    one = saved_session(folder, kv="int3")
    other = session(kv="int3")
    assert take_up(other, folder) == ""
    assert other._held == one._held
    for ours, theirs in zip(other._caches, one._caches, strict=True):
        tiles = ours.blocks(0, ours.n_blocks)  # type: ignore[attr-defined]
        assert tiles.shape[-1] == 8 * HEAD_DIM
        assert mx.array_equal(tiles, theirs.blocks(0, theirs.n_blocks))  # type: ignore[attr-defined]
    refused = session()
    assert "another kind" in take_up(refused, folder)
    assert refused._held == []


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", [2, 50, 700])
def test_taken_up_it_goes_on_as_if_it_had_never_stopped(folder: Path, name: str, n: int) -> None:
    one = saved_session(folder, n, name=name)
    other = session(name)
    assert take_up(other, folder) == ""
    assert_holds_start_of(other, one._held, held(one))
    assert other.cache_use().tokens == one.cache_use().tokens
    prompt = [*one._held, 5, 6, 7]
    expected, again = run(one, prompt, GREEDY, 40), run(other, prompt, GREEDY, 40)
    assert again.text == expected.text
    assert again.usage.cached_tokens == len(prompt) - 3
    for ours, theirs in zip(held(other), held(one), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_any_safetensors_reader_finds_the_tiles_in_canonical_order(folder: Path) -> None:
    one = saved_session(folder, name="here")
    with safe_open(folder / "state.safetensors", "numpy") as state:
        assert state.get_tensor("tokens").tolist() == one._held
        for layer in range(N_LAYERS):
            assert state.get_tensor(f"sink.k.{layer}").shape == (N_KV_HEADS, SINK, HEAD_DIM)
        segments = json.loads(state.metadata()["segments"])
        assert state.metadata()["model"] == "tiny"
    for layer in range(N_LAYERS):
        parts = []
        for segment in segments:
            with safe_open(folder / segment["name"], "numpy") as file:
                parts.append(file.get_tensor(f"tiles.{layer}"))
        tiles = np.concatenate(parts, axis=1)
        cache = one._caches[layer]
        assert tiles.shape == (N_KV_HEADS, cache.n_blocks, tile_words(HEAD_DIM))  # type: ignore[attr-defined]
        own = cache._backend.unseal(cache._tiles[:, : cache.n_blocks])  # type: ignore[attr-defined]
        for ours, theirs in zip(Backend().unseal(mx.array(tiles)), own, strict=True):
            np.testing.assert_array_equal(np.array(ours), np.array(theirs))


def test_what_was_saved_on_one_backend_is_taken_up_on_another(folder: Path) -> None:
    one = saved_session(folder, name="here")
    other = session("float32")
    assert take_up(other, folder) == ""
    assert_holds_start_of(other, one._held, held(one))


def test_a_turn_costs_what_it_added(folder: Path) -> None:
    one = saved_session(folder)
    before = {file.name: file.stat() for file in folder.iterdir()}
    run(one, [*one._held, *numbers(200, 1)])
    save(one)
    after = {file.name: file.stat() for file in folder.iterdir()}
    for name, status in before.items():
        if name != "state.safetensors":
            assert (after[name].st_ino, after[name].st_mtime_ns) == (
                status.st_ino,
                status.st_mtime_ns,
            )
    added = sum(status.st_size for name, status in after.items() if name not in before)
    assert 6 * BLOCK_BYTES < added < 8 * BLOCK_BYTES
    everything = sum(status.st_size for status in after.values())
    assert everything < one.cache_use().kv_bytes + 30_000


def test_files_are_the_owners_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        saved_session(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}


# Turns: how many tokens of the last prompt and answer stay, how many come, when saving gives way.
turn = st.tuples(st.integers(0, 900), st.integers(1, 300), st.integers(0, 5))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(turns=st.lists(turn, min_size=1, max_size=5), seed=st.integers(0, 2**32 - 1))
def test_after_any_history_the_disk_has_what_the_memory_has(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[int, int, int]], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("sessions") / "one" / "cache"
    one = session()
    take_up(one, folder)
    for kept, added, gives_way_after in turns:
        run(one, [*one._held[:kept], *numbers(added, seed)], max_tokens=5)
        assert save(one, gives_way_after) == ""
        other = session()
        assert take_up(other, folder) == ""
        assert_holds_start_of(other, one._held, held(one))
        if gives_way_after == 5:
            blocks = one._caches[0].n_blocks  # type: ignore[attr-defined]
            assert other.cache_use().tokens == len(one._held) or blocks > 5 * 4
        seed += 1
    assert save(one) == ""
    other = session()
    take_up(other, folder)
    assert other.cache_use().tokens == len(one._held)
    # It can be taken up and go on from there, too.
    run(other, [*other._held[:100], *numbers(100, seed)])
    assert save(other) == ""
    third = session()
    take_up(third, folder)
    assert_holds_start_of(third, other._held, held(other))
    assert third._held == other._held


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[np.ndarray]]:
    folder = tmp_path_factory.mktemp("sound") / "one" / "cache"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saved, "SEGMENT_BLOCKS", 4)
        one = saved_session(folder)
    return folder, one._held, held(one)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damage_is_noticed(
    sound: tuple[Path, list[int], list[np.ndarray]],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    """A bit flipped, a file cut short, grown or gone: what is taken up is sound, and a note."""
    source, tokens, whole = sound
    folder = tmp_path_factory.mktemp("damaged") / "one" / "cache"
    shutil.copytree(source, folder)
    file = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(file.read_bytes())
    match data.draw(st.sampled_from(["flip", "flip", "cut", "grow", "remove"])):
        case "flip":
            # Headers are small, but where most goes wrong.
            at = data.draw(st.integers(0, 1500) | st.integers(0, len(content) - 1))
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "grow":
            content += b"\0"
        case "remove":
            content = None
            file.unlink()
    if content is not None:
        file.write_bytes(content)
    one = session()
    note = take_up(one, folder)
    assert_holds_start_of(one, tokens, whole)
    assert one.cache_use().tokens < len(tokens)
    assert "again" in note or (content is None and file.name == "state.safetensors")


@pytest.mark.parametrize("name", ["state.safetensors", "000008-*"])
def test_after_damage_the_answer_is_the_same_and_all_is_saved_again(
    folder: Path, name: str
) -> None:
    saved_session(folder)
    (damaged,) = folder.glob(name)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    one = session()
    assert "damaged" in take_up(one, folder)
    assert run(one, numbers(700)).text == run(session(), numbers(700)).text
    assert save(one) == ""
    other = session()
    assert take_up(other, folder) == ""
    assert other._held == one._held
    assert_holds_start_of(other, one._held, held(one))


@pytest.mark.parametrize(
    ("other", "reason"),
    [({"model": "larger"}, "another model"), ({"tokenizer": "words"}, "another tokenizer")],
)
def test_what_belongs_to_another_model_is_not_taken_up(
    folder: Path, other: dict[str, str], reason: str
) -> None:
    saved_session(folder)
    one = session(**other)
    assert reason in take_up(one, folder)
    assert one.cache_use().tokens == 0
    # Then it is this model's.
    run(one, numbers(200))
    save(one)
    again = session(**other)
    assert take_up(again, folder) == ""
    assert again._held == one._held
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "other"), [("VERSION", "another version"), ("LAYOUT", "another kind")]
)
def test_other_versions_are_not_taken_up(
    folder: Path, name: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_session(folder)
    monkeypatch.setattr(saved, name, "other")
    assert other in take_up(session(), folder)


def test_fp16_is_not_saved_and_says_so(folder: Path) -> None:
    one = session(kv="fp16")
    assert "fp16" in take_up(one, folder)
    run(one, numbers(100))
    assert save(one) == ""
    assert not folder.exists()


def test_without_a_budget_nothing_is_saved(folder: Path) -> None:
    one = session()
    assert take_up(one, folder, budget=0) == ""
    run(one, numbers(100))
    assert save(one) == ""
    assert not folder.exists()


def conversations(n: int) -> list[sessions.Session]:
    made = []
    for used in range(n):
        conversation = sessions.Session.create()
        saved_session(conversation.cache_folder)
        state = conversation.cache_folder / "state.safetensors"
        for file in conversation.cache_folder.iterdir():
            os.utime(file, (used, used))
        assert state.exists()
        made.append(conversation)
    return made


def test_the_cache_used_longest_ago_gives_way() -> None:
    made = conversations(4)
    for conversation in made[1:]:
        conversation.close()
    size = sum(file.stat().st_size for file in made[0].cache_folder.iterdir())
    take_up(session(), made[1].cache_folder)
    new = sessions.Session.create()
    one = session()
    take_up(one, new.cache_folder, budget=4 * size + size // 2)
    run(one, numbers(700))
    assert save(one) == ""
    # The first is open, the second was used just now.
    assert [c.cache_folder.exists() for c in (*made, new)] == [True, True, False, True, True]
    # What is removed is the cache alone.
    assert len(sessions.summaries()) == 5


def test_a_cache_larger_than_the_budget_is_not_saved(folder: Path) -> None:
    one = session()
    take_up(one, folder, budget=10_000)
    run(one, numbers(700))
    assert "budget" in save(one)
    assert list(folder.iterdir()) == []


def test_a_nearly_full_disk_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = session()
    take_up(one, folder)
    run(one, numbers(700))
    with monkeypatch.context() as patched:
        usage = SimpleNamespace(free=saved.DISK_RESERVE + 1000)
        patched.setattr(shutil, "disk_usage", lambda path: usage)
        assert "nearly full" in save(one)
    assert list(folder.iterdir()) == []
    assert save(one) == ""


class Crash(BaseException):
    pass


def test_a_crash_at_any_step_of_saving_leaves_a_sound_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every change to the folder in turn is the one before which the program ends."""
    for step in range(100):
        folder = tmp_path / str(step) / "cache"
        one = saved_session(folder, 300)
        before = list(one._held), held(one)
        run(one, [*one._held[:180], *numbers(400, 1)])
        left = [step]

        def ends(call: Callable[..., object], left: list[int] = left) -> Callable[..., object]:
            def then(*arguments: object, **options: object) -> object:
                left[0] -= 1
                if left[0] < 0:
                    raise Crash
                return call(*arguments, **options)

            return then

        with monkeypatch.context() as patched:
            # After a crash nobody tidies up.
            patched.setattr(os, "replace", ends(os.replace))
            patched.setattr(os, "fsync", ends(os.fsync))
            patched.setattr(os, "unlink", lambda path: None)
            patched.setattr(Path, "unlink", ends(Path.unlink))
            try:
                save(one)
                crashed = False
            except Crash:
                crashed = True
        other = session()
        assert take_up(other, folder) == ""
        if other._held == one._held:
            assert_holds_start_of(other, one._held, held(one))
        else:
            assert crashed
            assert_holds_start_of(other, *before)
            assert other._held == before[0]
        assert save(other) == ""
        assert not [file for file in folder.iterdir() if file.name.startswith(".")]
        if not crashed:
            break
    assert step > 5


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_is_told_and_nothing_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    one = saved_session(folder, 300)
    before = list(one._held), held(one)
    run(one, [*one._held, *numbers(300, 1)])

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        assert "No space" in save(one)
    other = session()
    assert take_up(other, folder) == ""
    assert other._held == before[0]
    assert_holds_start_of(other, *before)
    assert save(one) == ""
    take_up(other, folder)
    assert other._held == one._held


def test_stopped_while_it_is_taken_up_nothing_is_held(folder: Path) -> None:
    class Stop(Exception):
        pass

    def progress(done: int, total: int) -> None:
        assert 0 < done < total
        raise Stop

    one = saved_session(folder)
    other = session()
    with pytest.raises(Stop):
        other.take_up(folder, 1 << 40, progress)
    assert other.cache_use().tokens == 0
    run(other, numbers(700))
    assert save(other) == ""
    third = session()
    take_up(third, folder)
    assert third._held == one._held
    assert_holds_start_of(third, other._held, held(other))


def test_too_much_for_the_memory_is_not_taken_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_session(folder)
    one = session()
    monkeypatch.setattr(one, "_fits", lambda tokens: tokens < 500)
    assert "memory" in take_up(one, folder)
    assert one.cache_use().tokens == 0


# The engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@contextmanager
def engine(model: Path, **options: object) -> Iterator[Engine]:
    one = Engine(EngineOptions(**options))  # type: ignore[arg-type]
    one.start()
    one.load(str(model))
    try:
        yield one
    finally:
        one.close()


def notes(events: Sequence[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Note)]


QUESTIONS = "Sixteen letters." * 40, "And now?", "And then?"


def two_turns(model: Path, folder: Path) -> tuple[str, str]:
    with engine(model) as one:
        one.take_up(folder)
        first = ask(one, QUESTIONS[0]).text
        second = ask(one, QUESTIONS[0], first, QUESTIONS[1]).text
    assert notes(list(one.events)) == []
    return first, second


@pytest.mark.parametrize("before_loading", [True, False])
def test_a_second_process_prefills_its_question_alone(
    tiny: Path, folder: Path, before_loading: bool
) -> None:
    first, second = two_turns(tiny, folder)
    with engine(tiny) as one:
        if before_loading:
            one.take_up(folder)
            one.load(str(tiny))
        else:
            until(one, Loaded)
            one.take_up(folder)
        *events, taken_up = until(one, TakenUp)
        assert isinstance(taken_up, TakenUp)
        assert taken_up.cache.tokens > 600
        assert notes(events) == []
        again = ask(one, QUESTIONS[0], first, QUESTIONS[1], second, QUESTIONS[2])
    # Random tokens may be no text: the end of the last answer is read again.
    assert again.usage.cached_tokens > taken_up.cache.tokens - 13
    with engine(tiny) as one:
        ask(one, QUESTIONS[0])
        ask(one, QUESTIONS[0], first, QUESTIONS[1])
        unbroken = ask(one, QUESTIONS[0], first, QUESTIONS[1], second, QUESTIONS[2])
    assert again.text == unbroken.text
    assert again.usage.cached_tokens == unbroken.usage.cached_tokens


READER = """
import os, signal, sys
from pathlib import Path
from tests.engine.test_engine import GREEDY, once, said
from tests.engine.test_saved import LONG
from tqchat.engine import engine
from tqchat.engine.events import Prefilling

model, folder = sys.argv[1:]
engine.SAVE_INTERVAL_S = engine.SAVE_REST = 0
reader = engine.Engine()
reader.events = once(Prefilling, lambda: os.kill(os.getpid(), signal.SIGKILL), after=4)
reader.start()
reader.take_up(Path(folder))
reader.load(model)
reader.generate(said(LONG), GREEDY)
reader._thread.join()
"""
LONG = "Sixteen letters." * 150


def test_what_was_read_before_a_kill_is_not_read_again(tiny: Path, folder: Path) -> None:
    """Killed when its third chunk is read and before that is saved."""
    argv = [sys.executable, "-c", READER, str(tiny), str(folder)]
    done = subprocess.run(argv, cwd=Path(__file__).parents[2], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, b"")
    with engine(tiny) as one:
        unbroken = ask(one, LONG)
        one.take_up(folder)
        *events, taken_up = until(one, TakenUp)
        assert notes(events) == []
        again = ask(one, LONG)
        assert taken_up.cache.tokens == again.usage.cached_tokens  # type: ignore[union-attr]
        assert 2 * one._loaded.backend.prefill_chunk == again.usage.cached_tokens
        assert again.text == unbroken.text


def test_nothing_is_saved_while_a_short_prompt_is_read(
    tiny: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would only make the answer wait."""
    saves = []
    monkeypatch.setattr(Session, "save", lambda self, give_way: saves.append(self._held) or "")
    monkeypatch.setattr("tqchat.engine.engine.SAVE_INTERVAL_S", 1e9)
    with engine(tiny) as one:
        one.take_up(folder)
        finished = ask(one, LONG)
    assert [len(held) for held in saves] == [finished.cache.tokens]


@pytest.mark.parametrize(("save_s", "pause_s"), [(0.5, 30), (1.5, 30), (4, 80), (60, 1200)])
def test_saving_takes_a_twentieth_of_the_time_at_most(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, save_s: float, pause_s: float
) -> None:
    """On a clock that goes on by 2 s a chunk, and by what a save takes."""
    now = 1000.0
    saves: list[float] = []
    before: list[int] = []

    def turn(self: Session, number: int, *arguments: object) -> Iterator[Event]:
        nonlocal now
        before.append(len(saves))
        for done in range(2000):
            now += 2
            yield Prefilling(number, done, 2000, 0)
        yield Finished(number, "stop", "", NO_USAGE, self.cache_use(), self.memory())

    def save(self: Session, give_way: Callable[[], bool]) -> str:
        nonlocal now
        saves.append(now)
        now += save_s
        return ""

    with engine(tiny) as one:
        until(one, Loaded)
        monkeypatch.setattr("tqchat.engine.engine.time", SimpleNamespace(monotonic=lambda: now))
        monkeypatch.setattr(Session, "turn", turn)
        monkeypatch.setattr(Session, "save", save)
        for _ in range(3):
            ask(one, "Hello")
    assert saves[0] == 1030
    pauses = [after - save - save_s for save, after in pairwise(saves)]
    # The save at the end of a turn waits for nothing.
    for start, end in pairwise([1, *before[1:]]):
        assert end - start >= 3
        assert all(pause_s <= pause <= pause_s + 2 for pause in pauses[start - 1 : end - 2])


def test_a_model_whose_files_have_changed_prefills(tiny: Path, folder: Path) -> None:
    first, _ = two_turns(tiny, folder)
    os.utime(tiny / "model.safetensors", (1, 1))
    with engine(tiny) as one:
        one.take_up(folder)
        events = until(one, TakenUp)
        assert ["another model" in note for note in notes(events)] == [True]
        assert ask(one, QUESTIONS[0]).text == first


def test_a_cleared_conversation_is_not_saved_over(tiny: Path, folder: Path) -> None:
    first, second = two_turns(tiny, folder)
    with engine(tiny) as one:
        one.take_up(folder)
        one.clear()
        ask(one, "Something else")
    with engine(tiny) as one:
        one.take_up(folder)
        until(one, TakenUp)
        again = ask(one, QUESTIONS[0], first, QUESTIONS[1], second, QUESTIONS[2])
    assert again.usage.cached_tokens > 600


def test_a_stop_while_the_saved_cache_is_read(tiny: Path, folder: Path) -> None:
    first, _ = two_turns(tiny, folder)
    with engine(tiny) as one:
        until(one, Loaded)
        one.events = once(Loading, one.stop)
        one.take_up(folder)
        *events, taken_up = until(one, TakenUp)
        assert isinstance(taken_up, TakenUp)
        assert taken_up.cache.tokens == 0
        assert ["Stopped" in note for note in notes(events)] == [True]
        assert ask(one, QUESTIONS[0]).text == first


def test_what_goes_wrong_while_saving_is_a_note_and_said_once(
    tiny: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise ValueError

    monkeypatch.setattr(saved, "_write", broken)
    with engine(tiny) as one:
        one.take_up(folder)
        for _ in range(3):
            ask(one, QUESTIONS[0])
    assert len(notes(list(one.events))) <= 1
    with engine(tiny) as one:
        one.take_up(folder)
        ask(one, QUESTIONS[0])
        assert ["log file" in note for note in notes(until(one, Note))] == [True]


def test_smollm2_comes_back_and_answers_the_same(smollm2_gguf: Path, folder: Path) -> None:
    """With the cache nothing is read again; with a damaged one the answer is still the same."""
    story = TIDES.read_text()[:2500] + "\n\nWhat is the text about?"
    then = "What causes the tides?"
    with engine(smollm2_gguf) as one:
        one.take_up(folder)
        first = ask(one, story, max_tokens=20).text
        expected = ask(one, story, first, then, max_tokens=20)
    shutil.copytree(folder, folder.with_name("damaged"))
    with engine(smollm2_gguf) as one:
        one.take_up(folder)
        taken_up = until(one, TakenUp)[-1]
        again = ask(one, story, first, then, max_tokens=20)
        assert again.text == expected.text
        # All that the first process held but the end of its last answer.
        assert again.usage.cached_tokens >= taken_up.cache.tokens - 50  # type: ignore[union-attr]
        assert again.usage.cached_tokens > 500
        segment = min(folder.with_name("damaged").glob("0*"))
        content = bytearray(segment.read_bytes())
        content[len(content) // 2] ^= 16
        segment.write_bytes(content)
        one.take_up(segment.parent)
        assert ["damaged" in note for note in notes(until(one, TakenUp))] == [True]
        assert ask(one, story, first, then, max_tokens=20).text == expected.text
