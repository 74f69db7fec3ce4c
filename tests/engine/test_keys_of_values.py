"""A model whose layers keep V alone, through the engine: what it takes, saved and taken up."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.test_cache import LAYER, PERIODS, WEIGHT, keys_of
from tests.engine.test_generation import GREEDY, Letters, run
from tests.engine.test_saved import numbers, save, take_up
from tests.models.test_families import GEMMA4 as TINY
from tests.models.test_families import Case, both
from tqchat.engine.cache import SealedCache
from tqchat.engine.events import ModelInfo
from tqchat.engine.generation import Session
from tqchat.engine.loading import LoadedModel
from tqchat.kernels import BLOCK, SINK, TAIL_MIN, Backend, KeysOfValues, select
from tqchat.kernels.cuda.backend import CUDA

# Two layers see everything: one KV head of 64 channels, K made of V.
GEMMA4 = Case("gemma4_text", TINY | {"vocab_size": 128}, q_norm=0.15)


class Both(Backend):
    derives_keys = CUDA.derives_keys


BACKENDS = {"plain": Backend(mx.float32), "here": select(mx.float16), "both": Both(mx.float32)}
MODELS = {name: both(GEMMA4, backend)[0] for name, backend in BACKENDS.items()}
for backend in BACKENDS.values():
    backend.cache_dtype = mx.float16


def session(name: str) -> Session:
    info = ModelInfo("tiny", "gemma4", 4096, 0, "CPU", name, "int4")
    letters = Letters()
    letters.fingerprint = "letters"  # type: ignore[attr-defined]
    return Session(LoadedModel(MODELS[name], BACKENDS[name], letters, None, info, "tiny"))  # type: ignore[arg-type]


def global_bytes(one: Session) -> list[int]:
    layers = MODELS["plain"].shape.kv_layers
    pairs = zip(layers, one._caches, strict=True)
    return [cache.nbytes for layer, cache in pairs if layer.window is None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sessions" / "one" / "cache"


@pytest.mark.parametrize("name", MODELS)
def test_half_the_bytes_are_held(name: str) -> None:
    """Of the layers without a window: 5 bits for 64 channels, 16 in the first and newest tokens."""
    one = session(name)
    run(one, numbers(700))
    tokens, n_blocks = one.cache_use().tokens, (700 - SINK - TAIL_MIN) // BLOCK
    size = 64 * (n_blocks * BLOCK * 5 + (tokens - n_blocks * BLOCK) * 16) // 8
    assert global_bytes(one) == [2 * size if name == "both" else size] * 2


@pytest.mark.parametrize("name", ["plain", "here"])
@pytest.mark.parametrize("reader", ["plain", "here"])
def test_what_was_saved_is_taken_up(folder: Path, name: str, reader: str) -> None:
    one, other = session(name), session(reader)
    assert take_up(one, folder) == ""
    run(one, numbers(700))
    assert save(one) == ""
    assert take_up(other, folder) == ""
    assert other._held == one._held
    assert global_bytes(other) == global_bytes(one)
    for ours, theirs in zip(other._caches, one._caches, strict=True):
        assert mx.array_equal(ours.blocks(0, ours.n_blocks), theirs.blocks(0, theirs.n_blocks))  # type: ignore[attr-defined]
        for x, y in zip(
            (*ours.sink(), *ours.tail()), (*theirs.sink(), *theirs.tail()), strict=True
        ):  # type: ignore[attr-defined]
            assert mx.array_equal(x, y)
    if name == reader:
        prompt = [*one._held, 5, 6, 7]
        expected, again = run(one, prompt, GREEDY, 40), run(other, prompt, GREEDY, 40)
        assert again.text == expected.text
        assert again.usage.cached_tokens == len(prompt) - 3


@pytest.mark.parametrize(("name", "reader"), [("plain", "both"), ("both", "here")])
def test_a_cache_of_the_other_form_is_not_taken_up(folder: Path, name: str, reader: str) -> None:
    one, other = session(name), session(reader)
    take_up(one, folder)
    run(one, numbers(300))
    assert save(one) == ""
    assert "another kind" in take_up(other, folder)
    assert other.cache_use().tokens == 0


def test_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="window"):
        replace(LAYER, k_is_v=True, window=64)


@pytest.mark.parametrize("name", ["plain", "here"])
def test_a_checkpoint_is_gone_back_to(name: str) -> None:
    backend, rng = BACKENDS[name], np.random.default_rng(3)
    one, other = (SealedCache(backend, replace(LAYER, k_is_v=True)) for _ in "ab")
    keys = KeysOfValues(*(backend.load_table(mx.array(x)) for x in (WEIGHT, PERIODS)))

    def attend(cache: SealedCache, v: np.ndarray) -> np.ndarray:
        k = keys_of(v, cache.offset)
        ours = (backend.load_table(mx.array(x)) for x in (k[:, -1:], k, v))
        return np.array(cache.attend(*ours, 0.2, keys=keys))

    first, chunk, last = (rng.normal(size=(2, n, 32)) for n in (300, 90, 1))
    for cache in (one, other):
        attend(cache, first)
    go_back = one.checkpoint()
    attend(one, chunk)
    go_back()
    np.testing.assert_array_equal(attend(one, last), attend(other, last))
