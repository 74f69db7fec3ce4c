"""A decode step traced once and run with any counts, so that a token costs little of the CPU.

An eager step of an 80-layer model costs some 10 ms of Python and more of MLX's bookkeeping: as
much as a fast GPU needs to compute it. A traced one must not depend on numbers that Python knows:
how many tokens are held reaches the kernels in an array that stays on the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from tqchat.engine.cache import SealedCache
from tqchat.kernels import SINK, TAIL_MAX, Array, Backend, KeysOfValues, KVView
from tqchat.models.registry import Model


class CompiledStep:
    """`model(ids, caches)` for one token, as long as `ready` says so.

    Between steps the caches may be used as always. What is queued must be there before anything
    else reads or writes them: the kernel writes to the tail in place.
    """

    def __init__(self, model: Model, backend: Backend, caches: Sequence[SealedCache]) -> None:
        self._model = model
        self._backend = backend
        self._caches = caches
        # Caches of one window hold as much at all times.
        self._kinds = list({cache.window: cache for cache in caches}.values())
        windows = [cache.window for cache in self._kinds]
        self._kind_of = [windows.index(cache.window) for cache in caches]
        self._step: Any = mx.compile(self._run)
        # Of each kind: n_sink, n_blocks, n_tail with the new token, 0; the new token's position
        self._counts = mx.zeros((len(windows), 8), mx.int32)
        self._one_more = mx.array([0, 0, 1, 0, 1, 0, 0, 0], dtype=mx.int32)
        self._counted: list[tuple[int, int]] = []

    @property
    def ready(self) -> bool:
        """Whether the next token can be taken in by a compiled step."""
        return all(
            (cache._n_sink == SINK or cache._dropped) and cache._n_tail < TAIL_MAX
            for cache in self._kinds
        )

    def __call__(self, ids: mx.array) -> mx.array:
        """Take in one token (1,); returns its logits (1, vocab_size), still lazy."""
        if self._counted != self._sealed():
            self._counts = mx.array(
                [
                    [cache._n_sink, cache._n_blocks, cache._n_tail + 1, 0, cache.offset, 0, 0, 0]
                    for cache in self._kinds
                ],
                dtype=mx.int32,
            )
        buffers = [cache._buffers() for cache in self._caches]
        logits: mx.array
        logits, self._counts = self._step(ids, self._counts, buffers)
        for cache in self._caches:
            cache._n_tail += 1
        self._counted = self._sealed()
        return logits

    def _sealed(self) -> list[tuple[int, int]]:
        """What a step's own count does not cover."""
        return [(cache._n_blocks, cache.offset) for cache in self._kinds]

    def _run(
        self, ids: mx.array, counts: mx.array, buffers: Sequence[tuple[mx.array, ...]]
    ) -> tuple[mx.array, mx.array]:
        # Taken apart once for all layers.
        held = [(counts[kind, :4], counts[kind, 4:5]) for kind in range(len(self._kinds))]
        layers = [
            _Layer(self._backend, layer, *held[kind], cache.window)
            for layer, kind, cache in zip(buffers, self._kind_of, self._caches, strict=True)
        ]
        return self._model(ids, layers), counts + self._one_more


class _Layer:
    """One layer's cache while a step is traced; it holds K and V both."""

    def __init__(
        self,
        backend: Any,
        buffers: tuple[mx.array, ...],
        lengths: mx.array,
        position: mx.array,
        window: int | None,
    ) -> None:
        self._backend = backend
        sink_k, sink_v, tiles, tail_k, tail_v = buffers
        self._view = KVView(sink_k, sink_v, tiles, tail_k, tail_v, 0, 0, 0, lengths)
        self._position = position
        self._window = window

    @property
    def offset(self) -> Any:
        return self._position

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale: float,
        sinks: Array | None = None,
        keys: KeysOfValues | None = None,
    ) -> Array:
        return self._backend.append_and_attend(
            q, k, v, self._view, scale, sinks=sinks, window=self._window
        )

    def share(
        self, q: Array, k: Array, v: Array, scale: float, keys: KeysOfValues | None = None
    ) -> tuple[Array, Callable[[Array, float], Array]]:
        def again(q: Array, scale: float) -> Array:
            # Its queries come of `out`, so the new token is in the tail by then.
            return self._backend.attend(q, self._view, scale, window=self._window)

        out = self.attend(q, k, v, scale)
        return out, again
