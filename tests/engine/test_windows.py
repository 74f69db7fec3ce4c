"""Models with sliding windows through the engine: what can be taken back, saved and taken up."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.test_generation import GREEDY, Letters, run
from tests.engine.test_saved import numbers, save, take_up
from tests.tiny import LLAMA, build_model, llama_weights
from tqchat.engine import saved
from tqchat.engine.events import Event, Finished, ModelInfo, Note
from tqchat.engine.generation import Session
from tqchat.engine.loading import LoadedModel
from tqchat.kernels import select
from tqchat.kernels.layout import tile_bytes

WINDOW, REWIND_BLOCKS = 40, 3
CONFIG = LLAMA | {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
}
BACKEND = select(mx.float16)
MODEL = build_model(CONFIG, llama_weights(CONFIG), BACKEND)


@pytest.fixture(autouse=True)
def little_to_take_back() -> Iterator[None]:
    with (
        patch("tqchat.engine.cache.REWIND_BYTES", REWIND_BLOCKS * 2 * tile_bytes(32)),
        patch.object(saved, "SEGMENT_BLOCKS", 4),
    ):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sessions" / "one" / "cache"


def session(kv: str = "int4") -> Session:
    info = ModelInfo("tiny", "llama", 4096, 0, "CPU", "", kv)  # type: ignore[arg-type]
    letters = Letters()
    letters.fingerprint = "letters"  # type: ignore[attr-defined]
    return Session(LoadedModel(MODEL, BACKEND, letters, None, info, "tiny"))  # type: ignore[arg-type]


def turn(one: Session, prompt: list[int]) -> tuple[list[Event], Finished]:
    *events, last = one.turn(1, prompt, GREEDY, 20, lambda: False)
    assert isinstance(last, Finished)
    return events, last


def holds(one: Session) -> tuple[int, int]:
    use = one.cache_use()
    return use.tokens, use.kv_bytes


@pytest.mark.parametrize("kv", ["int4", "fp16"])
def test_what_a_window_has_passed_is_read_again_and_said(kv: str) -> None:
    one, prompt = session(kv), numbers(900)
    run(one, prompt)
    held = one.cache_use()
    # 900 tokens in one layer; in the others, of a window of 40, at most some 400.
    assert held.kv_bytes_fp16 < (900 + 20 + 2 * 480) * 4 * 2 * 32
    other = [*prompt[:500], *numbers(50, seed=1)]
    events, last = turn(one, other)
    assert [e.message for e in events if isinstance(e, Note)] == [
        "500 tokens are read again: the model's sliding-window layers have forgotten what comes "
        "before the change."
    ]
    assert last.usage.cached_tokens == 0
    assert last.text == run(session(kv), other).text


@pytest.mark.parametrize("kv", ["int4", "fp16"])
def test_what_a_window_still_holds_is_kept(kv: str) -> None:
    one, prompt = session(kv), numbers(900)
    run(one, prompt)
    # The answer, and a little more, are taken back.
    events, last = turn(one, [*prompt[:880], *numbers(50, seed=1)])
    assert not any(isinstance(e, Note) for e in events)
    assert last.usage.cached_tokens == 880


def test_a_saved_cache_goes_on_as_if_it_had_never_stopped(folder: Path) -> None:
    one = session()
    assert take_up(one, folder) == ""
    run(one, numbers(900))
    assert save(one) == ""
    other = session()
    assert take_up(other, folder) == ""
    assert holds(other) == holds(one)
    prompt = [*one._held, 5, 6, 7]
    for asked in (prompt, [*prompt[:890], 3]):
        expected, again = run(one, asked, GREEDY, 100), run(other, asked, GREEDY, 100)
        assert again.text == expected.text
        assert again.usage.cached_tokens == expected.usage.cached_tokens > 800


def test_without_a_segment_all_is_read_again(folder: Path) -> None:
    """A window is of the last token: it is of no use where an earlier part is missing."""
    one = session()
    take_up(one, folder)
    run(one, numbers(900))
    save(one)
    for segment in sorted(folder.glob("0*.safetensors"))[2:3]:
        data = bytearray(segment.read_bytes())
        data[-200] ^= 1
        segment.write_bytes(data)
    other = session()
    assert "read again" in take_up(other, folder)
    assert other.cache_use().tokens == 0
    assert all(cache.offset == 0 for cache in other._caches)
    assert run(other, numbers(900)).text == run(session(), numbers(900)).text


def test_saving_that_gives_way_leaves_what_was_saved_before(folder: Path) -> None:
    one = session()
    take_up(one, folder)
    run(one, numbers(400))
    assert save(one) == ""
    saved_tokens = one.cache_use().tokens
    run(one, [*one._held, *numbers(500, seed=2)])
    assert save(one, gives_way_after=1) == ""
    other = session()
    assert take_up(other, folder) == ""
    assert other.cache_use().tokens == saved_tokens
    # And the next time it is all there.
    assert save(one) == ""
    assert take_up(other, folder) == ""
    assert holds(other) == holds(one)
    for ours, theirs in zip(other._caches, one._caches, strict=True):
        for mine, own in zip(ours.tail(), theirs.tail(), strict=True):  # type: ignore[attr-defined]
            np.testing.assert_array_equal(np.array(mine), np.array(own))
