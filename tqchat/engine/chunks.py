"""A prompt is read a chunk at a time: how large one is, and how a stop is heard within it."""

from collections.abc import Callable
from typing import Any

from tqchat.engine.cache import KVCache
from tqchat.engine.pace import work
from tqchat.kernels import Array, Backend, KeysOfValues
from tqchat.kernels.layout import BLOCK
from tqchat.models.errors import Stopped
from tqchat.models.registry import Shape

PIECE_S = 0.5
"""One layer of a chunk should take no longer. It is one piece of a GPU's work: until it is done the
screen may stand still, no stop is heard, and macOS ends pieces that take several seconds."""

SMALLEST = BLOCK


class ChunkSize:
    """How many tokens to read at a time, `most` wherever that can be.

    What an answer says depends a little on where chunks end, so the size follows the clock only
    where it must.
    """

    def __init__(self, shape: Shape, most: int) -> None:
        self._shape = shape
        self._most = most
        self._rate: float | None = None

    def next(self, start: int, fits: Callable[[int], bool]) -> int:
        """From position `start` on: halved until it is short and `fits` the memory."""
        size = self._most
        while size > SMALLEST and not (self._is_short(start, size) and fits(size)):
            size //= 2
        return size

    def took(self, start: int, size: int, seconds: float) -> None:
        """How long the chunk of the size that `next` said took."""
        self._rate = work(self._shape, start, start + size) / seconds

    def _is_short(self, start: int, size: int) -> bool:
        if self._rate is None:
            return True
        seconds = work(self._shape, start, start + size) / self._rate
        return seconds / self._shape.n_layers <= PIECE_S


class Stoppable:
    """A layer's cache while a chunk is read. Raises Stopped if a stop came before its turn."""

    def __init__(self, cache: KVCache, backend: Backend, stopped: Callable[[], bool]) -> None:
        self._cache = cache
        self._backend = backend
        self._stopped = stopped

    @property
    def offset(self) -> int:
        return self._cache.offset

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale: float,
        sinks: Array | None = None,
        keys: KeysOfValues | None = None,
    ) -> Array:
        self._before()
        out = self._cache.attend(q, k, v, scale, sinks, keys)
        self._backend.evaluate(out)
        return out

    def share(
        self, q: Array, k: Array, v: Array, scale: float, keys: KeysOfValues | None = None
    ) -> tuple[Array, Callable[[Array, float], Array]]:
        self._before()
        shared: tuple[Array, Any] = self._cache.share(q, k, v, scale, keys)
        self._backend.evaluate(shared[0])
        return shared

    def _before(self) -> None:
        if self._stopped():
            raise Stopped
