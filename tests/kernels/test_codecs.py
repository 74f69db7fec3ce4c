"""The codecs that the cache's own is compared with: what they lose and what they take."""

import mlx.core as mx
import numpy as np
import pytest

from tqchat.kernels import codec
from tqchat.kernels.codecs import CODECS


def random(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float16))


def test_product_is_the_caches_codec() -> None:
    k, v = random(2, 96, 64, seed=1), random(2, 96, 64, seed=2)
    product = CODECS["product"]
    expected = codec.unseal(codec.seal(k, v))
    for x, y in zip(product.decode(product.encode(k, v)), expected, strict=True):
        assert mx.array_equal(x, y)


@pytest.mark.parametrize("name", CODECS)
def test_attention_on_codes_is_attention_on_what_they_stand_for(name: str) -> None:
    chosen = CODECS[name]
    k, v, q = random(2, 64, 64, seed=1), random(2, 64, 64, seed=2), random(6, 3, 64, seed=3)
    state = chosen.encode(k, v)
    k64, v64 = (np.repeat(np.array(x, np.float64), 3, axis=0) for x in chosen.decode(state))
    scores = np.array(q, np.float64) @ k64.swapaxes(1, 2)
    weights = np.exp(scores / 8)
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v64
    assert np.abs(np.array(chosen.scores(q, state)) - scores).max() < 1e-4
    assert np.abs(np.array(chosen.attend(q, state, 1 / 8)) - expected).max() < 1e-5
