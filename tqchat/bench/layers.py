"""A cache's error layer by layer: where it arises, and what becomes of it over the depth.

The model reads a text with 16 bits and once more with each scheme. The error that a layer adds is
that of the scheme on the 16-bit run's own K and V; what has come together over all layers before
is the difference of the two runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from tqchat.bench.caches import MakeCache, Witness, fp16_cache
from tqchat.bench.predictions import CHUNK, make_caches
from tqchat.bench.progress import Progress
from tqchat.bench.schemes import Scheme
from tqchat.kernels import Backend
from tqchat.models.registry import Model


@dataclass(frozen=True, slots=True)
class LayerError:
    """One scheme at one layer, means over heads and the last CHUNK tokens of the text.

    k_error, v_error: |x - decoded| / |x| over what is encoded
    score_correlation: Pearson's, of a query's scores over what is encoded
    cosine: of attention's output, the layer alone; k_cosine, v_cosine: with K or V alone encoded
    compounded_cosine: of attention's output, every layer before having added its error
    """

    scheme: str
    layer: int
    k_error: float
    v_error: float
    score_correlation: float
    cosine: float
    k_cosine: float
    v_cosine: float
    compounded_cosine: float


def measure(
    model: Model,
    backend: Backend,
    schemes: Sequence[Scheme],
    ids: Sequence[int],
    progress: Progress = lambda share: None,
) -> list[LayerError]:
    """`ids`: the text, of a whole number of chunks, and longer than a scheme's tail."""
    exact = _read(model, backend, fp16_cache, ids)
    rows = []
    for done, scheme in enumerate(schemes):
        progress(done / len(schemes))
        run = _read(model, backend, scheme.cache, ids)
        for layer, (ours, theirs) in enumerate(zip(exact, run, strict=True)):
            rows.append(_row(scheme, layer, ours, cosine(ours.out, theirs.out)))
    progress(1.0)
    return rows


def _read(model: Model, backend: Backend, make: MakeCache, ids: Sequence[int]) -> list[Witness]:
    witnesses = [Witness(cache) for cache in make_caches(model, backend, make)]
    for start in range(0, len(ids), CHUNK):
        mx.eval(model(ids[start : start + CHUNK], witnesses))
    return witnesses


def _row(scheme: Scheme, layer: int, exact: Witness, compounded: float) -> LayerError:
    codec, k, v, q = scheme.codec.at_layer(layer), exact.k, exact.v, exact.q
    sink = scheme.kept.sink
    end = sink + scheme.kept.n_encoded(k.shape[1] - q.shape[1] - sink)
    past = slice(sink, end)
    state = codec.encode(k[:, past], v[:, past])
    coded_k, coded_v = mx.array(k), mx.array(v)
    coded_k[:, past], coded_v[:, past] = codec.decode(state)

    def out(k: mx.array, v: mx.array) -> mx.array:
        return attention(q, k, v, exact.scale)

    exact_out = out(k, v)
    return LayerError(
        scheme.name,
        layer,
        k_error=_relative_error(k[:, past], coded_k[:, past]),
        v_error=_relative_error(v[:, past], coded_v[:, past]),
        score_correlation=correlation(scores(q, k[:, past]), codec.scores(q, state)),
        cosine=cosine(exact_out, out(coded_k, coded_v)),
        k_cosine=cosine(exact_out, out(coded_k, v)),
        v_cosine=cosine(exact_out, out(k, coded_v)),
        compounded_cosine=compounded,
    )


def scores(q: mx.array, k: mx.array) -> mx.array:
    """Not scaled: (n_heads, queries, tokens) of q (n_heads, queries, head_dim)."""
    return q @ mx.repeat(k, len(q) // len(k), axis=0).swapaxes(1, 2)


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """Causal, q (n_heads, tokens, head_dim) being the last tokens of k and v; q's shape."""
    return mx.fast.scaled_dot_product_attention(
        q[None], k[None], v[None], scale=scale, mask="causal"
    )[0]


def cosine(a: mx.array, b: mx.array) -> float:
    """Of vectors along the last axis, mean."""
    x, y = (np.array(z, dtype=np.float64) for z in (a, b))
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return float(((x * y).sum(axis=-1) / np.maximum(lengths, 1e-30)).mean())


def correlation(a: mx.array, b: mx.array) -> float:
    """Pearson's along the last axis, mean."""
    x, y = (np.array(z, dtype=np.float64) for z in (a, b))
    return cosine(x - x.mean(axis=-1, keepdims=True), y - y.mean(axis=-1, keepdims=True))


def _relative_error(x: mx.array, coded: mx.array) -> float:
    exact, other = (np.array(z, dtype=np.float64) for z in (x, coded))
    return float(np.linalg.norm(exact - other) / np.linalg.norm(exact))
