"""Turns on one cache: what is reused, what is refused, and that running ahead changes nothing."""

import re
from collections.abc import Sequence
from types import SimpleNamespace

import mlx.core as mx
import pytest

from tests.tiny import LLAMA, build_model, llama_weights
from tqchat.engine.events import Failed, Finished, Memory, ModelInfo, Sampling, Token
from tqchat.engine.generation import Session
from tqchat.engine.loading import LoadedModel
from tqchat.kernels import Backend, select
from tqchat.models.errors import ModelError

GREEDY = Sampling(temperature=0)


class Letters:
    """A tokenizer whose token n is the character n + 1000."""

    stop_ids = frozenset({127})

    def stream(self) -> SimpleNamespace:
        return SimpleNamespace(add=lambda token: chr(token + 1000), finish=lambda: "")


class Asynchronous(Backend):
    asynchronous = True


def session(
    backend: Backend | None = None,
    kv: str = "int4",
    context: int = 4096,
    weights: dict[str, mx.array] | None = None,
) -> Session:
    backend = backend or Backend(mx.float32)
    model = build_model(LLAMA, weights or llama_weights(LLAMA), backend)
    info = ModelInfo("tiny", "llama", context, 0, "CPU", backend.name, kv)
    return Session(LoadedModel(model, backend, Letters(), None, info, ""))  # type: ignore[arg-type]


def run(session: Session, prompt: Sequence[int], sampling=GREEDY, max_tokens=20) -> Finished:
    *events, last = session.turn(1, prompt, sampling, max_tokens, lambda: False)
    assert isinstance(last, Finished)
    assert "".join(e.text for e in events if isinstance(e, Token)) == last.text
    return last


@pytest.mark.parametrize("kv", ["int4", "fp16"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3), Sampling(0, repetition_penalty=2)])
def test_running_ahead_changes_nothing(kv: str, sampling: Sampling) -> None:
    prompt = list(range(100))
    plain, ahead = session(kv=kv), session(Asynchronous(mx.float32), kv)
    expected = run(plain, prompt, sampling, 150)
    assert run(ahead, prompt, sampling, 150).text == expected.text
    # The caches hold the same, whatever was fed ahead: another turn says the same.
    longer = [*prompt, *(ord(c) - 1000 for c in expected.text), 5, 6, 7]
    assert run(ahead, longer, GREEDY, 5).text == run(plain, longer, GREEDY, 5).text


def test_only_what_is_new_is_prefilled() -> None:
    one = session()
    first = run(one, list(range(50)))
    answer = [ord(c) - 1000 for c in first.text]
    second = run(one, [*range(50), *answer, 1, 2, 3])
    assert second.usage.prompt_tokens - second.usage.cached_tokens <= 4


def test_an_edited_message_is_answered_as_in_a_fresh_session() -> None:
    one = session(kv="fp16")
    long = [i % 127 for i in range(300)]
    run(one, long)
    edited = [*long[:200], 9, *long[201:260]]
    again = run(one, edited)
    assert again.usage.cached_tokens == 200
    assert again.text == run(session(kv="fp16"), edited).text


@pytest.mark.parametrize("kv", ["int4", "fp16"])
@pytest.mark.parametrize("backend", [Backend(mx.float32), select(mx.float16)])
def test_a_stop_between_two_layers_is_as_if_the_chunk_had_not_begun(
    backend: Backend, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is left in any layer: what comes later is the same to the last bit."""
    monkeypatch.setattr(backend, "prefill_chunk", 100)
    prompt = [i % 127 for i in range(450)]
    expected = run(session(backend, kv), prompt)
    # It is asked before each of three layers, and after the chunk.
    for stop_at in (2, 4, 7, 9):
        one = session(backend, kv)
        says = iter([False] * (stop_at - 1) + [True])
        *_, stopped = one.turn(1, prompt, GREEDY, 20, lambda says=says: next(says))
        assert isinstance(stopped, Finished)
        assert stopped.reason == "stopped"
        assert stopped.cache.tokens == 100 * (stop_at // 4)
        again = run(one, prompt)
        assert again.usage.cached_tokens == stopped.cache.tokens
        assert again.text == expected.text


def test_a_prompt_past_the_context_is_refused_with_the_count_and_nothing_is_lost() -> None:
    one = session(context=100)
    run(one, list(range(50)), max_tokens=3)
    held = one.cache_use().tokens
    (event,) = one.turn(2, [1] * 107, GREEDY, None, lambda: False)
    assert isinstance(event, Failed)
    assert event.excess_tokens == 8
    assert "8 more" in event.message
    assert one.cache_use().tokens == held


def test_the_context_ends_an_answer() -> None:
    full = run(session(context=60), list(range(50)), max_tokens=None)
    assert full.reason == "context"
    assert full.usage.completion_tokens == 10


def test_a_failure_within_a_step_leaves_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    one = session()
    run(one, list(range(50)))
    layer = one._loaded.model.layers[1]  # type: ignore[attr-defined]
    original = layer.mlp

    def broken(x: mx.array) -> mx.array:
        raise MemoryError

    layer.mlp = broken
    with pytest.raises(MemoryError):
        list(one.turn(2, [*range(50), 3, 4], GREEDY, None, lambda: False))
    layer.mlp = original
    assert one.cache_use().tokens == 0
    prompt = list(range(60))
    assert run(one, prompt).text == run(session(), prompt).text


@pytest.mark.parametrize("value", [mx.nan, mx.inf, 1e38])
def test_weights_that_compute_no_numbers_are_refused(value: float) -> None:
    weights = llama_weights(LLAMA)
    weights["model.norm.weight"] = mx.full((LLAMA["hidden_size"],), value)
    with pytest.raises(ModelError, match="tiny: its weights are damaged"):
        session(weights=weights).warm_up()


def test_a_template_that_makes_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match="chat template makes nothing"):
        list(session().turn(1, [], GREEDY, None, lambda: False))


def test_tokens_that_the_model_does_not_know_are_refused() -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        list(session().turn(1, [1, LLAMA["vocab_size"]], GREEDY, None, lambda: False))


def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(monkeypatch) -> None:
    one = session(context=8192)
    run(one, list(range(50)), max_tokens=3)
    held = one.cache_use().tokens
    free = 1_000_000
    used = Memory(weights=0, kv=0, other=0, free=free, limit=free)
    monkeypatch.setattr("tqchat.engine.memory.measure", lambda weights, kv: used)
    (event,) = one.turn(2, [1] * 8000, GREEDY, None, lambda: False)
    assert isinstance(event, Failed)
    assert "8,000 tokens" in event.message
    assert "977 KiB is free" in event.message
    assert one.cache_use().tokens == held
    assert "sysctl" not in event.message
    # What the message offers fits.
    longest = int(re.search(r"about ([\d,]+) tokens", event.message)[1].replace(",", ""))
    assert run(one, [1] * longest, max_tokens=1).usage.completion_tokens == 1


def test_where_raising_the_limit_makes_room_the_command_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a Mac of 64 GiB, where 56 GiB are the most; and only where that is enough."""
    one = session(context=8192)
    more = 1_000_000
    need = one._more_bytes(8000, 32)
    monkeypatch.setattr("tqchat.engine.memory.raised_limit", lambda limit: limit + more)
    for free, is_enough in ((need - more, True), (need - more - 1, False)):
        used = Memory(weights=0, kv=0, other=0, free=free, limit=(56 << 30) - more)
        monkeypatch.setattr("tqchat.engine.memory.measure", lambda weights, kv, used=used: used)
        (event,) = one.turn(1, [1] * 8000, GREEDY, None, lambda: False)
        assert isinstance(event, Failed)
        assert ("sudo sysctl iogpu.wired_limit_mb=57344" in event.message) == is_enough
