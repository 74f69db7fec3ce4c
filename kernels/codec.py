"""The cache's codec in plain MLX operations: x = mid + scale * code, code in -8..7, or -4..3.

With 4 bits, scale = (maximum - minimum) / 15 and mid = minimum + 8 * scale, with 3 bits 7 and 4,
over the tokens of a block (K, per channel) or over a group of channels (V, per token), computed in
float32 and then rounded to fp16; codes are round-half-even((x - mid) / scale) with the rounded
parameters. A group whose scale rounds to zero has all codes 0, so it comes back as mid. Input is
saturated to the finite fp16 range and NaN counts as 0: a cache must hold whatever a model produces.

After KIVI (arXiv:2402.02750): K per channel, V per token; V per channel where it is held alone.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx

from tqchat.kernels.layout import BLOCK, GROUP

FP16_MAX = 65504.0
TOP_BITS, LOW_BITS = 0x88888888, 0x77777777
"""Of nibbles: the bit that a code of 3 bits leaves free, and the code."""


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


def pack_codes(codes: mx.array, bits: int = 4) -> mx.array:
    """Codes (..., n) of `quantize` to words (..., bits * n / 32) of uint32."""
    stored = (codes + (1 << (bits - 1))).astype(mx.uint32)
    nibbles = stored.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8)
    shifts = mx.arange(8, dtype=mx.uint32) * 4
    words = mx.left_shift(nibbles, shifts).sum(axis=-1).astype(mx.uint32)
    words = words.reshape(*codes.shape[:-1], codes.shape[-1] // 8)
    return narrow_words(words) if bits == 3 else words


def unpack_codes(words: mx.array, bits: int = 4) -> mx.array:
    """The reverse of `pack_codes`, float32."""
    words = widen_words(words) if bits == 3 else words
    shifts = mx.arange(8, dtype=mx.uint32) * 4
    nibbles = mx.right_shift(words[..., None], shifts) & 15
    half = 1 << (bits - 1)
    return nibbles.astype(mx.float32).reshape(*words.shape[:-1], 8 * words.shape[-1]) - half


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


def narrow(words: Sequence[Any]) -> list[Any]:
    """Four arrays of words whose nibbles are codes of 3 bits as three; see `layout`."""
    a, b, c, last = words
    low, middle, high = last << 3, last << 2, last << 1
    return [a | low & TOP_BITS, b | middle & TOP_BITS, c | high & TOP_BITS]


def widen(words: Sequence[Any]) -> list[Any]:
    """The reverse of `narrow`."""
    a, b, c = words
    last = (a & TOP_BITS) >> 3 | (b & TOP_BITS) >> 2 | (c & TOP_BITS) >> 1
    return [a & LOW_BITS, b & LOW_BITS, c & LOW_BITS, last]


def narrow_words(words: mx.array) -> mx.array:
    """`narrow` of every four consecutive words: (..., 4 n) to (..., 3 n)."""
    shape = (*words.shape[:-1], words.shape[-1] // 4)
    fours = words.reshape(*shape, 4)
    threes = mx.stack(narrow([fours[..., i] for i in range(4)]), axis=-1)
    return threes.reshape(*shape[:-1], 3 * shape[-1])


def widen_words(words: mx.array) -> mx.array:
    """The reverse of `narrow_words`."""
    shape = (*words.shape[:-1], words.shape[-1] // 3)
    threes = words.reshape(*shape, 3)
    fours = mx.stack(widen([threes[..., i] for i in range(3)]), axis=-1)
    return fours.reshape(*shape[:-1], 4 * shape[-1])


def narrow_tiles(tiles: mx.array, k_is_v: bool = False) -> mx.array:
    """Canonical tiles of 3 bits, of ones whose code words are still as with 4."""
    parts = split_tile(tiles, 4, k_is_v)
    parts[::2] = map(narrow_words, parts[::2])
    return mx.concatenate(parts, axis=-1)


def widen_tiles(tiles: mx.array, k_is_v: bool = False) -> mx.array:
    """The reverse of `narrow_tiles`."""
    parts = split_tile(tiles, 3, k_is_v)
    parts[::2] = map(widen_words, parts[::2])
    return mx.concatenate(parts, axis=-1)


def split_tile(tiles: Any, bits: int, k_is_v: bool = False) -> list[Any]:
    """K codes, K parameters, V codes, V parameters: (n_kv_heads, n, words) each; V's alone if
    `k_is_v`."""
    halves = 1 if k_is_v else 2
    dim = tiles.shape[-1] // (halves * (bits + 1))
    ends = [0, bits, bits + 1, 2 * bits + 1, 2 * bits + 2][: 2 * halves + 1]
    return [tiles[..., a * dim : b * dim] for a, b in pairwise(ends)]


def seal(k: mx.array, v: mx.array, bits: int = 4) -> mx.array:
    """Tiles (n_kv_heads, n, tile_words) of K and V, both (n_kv_heads, n * BLOCK, head_dim)."""
    heads, tokens, dim = v.shape
    n = tokens // BLOCK
    v = v.reshape(heads, n, BLOCK, dim // GROUP, GROUP)
    codes, scale, mid = quantize(v, axis=4, bits=bits)
    parts = [
        seal_channels(k, bits),
        pack_codes(codes.reshape(heads, n, BLOCK, dim), bits).reshape(heads, n, -1),
        pack_parameters(scale, mid).reshape(heads, n, -1),
    ]
    return mx.concatenate(parts, axis=-1)


def unseal(tiles: mx.array, bits: int = 4) -> tuple[mx.array, mx.array]:
    """The reverse of `seal`, but for what rounding lost: K and V in float32."""
    heads, n, words = tiles.shape
    dim = words // (2 * (bits + 1))
    *_, v_words, v_params = split_tile(tiles, bits)
    scale, mid = unpack_parameters(v_params.reshape(heads, n, BLOCK, dim // GROUP, 1))
    codes = unpack_codes(v_words, bits).reshape(heads, n, BLOCK, dim // GROUP, GROUP)
    v = dequantize(codes, scale, mid)
    return unseal_channels(tiles[..., : words // 2], bits), v.reshape(heads, n * BLOCK, dim)


def seal_channels(x: mx.array, bits: int = 4) -> mx.array:
    """K's half of tiles, or whole ones that hold V alone: (n_kv_heads, n, (bits + 1) * head_dim).

    x: (n_kv_heads, n * BLOCK, head_dim)
    """
    heads, tokens, dim = x.shape
    n = tokens // BLOCK
    codes, scale, mid = quantize(x.reshape(heads, n, BLOCK, dim), axis=2, bits=bits)
    parts = (pack_codes(codes, bits), pack_parameters(scale, mid))
    return mx.concatenate([part.reshape(heads, n, -1) for part in parts], axis=-1)


def unseal_channels(tiles: mx.array, bits: int = 4) -> mx.array:
    """The reverse of `seal_channels`, but for what rounding lost, in float32."""
    words, parameters = split_tile(tiles, bits, k_is_v=True)
    heads, n, dim = parameters.shape
    scale, mid = unpack_parameters(parameters.reshape(heads, n, 1, dim))
    codes = unpack_codes(words, bits).reshape(heads, n, BLOCK, dim)
    return dequantize(codes, scale, mid).reshape(heads, n * BLOCK, dim)
