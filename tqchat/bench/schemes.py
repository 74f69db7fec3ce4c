"""The ways to keep a KV cache that are compared: which codec, and what stays in 16 bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import mlx.core as mx

from tqchat.bench.caches import NOTHING, SINK_AND_TAIL, TAIL, CodecCache, Kept, int4_cache
from tqchat.engine.cache import KVCache
from tqchat.kernels import Backend
from tqchat.kernels.codecs import CODECS, Codec, Quantizer, State
from tqchat.models.kv import KVLayer


@dataclass(frozen=True)
class Hadamard(Quantizer):
    """Another quantizer after a Hadamard rotation of the channels (QuaRot, arXiv:2404.00456).

    head_dim must be one that `mx.hadamard_transform` takes.
    """

    inner: Quantizer

    def encode(self, x: mx.array) -> State:
        return self.inner.encode(mx.hadamard_transform(x.astype(mx.float32)))

    def decode(self, state: State) -> mx.array:
        return mx.hadamard_transform(self.inner.decode(state))


@dataclass(frozen=True, slots=True)
class Scheme:
    """A codec for what is not kept in 16 bits; `own`: in the program's int4 cache itself."""

    name: str
    codec: Codec
    kept: Kept = SINK_AND_TAIL
    own: bool = False

    def cache(self, backend: Backend, layer: KVLayer, number: int) -> KVCache:
        if self.own:
            return int4_cache(backend, layer, number)
        return CodecCache(backend, layer, self.codec.at_layer(number), self.kept)


PRODUCT = CODECS["product"]
SEED = CODECS["open-tq-metal"]
INT4 = Scheme("int4", PRODUCT, own=True)

_ROTATED = Codec("open-tq-metal, K rotated", Hadamard(SEED.keys), SEED.values)

ORDERING = (
    Scheme("open-tq-metal, no tail", SEED, NOTHING),
    Scheme("open-tq-metal, K rotated, no tail", _ROTATED, NOTHING),
    Scheme("product, no tail", PRODUCT, NOTHING),
    Scheme("product, tail alone", PRODUCT, TAIL),
    INT4,
)
"""All of 5 bits per element; each was closer to fp16 than the one before on SmolLM2."""

CODED = tuple(Scheme(name, codec) for name, codec in CODECS.items() if name != "product")
"""Every other codec, with the program's tail and sink."""


def bits_per_element(codec: Codec, layers: Sequence[KVLayer]) -> float:
    """Mean over a model's layers. Raises ValueError if the codec does not take their head_dim."""
    return fmean(codec.at_layer(n).bits_per_element(kv.head_dim) for n, kv in enumerate(layers))
