"""How long a prompt will take: told from what is remembered, and remembered whatever is there."""

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.test_generation import GREEDY, session
from tqchat import paths
from tqchat.engine import pace
from tqchat.engine.events import Planned, Prefilling
from tqchat.engine.pace import Pace, Reading, work
from tqchat.kernels import select
from tqchat.models.kv import KVLayer

# SmolLM2-135M. Its prefill on a CPU ran at 724, 712 and 486 tokens per second with prompts of 128,
# 1,024 and 4,096 tokens (README).
SMOLLM2 = SimpleNamespace(
    n_heads=9,
    head_dim=64,
    hidden_size=576,
    vocab_size=49152,
    n_parameters=134_515_008,
    n_expert_parameters=0,
    kv_layers=[KVLayer(3, 64)] * 30,
)


def test_a_rate_tells_how_long_other_lengths_take() -> None:
    known = Pace(SMOLLM2, "smollm2")  # type: ignore[arg-type]
    known.measured(0, 1024, 1024 / 712)
    assert Reading(known, 0, 128).seconds == pytest.approx(128 / 724, rel=0.2)
    assert Reading(known, 0, 4096).seconds == pytest.approx(4096 / 486, rel=0.2)


def read(reading: Reading, seconds: Callable[[int, int], float], chunk: int = 256) -> Iterator[int]:
    """Chunk by chunk, on a machine where positions take so long; yields how far it has come."""
    elapsed = 0.0
    for at in range(reading.start, reading.stop, chunk):
        to = min(at + chunk, reading.stop)
        elapsed += seconds(at, to)
        reading.came_to(to, elapsed)
        yield to


@pytest.mark.parametrize("slower", [0.5, 2.0])
def test_what_is_left_follows_a_machine_that_is_not_as_fast_as_remembered(slower: float) -> None:
    known = Pace(SMOLLM2, "smollm2")  # type: ignore[arg-type]
    known.measured(0, 1024, 1.0)
    rate = known.rate
    assert rate is not None

    def seconds(start: int, stop: int) -> float:
        return slower * work(SMOLLM2, start, stop) / rate  # type: ignore[arg-type]

    reading = Reading(known, 44, 16_000)
    told = reading.seconds
    assert told == reading.seconds_left == pytest.approx(seconds(44, 16_000) / slower)
    for at in read(reading, seconds):
        if at > 8_000:
            assert reading.seconds_left == pytest.approx(seconds(at, 16_000), rel=0.15)
            assert reading.seconds == pytest.approx(seconds(44, 16_000), rel=0.15)
    assert reading.seconds_left == 0
    assert reading.seconds == pytest.approx(seconds(44, 16_000))


def test_what_is_left_is_near_where_attention_is_slower_than_the_matrices() -> None:
    def seconds(start: int, stop: int) -> float:
        return (stop - start) / 1000 + (stop**2 - start**2) / 4e6

    reading = Reading(Pace(SMOLLM2, "new"), 0, 16_000)  # type: ignore[arg-type]
    assert reading.seconds is None
    for at in read(reading, seconds):
        if 4_000 < at < 16_000:
            assert reading.seconds_left == pytest.approx(seconds(at, 16_000), rel=0.25)


@given(st.lists(st.integers(0, 200_000), min_size=3, max_size=3).map(sorted))
def test_the_parts_take_as_long_as_the_whole(at: list[int]) -> None:
    first, middle, last = at
    parts = work(SMOLLM2, first, middle) + work(SMOLLM2, middle, last)  # type: ignore[arg-type]
    assert parts == pytest.approx(work(SMOLLM2, first, last))  # type: ignore[arg-type]


@given(
    st.integers(0, 300),
    st.integers(0, 300),
    st.lists(st.sampled_from([None, 1, 50, 100]), min_size=1, max_size=3),
)
def test_attention_takes_what_each_token_sees(
    start: int, more: int, windows: list[int | None]
) -> None:
    """Within half a token at each position, which the count is coarser by."""
    layers = [KVLayer(3, 64, window) for window in windows]
    shape = SimpleNamespace(**{**vars(SMOLLM2), "kv_layers": layers})
    none = SimpleNamespace(**{**vars(SMOLLM2), "kv_layers": []})
    stop = start + more
    attention = work(shape, start, stop) - work(none, start, stop)  # type: ignore[arg-type]
    per_token_seen = 2 * 2 * 9 * 64
    seen = sum(min(p, w or p) for w in windows for p in range(start, stop))
    assert attention / per_token_seen == pytest.approx(seen, abs=0.5 * more * len(windows) + 1e-6)


def test_it_is_remembered_for_each_model_from_long_prompts_alone() -> None:
    for name, tokens in (("a", 5000), ("b", 2000), ("short", 500)):
        one = Pace(SMOLLM2, name)  # type: ignore[arg-type]
        assert one.rate is None
        one.measured(0, tokens, tokens / 100)
        one.remember(tokens)
    a, b, short = (Pace(SMOLLM2, name) for name in ("a", "b", "short"))  # type: ignore[arg-type]
    assert Reading(a, 0, 5000).seconds == pytest.approx(50)
    assert Reading(b, 0, 2000).seconds == pytest.approx(20)
    assert short.rate is None


def test_old_rates_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "REMEMBERED", 2)
    for name in "abac":
        one = Pace(SMOLLM2, name)  # type: ignore[arg-type]
        one.measured(0, 2000, 1)
        one.remember(2000)
    assert [bool(Pace(SMOLLM2, name).rate) for name in "abc"] == [True, False, True]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["", "[1]", '{"a": "fast"}', '{"a": 0.0}', '{"a": NaN}', '{"a": -1.0}', "[" * 100_000, "\x00"],
)
def test_a_damaged_memory_is_none(text: str) -> None:
    paths.write_private(paths.state_dir() / "prefill-rates.json", text)
    one = Pace(SMOLLM2, "a")  # type: ignore[arg-type]
    assert one.rate is None
    one.measured(0, 2000, 1)
    one.remember(2000)
    assert list(json.loads((paths.state_dir() / "prefill-rates.json").read_text())) == ["a"]


def test_a_prompt_is_planned_before_it_is_read() -> None:
    """The first time without its seconds, which follow; later with them, for what is new alone."""
    one = session(select(mx.float16), context=8192)
    before = one.cache_use()
    prompt = [1] * 3000
    first, *events = one.turn(1, prompt, GREEDY, 1, lambda: False)
    assert isinstance(first, Planned)
    assert (first.tokens, first.seconds) == (3000, None)
    assert first.peak > one.cache_use().kv_bytes - before.kv_bytes
    begun, again = events[:2]
    assert isinstance(begun, Prefilling)
    assert isinstance(again, Planned)
    assert again.tokens == 3000
    assert again.seconds is not None
    told = [event.seconds_left for event in events if isinstance(event, Prefilling)]
    assert told[0] is None
    assert None not in told[1:]
    assert told[-1] == 0
    assert [event for event in events if isinstance(event, Planned)] == [again]

    longer = [*prompt, *[2] * 500]
    for other in (one, session(select(mx.float16), context=8192)):
        held = other.cache_use().tokens
        events = list(other.turn(2, longer, GREEDY, 1, lambda: False))
        (plan,) = [event for event in events if isinstance(event, Planned)]
        assert plan is events[0]
        assert plan.tokens == 3500 - min(held, 3000)
        assert plan.seconds is not None
        assert plan.seconds > 0
        # The bar begins where the announcement is.
        assert isinstance(events[1], Prefilling)
        assert events[1].seconds_left == plan.seconds
