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
from tqchat.bench.schemes import INT4, Scheme, bits_per_element
from tqchat.engine.loading import LoadedModel
from tqchat.kernels import Backend
from tqchat.kernels.codecs import CODECS, Codec
from tqchat.models.config import Config
from tqchat.models.errors import ModelError
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
SYNTHETIC_TOKENS, SYNTHETIC_QUERIES = 512, 8
TIMED_TOKENS = 4096
DEPTHS = (32, 80)
SEED = 1

# A narrow model with the shape of a Llama's heads; its depth is what matters.
SHARP = 3.0
"""The spread of its attention's scores: random weights would look everywhere alike."""
_STACK = {
    "model_type": "llama",
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "tie_word_embeddings": True,
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
    bits, model_bits: per element, with Llama 70B's head_dim and with the model's
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
    model_bits: dict[str, float]

    def mean(self, scheme: str, of: str) -> float:
        return fmean(getattr(row, of) for row in self.layers[scheme])

    def effect(self, shape: Shape, codec: str, scale: float) -> ScaleEffect:
        return next(
            row
            for row in self.scales
            if (row.shape, row.codec, row.scale) == (shape.name, codec, scale)
        )


def measure(loaded: LoadedModel, text: Text, console: Console) -> Evidence:
    """`text`: longer than LAYER_TOKENS. Progress goes to `console`. Raises ModelError."""
    model, backend = loaded.model, loaded.backend
    try:
        model_bits = {n: bits_per_element(CODECS[n], model.shape.kv_layers) for n in NAMES}
    except ValueError as error:
        raise ModelError(
            f"{loaded.info.name}: not every codec takes its head_dim. Choose another model."
        ) from error
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
        bits={name: CODECS[name].bits_per_element(LLAMA_70B.head_dim) for name in NAMES},
        model_bits=model_bits,
    )


def _scales(progress: Progress) -> list[ScaleEffect]:
    """Every codec on both shapes, with both scales on the same activations."""
    rows = []
    for shape in (LLAMA_70B, GEMMA_4):
        q, k, v = activations(shape, SYNTHETIC_TOKENS, SYNTHETIC_QUERIES, SEED)
        for name in SYNTHETIC:
            rows += _scale_effects(shape, CODECS[name], q, k, v)
            progress(len(rows) / (2 * len(SCALES) * len(SYNTHETIC)))
    return rows


SCALES = (LLAMA_70B.scale, GEMMA_4.scale)


def _scale_effects(
    shape: Shape, codec: Codec, q: mx.array, k: mx.array, v: mx.array
) -> list[ScaleEffect]:
    state = codec.encode(k, v)
    exact, coded = layers.scores(q, k), codec.scores(q, state)
    error = np.array(coded - exact, dtype=np.float64)
    rms = float(np.sqrt((error**2).mean()))
    values = mx.repeat(v, len(q) // len(k), axis=0)
    rows = []
    for scale in SCALES:
        out = mx.softmax(exact * scale, axis=-1) @ values
        coded_out = codec.values.mix(mx.softmax(coded * scale, axis=-1), state[1])
        rows.append(ScaleEffect(shape.name, codec.name, scale, scale * rms, cosine(out, coded_out)))
    return rows


def _stack(backend: Backend, n_layers: int) -> list[LayerError]:
    """QJL on a model of so many random layers."""
    name, config = f"{n_layers} random layers", _STACK | {"num_hidden_layers": n_layers}
    model = build(Config(name, config), Weights(name, _random_layers(n_layers), backend), backend)
    ids = np.random.default_rng(SEED).integers(model.vocab_size, size=LAYER_TOKENS).tolist()
    return layers.measure(model, backend, [Scheme("qjl", CODECS["qjl"], NOTHING)], ids)


def _random_layers(n_layers: int) -> dict[str, mx.array]:
    """A checkpoint of _STACK whose products are about as large as their inputs."""
    rng = np.random.default_rng(SEED)
    hidden, inner, vocab = (256, 512, 512)
    matrices: dict[str, tuple[int, int, float]] = {"model.embed_tokens": (vocab, hidden, 1.0)}
    norms = ["model.norm"]
    for i in range(n_layers):
        layer = f"model.layers.{i}"
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        matrices |= {
            f"{layer}.self_attn.q_proj": (256, hidden, SHARP * hidden**-0.5),
            f"{layer}.self_attn.k_proj": (128, hidden, hidden**-0.5),
            f"{layer}.self_attn.v_proj": (128, hidden, hidden**-0.5),
            f"{layer}.self_attn.o_proj": (hidden, 256, 256**-0.5),
            f"{layer}.mlp.gate_proj": (inner, hidden, hidden**-0.5),
            f"{layer}.mlp.up_proj": (inner, hidden, hidden**-0.5),
            f"{layer}.mlp.down_proj": (hidden, inner, inner**-0.5),
        }
    tensors = {f"{name}.weight": mx.ones((hidden,), mx.float16) for name in norms}
    for name, (rows, columns, size) in matrices.items():
        values = size * rng.standard_normal((rows, columns), dtype=np.float32)
        tensors[f"{name}.weight"] = mx.array(values.astype(np.float16))
    return tensors


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
