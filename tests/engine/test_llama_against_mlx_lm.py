"""Llama's logits equal mlx-lm's on the same random weights, float32 throughout."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama as peer
from mlx_lm.models.cache import make_prompt_cache

from tests.tiny import LLAMA, build_model, llama_weights
from tqchat.engine.cache import DenseCache
from tqchat.kernels import Backend

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "llama3 scaling": {"rope_scaling": LLAMA3_SCALING},
    "linear scaling": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "no grouping": {"num_key_value_heads": 4},
}


def peer_logits(config: dict[str, Any], weights: dict[str, mx.array], ids: list[int]) -> Any:
    model = peer.Model(peer.ModelArgs.from_dict(config))
    model.load_weights(list(weights.items()))
    return model(mx.array(ids)[None], cache=make_prompt_cache(model))[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_mlx_lms(variant: str) -> None:
    config = {**LLAMA, **VARIANTS[variant]}
    weights = llama_weights(config, bias=variant == "biases")
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], 100).tolist()
    backend = Backend(mx.float32, cache_dtype=mx.float32)
    model = build_model(config, weights, backend)
    caches = [DenseCache(backend, model.n_kv_heads, model.head_dim) for _ in range(model.n_layers)]
    ours = [model(ids[:40], caches, n_logits=40), model(ids[40:80], caches, n_logits=40)]
    ours += [model([token], caches) for token in ids[80:]]
    expected = np.array(peer_logits(config, weights, ids))
    error = np.linalg.norm(np.array(mx.concatenate(ours)) - expected, axis=1)
    assert (error < 1e-4 * np.linalg.norm(expected, axis=1)).all()


def test_quantised_logits_equal_mlx_lms() -> None:
    config = {**LLAMA, "hidden_size": 64, "quantization": {"group_size": 32, "bits": 4}}
    model = peer.Model(peer.ModelArgs.from_dict(config))
    nn.quantize(model, group_size=32, bits=4)
    from mlx.utils import tree_flatten

    weights = dict(tree_flatten(model.parameters()))
    backend = Backend(mx.float32, cache_dtype=mx.float32)
    ours = build_model(config, weights, backend)
    caches = [DenseCache(backend, ours.n_kv_heads, ours.head_dim) for _ in range(ours.n_layers)]
    ids = list(range(50))
    expected = np.array(model(mx.array(ids)[None])[0])
    error = np.linalg.norm(np.array(ours(ids, caches, n_logits=50)) - expected, axis=1)
    assert (error < 1e-4 * np.linalg.norm(expected, axis=1)).all()
