"""What PolarQuant and TurboQuant share: they code a vector after a random rotation.

The rotation makes every vector look like one of independent normal numbers, whatever its outliers,
so one codebook fits all. It never has to be undone token by token: <q, x> is <q R, x R>, and a
weighted sum is rotated back once.
"""

from abc import abstractmethod

import mlx.core as mx

from tqchat.kernels.codec import FP16_MAX
from tqchat.kernels.codecs.base import Quantizer, State, group, ungroup
from tqchat.kernels.codecs.projection import rotation


class Rotated(Quantizer):
    """y: x in rotated coordinates, float32."""

    @abstractmethod
    def encode_rotated(self, y: mx.array) -> State: ...

    @abstractmethod
    def decode_rotated(self, state: State) -> mx.array: ...

    def encode(self, x: mx.array) -> State:
        return self.encode_rotated(x.astype(mx.float32) @ rotation(x.shape[-1]))

    def decode(self, state: State) -> mx.array:
        y = self.decode_rotated(state)
        return y @ rotation(y.shape[-1]).T

    def scores(self, q: mx.array, state: State) -> mx.array:
        y = self.decode_rotated(state)
        rotated = group(q, len(y)) @ rotation(q.shape[-1])
        return ungroup(rotated @ y.swapaxes(1, 2), q)

    def mix(self, weights: mx.array, state: State) -> mx.array:
        y = self.decode_rotated(state)
        return ungroup(group(weights, len(y)) @ y @ rotation(y.shape[-1]).T, weights)


def length16(x: mx.array) -> mx.array:
    """Lengths of vectors along the last axis, in fp16."""
    return mx.minimum(mx.linalg.norm(x, axis=-1), FP16_MAX).astype(mx.float16)


def nearest(x: mx.array, codebook: mx.array) -> mx.array:
    """The index of the value in a rising codebook that is nearest to each element."""
    bounds = (codebook[1:] + codebook[:-1]) / 2
    return (x[..., None] > bounds).sum(axis=-1)
