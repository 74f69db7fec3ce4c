"""Tiny random models in memory, for tests that need an architecture and no sense."""

from typing import Any

import mlx.core as mx
import numpy as np

from tqchat.kernels import Backend
from tqchat.models.config import Config
from tqchat.models.registry import Model, build
from tqchat.models.weights import Weights

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def llama_weights(config: dict[str, Any], bias: bool = False) -> dict[str, mx.array]:
    """Random float32 weights under Hugging Face's names."""
    rng = np.random.default_rng(7)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        matrices = {
            "self_attn.q_proj": (q_size, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.o_proj": (hidden, q_size),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in matrices.items():
            shapes[f"{layer}.{name}.weight"] = shape
            if bias:
                shapes[f"{layer}.{name}.bias"] = shape[:1]
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    return {
        name: mx.array((rng.normal(size=shape) * 0.15 + (len(shape) == 1)).astype(np.float32))
        for name, shape in shapes.items()
    }


def build_model(config: dict[str, Any], weights: dict[str, mx.array], backend: Backend) -> Model:
    return build(Config("tiny", config), Weights("tiny", weights, backend), backend)
