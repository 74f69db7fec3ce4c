"""QJL: a key is the signs of its Gaussian sketch and its length (arXiv:2406.03482).

With S of independent standard normal numbers and a sketch of m dimensions,

    <q, k> is estimated by sqrt(pi / 2) / m * |k| * <S^T q, sign(S^T k)>,

without bias and with a variance of at most pi / (2 m) * |q|^2 |k|^2: the query is not reduced to
signs, only the key is.
"""

import math
from dataclasses import dataclass

import mlx.core as mx

from tqchat.kernels.codecs import metal
from tqchat.kernels.codecs.base import Codec, Quantizer, State, group, ungroup
from tqchat.kernels.codecs.projection import gaussian
from tqchat.kernels.codecs.rotated import length16


@dataclass(frozen=True)
class QJL(Quantizer):
    """sketch_per_channel: bits per channel, m = sketch_per_channel * head_dim.

    query_bits: the query's sketch is rounded to integers of so many bits, so that a product with
        signs is XNOR and popcount. With 1, the query is reduced to signs too, and the estimate is
        biased.
    """

    sketch_per_channel: int
    query_bits: int = 8

    def encode(self, x: mx.array) -> State:
        return sketch(x.astype(mx.float32), self._matrix(x.shape[-1]))

    def decode(self, state: State) -> mx.array:
        """The vector whose product with q is the estimate: no good approximation of x itself."""
        return estimate(state, self._matrix(32 * state[0].shape[-1] // self.sketch_per_channel))

    def scores(self, q: mx.array, state: State) -> mx.array:
        words, lengths = state
        rows = group(q, len(words)) @ self._matrix(q.shape[-1])
        planes, step = bit_planes(rows, self.query_bits)
        if metal.is_default():
            scores = metal.qjl_scores(planes, step, words, lengths, unbiased(rows.shape[-1]))
        else:
            scores = product(planes, words) * step * _factor(state)[:, None]
        return ungroup(scores, q)

    def _matrix(self, head_dim: int) -> mx.array:
        return gaussian(head_dim, self.sketch_per_channel * head_dim)


def unbiased(sketch_dim: int) -> float:
    """What the product with signs is multiplied by."""
    return math.sqrt(math.pi / 2) / sketch_dim


def sketch(x: mx.array, matrix: mx.array) -> State:
    """Signs of x's sketch as bits, (..., m / 32) uint32, lowest first, and lengths (...), fp16."""
    bits = (x @ matrix >= 0).astype(mx.uint32)
    return _words(bits), length16(x)


def estimate(state: State, matrix: mx.array) -> mx.array:
    """The reverse of `sketch`: what has the estimated inner products."""
    words, _ = state
    bits = mx.right_shift(words[..., None], mx.arange(32, dtype=mx.uint32)) & 1
    signs = 2.0 * bits.astype(mx.float32).reshape(*words.shape[:-1], -1) - 1.0
    return (signs @ matrix.swapaxes(-1, -2)) * _factor(state)[..., None]


def _factor(state: State) -> mx.array:
    """What a product with the signs of each vector is multiplied by."""
    words, lengths = state
    return lengths.astype(mx.float32) * unbiased(32 * words.shape[-1])


def bit_planes(x: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    """x (..., m) as step * (a sum over planes i of 2^i * (1 where the bit is set, else -1)).

    Returns planes (..., bits, m / 32) uint32 and step (..., 1) float32.
    """
    levels = (1 << bits) - 1
    # One bit alone is closest with the mean.
    size = mx.abs(x)
    step = size.mean(axis=-1, keepdims=True) if bits == 1 else size.max(axis=-1, keepdims=True)
    step = mx.maximum(step / levels, 1e-30)
    codes = mx.clip(mx.floor((x / step + levels + 1) / 2), 0, levels).astype(mx.uint32)
    planes = mx.right_shift(codes[..., None, :], mx.arange(bits, dtype=mx.uint32)[:, None]) & 1
    return _words(planes), step


def product(planes: mx.array, words: mx.array) -> mx.array:
    """Bit planes (heads, rows, bits, m / 32) times signs (heads, tokens, m / 32), by popcount.

    Returns (heads, rows, tokens), float32.
    """
    bits, m = planes.shape[2], 32 * planes.shape[3]
    differ = popcount(planes[..., None, :] ^ words[:, None, None]).sum(axis=-1)
    agreement = m - 2 * differ.astype(mx.int32)
    return (agreement * mx.left_shift(1, mx.arange(bits))[:, None]).sum(axis=2).astype(mx.float32)


def popcount(x: mx.array) -> mx.array:
    """Set bits of each uint32, counted in pairs, nibbles, bytes."""
    x = x - (mx.right_shift(x, 1) & 0x55555555)
    x = (x & 0x33333333) + (mx.right_shift(x, 2) & 0x33333333)
    x = (x + mx.right_shift(x, 4)) & 0x0F0F0F0F
    return mx.right_shift(x * 0x01010101, 24)


def _words(bits: mx.array) -> mx.array:
    words = bits.reshape(*bits.shape[:-1], -1, 32)
    return mx.left_shift(words, mx.arange(32, dtype=mx.uint32)).sum(axis=-1).astype(mx.uint32)


@dataclass(frozen=True)
class FirstLayers(Codec):
    """A codec for the first layers of a model and another for the rest."""

    n_first: int
    rest: Codec

    def at_layer(self, layer: int) -> Codec:
        first = Codec(self.name, self.keys, self.values)
        return first if layer < self.n_first else self.rest
