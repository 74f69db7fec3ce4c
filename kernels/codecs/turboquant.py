"""TurboQuant: rotated coordinates in Lloyd-Max codebooks, one length per vector (arXiv:2504.19874).

A coordinate of a rotated unit vector follows Beta's distribution, so one codebook serves all. The
form for inner products spends one bit of each coordinate on a QJL sketch of what the codebook
left, which makes estimates of <q, x> unbiased.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from tqchat.kernels.codecs import metal
from tqchat.kernels.codecs.base import State, pack, unpack
from tqchat.kernels.codecs.lloyd_max import sphere
from tqchat.kernels.codecs.projection import gaussian
from tqchat.kernels.codecs.qjl import estimate, sketch
from tqchat.kernels.codecs.rotated import Rotated, length16, nearest


@dataclass(frozen=True)
class TurboQuant(Rotated):
    """Of least mean squared error. bits: of a coordinate's code."""

    bits: int

    def encode_rotated(self, y: mx.array) -> State:
        lengths = length16(y)
        unit = y / mx.maximum(lengths.astype(mx.float32), 1e-30)[..., None]
        codes = nearest(unit, self.codebook(y.shape[-1]))
        return pack(codes, self.bits), lengths

    def decode_rotated(self, state: State) -> mx.array:
        words, lengths = state
        codebook = self.codebook(words.shape[2])
        if metal.is_default():
            return metal.turboquant_decode(words, lengths, codebook)
        return codebook[unpack(words)] * lengths.astype(mx.float32)[..., None]

    def codebook(self, head_dim: int) -> mx.array:
        """Values of a unit vector's coordinate, rising, float32."""
        return mx.array(sphere(head_dim, self.bits).astype(np.float32))


@dataclass(frozen=True)
class TurboQuantProduct(Rotated):
    """For inner products. bits: per coordinate, at least 2, the residual's sign included."""

    bits: int

    def encode_rotated(self, y: mx.array) -> State:
        state = self._main.encode_rotated(y)
        dim = y.shape[-1]
        return *state, *sketch(y - self._main.decode_rotated(state), gaussian(dim, dim))

    def decode_rotated(self, state: State) -> mx.array:
        y = self._main.decode_rotated(state[:2])
        dim = y.shape[-1]
        return y + estimate(state[2:], gaussian(dim, dim))

    @property
    def _main(self) -> TurboQuant:
        return TurboQuant(self.bits - 1)
