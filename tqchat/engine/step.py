"""A decode step traced once and run with any counts, so that a token costs little of the CPU.

An eager step of an 80-layer model costs some 10 ms of Python and more of MLX's bookkeeping: as
much as a fast GPU needs to compute it. A traced one must not depend on numbers that Python knows:
how many tokens are held reaches the kernels in an array that stays on the device.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from tqchat.engine.cache import Int4Cache
from tqchat.kernels import SINK, TAIL_MAX, Array, Backend, KVView
from tqchat.models.registry import Model


class CompiledStep:
    """`model(ids, caches)` for one token, as long as `ready` says so.

    Between steps the caches may be used as always. What is queued must be there before anything
    else reads or writes them: the kernel writes to the tail in place.
    """

    def __init__(self, model: Model, backend: Backend, caches: Sequence[Int4Cache]) -> None:
        self._model = model
        self._backend = backend
        self._caches = caches
        self._step: Any = mx.compile(self._run)
        # n_sink, n_blocks, n_tail with the new token, 0; the new token's position
        self._counts = mx.zeros((8,), mx.int32)
        self._one_more = mx.array([0, 0, 1, 0, 1, 0, 0, 0], dtype=mx.int32)
        self._counted = (-1, -1)

    @property
    def ready(self) -> bool:
        """Whether the next token can be taken in by a compiled step."""
        cache = self._caches[0]
        return cache._n_sink == SINK and cache._n_tail < TAIL_MAX

    def __call__(self, ids: mx.array) -> mx.array:
        """Take in one token (1,); returns its logits (1, vocab_size), still lazy."""
        first = self._caches[0]
        if self._counted != (first._n_blocks, first.offset):
            held = [first._n_sink, first._n_blocks, first._n_tail + 1, 0, first.offset, 0, 0, 0]
            self._counts = mx.array(held, dtype=mx.int32)
        buffers = [cache._buffers() for cache in self._caches]
        logits: mx.array
        logits, self._counts = self._step(ids, self._counts, buffers)
        for cache in self._caches:
            cache._n_tail += 1
        self._counted = (first._n_blocks, first.offset)
        return logits

    def _run(
        self, ids: mx.array, counts: mx.array, buffers: Sequence[tuple[mx.array, ...]]
    ) -> tuple[mx.array, mx.array]:
        layers = [_Layer(self._backend, layer, counts) for layer in buffers]
        return self._model(ids, layers), counts + self._one_more


class _Layer:
    """One layer's cache while a step is traced."""

    def __init__(self, backend: Any, buffers: tuple[mx.array, ...], counts: mx.array) -> None:
        self._backend = backend
        sink_k, sink_v, tiles, tail_k, tail_v = buffers
        self._view = KVView(sink_k, sink_v, tiles, tail_k, tail_v, 0, 0, 0, counts[:4])
        self._position = counts[4:5]

    @property
    def offset(self) -> Any:
        return self._position

    def attend(self, q: Array, k: Array, v: Array, scale: float) -> Array:
        return self._backend.append_and_attend(q, k, v, self._view, scale)
