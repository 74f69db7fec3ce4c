"""The KV cache of one layer: sealed int4 blocks with a 16-bit tail and sink, or plain 16 bits.

Buffers grow in steps and are written in place: MLX gives an array's memory to its update only if
nothing else still refers to it, so what a chunk has read is computed before it is overwritten.
"""

from typing import Protocol

import mlx.core as mx

from tqchat.kernels import BLOCK, SINK, TAIL_MAX, TAIL_MIN, Array, Backend, KVView, tile_words
from tqchat.kernels.layout import MAX_DECODE_TOKENS, TAIL_CAPACITY, tile_bytes

GROWTH_TOKENS = 256


class KVCache(Protocol):
    """What the engine asks of a layer's cache; `offset` and `attend` are for the model."""

    @property
    def offset(self) -> int: ...
    def attend(self, q: Array, k: Array, v: Array, scale: float) -> Array: ...
    def trim(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        ...

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next token can be taken in while the last one is still being computed.

        MLX copies a buffer that work under way still reads when it is written.
        """
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that the tokens held take."""
        ...

    @property
    def nbytes_allocated(self) -> int: ...
    @property
    def nbytes_fp16(self) -> int:
        """Bytes that the same tokens would take in 16 bits."""
        ...


def _grown(backend: Backend, buffer: Array, capacity: int, dtype: mx.Dtype) -> Array:
    """A copy of `buffer` with `capacity` entries along axis 1, the new ones zero."""
    heads, size, width = buffer.shape
    new = backend.zeros((heads, capacity, width), dtype)
    new[:, :size] = buffer
    return new


def _next_capacity(needed: int, step: int) -> int:
    """Room for `needed` entries and a sixteenth more, in whole steps."""
    return -(-(needed + needed // 16) // step) * step


class Int4Cache:
    """`layout`'s int4 cache of one layer; see there for what lies where."""

    def __init__(self, backend: Backend, n_kv_heads: int, head_dim: int) -> None:
        self._backend = backend
        self._head_dim = head_dim
        self._n_kv_heads = n_kv_heads
        dtype = backend.cache_dtype
        self._sink_k = backend.zeros((n_kv_heads, SINK, head_dim), dtype)
        self._sink_v = backend.zeros((n_kv_heads, SINK, head_dim), dtype)
        self._tail_k = backend.zeros((n_kv_heads, TAIL_CAPACITY, head_dim), dtype)
        self._tail_v = backend.zeros((n_kv_heads, TAIL_CAPACITY, head_dim), dtype)
        self._tiles = backend.zeros((n_kv_heads, 0, tile_words(head_dim)), mx.uint32)
        self._n_sink = self._n_blocks = self._n_tail = 0

    @property
    def offset(self) -> int:
        return self._n_sink + BLOCK * self._n_blocks + self._n_tail

    def attend(self, q: Array, k: Array, v: Array, scale: float) -> Array:
        if k.shape[1] <= MAX_DECODE_TOKENS:
            self._append(k, v)
            return self._backend.attend(q, self._view(), scale)
        out = self._backend.attend_chunk(q, k, v, self._view(), scale)
        self._backend.evaluate(out)
        self._append(k, v)
        self._backend.evaluate(*self._buffers())
        return out

    def _buffers(self) -> tuple[Array, Array, Array, Array, Array]:
        return (self._sink_k, self._sink_v, self._tiles, self._tail_k, self._tail_v)

    def _view(self) -> KVView:
        return KVView(*self._buffers(), self._n_sink, self._n_blocks, self._n_tail)

    def _append(self, k: Array, v: Array) -> None:
        taken = min(SINK - self._n_sink, k.shape[1])
        if taken:
            # One at a time: in MLX an assignment to all of an array makes it a view of the source,
            # which would keep a whole chunk's K and V.
            for i in range(taken):
                at = slice(self._n_sink + i, self._n_sink + i + 1)
                self._sink_k[:, at] = k[:, i : i + 1]
                self._sink_v[:, at] = v[:, i : i + 1]
            self._n_sink += taken
            k, v = k[:, taken:], v[:, taken:]
        added = k.shape[1]
        total = self._n_tail + added
        if total > TAIL_MAX:
            n_seal = (total - TAIL_MIN) // BLOCK
            old = min(self._n_tail, n_seal * BLOCK)
            new = n_seal * BLOCK - old
            self._seal(
                self._backend.concatenate_tokens([self._tail_k[:, :old], k[:, :new]]),
                self._backend.concatenate_tokens([self._tail_v[:, :old], v[:, :new]]),
            )
            k, v = k[:, new:], v[:, new:]
            kept = self._n_tail - old
            if kept:
                self._write_tail(
                    0, self._tail_k[:, old : old + kept], self._tail_v[:, old : old + kept]
                )
            self._n_tail = kept
        if k.shape[1]:
            self._write_tail(self._n_tail, k, v)
            self._n_tail += k.shape[1]

    def _write_tail(self, start: int, k: Array, v: Array) -> None:
        self._backend.write_tokens(self._tail_k, start, k)
        self._backend.write_tokens(self._tail_v, start, v)

    def _seal(self, k: Array, v: Array) -> None:
        self._append_tiles(self._backend.seal(k, v))

    def _append_tiles(self, tiles: Array) -> None:
        end = self._n_blocks + tiles.shape[1]
        self._reserve(end)
        self._tiles[:, self._n_blocks : end] = tiles
        self._n_blocks = end

    def _reserve(self, n_blocks: int) -> None:
        if n_blocks > self._tiles.shape[1]:
            capacity = _next_capacity(n_blocks, GROWTH_TOKENS // BLOCK)
            self._tiles = _grown(self._backend, self._tiles, capacity, mx.uint32)

    def trim(self, length: int) -> None:
        """What is left of a sealed block goes back to the tail, as its codes give it."""
        length = min(length, self.offset)
        sealed_end = self._n_sink + BLOCK * self._n_blocks
        if length >= sealed_end:
            self._n_tail = length - sealed_end
        elif length <= SINK:
            self._n_sink, self._n_blocks, self._n_tail = length, 0, 0
        else:
            self._n_blocks, self._n_tail = divmod(length - SINK, BLOCK)
            if self._n_tail:
                block = self._tiles[:, self._n_blocks : self._n_blocks + 1]
                k, v = self._backend.unseal(block)
                self._write_tail(0, k[:, : self._n_tail], v[:, : self._n_tail])
        self._backend.evaluate(*self._buffers())

    # What is saved, and taken up again: in canonical order, as MLX arrays

    @property
    def n_blocks(self) -> int:
        return self._n_blocks

    def blocks(self, start: int, stop: int) -> mx.array:
        """Sealed blocks: (n_kv_heads, stop - start, tile_words)."""
        tiles: mx.array = self._backend.to_canonical(self._tiles[:, start:stop])
        return tiles

    def sink(self) -> tuple[mx.array, mx.array]:
        """K and V of the first tokens: (n_kv_heads, up to SINK, head_dim), 16 bits."""
        sink = slice(0, self._n_sink)
        return mx.array(self._sink_k[:, sink]), mx.array(self._sink_v[:, sink])

    def tail(self) -> tuple[mx.array, mx.array]:
        """K and V of the newest tokens, as `sink`."""
        tail = slice(0, self._n_tail)
        return mx.array(self._tail_k[:, tail]), mx.array(self._tail_v[:, tail])

    def restore_sink(self, k: mx.array, v: mx.array, n_blocks: int) -> None:
        """Begin anew with this sink and room for `n_blocks`; blocks come next, then the tail."""
        self._n_sink = self._n_blocks = self._n_tail = 0
        self._append(self._backend.load_table(k), self._backend.load_table(v))
        self._reserve(n_blocks)

    def restore_blocks(self, tiles: mx.array) -> None:
        self._append_tiles(self._backend.from_canonical(tiles))
        self._backend.evaluate(self._tiles)

    def restore_tail(self, k: mx.array, v: mx.array) -> None:
        self._append(self._backend.load_table(k), self._backend.load_table(v))
        self._backend.evaluate(*self._buffers())

    @property
    def may_run_ahead(self) -> bool:
        """The tail is small enough to be copied, the tiles are not: those change when sealing."""
        return self._n_tail < TAIL_MAX

    @property
    def nbytes(self) -> int:
        tokens_16bit = self._n_sink + self._n_tail
        sealed = self._n_kv_heads * self._n_blocks * tile_bytes(self._head_dim)
        return sealed + tokens_16bit * self._token_bytes_fp16

    @property
    def nbytes_allocated(self) -> int:
        return sum(int(buffer.nbytes) for buffer in self._buffers())

    @property
    def nbytes_fp16(self) -> int:
        return self.offset * self._token_bytes_fp16

    @property
    def _token_bytes_fp16(self) -> int:
        return 4 * self._n_kv_heads * self._head_dim


class DenseCache:
    """K and V as they come, in the backend's cache type: the yardstick."""

    def __init__(self, backend: Backend, n_kv_heads: int, head_dim: int) -> None:
        self._backend = backend
        self._width = n_kv_heads * head_dim
        self._k = backend.zeros((n_kv_heads, 0, head_dim), backend.cache_dtype)
        self._v = backend.zeros((n_kv_heads, 0, head_dim), backend.cache_dtype)
        self._length = 0

    @property
    def offset(self) -> int:
        return self._length

    def attend(self, q: Array, k: Array, v: Array, scale: float) -> Array:
        end = self._length + k.shape[1]
        if end > self._k.shape[1]:
            capacity, dtype = _next_capacity(end, GROWTH_TOKENS), self._backend.cache_dtype
            self._k = _grown(self._backend, self._k, capacity, dtype)
            self._v = _grown(self._backend, self._v, capacity, dtype)
        self._backend.write_tokens(self._k, self._length, k)
        self._backend.write_tokens(self._v, self._length, v)
        self._length = end
        return self._backend.attend_dense(q, self._k[:, :end], self._v[:, :end], scale)

    def trim(self, length: int) -> None:
        self._length = min(length, self._length)

    @property
    def may_run_ahead(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return 2 * self._length * self._width * int(self._backend.cache_dtype.size)

    @property
    def nbytes_allocated(self) -> int:
        return int(self._k.nbytes) + int(self._v.nbytes)

    @property
    def nbytes_fp16(self) -> int:
        return 4 * self._length * self._width
