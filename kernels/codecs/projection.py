"""Random matrices that a codec shares with itself across runs and machines, made from a seed."""

import functools

import mlx.core as mx
import numpy as np


@functools.cache
def rotation(dim: int) -> mx.array:
    """A random orthogonal matrix (dim, dim), Haar distributed: it spreads any vector's size evenly
    over the channels."""
    q, r = np.linalg.qr(np.random.default_rng(dim).standard_normal((dim, dim)))
    return mx.array((q * np.sign(np.diag(r))).astype(np.float32))


@functools.cache
def gaussian(dim: int, sketch_dim: int) -> mx.array:
    """Independent standard normal numbers (dim, sketch_dim)."""
    numbers = np.random.default_rng((dim, sketch_dim)).standard_normal((dim, sketch_dim))
    return mx.array(numbers.astype(np.float32))
