"""What is measured to judge Open-TQ-Metal's claims: on a model, and on what is made up.

With everything coded, as there: the newest tokens too.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

import mlx.core as mx
import numpy as np
from rich.console import Console

from tqchat.bench import layers, predictions
from tqchat.bench.activations import GEMMA_4, LLAMA_70B, Shape, activations
from tqchat.bench.caches import NOTHING
from tqchat.bench.layers import LayerError, attention, cosine
from tqchat.bench.predictions import FP16, Prediction, Text
from tqchat.bench.progress import Progress, steps
from tqchat.bench.schemes import INT4, Scheme
from tqchat.bench.synthetic import tensors
from tqchat.engine.loading import LoadedModel
from tqchat.kernels import Backend
from tqchat.kernels.codecs import CODECS, Codec
from tqchat.models.config import Config
from tqchat.models.registry import build
from tqchat.models.weights import Weights

NAMES = (
    "open-tq-metal", "product", "mlx-lm", "polarquant-5", "qjl",
    "turboquant-2", "turboquant-3", "turboquant-4",
)  # fmt: skip
SCHEMES = tuple(Scheme(name, CODECS[name], NOTHING) for name in NAMES)
SYNTHETIC = ("open-tq-metal", "polarquant-5", "turboquant-4", "qjl")

LAYER_TOKENS = 320
SCORED_FROM = 256
SYNTHETIC_TOKENS, SYNTHETIC_QUERIES = 512, 32
TIMED_TOKENS = 4096
DEPTHS = (32, 80)
SEED = 1

# A narrow model with the shape of a Llama's heads; its depth is what matters.
_STACK = {
    "model_type": "llama",
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class ScaleEffect:
    """One codec on one shape's activations at one attention scale.

    score_error: root mean square, of what goes into the softmax; cosine: of attention's output
    """

    shape: str
    codec: str
    scale: float
    score_error: float
    cosine: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """`layers`: by scheme, in order; `stacks`: QJL's at random models' layers, by their number.

    seconds: of one layer's decode attention on the encoded form, Llama 70B's shape
    """

    model: str
    backend: str
    on_metal: bool
    n_layers: int
    predictions: dict[str, Prediction]
    layers: dict[str, list[LayerError]]
    scales: list[ScaleEffect]
    stacks: dict[int, list[LayerError]]
    seconds: dict[str, float]
    bits: dict[str, float]

    def mean(self, scheme: str, of: str) -> float:
        return fmean(getattr(row, of) for row in self.layers[scheme])

    def effect(self, shape: Shape, codec: str, scale: float) -> ScaleEffect:
        return next(
            row
            for row in self.scales
            if (row.shape, row.codec, row.scale) == (shape.name, codec, scale)
        )


def measure(loaded: LoadedModel, text: Text, console: Console) -> Evidence:
    """`text`: longer than LAYER_TOKENS. Progress goes to `console`."""
    model, backend = loaded.model, loaded.backend
    with steps(console, "predictions", "layers", "shapes", "depths", "times") as progress:
        kinds = {scheme.name: scheme.cache for scheme in (*SCHEMES, INT4)}
        predicted = predictions.predictions(loaded, kinds, [text], SCORED_FROM, 32, progress[0])
        errors = layers.measure(model, backend, SCHEMES, text.ids[:LAYER_TOKENS], progress[1])
        scales = _scales(progress[2])
        stacks = {}
        for done, depth in enumerate(DEPTHS):
            stacks[depth] = _stack(backend, depth)
            progress[3]((done + 1) / len(DEPTHS))
        seconds = _seconds(progress[4])
    return Evidence(
        model=loaded.info.name,
        backend=loaded.info.backend,
        on_metal=mx.metal.is_available() and mx.default_device().type == mx.gpu,
        n_layers=len(model.shape.kv_layers),
        predictions={row.kind: row for row in predicted},
        layers={s.name: [row for row in errors if row.scheme == s.name] for s in SCHEMES},
        scales=scales,
        stacks=stacks,
        seconds=seconds,
        bits={name: CODECS[name].bits_per_element(LLAMA_70B.head_dim) for name in CODECS},
    )


def _scales(progress: Progress) -> list[ScaleEffect]:
    """Every codec on both shapes, with both scales on the same activations."""
    rows = []
    for shape in (LLAMA_70B, GEMMA_4):
        q, k, v = activations(shape, SYNTHETIC_TOKENS, SYNTHETIC_QUERIES, SEED)
        for name in SYNTHETIC:
            rows += [_scale_effect(shape, CODECS[name], q, k, v, scale) for scale in SCALES]
            progress(len(rows) / (4 * len(SYNTHETIC)))
    return rows


SCALES = (LLAMA_70B.scale, GEMMA_4.scale)


def _scale_effect(
    shape: Shape, codec: Codec, q: mx.array, k: mx.array, v: mx.array, scale: float
) -> ScaleEffect:
    state = codec.encode(k, v)
    exact = layers.scores(q, k)
    error = scale * (np.array(codec.scores(q, state)) - np.array(exact))
    weights = mx.softmax(exact * scale, axis=-1)
    group = len(q) // len(k)
    out = weights @ mx.repeat(v, group, axis=0)
    rms = float(np.sqrt((error.astype(np.float64) ** 2).mean()))
    return ScaleEffect(
        shape.name, codec.name, scale, rms, cosine(out, codec.attend(q, state, scale))
    )


def _stack(backend: Backend, n_layers: int) -> list[LayerError]:
    """QJL on a model of so many random layers."""
    config = _STACK | {"num_hidden_layers": n_layers}
    mx.random.seed(SEED)
    name = f"{n_layers} random layers"
    model = build(Config(name, config), Weights(name, tensors(config), backend), backend)
    ids = [(7919 * i) % model.vocab_size for i in range(LAYER_TOKENS)]
    return layers.measure(model, backend, [Scheme("qjl", CODECS["qjl"], NOTHING)], ids)


def _seconds(progress: Progress) -> dict[str, float]:
    """Of one query token's attention on each codec's encoded form, the median of several."""
    q, k, v = activations(LLAMA_70B, TIMED_TOKENS, 1, SEED)
    times: dict[str, float] = {}
    for name in NAMES:
        state = CODECS[name].encode(k, v)
        times[name] = _timed(partial(CODECS[name].attend, q, state, LLAMA_70B.scale))
        progress(len(times) / len(NAMES))
    k, v = k.astype(mx.float16), v.astype(mx.float16)
    half = q.astype(mx.float16)
    times[FP16] = _timed(partial(attention, half, k, v, LLAMA_70B.scale))
    return times


def _timed(run: Callable[[], mx.array]) -> float:
    times = []
    for _ in range(4):
        start = time.perf_counter()
        mx.eval(run())
        times.append(time.perf_counter() - start)
    return median(times[1:])
