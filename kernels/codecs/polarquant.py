"""PolarQuant: angles of a recursive polar transform (arXiv:2502.02617).

After the random rotation, 16 coordinates become one radius and 15 angles: pairs of coordinates
give 8 angles in a full circle and 8 radii (level 1), pairs of radii give angles in a quarter of
it, and so on up to level 4. For independent normal coordinates the angles are independent and
their distributions known, so their codebooks need no scale. The radius is kept in fp16.
"""

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from tqchat.kernels.codec import FP16_MAX
from tqchat.kernels.codecs import metal
from tqchat.kernels.codecs.base import State, group, pack, ungroup, unpack
from tqchat.kernels.codecs.lloyd_max import polar
from tqchat.kernels.codecs.projection import rotation
from tqchat.kernels.codecs.rotated import Rotated, nearest

LEVELS = 4
GROUP_SIZE = 1 << LEVELS
"""Coordinates that share a radius."""


@dataclass(frozen=True)
class PolarQuant(Rotated):
    """bits: of an angle of level 1, two fewer on the levels above, whose range is a quarter.

    With the radius that is 15 / 16 * bits + 1 / 8 per element, nearly bits. head_dim must be a
    multiple of 16.
    """

    bits: int

    def encode_rotated(self, y: mx.array) -> State:
        n = 1 << self.bits
        even, odd = y[..., 0::2], y[..., 1::2]
        turn = (mx.arctan2(odd, even) + math.pi) / (2 * math.pi)
        first = mx.clip(mx.floor(turn * n), 0, n - 1)
        radii = mx.sqrt(even * even + odd * odd)
        upper = []
        for level in range(2, LEVELS + 1):
            even, odd = radii[..., 0::2], radii[..., 1::2]
            upper.append(nearest(mx.arctan2(odd, even), self._codebook(level)))
            radii = mx.sqrt(even * even + odd * odd)
        return (
            pack(first, self.bits),
            pack(mx.concatenate(upper, axis=-1), self.bits - 2),
            mx.minimum(radii, FP16_MAX).astype(mx.float16),
        )

    def decode_rotated(self, state: State) -> mx.array:
        first, upper, radii = state
        codes = unpack(upper)
        x = radii.astype(mx.float32)
        tables = self.tables()
        end = codes.shape[-1]
        for level in range(LEVELS, 1, -1):
            width = x.shape[-1]
            x = _spread(x, tables[level - 1], codes[..., end - width : end])
            end -= width
        return _spread(x, tables[0], unpack(first))

    def scores(self, q: mx.array, state: State) -> mx.array:
        if not metal.is_default():
            return super().scores(q, state)
        first, upper, radii = state
        rotated = group(q, len(radii)) @ rotation(q.shape[-1])
        return ungroup(metal.polarquant_scores(rotated, first, upper, radii, self.tables()), q)

    def tables(self) -> list[mx.array]:
        """Cosine and sine of each level's codebook, level 1 first: (codes, 2), float32."""
        n = 1 << self.bits
        circle = (mx.arange(n) + 0.5) * (2 * math.pi / n) - math.pi
        angles = [circle, *(self._codebook(level) for level in range(2, LEVELS + 1))]
        return [mx.stack([mx.cos(each), mx.sin(each)], axis=-1) for each in angles]

    def _codebook(self, level: int) -> mx.array:
        return mx.array(polar(level, self.bits - 2).astype(np.float32))


def _spread(radii: mx.array, table: mx.array, codes: mx.array) -> mx.array:
    """Each radius as the pair it came from, twice as wide."""
    return (radii[..., None] * table[codes]).reshape(*radii.shape[:-1], -1)
