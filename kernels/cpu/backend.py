"""The CPU backend: native kernels on numpy float32 arrays, weights as they are stored."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tqchat.kernels import codec
from tqchat.kernels.backend import CLAMP, GELU, SWISH, Array, Backend
from tqchat.kernels.cpu import _native
from tqchat.kernels.cpu.cores import usable_cores
from tqchat.kernels.layout import BLOCK, GROUP, SINK
from tqchat.kernels.view import KVView
from tqchat.kernels.weight import Weight

EXP_MOST = 80.0
"""float32's exp overflows past 88, where a sigmoid has long been 0."""


class CPU(Backend):
    """`threads`: how many compute; None: as many as the cores this process may use.

    Threads are the process's, not the object's: the last object made decides.
    """

    prefill_chunk = 256

    def __init__(self, threads: int | None = None, kv_bits: int = 4) -> None:
        super().__init__(mx.float32, kv_bits=kv_bits)
        self.past_bytes = 0
        self.threads = _native.set_threads(threads or usable_cores())
        self.name = f"CPU, {_native.instruction_sets()[0]}, {self.threads} threads"
        self._arena = _Arena()
        self._rope_for: tuple[Array, int, int] = (None, 0, 0)
        self._rope_table = np.zeros((0, 2, 0), np.float32)
        self._turns_for: Array = None
        self._places = self._starts = self._rope_table

    # Arrays

    def zeros(self, shape: Sequence[int], dtype: mx.Dtype) -> Array:
        return np.zeros(tuple(shape), str(dtype).removeprefix("mlx.core."))

    def evaluate(self, *arrays: Array) -> None:
        pass

    def concatenate(self, arrays: Sequence[Array]) -> Array:
        return np.concatenate(arrays, axis=-1)

    def concatenate_tokens(self, arrays: Sequence[Array]) -> Array:
        return np.concatenate(arrays, axis=1)

    def write_tokens(self, buffer: Array, start: int, x: Array) -> None:
        if buffer.dtype == np.float16:
            _native.write(buffer, start, x)
        else:
            super().write_tokens(buffer, start, x)

    # Layers

    def load(self, weight: Weight) -> Weight:
        """Types stay as they are; affine widths other than 4 and 8 bits become 8, which hold them.
        MXFP8 and NVFP4 become bfloat16, which holds them."""
        weight = _known(weight)
        data, keep = _numpy(weight.data), self._arena.keep
        if not weight.bits:
            return Weight(keep(data))
        bits = weight.bits
        if bits not in (4, 8):
            data, bits = _widened(data, bits), 8
        scales, biases = _numpy(weight.scales), _numpy(weight.biases)
        return Weight(keep(data), keep(scales), keep(biases), weight.group_size, bits, weight.mode)

    def load_vector(self, x: mx.array) -> Array:
        return _numpy(x.astype(mx.float32))

    def load_table(self, x: mx.array) -> Array:
        return _numpy(x.astype(mx.float32))

    def embed(self, weight: Weight, ids: Sequence[int] | mx.array) -> Array:
        return _native.embed(weight, np.asarray(ids))

    def linear(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        return _native.linear(x, weight, bias)

    def logits(self, x: Array, weight: Weight) -> mx.array:
        return mx.array(_native.linear(x, weight, None))

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        return _native.rms_norm(x, weight, eps)

    def rope(self, x: Array, periods: Array, offset: int) -> Array:
        """Angles in float64: at position 100,000 float32 is off by a hundredth of a radian."""
        tokens = x.shape[1]
        of, at, n = self._rope_for
        if of is not periods or at != offset or n != tokens:
            self._rope_table = _turns(periods, np.arange(offset, offset + tokens))
            self._rope_for = (periods, offset, tokens)
        return _native.rope(x, self._rope_table)

    def swiglu(self, gate_up: Array) -> Array:
        return _native.swiglu(gate_up)

    def clamped_swiglu(self, gate_up: Array) -> Array:
        gate, up = np.split(gate_up, 2, axis=-1)
        gate = np.minimum(gate, CLAMP)
        up = np.clip(up, -CLAMP, CLAMP) + 1
        return gate * up / (1 + np.exp(np.minimum(-SWISH * gate, EXP_MOST)))

    def geglu(self, gate_up: Array) -> Array:
        gate, up = np.split(gate_up, 2, axis=-1)
        inner = gate * (GELU + GELU * 0.044715 * gate * gate)
        return gate * up / (1 + np.exp(np.minimum(-inner, EXP_MOST)))

    def temper(self, q: Array, offset: int, beta: float, length: float) -> Array:
        positions = np.arange(offset, offset + q.shape[1])
        factors = 1 + beta * np.log1p(positions // length)
        return q * factors[:, None].astype(np.float32)

    # Mixtures of experts

    def route(self, logits: Array, top_k: int, renormalise: bool) -> tuple[Array, Array]:
        chosen = np.argpartition(-logits, top_k - 1, axis=-1)[:, :top_k]
        picked = np.take_along_axis(logits, chosen, axis=-1)
        among = picked if renormalise else logits
        largest = among.max(axis=-1, keepdims=True)
        total = np.exp(among - largest).sum(axis=-1, keepdims=True)
        return chosen, np.exp(picked - largest) / total

    def experts(
        self,
        x: Array,
        chosen: Array,
        shares: Array,
        gate_up: Weight,
        down: Weight,
        activation: Callable[[Array], Array],
        biases: tuple[Array, Array] | None = None,
    ) -> Array:
        out = np.zeros_like(x)
        for expert in np.unique(chosen):
            tokens, slots = np.nonzero(chosen == expert)
            up, down_bias = (None, None) if biases is None else (b[expert] for b in biases)
            y = activation(self.linear(x[tokens], gate_up.expert(expert), up))
            y = self.linear(y, down.expert(expert), down_bias)
            out[tokens] += shares[tokens, slots, None] * y
        return out

    # The sealed cache

    def seal(self, k: Array, v: Array) -> Array:
        return _native.seal(k, v, self.kv_bits)

    def unseal(self, tiles: Array) -> tuple[Array, Array]:
        return _native.unseal(tiles, self.kv_bits)

    def seal_values(self, v: Array) -> Array:
        return _native.seal(None, v, self.kv_bits)

    def unseal_values(self, tiles: Array) -> Array:
        return _native.unseal_values(tiles, self.kv_bits)

    def to_canonical(self, tiles: Array, k_is_v: bool = False) -> mx.array:
        *k, v, parameters = codec.split_tile(tiles, self.kv_bits, k_is_v)
        heads, n, dim = parameters.shape
        v_codes = _unpacked(self._code_words(v).reshape(heads, n, BLOCK // 8, dim)).swapaxes(3, 4)
        v_codes = _packed(v_codes.reshape(heads, n, BLOCK, dim // 8, 8))

        def by_channel(parameters: Array) -> Array:
            return _halves(parameters).reshape(heads, n, 2, dim).swapaxes(2, 3)

        if k:
            k_codes = self._code_words(k[0]).reshape(heads, n, dim // 8, BLOCK).swapaxes(2, 3)
            v_parameters = _halves(parameters).reshape(heads, n, dim // GROUP, 2, BLOCK)
            v_parameters = v_parameters.transpose(0, 1, 4, 2, 3)
            canonical = mx.array(_joined([k_codes, by_channel(k[1]), v_codes, v_parameters]))
        else:
            canonical = mx.array(_joined([v_codes, by_channel(parameters)]))
        return codec.narrow_tiles(canonical, k_is_v) if self.kv_bits == 3 else canonical

    def from_canonical(self, tiles: mx.array, k_is_v: bool = False) -> Array:
        words = _numpy(codec.widen_tiles(tiles, k_is_v) if self.kv_bits == 3 else tiles)
        *k, v, parameters = codec.split_tile(words, 4, k_is_v)
        heads, n, dim = parameters.shape
        v_codes = _unpacked(v.reshape(heads, n, BLOCK, dim // 8))
        v_codes = _packed(v_codes.reshape(heads, n, BLOCK // 8, 8, dim).swapaxes(3, 4))

        def by_channel(parameters: Array) -> Array:
            return _halves(parameters).reshape(heads, n, dim, 2).swapaxes(2, 3)

        narrowed = _narrowed if self.kv_bits == 3 else np.asarray
        if not k:
            return _joined([narrowed(v_codes), by_channel(parameters)])
        k_codes = k[0].reshape(heads, n, BLOCK, dim // 8).swapaxes(2, 3)
        v_parameters = _halves(parameters).reshape(heads, n, BLOCK, dim // GROUP, 2)
        v_parameters = v_parameters.transpose(0, 1, 3, 4, 2)
        return _joined([narrowed(k_codes), by_channel(k[1]), narrowed(v_codes), v_parameters])

    def _code_words(self, codes: Array) -> Array:
        """Code words as with 4 bits."""
        if self.kv_bits == 4:
            return codes
        return np.concatenate(codec.widen(np.split(codes, 3, axis=-1)), axis=-1)

    def attend(
        self,
        q: Array,
        view: KVView,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: Array | None = None,
        window: int | None = None,
    ) -> Array:
        seen = view.seen(window, q.shape[1])
        keys = self._rule(view)
        return _native.attend(q, seen, None, None, scale, softcap, sinks, window, keys)

    def attend_chunk(
        self,
        q: Array,
        k: Array,
        v: Array,
        view: KVView,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: Array | None = None,
        window: int | None = None,
    ) -> Array:
        seen, keys = view.seen(window), self._rule(view)
        return _native.attend(q, seen, k, v, scale, softcap, sinks, window, keys)

    def attend_dense(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: Array | None = None,
        window: int | None = None,
    ) -> Array:
        return _native.attend(q, None, k, v, scale, softcap, sinks, window, None)

    def _rule(self, view: KVView) -> tuple[Array, Array, Array, int] | None:
        """What the native kernels make K of V by; the tables are one for all layers."""
        if view.keys is None:
            return None
        periods, n_blocks = view.keys.periods, 2 + view.length // BLOCK
        turning = periods[np.isfinite(periods)]
        if self._turns_for is not periods:
            self._turns_for = periods
            self._places = _turns(turning, np.arange(BLOCK))
            self._starts = self._starts[:0]
        if len(self._starts) < n_blocks:
            positions = BLOCK * np.arange(2 * n_blocks) - (BLOCK - SINK)
            self._starts = _turns(turning, np.maximum(positions, 0))
        return view.keys.weight, self._starts, self._places, len(periods)


def _turns(periods: NDArray[np.float32], positions: NDArray[Any]) -> NDArray[np.float32]:
    """Cosines and sines of what RoPE turns by: (positions, 2, periods)."""
    angles = positions[:, None] / periods.astype(np.float64)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


class _Arena:
    """Weights side by side in large blocks, for which numpy asks the system for large pages.

    A token reads every page of the model: with pages of 4 KiB, looking them up costs a tenth of
    its time.
    """

    _BLOCK_BYTES = 1 << 25
    _ALIGNMENT = 64

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def keep(self, x: NDArray[Any]) -> NDArray[Any]:
        """A copy of x."""
        size = -(-x.nbytes // self._ALIGNMENT) * self._ALIGNMENT
        if size > self._free.size:
            # What was copied so far is free now, but MLX and malloc hold on to it.
            mx.clear_cache()
            _native.trim_heap()
            block = np.empty(max(size, self._BLOCK_BYTES) + self._ALIGNMENT, np.uint8)
            self._free = block[-block.ctypes.data % self._ALIGNMENT :]
        room, self._free = self._free[: x.nbytes], self._free[size:]
        copy = room.view(x.dtype).reshape(x.shape)
        copy[...] = x
        return copy


def _numpy(x: mx.array) -> NDArray[Any]:
    """The evaluated array's own memory; bfloat16, which numpy lacks, as its bits in uint16."""
    x = mx.contiguous(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)
    mx.eval(x)
    return np.require(np.asarray(x), requirements=["C", "A"])


def _known(weight: Weight) -> Weight:
    """The same numbers in a form that the native kernels know."""
    if weight.mode == "affine":
        return weight
    if weight.mode == "mxfp4":
        # Powers of two, as they lie in a bfloat16's exponent. Biases are there for all or none.
        exponents = weight.scales.astype(mx.uint16)
        scales = mx.left_shift(exponents, mx.array(7, mx.uint16)).view(mx.bfloat16)
        return replace(weight, scales=scales, biases=mx.zeros_like(scales))
    return Weight(
        mx.dequantize(
            weight.data,
            weight.scales,
            group_size=weight.group_size,
            bits=weight.bits,
            mode=weight.mode,
            dtype=mx.bfloat16,
        )
    )


def _widened(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    """Codes of `bits` bits, lowest first, as bytes."""
    rows = []
    for row in words.reshape(-1, words.shape[-1]):
        codes = np.unpackbits(row.view(np.uint8), bitorder="little").reshape(-1, bits)
        rows.append(np.packbits(codes, axis=-1, bitorder="little").reshape(-1).view(np.uint32))
    return np.stack(rows).reshape(*words.shape[:-1], -1)


def _halves(words: NDArray[np.uint32]) -> NDArray[np.uint16]:
    return np.ascontiguousarray(words).view(np.uint16)


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[np.uint32]:
    """Arrays (heads, n, ...) as words, side by side."""
    flat = [part.reshape(*part.shape[:2], math.prod(part.shape[2:])) for part in parts]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint32) for part in flat], axis=-1)


def _narrowed(codes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Code words (heads, n, ...) of 3 bits: the last quarter of a tile's into the others."""
    quarters = np.split(codes.reshape(*codes.shape[:2], -1), 4, axis=-1)
    return np.concatenate(codec.narrow(quarters), axis=-1)


_SHIFTS = np.arange(0, 32, 4, dtype=np.uint32)


def _unpacked(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    codes: NDArray[np.uint32] = (words[..., None] >> _SHIFTS) & np.uint32(15)
    return codes


def _packed(codes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    words: NDArray[np.uint32] = np.bitwise_or.reduce(codes << _SHIFTS, axis=-1)
    return words
