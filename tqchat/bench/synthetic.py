"""Models of a real one's shape with random 4-bit weights, made on the device in seconds.

Speed does not depend on the values, so decoding at a full 128K can be measured without a download
and without an hour of prefill: `fill` gives a cache any length.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import mlx.core as mx

from tqchat.engine.cache import Int4Cache
from tqchat.engine.step import CompiledStep
from tqchat.kernels import Backend, select
from tqchat.models.config import Config
from tqchat.models.registry import Model, build
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
    config = CONFIGS[name]
    backend = select(mx.float16)
    weights = Weights(name, tensors(config), backend)
    model = build(Config(name, config), weights, backend)
    return Synthetic(name, config, model, backend, weights.nbytes)


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
        # Codes are spread evenly, so this keeps a product about as large as its input.
        scale = columns**-0.5 / 4.6
        words = mx.random.randint(-(2**31), 2**31 - 1, (rows, columns * BITS // 32), dtype=mx.int32)
        scales = mx.random.uniform(0.9 * scale, 1.1 * scale, (rows, columns // GROUP_SIZE))
        tensors[f"{name}.weight"] = words.view(mx.uint32)
        tensors[f"{name}.scales"] = scales.astype(mx.float16)
        tensors[f"{name}.biases"] = (-7.5 * scales).astype(mx.float16)
    return tensors


def fill(synthetic: Synthetic, caches: list[Any], tokens: int) -> None:
    """Give every layer's empty cache `tokens` random tokens, through the cache's own call."""
    c = synthetic.config
    shape = (c["num_key_value_heads"], tokens, c["head_dim"])
    backend = synthetic.backend
    q = backend.zeros((c["num_attention_heads"], 1, c["head_dim"]), backend.dtype)
    for cache in caches:
        k, v = (backend.load_vector(mx.random.normal(shape)) for _ in "kv")
        backend.evaluate(cache.attend(q, k, v, 1.0))
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

    def filled(context: int) -> list[Int4Cache]:
        caches = [
            Int4Cache(backend, model.n_kv_heads, model.head_dim) for _ in range(model.n_layers)
        ]
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
    llama: Any = import_module("mlx_lm.models.llama")
    kv_cache: Any = import_module("mlx_lm.models.cache").KVCache
    model = llama.Model(llama.ModelArgs.from_dict(dict(config)))
    import_module("mlx.nn").quantize(model, GROUP_SIZE, BITS)
    model.load_weights(list(tensors(config).items()))
    for layer in model.model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    rows = []
    for context in contexts:
        caches: list[Any] = []
        for _ in model.layers:
            cache = kv_cache()
            shape = (1, config["num_key_value_heads"], context, config["head_dim"])
            k, v = (mx.random.normal(shape).astype(mx.float16) for _ in "kv")
            cache.update_and_fetch(k, v)
            mx.eval(cache.keys, cache.values)
            if kv_bits:
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
