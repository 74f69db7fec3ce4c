"""Q, K and V of real models' shapes, made up: for what depends on the shape and the scale alone."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

LARGE_CHANNELS = 4
LARGE = 6.0
"""A few channels of K lie far from zero in trained models (KIVI, arXiv:2402.02750)."""
ALIKE = 0.5
"""How much of some key a query has: attention then looks somewhere, as in a trained model."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`normalised`: Q and K have a root mean square of 1, as under a norm of their own."""

    name: str
    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    normalised: bool


LLAMA_70B = Shape("Llama 70B", 64, 8, 128, 128**-0.5, normalised=False)
GEMMA_4 = Shape("Gemma 4", 32, 16, 256, 1.0, normalised=True)


def activations(
    shape: Shape, tokens: int, n_queries: int, seed: int
) -> tuple[mx.array, mx.array, mx.array]:
    """q (n_heads, n_queries, head_dim); k, v (n_kv_heads, tokens, head_dim)."""
    rng = np.random.default_rng(seed)

    def normal(*size: int) -> NDArray[np.float64]:
        return rng.standard_normal((*size, shape.head_dim))

    k, v = normal(shape.n_kv_heads, tokens), normal(shape.n_kv_heads, tokens)
    k[..., :LARGE_CHANNELS] += LARGE
    seen = rng.integers(tokens, size=(shape.n_heads, n_queries))
    heads = np.arange(shape.n_heads) // (shape.n_heads // shape.n_kv_heads)
    centred = k - k.mean(axis=1, keepdims=True)
    q = ALIKE * centred[heads[:, None], seen] + normal(shape.n_heads, n_queries)
    if shape.normalised:
        q, k = (x / np.sqrt((x**2).mean(axis=-1, keepdims=True)) for x in (q, k))
    return mx.array(q, mx.float32), mx.array(k, mx.float32), mx.array(v, mx.float32)
