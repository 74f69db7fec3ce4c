"""The int4 codec in plain MLX operations: x = mid + scale * code, code in -8..7.

scale = (maximum - minimum) / 15 and mid = minimum + 8 * scale over the tokens of a block (K, per
channel) or over a group of channels (V, per token), computed in float32 and then rounded to fp16;
codes are round-half-even((x - mid) / scale) with the rounded parameters. A group whose scale
rounds to zero has all codes 0, so it comes back as mid. Input is saturated to the finite fp16
range and NaN counts as 0: a cache must hold whatever a model produces.

After KIVI (arXiv:2402.02750): K per channel, V per token.
"""

import mlx.core as mx

from tqchat.kernels.layout import BLOCK, GROUP

FP16_MAX = 65504.0


def quantize(x: mx.array, axis: int, bits: int = 4) -> tuple[mx.array, mx.array, mx.array]:
    """Quantise x, any shape and float type, over one axis.

    Returns codes (int32, x's shape, -half to half - 1 with half = 2 ** (bits - 1)) and scale and
    mid (fp16, with size 1 along axis).
    """
    half = 1 << (bits - 1)
    x = x.astype(mx.float32)
    x = mx.clip(mx.where(mx.isnan(x), 0.0, x), -FP16_MAX, FP16_MAX)
    low = x.min(axis=axis, keepdims=True)
    high = x.max(axis=axis, keepdims=True)
    step = (high - low) / (2.0 * half - 1.0)
    mid = (low + half * step).astype(mx.float16)
    scale = step.astype(mx.float16)
    divisor = scale.astype(mx.float32)
    divisor = mx.where(divisor == 0, mx.array(float("inf")), divisor)
    codes = mx.clip(mx.round((x - mid.astype(mx.float32)) / divisor), -half, half - 1)
    return codes.astype(mx.int32), scale, mid


def dequantize(codes: mx.array, scale: mx.array, mid: mx.array) -> mx.array:
    """The reverse of `quantize`, but for what rounding lost, in float32."""
    x = mid.astype(mx.float32) + scale.astype(mx.float32) * codes.astype(mx.float32)
    # At the end of fp16's range, rounded parameters may lead past it.
    return mx.clip(x, -FP16_MAX, FP16_MAX)


def pack_codes(codes: mx.array) -> mx.array:
    """Codes (..., n) in -8..7 to words (..., n / 8) of uint32."""
    nibbles = (codes + 8).astype(mx.uint32).reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8)
    shifts = mx.arange(8, dtype=mx.uint32) * 4
    return mx.left_shift(nibbles, shifts).sum(axis=-1).astype(mx.uint32)


def unpack_codes(words: mx.array) -> mx.array:
    """Words (..., n / 8) to codes (..., n), float32."""
    shifts = mx.arange(8, dtype=mx.uint32) * 4
    nibbles = mx.right_shift(words[..., None], shifts) & 15
    return nibbles.astype(mx.float32).reshape(*words.shape[:-1], 8 * words.shape[-1]) - 8.0


def pack_parameters(scale: mx.array, mid: mx.array) -> mx.array:
    """Two fp16 arrays to one of uint32: scale in the low half, mid in the high half."""
    low = scale.view(mx.uint16).astype(mx.uint32)
    high = mid.view(mx.uint16).astype(mx.uint32)
    return low | mx.left_shift(high, mx.array(16, dtype=mx.uint32))


def unpack_parameters(words: mx.array) -> tuple[mx.array, mx.array]:
    """The reverse of `pack_parameters`, as float32."""
    low = (words & 0xFFFF).astype(mx.uint16).view(mx.float16)
    high = mx.right_shift(words, mx.array(16, dtype=mx.uint32)).astype(mx.uint16).view(mx.float16)
    return low.astype(mx.float32), high.astype(mx.float32)


def seal(k: mx.array, v: mx.array) -> mx.array:
    """Tiles of K and V, both (n_kv_heads, n * BLOCK, head_dim): (n_kv_heads, n, 10 * head_dim)."""
    heads, tokens, dim = k.shape
    n = tokens // BLOCK
    k = k.reshape(heads, n, BLOCK, dim)
    v = v.reshape(heads, n, BLOCK, dim // GROUP, GROUP)
    k_codes, k_scale, k_mid = quantize(k, axis=2)
    v_codes, v_scale, v_mid = quantize(v, axis=4)
    parts = (
        pack_codes(k_codes),
        pack_parameters(k_scale, k_mid),
        pack_codes(v_codes.reshape(heads, n, BLOCK, dim)),
        pack_parameters(v_scale, v_mid),
    )
    return mx.concatenate([part.reshape(heads, n, -1) for part in parts], axis=-1)


def unseal(tiles: mx.array) -> tuple[mx.array, mx.array]:
    """The reverse of `seal`, but for what rounding lost: K and V in float32."""
    heads, n, words = tiles.shape
    dim = words // 10
    k_words, k_params, v_words, v_params = mx.split(tiles, [4 * dim, 5 * dim, 9 * dim], axis=-1)
    k_scale, k_mid = unpack_parameters(k_params.reshape(heads, n, 1, dim))
    k = dequantize(unpack_codes(k_words.reshape(heads, n, BLOCK, dim // 8)), k_scale, k_mid)
    v_scale, v_mid = unpack_parameters(v_params.reshape(heads, n, BLOCK, dim // GROUP, 1))
    v_codes = unpack_codes(v_words.reshape(heads, n, BLOCK, dim // GROUP, GROUP // 8))
    v = dequantize(v_codes, v_scale, v_mid)
    return k.reshape(heads, n * BLOCK, dim), v.reshape(heads, n * BLOCK, dim)
