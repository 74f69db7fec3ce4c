"""The KV cache of one layer: sealed blocks with a 16-bit tail and sink, or plain 16 bits.

A layer with a sliding window keeps what its next token sees and some more, so that a conversation
can be taken back a little without reading it anew.

Buffers grow in steps and are written in place: MLX gives an array's memory to its update only if
nothing else still refers to it, so what a chunk has read is computed before it is overwritten.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import mlx.core as mx

from tqchat.kernels import (
    BLOCK,
    SINK,
    TAIL_MAX,
    TAIL_MIN,
    Array,
    Backend,
    KeysOfValues,
    KVView,
    tile_words,
)
from tqchat.kernels.layout import MAX_DECODE_TOKENS, TAIL_CAPACITY, tile_bytes
from tqchat.models.kv import KVLayer

GROWTH_TOKENS = 256
GROWTH_SHARE = 16
"""A buffer that grows gets room for this part of what it needs more, in steps of GROWTH_TOKENS."""

REWIND_BYTES = 4 << 20
"""Of sealed blocks that a layer keeps past its window."""


class KVCache(Protocol):
    """What the engine asks of a layer's cache; `offset` and `attend` are for the model."""

    @property
    def offset(self) -> int: ...
    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale: float,
        sinks: Array | None = None,
        keys: KeysOfValues | None = None,
    ) -> Array: ...
    def share(
        self, q: Array, k: Array, v: Array, scale: float, keys: KeysOfValues | None = None
    ) -> tuple[Array, Callable[[Array, float], Array]]: ...
    def trim(self, length: int) -> None:
        """Forget all but the first `length` tokens: 0, or at least `trimmable_to`."""
        ...

    @property
    def trimmable_to(self) -> int:
        """The fewest tokens that can be kept: what a window has passed is no longer there."""
        ...

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in one go, without a copy for every step on the way."""
        ...

    def checkpoint(self) -> Callable[[], None]:
        """What puts the cache back to how it is now, if only one chunk is taken in meanwhile."""
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


def make_caches(
    kind: Callable[[Backend, KVLayer], KVCache], backend: Backend, layers: Sequence[KVLayer]
) -> list[KVCache]:
    """An empty cache, SealedCache or DenseCache, for each of `layers`."""
    return [kind(backend, layer) for layer in layers]


def stored(layer: KVLayer, backend: Backend) -> KVLayer:
    """The layer as a SealedCache on this backend keeps it: perhaps K and V both after all."""
    return replace(layer, k_is_v=layer.k_is_v and backend.derives_keys)


def window_tokens(n_kv_heads: int, head_dim: int, window: int) -> int:
    """Tokens that a layer with a sliding window keeps, in whole blocks."""
    seen = -(-(window - 1) // BLOCK)
    return BLOCK * (seen + REWIND_BYTES // (n_kv_heads * tile_bytes(head_dim)))


def _grown(backend: Backend, buffer: Array, capacity: int, dtype: mx.Dtype) -> Array:
    """A copy of `buffer` with `capacity` entries along axis 1, the new ones zero."""
    heads, size, width = buffer.shape
    new = backend.zeros((heads, capacity, width), dtype)
    new[:, :size] = buffer
    return new


def next_capacity(needed: int, step: int) -> int:
    """Room for `needed` entries and GROWTH_SHARE's part more, in whole steps."""
    return -(-(needed + needed // GROWTH_SHARE) // step) * step


class SealedCache:
    """`layout`'s cache of one layer, with codes of its backend's `kv_bits`.

    With a `window`, blocks that have gone by are left out at the front, and the sink with them.
    A layer that is `k_is_v` has V alone, and K of no channels, if the backend can make K of V;
    every call then needs `keys`.
    """

    def __init__(self, backend: Backend, layer: KVLayer) -> None:
        n_kv_heads, head_dim, window = layer.n_kv_heads, layer.head_dim, layer.window
        self._backend = backend
        self._head_dim = head_dim
        self._n_kv_heads = n_kv_heads
        self._window = window
        self._k_is_v = stored(layer, backend).k_is_v
        self._kept_blocks = window_tokens(n_kv_heads, head_dim, window) // BLOCK if window else 0
        dtype, k_dim = backend.cache_dtype, 0 if self._k_is_v else head_dim
        self._sink_k = backend.zeros((n_kv_heads, SINK, k_dim), dtype)
        self._sink_v = backend.zeros((n_kv_heads, SINK, head_dim), dtype)
        self._tail_k = backend.zeros((n_kv_heads, TAIL_CAPACITY, k_dim), dtype)
        self._tail_v = backend.zeros((n_kv_heads, TAIL_CAPACITY, head_dim), dtype)
        self._tile_words = tile_words(head_dim, backend.kv_bits, self._k_is_v)
        self._tiles = backend.zeros((n_kv_heads, 0, self._tile_words), mx.uint32)
        # Tokens left out at the front, then those held.
        self._dropped = self._n_sink = self._n_blocks = self._n_tail = 0

    @property
    def window(self) -> int | None:
        return self._window

    @property
    def offset(self) -> int:
        return self._dropped + self._n_held

    @property
    def _n_held(self) -> int:
        return self._n_sink + BLOCK * self._n_blocks + self._n_tail

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale: float,
        sinks: Array | None = None,
        keys: KeysOfValues | None = None,
    ) -> Array:
        backend, window = self._backend, self._window
        if k.shape[1] <= MAX_DECODE_TOKENS:
            self._append(k, v)
            return backend.attend(q, self._view(keys), scale, sinks=sinks, window=window)
        out = backend.attend_chunk(q, k, v, self._view(keys), scale, sinks=sinks, window=window)
        self._take_in_chunk(k, v, out)
        return out

    def share(
        self, q: Array, k: Array, v: Array, scale: float, keys: KeysOfValues | None = None
    ) -> tuple[Array, Callable[[Array, float], Array]]:
        backend, window = self._backend, self._window
        if k.shape[1] <= MAX_DECODE_TOKENS:
            self._append(k, v)
            view = self._view(keys)

            def step(q: Array, scale: float) -> Array:
                return backend.attend(q, view, scale, window=window)

            return step(q, scale), step
        all_k, all_v = backend.gather(self._view(keys).seen(window), k, v)

        def chunk(q: Array, scale: float) -> Array:
            return backend.attend_dense(q, all_k, all_v, scale, window=window)

        out = chunk(q, scale)
        self._take_in_chunk(k, v, out)
        return out, chunk

    def _take_in_chunk(self, k: Array, v: Array, out: Array) -> None:
        """`out` has read the buffers that are written now."""
        self._backend.evaluate(out)
        self._append(k, v)
        self._backend.evaluate(*self._buffers())

    def _buffers(self) -> tuple[Array, Array, Array, Array, Array]:
        return (self._sink_k, self._sink_v, self._tiles, self._tail_k, self._tail_v)

    def _view(self, keys: KeysOfValues | None) -> KVView:
        counts = (self._n_sink, self._n_blocks, self._n_tail)
        return KVView(*self._buffers(), *counts, keys=keys if self._k_is_v else None)

    def _append(self, k: Array, v: Array) -> None:
        if self._k_is_v:
            k = k[..., :0]
        taken = 0 if self._dropped else min(SINK - self._n_sink, k.shape[1])
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
        if not self._k_is_v:
            self._backend.write_tokens(self._tail_k, start, k)
        self._backend.write_tokens(self._tail_v, start, v)

    def _seal(self, k: Array, v: Array) -> None:
        backend = self._backend
        self._append_tiles(backend.seal_values(v) if self._k_is_v else backend.seal(k, v))

    def _unseal(self, tiles: Array) -> tuple[Array, Array]:
        if self._k_is_v:
            v = self._backend.unseal_values(tiles)
            return v[..., :0], v
        return self._backend.unseal(tiles)

    def _append_tiles(self, tiles: Array) -> None:
        n_blocks = self._n_blocks + tiles.shape[1]
        if self._window and n_blocks > self._kept_blocks + GROWTH_TOKENS // BLOCK:
            tiles = self._drop(n_blocks - self._kept_blocks, tiles)
        end = self._n_blocks + tiles.shape[1]
        self._reserve(end)
        self._tiles[:, self._n_blocks : end] = tiles
        self._n_blocks = end

    def _drop(self, n_blocks: int, tiles: Array) -> Array:
        """Leave out the sink and the oldest blocks, those held before `tiles`; what is left."""
        self._dropped += self._n_sink + BLOCK * n_blocks
        self._n_sink = 0
        gone = min(n_blocks, self._n_blocks)
        left = self._tiles[:, gone : self._n_blocks]
        self._n_blocks -= gone
        capacity = self._kept_blocks + GROWTH_TOKENS // BLOCK
        shape = (self._n_kv_heads, capacity, self._tile_words)
        self._tiles = self._backend.zeros(shape, mx.uint32)
        self._tiles[:, : self._n_blocks] = left
        return tiles[:, n_blocks - gone :]

    def reserve(self, length: int) -> None:
        if not self._window:
            self._reserve((length - SINK - TAIL_MIN) // BLOCK)
            self._backend.evaluate(self._tiles)

    def _reserve(self, n_blocks: int) -> None:
        if n_blocks > self._tiles.shape[1]:
            capacity = next_capacity(n_blocks, GROWTH_TOKENS // BLOCK)
            self._tiles = _grown(self._backend, self._tiles, capacity, mx.uint32)

    @property
    def trimmable_to(self) -> int:
        return self._dropped + self._window - 1 if self._window and self._dropped else 0

    def trim(self, length: int) -> None:
        """What is left of a sealed block goes back to the tail, as its codes give it."""
        length = min(length, self.offset) - self._dropped
        sink = 0 if self._dropped else SINK
        sealed_end = self._n_sink + BLOCK * self._n_blocks
        if length < 0:
            self._dropped = self._n_sink = self._n_blocks = self._n_tail = 0
        elif length >= sealed_end:
            self._n_tail = length - sealed_end
        elif length <= sink:
            self._n_sink, self._n_blocks, self._n_tail = length, 0, 0
        else:
            self._n_blocks, self._n_tail = divmod(length - sink, BLOCK)
            if self._n_tail:
                block = self._tiles[:, self._n_blocks : self._n_blocks + 1]
                k, v = self._unseal(block)
                self._write_tail(0, k[:, : self._n_tail], v[:, : self._n_tail])
        self._backend.evaluate(*self._buffers())

    def checkpoint(self) -> Callable[[], None]:
        counts = (self._dropped, self._n_sink, self._n_blocks, self._n_tail)
        tail = self.tail()
        # Without a window nothing leaves them, and to hold them while they grow takes them twice.
        tiles = self._tiles if self._window else None

        def go_back() -> None:
            self._dropped, self._n_sink, self._n_blocks, self._n_tail = counts
            if tiles is not None:
                self._tiles = tiles
            self._write_tail(0, *map(self._backend.load_table, tail))
            self._backend.evaluate(*self._buffers())

        return go_back

    # What is saved, and taken up again: in canonical order, as MLX arrays

    @property
    def dropped(self) -> int:
        """Tokens that are no longer held; the sealed blocks follow them, without a sink."""
        return self._dropped

    @property
    def n_blocks(self) -> int:
        return self._n_blocks

    def blocks(self, start: int, stop: int) -> mx.array:
        """Sealed blocks: (n_kv_heads, stop - start, tile_words)."""
        tiles: mx.array = self._backend.to_canonical(self._tiles[:, start:stop], self._k_is_v)
        return tiles

    def sink(self) -> tuple[mx.array, mx.array]:
        """K and V of the first tokens: (n_kv_heads, up to SINK, head_dim), 16 bits.

        K has no channels where V alone is held.
        """
        sink = slice(0, self._n_sink)
        return mx.array(self._sink_k[:, sink]), mx.array(self._sink_v[:, sink])

    def tail(self) -> tuple[mx.array, mx.array]:
        """K and V of the newest tokens, as `sink`."""
        tail = slice(0, self._n_tail)
        return mx.array(self._tail_k[:, tail]), mx.array(self._tail_v[:, tail])

    def restore_sink(self, k: mx.array, v: mx.array, n_blocks: int, dropped: int = 0) -> None:
        """Begin anew with this sink and room for `n_blocks`; blocks come next, then the tail."""
        self._n_sink = self._n_blocks = self._n_tail = 0
        self._dropped = dropped
        self._append(self._backend.load_table(k), self._backend.load_table(v))
        self._reserve(n_blocks)

    def restore_blocks(self, tiles: mx.array) -> None:
        self._append_tiles(self._backend.from_canonical(tiles, self._k_is_v))
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
        sealed = 4 * self._n_kv_heads * self._n_blocks * self._tile_words
        return sealed + tokens_16bit * self._token_bytes_fp16 // (2 if self._k_is_v else 1)

    @property
    def nbytes_allocated(self) -> int:
        return sum(int(buffer.nbytes) for buffer in self._buffers())

    @property
    def nbytes_fp16(self) -> int:
        return self._n_held * self._token_bytes_fp16

    @property
    def _token_bytes_fp16(self) -> int:
        return 4 * self._n_kv_heads * self._head_dim


class DenseCache:
    """K and V as they come, in the backend's cache type: the yardstick."""

    def __init__(self, backend: Backend, layer: KVLayer) -> None:
        n_kv_heads, head_dim, window = layer.n_kv_heads, layer.head_dim, layer.window
        self._backend = backend
        self._width = n_kv_heads * head_dim
        self._window = window
        self._kept = window_tokens(n_kv_heads, head_dim, window) if window else 0
        self._k = backend.zeros((n_kv_heads, 0, head_dim), backend.cache_dtype)
        self._v = backend.zeros((n_kv_heads, 0, head_dim), backend.cache_dtype)
        self._dropped = self._length = 0

    @property
    def window(self) -> int | None:
        return self._window

    @property
    def offset(self) -> int:
        return self._dropped + self._length

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale: float,
        sinks: Array | None = None,
        keys: KeysOfValues | None = None,
    ) -> Array:
        return self._attention(k, v, sinks)(q, scale)

    def share(
        self, q: Array, k: Array, v: Array, scale: float, keys: KeysOfValues | None = None
    ) -> tuple[Array, Callable[[Array, float], Array]]:
        attend = self._attention(k, v, None)
        return attend(q, scale), attend

    def _attention(
        self, k: Array, v: Array, sinks: Array | None
    ) -> Callable[[Array, float], Array]:
        """Take in K and V; returns attention on what their queries see."""
        backend, window = self._backend, self._window
        first = max(0, self._length - window + 1) if window else 0
        end = self._length + k.shape[1]
        self._reserve(end)
        backend.write_tokens(self._k, self._length, k)
        backend.write_tokens(self._v, self._length, v)
        self._length = end
        seen_k, seen_v = self._k[:, first:end], self._v[:, first:end]
        if window and end > self._kept + GROWTH_TOKENS:
            self._drop(end - self._kept)
        return lambda q, scale: backend.attend_dense(
            q, seen_k, seen_v, scale, sinks=sinks, window=window
        )

    def reserve(self, length: int) -> None:
        if not self._window:
            self._reserve(length)
            self._backend.evaluate(self._k, self._v)

    def _reserve(self, length: int) -> None:
        if length > self._k.shape[1]:
            capacity, dtype = next_capacity(length, GROWTH_TOKENS), self._backend.cache_dtype
            self._k = _grown(self._backend, self._k, capacity, dtype)
            self._v = _grown(self._backend, self._v, capacity, dtype)

    def _drop(self, n: int) -> None:
        self._dropped += n
        held = slice(n, self._length)
        self._length -= n
        dtype = self._backend.cache_dtype
        capacity = next_capacity(self._length, GROWTH_TOKENS)
        self._k = _grown(self._backend, self._k[:, held], capacity, dtype)
        self._v = _grown(self._backend, self._v[:, held], capacity, dtype)

    @property
    def trimmable_to(self) -> int:
        return self._dropped + self._window - 1 if self._window and self._dropped else 0

    def trim(self, length: int) -> None:
        self._length = min(length, self.offset) - self._dropped
        if self._length < 0:
            self._dropped = self._length = 0

    def checkpoint(self) -> Callable[[], None]:
        counts = (self._dropped, self._length)
        buffers = (self._k, self._v) if self._window else None

        def go_back() -> None:
            self._dropped, self._length = counts
            if buffers is not None:
                self._k, self._v = buffers

        return go_back

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
