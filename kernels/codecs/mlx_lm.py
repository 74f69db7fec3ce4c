"""mlx-lm's quantised cache: MLX's affine quantisation per token, groups of 64 channels.

See `QuantizedKVCache` in mlx_lm/models/cache.py; 64 is its default.
"""

from dataclasses import dataclass

import mlx.core as mx

from tqchat.kernels.codecs.base import Quantizer, State, group, ungroup


@dataclass(frozen=True)
class Affine(Quantizer):
    """head_dim must be a multiple of group_size."""

    bits: int
    group_size: int = 64

    def encode(self, x: mx.array) -> State:
        # Scales and biases come in the type of x.
        words, scales, biases = mx.quantize(x.astype(mx.float16), self.group_size, self.bits)
        return words, scales, biases

    def decode(self, state: State) -> mx.array:
        return mx.dequantize(*_float32(state), group_size=self.group_size, bits=self.bits)

    def scores(self, q: mx.array, state: State) -> mx.array:
        return ungroup(self._matmul(group(q, len(state[0])), state, transpose=True), q)

    def mix(self, weights: mx.array, state: State) -> mx.array:
        return ungroup(self._matmul(group(weights, len(state[0])), state, transpose=False), weights)

    def _matmul(self, x: mx.array, state: State, transpose: bool) -> mx.array:
        return mx.quantized_matmul(
            x, *_float32(state), transpose=transpose, group_size=self.group_size, bits=self.bits
        )


def _float32(state: State) -> tuple[mx.array, mx.array, mx.array]:
    words, scales, biases = state
    return words, scales.astype(mx.float32), biases.astype(mx.float32)
