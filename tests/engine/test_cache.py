"""The sealed cache against plain numpy: what it holds after any mix of chunks, steps and trims."""

from dataclasses import replace
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tqchat.engine.cache import DenseCache, SealedCache, stored, window_tokens
from tqchat.kernels import BLOCK, SINK, TAIL_MAX, TAIL_MIN, Backend, KeysOfValues, select
from tqchat.kernels.layout import tile_bytes
from tqchat.models.kv import KVLayer

HEADS, DIM = 2, 32
LAYER = KVLayer(HEADS, DIM)
# Of a layer whose K is made of V: a quarter of the pairs do not turn.
WEIGHT = np.linspace(0.5, 1.5, DIM)
PERIODS = np.array([100 ** (i / 16) if i < 12 else np.inf for i in range(DIM // 2)])
Array = NDArray[np.float64]


def fake_quantise(x: Array, axis: int, bits: int) -> Array:
    """The codec's contract in numpy: float32 arithmetic, scale and mid in fp16."""
    x, half = x.astype(np.float32), 2 ** (bits - 1)
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    step = (high - low) / np.float32(2 * half - 1)
    scale = step.astype(np.float16).astype(np.float32)
    mid = (low + half * step).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint((x - mid) / np.where(scale, scale, np.inf)), -half, half - 1)
    return mid.astype(np.float64) + scale.astype(np.float64) * codes


def attention(q: Array, k: Array, v: Array, scale: float, window: int | None = None) -> Array:
    groups = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, groups, axis=0), np.repeat(v, groups, axis=0)
    scores = scale * q @ k.swapaxes(1, 2)
    tokens, length = scores.shape[1:]
    back = np.arange(length - tokens, length)[:, None] - np.arange(length)
    scores[:, (back < 0) | (back >= (window or length))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def keys_of(v: Array, start: int) -> Array:
    """K of V where it is made of it: V by channel, then turned."""
    x, half = v * WEIGHT, DIM // 2
    angles = np.arange(start, start + x.shape[1])[:, None] / PERIODS
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Model:
    """A quantised cache in float64: all K and V seen, and how many blocks are sealed."""

    def __init__(self, bits: int = 4, k_is_v: bool = False) -> None:
        self.bits, self.k_is_v = bits, k_is_v
        self.k = np.zeros((HEADS, 0, DIM))
        self.v = np.zeros((HEADS, 0, DIM))
        self.n_blocks = 0

    def append(self, k: Array, v: Array) -> None:
        self.k = np.concatenate([self.k, k], axis=1)
        self.v = np.concatenate([self.v, v], axis=1)
        tail = self.k.shape[1] - SINK - BLOCK * self.n_blocks
        if tail > TAIL_MAX:
            for _ in range((tail - TAIL_MIN) // BLOCK):
                block = slice(SINK + BLOCK * self.n_blocks, SINK + BLOCK * (self.n_blocks + 1))
                self.n_blocks += 1
                if self.k_is_v:
                    self.v[:, block] = fake_quantise(self.v[:, block], 1, self.bits)
                    continue
                self.k[:, block] = fake_quantise(self.k[:, block], 1, self.bits)
                groups = self.v[:, block].reshape(HEADS, BLOCK, -1, 32)
                self.v[:, block] = fake_quantise(groups, 3, self.bits).reshape(HEADS, BLOCK, DIM)
        self._make_keys()

    def _make_keys(self) -> None:
        if self.k_is_v:
            self.k = keys_of(self.v, 0)

    def trim(self, length: int) -> None:
        self.k, self.v = self.k[:, :length].copy(), self.v[:, :length].copy()
        sealed_end = SINK + BLOCK * self.n_blocks
        self.n_blocks = min(self.n_blocks, max(0, length - SINK) // BLOCK)
        # What a cut block held goes back to the 16-bit tail.
        for x in (self.k, self.v):
            back = x[:, SINK + BLOCK * self.n_blocks : sealed_end]
            back[:] = back.astype(np.float16)
        self._make_keys()


def exact_in_fp16(rng: np.random.Generator, amount: int) -> Array:
    """K or V of `amount` tokens: both sides quantise the same numbers."""
    return rng.normal(size=(HEADS, amount, DIM)).astype(np.float16).astype(np.float32)


step = st.one_of(st.integers(1, 8), st.integers(9, 200))
action = st.one_of(step.map(lambda n: ("add", n)), st.integers(0, 400).map(lambda n: ("trim", n)))


@pytest.mark.parametrize("k_is_v", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Backend(mx.float32),
        lambda: select(mx.float16),
        lambda: Backend(mx.float32, kv_bits=3),
        lambda: select(mx.float16, kv_bits=3),
    ],
)
@settings(max_examples=15, deadline=None)
@given(actions=st.lists(action, min_size=1, max_size=8), seed=st.integers(0, 2**32 - 1))
def test_attention_over_any_history(make, k_is_v, actions, seed) -> None:
    rng = np.random.default_rng(seed)
    backend = make()
    bits = backend.kv_bits
    layer = stored(replace(LAYER, k_is_v=k_is_v), backend)
    k_is_v = layer.k_is_v
    cache, model = SealedCache(backend, layer), Model(bits, k_is_v)
    keys = KeysOfValues(*(backend.load_table(mx.array(x)) for x in (WEIGHT, PERIODS)))
    for kind, amount in [*actions, ("add", 1)]:
        if kind == "trim":
            cache.trim(amount)
            model.trim(amount)
        else:
            k, v = (exact_in_fp16(rng, amount) for _ in range(2))
            if k_is_v:
                k = keys_of(v, cache.offset).astype(np.float32)
            q = rng.normal(size=(2 * HEADS, amount, DIM)).astype(np.float32)
            past = model.k, model.v
            if amount <= 8:
                model.append(k, v)
                seen = model.k, model.v
            else:
                seen = np.concatenate([past[0], k], 1), np.concatenate([past[1], v], 1)
                model.append(k, v)
            ours = (backend.load_table(mx.array(x)) for x in (q, k, v))
            out = cache.attend(*ours, 0.2, keys=keys)
            expected = attention(q, *seen, 0.2)
            np.testing.assert_allclose(np.array(out), expected, atol=2e-3, rtol=0)
        assert cache.offset == model.k.shape[1]
        tail = cache.offset - SINK - BLOCK * model.n_blocks
        sealed = HEADS * model.n_blocks * 8 * (bits + 1) * DIM
        fp16 = (min(cache.offset, SINK) + max(tail, 0)) * 4 * HEADS * DIM
        assert cache.nbytes == (sealed + fp16) // (2 if k_is_v else 1)
        assert cache.nbytes_allocated >= cache.nbytes
        assert cache.nbytes_fp16 == cache.offset * 4 * HEADS * DIM


@pytest.mark.parametrize("make", [lambda: Backend(mx.float32), lambda: select(mx.float16)])
@pytest.mark.parametrize("kind", [SealedCache, DenseCache])
@settings(max_examples=8, deadline=None)
@given(
    actions=st.lists(action, min_size=1, max_size=10),
    window=st.sampled_from([1, 31, 64, 100, 200]),
    rewind_blocks=st.integers(0, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_sliding_window_over_any_history(
    make, kind, actions, window: int, rewind_blocks: int, seed: int
) -> None:
    """A layer that shares the cache sees the same; what is held stays within a bound."""
    rng = np.random.default_rng(seed)
    backend, model = make(), Model()
    with patch("tqchat.engine.cache.REWIND_BYTES", rewind_blocks * HEADS * tile_bytes(DIM)):
        cache = kind(backend, replace(LAYER, window=window))
        kept = window_tokens(HEADS, DIM, window)
    for action, amount in [*actions, ("add", 1), ("add", 300), ("add", 1)]:
        if action == "trim":
            amount = max(amount, cache.trimmable_to) if amount else 0
            cache.trim(amount)
            model.trim(amount)
        else:
            k, v = (exact_in_fp16(rng, amount) for _ in range(2))
            q, again = (rng.normal(size=(2 * HEADS, amount, DIM)) for _ in range(2))
            past = model.k, model.v
            model.append(k, v)
            if kind is DenseCache or amount > 8:
                seen = np.concatenate([past[0], k], 1), np.concatenate([past[1], v], 1)
            else:
                seen = model.k, model.v
            if kind is DenseCache:
                model.k, model.v = seen
            ours = [backend.load_table(mx.array(x.astype(np.float32))) for x in (q, k, v, again)]
            out, share = cache.share(*ours[:3], 0.2)
            expected = attention(q, *seen, 0.2, window)
            np.testing.assert_allclose(np.array(out), expected, atol=2e-3, rtol=0)
            expected = attention(again, *seen, 0.3, window)
            np.testing.assert_allclose(np.array(share(ours[3], 0.3)), expected, atol=2e-3, rtol=0)
        assert cache.offset == model.k.shape[1]
        token = 4 * HEADS * DIM
        if kind is SealedCache:
            most = (kept + 256) // BLOCK * HEADS * tile_bytes(DIM) + (SINK + TAIL_MAX) * token
            assert cache.nbytes <= most
            assert cache.nbytes_allocated <= 1.1 * most + 256 * token
        else:
            assert cache.nbytes <= (kept + 256) * token


def test_a_window_that_has_gone_by_can_be_taken_back_a_little() -> None:
    backend = select(mx.float16)
    with patch("tqchat.engine.cache.REWIND_BYTES", 5 * HEADS * tile_bytes(DIM)):
        caches = [kind(backend, replace(LAYER, window=64)) for kind in (SealedCache, DenseCache)]
    x = backend.load_table(mx.ones((HEADS, 500, DIM)))
    for cache in caches:
        assert cache.trimmable_to == 0
        for _ in range(4):
            cache.attend(x, x, x, 1.0)
        assert 1000 < cache.trimmable_to <= cache.offset - 5 * BLOCK == 2000 - 5 * BLOCK
        cache.trim(0)
        assert (cache.offset, cache.nbytes, cache.trimmable_to) == (0, 0, 0)


def test_tail_keeps_64_to_127_tokens_while_decoding() -> None:
    backend = select(mx.float16)
    cache = SealedCache(backend, LAYER)
    x = backend.load_table(mx.ones((HEADS, 1, DIM)))
    for length in range(1, 600):
        cache.attend(x, x, x, 1.0)
        tail = (cache.nbytes - cache._n_blocks * HEADS * 40 * DIM) // (4 * HEADS * DIM) - SINK
        assert tail <= TAIL_MAX
        assert length < SINK + TAIL_MIN or tail >= TAIL_MIN
    assert cache.nbytes_allocated <= 1.1 * cache.nbytes + 4 * HEADS * DIM * 300


def test_dense_cache_holds_what_it_is_given() -> None:
    rng = np.random.default_rng(0)
    backend = select(mx.float16)
    cache = DenseCache(backend, LAYER)
    k, v, q = (rng.normal(size=(HEADS, 700, DIM)).astype(np.float16) for _ in range(3))
    k, v, q = (x.astype(np.float32) for x in (k, v, q))
    for start, end in [(0, 300), (300, 301), (301, 700)]:
        part = (backend.load_table(mx.array(x[:, start:end])) for x in (q, k, v))
        out = cache.attend(*part, 0.3)
        expected = attention(*(x[:, :end] for x in (q, k, v)), 0.3)[:, start:end]
        np.testing.assert_allclose(np.array(out), expected, atol=2e-3, rtol=0)
    cache.trim(10)
    assert (cache.offset, cache.nbytes) == (10, 10 * 4 * HEADS * DIM)
