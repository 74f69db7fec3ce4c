"""Open-TQ-Metal's int4: K and V per token, groups of 32 channels, with a zero point.

x = scale * (code - zero), code 0 to 15, scale and zero in fp16. A group that is narrow and far from
0 has a zero point beyond fp16, which saturates.

Source: github.com/svv232/turboquant-llama3.170B.
"""

import mlx.core as mx

from tqchat.kernels.codec import FP16_MAX
from tqchat.kernels.codecs.base import Quantizer, State, pack, unpack

GROUP_SIZE = 32
BITS = 4
LEAST_SCALE = 6.1e-5
"""The least normal number of fp16: a constant group has no scale of its own."""


class ZeroPoint(Quantizer):
    def encode(self, x: mx.array) -> State:
        groups = x.astype(mx.float32).reshape(*x.shape[:2], -1, GROUP_SIZE)
        low, high = groups.min(axis=3, keepdims=True), groups.max(axis=3, keepdims=True)
        scale = mx.maximum((high - low) / 15.0, LEAST_SCALE).astype(mx.float16)
        zero = mx.clip(-low / scale.astype(mx.float32), -FP16_MAX, FP16_MAX).astype(mx.float16)
        exact = groups / scale.astype(mx.float32) + zero.astype(mx.float32)
        codes = mx.clip(mx.round(exact), 0, 15).reshape(x.shape)
        return pack(codes, BITS), scale, zero

    def decode(self, state: State) -> mx.array:
        words, scale, zero = state
        codes = unpack(words).astype(mx.float32)
        groups = codes.reshape(*codes.shape[:2], -1, GROUP_SIZE)
        return (scale.astype(mx.float32) * (groups - zero.astype(mx.float32))).reshape(codes.shape)
