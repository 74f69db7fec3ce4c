"""Models of a real one's shape with random 4-bit weights, made on the device in seconds.

Speed does not depend on the values, so decoding at a full 128K can be measured without a download
and without an hour of prefill: `fill` gives a cache any length.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import mlx.core as mx

from tqchat.bench import charts
from tqchat.bench.caches import append_random
from tqchat.engine.cache import KVCache, SealedCache
from tqchat.engine.step import CompiledStep
from tqchat.kernels import Backend, Weight, select
from tqchat.models.config import Config
from tqchat.models.registry import Model, architecture, build
from tqchat.models.weights import Weights

GROUP_SIZE, BITS = 64, 4
DECODED = 256

# config.json of meta-llama/Llama-3.1-70B-Instruct and -8B-Instruct, as far as speed depends on it.
_LLAMA_3_1 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
# The same of google/gemma-4-31B-it and -26B-A4B-it.
_GEMMA_4 = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-70b": _LLAMA_3_1
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama-8b": _LLAMA_3_1
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "gemma-4-31b": _GEMMA_4
    | {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
    },
    "gemma-4-26b-a4b": _GEMMA_4
    | {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}


@dataclass(frozen=True, slots=True)
class Synthetic:
    name: str
    config: dict[str, Any]
    model: Model
    backend: Backend
    weights_bytes: int


def synthetic(name: str) -> Synthetic:
    """The model `name` of CONFIGS on the backend for this machine. Raises KeyError."""
    return make(name, CONFIGS[name], select(mx.float16))


def make(name: str, config: dict[str, Any], backend: Backend) -> Synthetic:
    """A model of any family, its weights random."""
    weights = RandomWeights(name, backend)
    model = build(Config(name, config), weights, backend)
    return Synthetic(name, config, model, backend, weights.nbytes)


class RandomWeights(Weights):
    """Whatever is asked for: matrices in 4 bits, all else ones."""

    def __init__(self, name: str, backend: Backend) -> None:
        super().__init__(name, {}, backend)

    def experts(self, prefix: str, parts: dict[str, int], columns: int, n: int) -> Weight:
        return self._load(self._matrix(prefix, sum(parts.values()), columns, (n,)))

    def _take(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        dtypes: tuple[mx.Dtype, ...] = (mx.float16,),
    ) -> mx.array:
        return mx.ones(shape or (), dtypes[0])

    def _bias(self, name: str, rows: int, needed: bool) -> mx.array | None:
        return mx.zeros((rows,), mx.float16) if needed else None

    def _matrix(self, name: str, rows: int, columns: int, experts: tuple[int, ...] = ()) -> Weight:
        return Weight(*_matrix((*experts, rows), columns), GROUP_SIZE, BITS)


def _matrix(rows: tuple[int, ...], columns: int) -> tuple[mx.array, mx.array, mx.array]:
    """Codes, scales and biases, still lazy."""
    # Codes are spread evenly, so this keeps a product about as large as its input.
    scale = columns**-0.5 / 4.6
    shape = (*rows, columns * BITS // 32)
    words = mx.random.randint(-(2**31), 2**31 - 1, shape, dtype=mx.int32).view(mx.uint32)
    scales = mx.random.uniform(0.9 * scale, 1.1 * scale, (*rows, columns // GROUP_SIZE))
    return words, scales.astype(mx.float16), (-7.5 * scales).astype(mx.float16)


def tensors(config: dict[str, Any]) -> dict[str, mx.array]:
    """A checkpoint of `config`, still lazy, under Hugging Face's names."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    tensors = {"model.norm.weight": mx.ones((hidden,), mx.float16)}
    matrices = {"model.embed_tokens": (config["vocab_size"], hidden)}
    matrices["lm_head"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = mx.ones((hidden,), mx.float16)
        matrices |= {
            f"{layer}.self_attn.q_proj": (q_size, hidden),
            f"{layer}.self_attn.k_proj": (kv_size, hidden),
            f"{layer}.self_attn.v_proj": (kv_size, hidden),
            f"{layer}.self_attn.o_proj": (hidden, q_size),
            f"{layer}.mlp.gate_proj": (inner, hidden),
            f"{layer}.mlp.up_proj": (inner, hidden),
            f"{layer}.mlp.down_proj": (hidden, inner),
        }
    for name, (rows, columns) in matrices.items():
        words, scales, biases = _matrix((rows,), columns)
        tensors |= {f"{name}.weight": words, f"{name}.scales": scales, f"{name}.biases": biases}
    return tensors


def fill(synthetic: Synthetic, caches: Sequence[KVCache], tokens: int) -> None:
    """Give every empty cache `tokens` random tokens, through the cache's own call."""
    append_random(synthetic.backend, synthetic.model.shape.kv_layers, caches, tokens)
    mx.clear_cache()


@dataclass(frozen=True, slots=True)
class Row:
    """Decoding at one context: tokens per second (median and mean), bytes in use and grown."""

    context: int
    decode_tps: float
    mean_tps: float
    active_bytes: int
    grown_bytes: int


def measure(synthetic: Synthetic, contexts: Sequence[int]) -> list[Row]:
    """Decode DECODED tokens greedily at each context, sealing as it comes."""
    model, backend = synthetic.model, synthetic.backend

    def filled(context: int) -> list[SealedCache]:
        caches = [SealedCache(backend, layer) for layer in model.shape.kv_layers]
        fill(synthetic, caches, context)
        return caches

    # Kernels are compiled when first used: sealing, and attention outside a compiled step.
    mx.eval(model([1], filled(256)))
    rows = []
    for context in contexts:
        caches = filled(context)
        step = CompiledStep(model, backend, caches)

        def following(token: mx.array, caches: Any = caches, step: Any = step) -> mx.array:
            if step.ready:
                logits = step(token)
            else:
                mx.eval(token)
                logits = model(token, caches)
            return mx.argmax(logits, axis=-1)

        rows.append(_decode(following, context))
        del caches, step, following
        mx.clear_cache()
    return rows


def measure_mlx_lm(
    config: dict[str, Any], contexts: Sequence[int], kv_bits: int | None = None
) -> list[Row]:
    """The same with mlx-lm's model and cache: fp16, or quantised to `kv_bits`.

    Raises ImportError without mlx-lm, and whatever its cache raises.
    """
    family: Any = import_module(f"mlx_lm.models.{config['model_type']}")
    make_cache: Any = import_module("mlx_lm.models.cache").make_prompt_cache
    model = family.Model(family.ModelArgs.from_dict(dict(config)))
    import_module("mlx.nn").quantize(model, GROUP_SIZE, BITS)
    model.load_weights(list(_random_parameters(model).items()))
    for layer in model.model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    known = Config(config["model_type"], config)
    layers = architecture(known).parse(known).kv_layers
    rows = []
    for context in contexts:
        caches: list[Any] = []
        for layer, cache in zip(layers, make_cache(model), strict=True):
            shape = (1, layer.n_kv_heads, context, layer.head_dim)
            k, v = (mx.random.normal(shape).astype(mx.float16) for _ in "kv")
            cache.update_and_fetch(k, v)
            mx.eval(cache.keys, cache.values)
            if kv_bits and layer.window is None:
                cache = cache.to_quantized(group_size=GROUP_SIZE, bits=kv_bits)
                mx.eval(cache.keys, cache.values)
            caches.append(cache)
            del k, v

        def following(token: mx.array, caches: Any = caches) -> mx.array:
            return mx.argmax(model(token[None], cache=caches)[0], axis=-1)

        rows.append(_decode(following, context))
        del caches, following
        mx.clear_cache()
    return rows


def _random_parameters(model: Any) -> dict[str, mx.array]:
    """As RandomWeights has them, for a quantised model of mlx-lm's."""
    parameters: dict[str, mx.array] = {}
    for name, x in import_module("mlx.utils").tree_flatten(model.parameters()):
        if x.dtype == mx.uint32:
            base = name.removesuffix("weight")
            made = _matrix(x.shape[:-1], x.shape[-1] * 32 // BITS)
            parts = ("weight", "scales", "biases")
            parameters |= {f"{base}{part}": y for part, y in zip(parts, made, strict=True)}
        elif name not in parameters and not name.endswith((".scales", ".biases")):
            parameters[name] = mx.ones(x.shape, mx.float16)
    return parameters


def _decode(following: Callable[[mx.array], mx.array], context: int) -> Row:
    """Each step is queued before the token of the last one is read."""
    token = mx.array([1], dtype=mx.uint32)
    for _ in range(3):
        token = following(token)
        mx.eval(token)
    before = mx.get_active_memory()
    times = [time.perf_counter()]
    mx.async_eval(token)  # type: ignore[no-untyped-call]
    for _ in range(DECODED):
        queued = following(token)
        mx.async_eval(queued)  # type: ignore[no-untyped-call]
        token.item()
        token = queued
        times.append(time.perf_counter())
    mx.eval(token)
    steps = [end - start for start, end in pairwise(times)]
    return Row(
        context,
        1 / statistics.median(steps),
        DECODED / (times[-1] - times[0]),
        mx.get_active_memory(),
        mx.get_active_memory() - before,
    )


def report_charts(report: Mapping[str, Any]) -> list[charts.Chart]:
    """Of a report whose "rows" are Rows as dictionaries, by name."""
    lines = {
        name: [(row["context"], row["decode_tps"]) for row in rows]
        for name, rows in report["rows"].items()
    }
    title = f"Decoding a {report['model']} of random weights"
    return [charts.Lines("decode-synthetic", title, "context", "tokens/s", lines, log_x=True)]
