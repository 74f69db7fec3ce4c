"""The cache's own codec at any number of bits: K per channel, V per token, groups of 32.

After KIVI (arXiv:2402.02750). At 4 bits these are the values of `tqchat.kernels.codec`, whose
16-bit sink and tail are the cache's part, not the codec's.
"""

from dataclasses import dataclass

import mlx.core as mx

from tqchat.kernels.codec import dequantize, quantize
from tqchat.kernels.codecs.base import Quantizer, State, pack, unpack
from tqchat.kernels.layout import BLOCK, GROUP


@dataclass(frozen=True)
class PerChannel(Quantizer):
    """A channel's BLOCK tokens share scale and mid."""

    bits: int

    def encode(self, x: mx.array) -> State:
        heads, tokens, dim = x.shape
        blocks = x.reshape(heads, tokens // BLOCK, BLOCK, dim)
        codes, scale, mid = quantize(blocks, axis=2, bits=self.bits)
        return pack(codes.reshape(x.shape) + (1 << (self.bits - 1)), self.bits), scale, mid

    def decode(self, state: State) -> mx.array:
        words, scale, mid = state
        codes = unpack(words).astype(mx.float32) - (1 << (self.bits - 1))
        heads, tokens, dim = codes.shape
        blocks = codes.reshape(heads, tokens // BLOCK, BLOCK, dim)
        return dequantize(blocks, scale, mid).reshape(codes.shape)


@dataclass(frozen=True)
class PerToken(Quantizer):
    """GROUP channels of a token share scale and mid."""

    bits: int

    def encode(self, x: mx.array) -> State:
        groups = x.reshape(*x.shape[:2], x.shape[2] // GROUP, GROUP)
        codes, scale, mid = quantize(groups, axis=3, bits=self.bits)
        return pack(codes.reshape(x.shape) + (1 << (self.bits - 1)), self.bits), scale, mid

    def decode(self, state: State) -> mx.array:
        words, scale, mid = state
        codes = unpack(words).astype(mx.float32) - (1 << (self.bits - 1))
        groups = codes.reshape(*codes.shape[:2], codes.shape[2] // GROUP, GROUP)
        return dequantize(groups, scale, mid).reshape(codes.shape)
