"""KV caches for measurement: any codec behind a 16-bit tail and sink, and one that remembers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from tqchat.engine.cache import DenseCache, KVCache, SealedCache
from tqchat.kernels import BLOCK, SINK, TAIL_MAX, TAIL_MIN, Array, Backend, KeysOfValues
from tqchat.kernels.codecs import Codec
from tqchat.models.kv import KVLayer

MakeCache = Callable[[Backend, KVLayer, int], KVCache]
"""The cache of a model's layer, and the layer's number from 0."""


def fp16_cache(backend: Backend, layer: KVLayer, number: int) -> KVCache:
    return DenseCache(backend, layer)


def int4_cache(backend: Backend, layer: KVLayer, number: int) -> KVCache:
    return SealedCache(backend, layer)


def append_random(
    backend: Backend, layers: Sequence[KVLayer], caches: Sequence[KVCache], tokens: int
) -> None:
    """Give every cache `tokens` random tokens more, through its own call."""
    for layer, cache in zip(layers, caches, strict=True):
        shape = (layer.n_kv_heads, tokens, layer.head_dim)
        k, v = (backend.load_vector(mx.random.normal(shape)) for _ in "kv")
        ones = mx.ones((layer.head_dim,))
        keys = KeysOfValues(backend.load_vector(ones), backend.load_table(ones[::2]))
        backend.evaluate(cache.attend(k[:, -1:], k, v, 1.0, keys=keys))


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays in 16 bits: the first `sink` tokens, and the newest.

    Whole blocks are encoded when more than `tail_max` tokens wait, so that `tail_min` or more stay.
    """

    sink: int
    tail_min: int
    tail_max: int

    def n_encoded(self, waiting: int) -> int:
        """How many of so many tokens past the sink and not yet encoded are to be encoded now."""
        return (waiting - self.tail_min) // BLOCK * BLOCK if waiting > self.tail_max else 0


SINK_AND_TAIL = Kept(SINK, TAIL_MIN, TAIL_MAX)
"""The program's own cache."""
TAIL = Kept(0, TAIL_MIN, TAIL_MAX)
NOTHING = Kept(0, 0, BLOCK - 1)


class CodecCache(DenseCache):
    """A cache whose tokens go through a codec as they leave the tail.

    What comes back is held in 16 bits: this says what a codec's error costs, not what it takes.
    """

    def __init__(self, backend: Backend, layer: KVLayer, codec: Codec, kept: Kept) -> None:
        super().__init__(backend, layer)
        self._codec, self._in_16_bits = codec, kept
        self._end = kept.sink

    def _attention(
        self, k: Array, v: Array, sinks: Array | None
    ) -> Callable[[Array, float], Array]:
        n = self._in_16_bits.n_encoded(self.offset - self._end)
        if n:
            start = self._end - self._dropped
            past = slice(start, start + n)
            state = self._codec.encode(mx.array(self._k[:, past]), mx.array(self._v[:, past]))
            for buffer, x in zip((self._k, self._v), self._codec.decode(state), strict=True):
                self._backend.write_tokens(buffer, start, self._backend.load_table(x))
            self._end += n
        return super()._attention(k, v, sinks)


class Witness:
    """Keeps what passes through another cache, as MLX arrays in float32.

    k, v: (n_kv_heads, tokens, head_dim) of all tokens
    q, out: (n_heads, tokens, head_dim) of the last call
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._k: list[mx.array] = []
        self._v: list[mx.array] = []

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
        out = self._cache.attend(q, k, v, scale, sinks, keys)
        self._keep(q, k, v, scale, out)
        return out

    def share(
        self, q: Array, k: Array, v: Array, scale: float, keys: KeysOfValues | None = None
    ) -> tuple[Array, Callable[[Array, float], Array]]:
        out, attend = self._cache.share(q, k, v, scale, keys)
        self._keep(q, k, v, scale, out)
        return out, attend

    def _keep(self, q: Array, k: Array, v: Array, scale: float, out: Array) -> None:
        self.scale = scale
        self.q, self.out = _float32(q), _float32(out)
        self._k.append(_float32(k))
        self._v.append(_float32(v))

    @property
    def k(self) -> mx.array:
        return mx.concatenate(self._k, axis=1)

    @property
    def v(self) -> mx.array:
        return mx.concatenate(self._v, axis=1)


def _float32(x: Array) -> mx.array:
    return mx.array(x).astype(mx.float32)
