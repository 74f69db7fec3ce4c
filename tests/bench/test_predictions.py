"""Figures of predictions against float64, and the codec's cache against the program's own."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.folders import write_tiny
from tqchat.bench import caches, layers, predictions
from tqchat.bench.caches import NOTHING, SINK_AND_TAIL, CodecCache, Kept
from tqchat.bench.predictions import FP16, Text
from tqchat.bench.schemes import INT4, PRODUCT, Scheme
from tqchat.engine.events import EngineOptions
from tqchat.engine.loading import LoadedModel, load_path
from tqchat.kernels import Backend
from tqchat.kernels.codecs import CODECS, Codec, Quantizer, State
from tqchat.models.kv import KVLayer

IDS = [(37 * i + i * i // 7) % 200 for i in range(288)]
SCORED_FROM = 160


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_tiny(tmp_path_factory.mktemp("models") / "tiny", head_dim=64)
    return load_path(folder, "tiny", EngineOptions())


def logits(loaded: LoadedModel, make: caches.MakeCache, ids: Sequence[int]) -> NDArray[np.float64]:
    held = predictions.make_caches(loaded.model, loaded.backend, make)
    chunks = [ids[i : i + predictions.CHUNK] for i in range(0, len(ids), predictions.CHUNK)]
    return np.concatenate([np.array(loaded.model(c, held, len(c)), np.float64) for c in chunks])


def test_the_figures_are_those_of_float64(loaded: LoadedModel) -> None:
    scheme = Scheme("3 bits", CODECS["product-3bit"], NOTHING)
    rows = predictions.predictions(
        loaded, {"3 bits": scheme.cache}, [Text("text", IDS)], SCORED_FROM, n_greedy=4
    )
    p, q = (
        x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
        for x in (logits(loaded, make, IDS)[SCORED_FROM:]
                  for make in (caches.fp16_cache, scheme.cache))
    )  # fmt: skip
    exact, coded = rows
    kl = (np.exp(p) * (p - q)).sum(axis=-1).mean()
    assert kl > 1e-4
    assert (exact.kind, exact.kl, exact.same_top1, exact.greedy_run) == (FP16, 0.0, 1.0, 4.0)
    assert coded.kl == pytest.approx(kl, rel=1e-3)
    assert coded.same_top1 == (p.argmax(axis=-1) == q.argmax(axis=-1)).mean()
    for row, x in ((exact, p), (coded, q)):
        nll = -x[np.arange(len(x) - 1), IDS[SCORED_FROM + 1 :]].mean()
        assert row.perplexity == pytest.approx(np.exp(nll), rel=1e-5)


def test_a_greedy_run_ends_where_the_text_differs(loaded: LoadedModel) -> None:
    """With noise for a past, what is said differs at once; with 8 bits it does not."""
    kinds = {
        "noise": Scheme("noise", Codec("noise", Noise(), Noise()), NOTHING).cache,
        "8 bits": Scheme("8 bits", CODECS["product-8bit"]).cache,
    }
    _, noise, eight = predictions.predictions(loaded, kinds, [Text("t", IDS)], SCORED_FROM, 8)
    assert noise.greedy_run < eight.greedy_run == 8


class Noise(Quantizer):
    def encode(self, x: mx.array) -> State:
        return (mx.zeros(x.shape),)

    def decode(self, state: State) -> mx.array:
        return 5 * mx.random.normal(state[0].shape, key=mx.random.key(1))


def test_the_products_codec_is_the_programs_cache(loaded: LoadedModel) -> None:
    """In the codec's cache and in the program's own, K and V come back as the same numbers."""
    coded = Scheme("product", PRODUCT, SINK_AND_TAIL)
    a, b = (logits(loaded, make, IDS) for make in (coded.cache, INT4.cache))
    exact = logits(loaded, caches.fp16_cache, IDS)
    assert np.abs(a - b).max() < 0.05 * np.abs(a - exact).max()


@pytest.mark.parametrize("kept", [NOTHING, SINK_AND_TAIL, Kept(4, 64, 127)])
def test_what_is_kept_in_16_bits_is_as_it_was(kept: Kept) -> None:
    """A codec that forgets everything shows which tokens it was given."""
    codec = Codec("zero", Zero(), Zero())
    cache = CodecCache(Backend(), KVLayer(1, 32), codec, kept)
    one = mx.ones((1, 1, 32))
    n = 300
    for _ in range(n):
        cache.attend(one, one, one, 1.0)
    # Uniform weights: the output is the share of tokens that are still ones.
    out = cache.attend(mx.zeros((1, 1, 32)), one, one, 1.0)[0, 0, 0].item()
    waiting = (n - kept.sink) % 32 if kept is NOTHING else None
    left = round(out * (n + 1)) - 1
    if waiting is not None:
        assert left == waiting
    else:
        assert kept.sink + kept.tail_min <= left <= kept.sink + kept.tail_max


class Zero(Quantizer):
    def encode(self, x: mx.array) -> State:
        return (mx.zeros(x.shape),)

    def decode(self, state: State) -> mx.array:
        return state[0]


def test_layer_by_layer_against_float64(loaded: LoadedModel) -> None:
    scheme = Scheme("mlx-lm", CODECS["mlx-lm"], NOTHING)
    rows = layers.measure(loaded.model, loaded.backend, [scheme], IDS)
    assert [row.layer for row in rows] == [0, 1, 2]
    witnesses = [
        caches.Witness(cache)
        for cache in predictions.make_caches(loaded.model, loaded.backend, caches.fp16_cache)
    ]
    for i in range(0, len(IDS), predictions.CHUNK):
        loaded.model(IDS[i : i + predictions.CHUNK], witnesses)
    for row, w in zip(rows, witnesses, strict=True):
        k, v, q = (np.array(x, np.float64) for x in (w.k, w.v, w.q))
        past = k.shape[1] - q.shape[1]
        ck, cv = (
            np.array(mx.dequantize(*mx.quantize(mx.array(x[:, :past]).astype(mx.float16), 64, 4),
                                   64, 4), np.float64)
            for x in (k, v)
        )  # fmt: skip
        assert row.k_error == pytest.approx(relative(k[:, :past], ck), rel=1e-2)
        assert row.v_error == pytest.approx(relative(v[:, :past], cv), rel=1e-2)
        exact, coded = (
            np.einsum("hqd,hkd->hqk", q, np.repeat(x, 2, axis=0)) for x in (k[:, :past], ck)
        )
        correlations = [
            np.corrcoef(a, b)[0, 1]
            for a, b in zip(exact.reshape(-1, past), coded.reshape(-1, past), strict=True)
        ]
        assert row.score_correlation == pytest.approx(np.mean(correlations), abs=1e-4)
        assert max(row.cosine, row.k_cosine, row.v_cosine) < 1
        assert row.cosine <= max(row.k_cosine, row.v_cosine)
    # The first layer's K and V are the same in both runs but for the coded past.
    assert rows[0].compounded_cosine == pytest.approx(rows[0].cosine, abs=1e-3)


def relative(x: NDArray[np.float64], coded: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(x - coded) / np.linalg.norm(x))
