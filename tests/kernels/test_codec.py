"""The codec's contract, element by element: x = mid + scale * code."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tqchat.kernels import BLOCK, GROUP, codec
from tqchat.kernels.layout import tile_words

Floats = NDArray[np.float64]


def groups(x: Floats, kind: str) -> Floats:
    """The elements that share parameters along the last axis: K's by channel, V's by token."""
    heads, tokens, dim = x.shape
    if kind == "K":
        return x.reshape(heads, tokens // BLOCK, BLOCK, dim).swapaxes(2, 3)
    return x.reshape(heads, tokens // BLOCK, BLOCK, dim // GROUP, GROUP)


def check(k: mx.array, v: mx.array, bits: int = 4) -> None:
    half = 2 ** (bits - 1)
    sealed = codec.unseal(codec.seal(k, v, bits), bits)
    for kind, x, y in zip("KV", (k, v), sealed, strict=True):
        exact = groups(np.array(x.astype(mx.float32)).astype(np.float64), kind)
        back = groups(np.array(y).astype(np.float64), kind)
        low, high = exact.min(-1, keepdims=True), exact.max(-1, keepdims=True)
        step = (high - low) / (2 * half - 1)
        mid = low + half * step
        # Half a step, and what rounding to 16 bits makes of `half` steps and of mid.
        rounding = half * np.spacing(step.astype(np.float16)) + np.spacing(mid.astype(np.float16))
        bound = step / 2 + np.abs(rounding).astype(np.float64)
        assert (np.abs(back - exact) <= bound * (1 + 1e-5)).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    heads=st.integers(1, 3),
    n=st.integers(1, 3),
    dim=st.sampled_from([32, 64, 96, 128]),
    size=st.floats(1e-6, 1e4),
    offset=st.floats(-100, 100),
    bfloat=st.booleans(),
    bits=st.sampled_from([3, 4]),
)
def test_within_half_a_step(
    seed: int, heads: int, n: int, dim: int, size: float, offset: float, bfloat: bool, bits: int
) -> None:
    x = np.random.default_rng(seed).standard_normal((2, heads, BLOCK * n, dim)) * size + offset
    k, v = mx.array(x).astype(mx.bfloat16 if bfloat else mx.float16)
    check(k, v, bits)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.1, 65504.0, -65504.0, 6e-8])
def test_constant_block(value: float) -> None:
    x = mx.full((1, BLOCK, 64), value, mx.float16)
    for y in codec.unseal(codec.seal(x, x)):
        assert (np.array(y) == np.array(x).astype(np.float32)).all()


@pytest.mark.parametrize("outlier", [6e4, -6e4])
def test_one_outlier(outlier: float) -> None:
    mx.random.seed(0)
    x = mx.random.normal((2, 1, 2 * BLOCK, 64)).astype(mx.float16)
    x[:, 0, 40, 9] = outlier
    check(*x)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 1e38])
def test_what_16_bits_cannot_hold_is_saturated(value: float) -> None:
    """NaN counts as 0; the rest of the block survives as with the largest fp16 number."""
    mx.random.seed(0)
    x = mx.random.normal((1, BLOCK, 64)).astype(mx.bfloat16)
    x[0, 3, 5] = value
    finite = x.astype(mx.float32)
    finite[0, 3, 5] = 0.0 if value != value else np.clip(value, -65504, 65504)
    assert mx.array_equal(codec.seal(x, x), codec.seal(finite, finite))


def test_codes_of_3_bits_lie_as_the_layout_says() -> None:
    k, v = mx.random.normal((2, 2, BLOCK, 64), key=mx.random.key(5))
    tiles = codec.seal(k, v, 3)
    assert tiles.shape == (2, 1, tile_words(64, 3))
    for x, axis, at in ((k, 1, 0), (v.reshape(2, BLOCK, 2, GROUP), 3, 4 * 64)):
        expected = np.array(codec.quantize(x, axis, 3)[0]).reshape(2, BLOCK, 8, 8) + 4
        words = np.array(tiles)[:, 0, at : at + 3 * 64].reshape(2, BLOCK, 2, 3)
        bits = words[..., None] >> np.arange(32, dtype=np.uint32) & 1
        nibbles = bits.reshape(2, BLOCK, 2, 3, 8, 4)
        # Of each four words: three in the low bits of the nibbles, the last in their top bits.
        low = (nibbles[..., :3] << np.arange(3)).sum(axis=-1)
        last = (nibbles[..., 3] << np.arange(3)[:, None]).sum(axis=-2)
        found = np.concatenate([low, last[..., None, :]], axis=-2).reshape(expected.shape)
        assert (found == expected).all()
