"""Models of a real one's shape with random 4-bit weights, made on the device in seconds.

Speed does not depend on the values, so decoding at a full 128K can be measured without a download
and without an hour of prefill: `fill` gives a cache any length.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from tqchat.kernels import Backend, select
from tqchat.models.config import Config
from tqchat.models.layers import Weights
from tqchat.models.registry import Model, build

GROUP_SIZE, BITS = 64, 4

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
