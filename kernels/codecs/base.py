"""What a codec of K or V offers, and what a pair of them makes of attention.

Codecs are for comparing: what each costs in bits and in error. The cache itself uses
`tqchat.kernels.codec`; the codec called "product" is the same arithmetic.

Everything is stored in arrays that are really packed, so that bits per element are counted, not
claimed. Matrices and codebooks that are the same for every token are not counted: they are made
anew from a seed.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from tqchat.kernels.layout import BLOCK

State: TypeAlias = tuple[mx.array, ...]
"""What is stored of one tensor."""


class Quantizer(ABC):
    """Stores one tensor, K or V, of BLOCK * n tokens.

    x: (n_kv_heads, tokens, head_dim), any float type
    q: (n_heads, n_queries, head_dim); consecutive heads share a KV head
    """

    @abstractmethod
    def encode(self, x: mx.array) -> State: ...

    @abstractmethod
    def decode(self, state: State) -> mx.array:
        """x again, but for what was lost, in float32."""

    def scores(self, q: mx.array, state: State) -> mx.array:
        """<q, x> of every query and token: (n_heads, n_queries, tokens), float32."""
        x = self.decode(state)
        return ungroup(group(q, len(x)) @ x.swapaxes(1, 2), q)

    def mix(self, weights: mx.array, state: State) -> mx.array:
        """Sums of x, weighted (n_heads, n_queries, tokens): (n_heads, n_queries, head_dim)."""
        x = self.decode(state)
        return ungroup(group(weights, len(x)) @ x, weights)


def group(x: mx.array, n_kv_heads: int) -> mx.array:
    """(n_heads, n, width) -> (n_kv_heads, rows, width), float32: what shares a KV head."""
    return x.astype(mx.float32).reshape(n_kv_heads, -1, x.shape[-1])


def ungroup(x: mx.array, q: mx.array) -> mx.array:
    """The reverse of `group` for a result of q's heads and queries."""
    return x.reshape(*q.shape[:2], x.shape[-1])


KVState: TypeAlias = tuple[State, State]


@dataclass(frozen=True)
class Codec:
    """A quantizer for K and one for V. k, v, q: as in `Quantizer`."""

    name: str
    keys: Quantizer
    values: Quantizer

    def encode(self, k: mx.array, v: mx.array) -> KVState:
        return self.keys.encode(k), self.values.encode(v)

    def decode(self, state: KVState) -> tuple[mx.array, mx.array]:
        return self.keys.decode(state[0]), self.values.decode(state[1])

    def scores(self, q: mx.array, state: KVState) -> mx.array:
        """<q, k>, not scaled: (n_heads, n_queries, tokens), float32."""
        return self.keys.scores(q, state[0])

    def attend(self, q: mx.array, state: KVState, scale: float) -> mx.array:
        """Attention of queries that see every token, on the encoded form: q's shape, float32."""
        weights = mx.softmax(self.scores(q, state) * scale, axis=-1, precise=True)
        return self.values.mix(weights, state[1])

    def at_layer(self, layer: int) -> "Codec":
        """The codec for a model's layer, counted from 0."""
        return self

    def bits_per_element(self, head_dim: int, n_layers: int = 1) -> float:
        """Bits that an element of K or V takes, counted from what is stored of a block."""
        x = mx.zeros((1, BLOCK, head_dim), mx.float16)
        layers = [self.at_layer(layer).encode(x, x) for layer in range(n_layers)]
        return 8 * sum(map(nbytes, layers)) / (2 * x.size * n_layers)


def nbytes(state: KVState) -> int:
    """Bytes that are stored of K and V."""
    return sum(array.nbytes for array in (*state[0], *state[1]))


def pack(codes: mx.array, bits: int) -> mx.array:
    """Codes (heads, BLOCK * n, width) from 0 to 2 ** bits - 1 as bit planes, a word per plane.

    Returns uint32 (heads, n, width, bits): bit t of word i is bit i of token t's code. A GPU's
    lane that serves token t finds its code in the same words as its neighbours find theirs.
    """
    heads, tokens, width = codes.shape
    codes = codes.astype(mx.uint32).reshape(heads, tokens // BLOCK, BLOCK, width).swapaxes(2, 3)
    planes = mx.right_shift(codes[..., None, :], mx.arange(bits, dtype=mx.uint32)[:, None]) & 1
    return mx.left_shift(planes, mx.arange(BLOCK, dtype=mx.uint32)).sum(axis=-1).astype(mx.uint32)


def unpack(words: mx.array) -> mx.array:
    """The reverse of `pack`: codes (heads, BLOCK * n, width), uint32."""
    heads, n, width, bits = words.shape
    planes = mx.right_shift(words[..., None], mx.arange(BLOCK, dtype=mx.uint32)) & 1
    weighted = mx.left_shift(planes, mx.arange(bits, dtype=mx.uint32)[:, None])
    return weighted.sum(axis=3).astype(mx.uint32).swapaxes(2, 3).reshape(heads, n * BLOCK, width)
