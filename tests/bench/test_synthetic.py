"""Synthetic models: small ones of the families' shapes, built, filled and decoded, and mlx-lm's."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tqchat.bench import synthetic
from tqchat.engine.cache import SealedCache, make_caches
from tqchat.kernels import Backend, select
from tqchat.models.config import Config
from tqchat.models.registry import architecture

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "vocab_size": 256,
}


def small(name: str) -> dict[str, Any]:
    config = synthetic.CONFIGS[name] | SMALL
    if "num_experts" in config:
        config |= {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
    return config


@pytest.mark.parametrize("name", synthetic.CONFIGS)
def test_a_small_one_decodes_numbers(name: str) -> None:
    made = synthetic.make(name, small(name), select(mx.float16))
    caches = make_caches(SealedCache, made.backend, made.model.shape.kv_layers)
    synthetic.fill(made, caches, 1500)
    for _ in range(3):
        logits = np.array(made.model([5], caches))
        assert np.isfinite(logits).all()
        assert logits.std() > 0
    assert {cache.offset for cache in caches} == {1503}


# In 10**9: what the models' cards say.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-8b", 8.03), ("llama-70b", 70.6), ("gemma-4-31b", 30.7), ("gemma-4-26b-a4b", 25.2)],
)
def test_the_shapes_are_the_real_ones(name: str, parameters: float) -> None:
    config = Config(name, synthetic.CONFIGS[name])
    shape = architecture(config).parse(config)
    assert shape.n_parameters / 1e9 == pytest.approx(parameters, rel=3e-3)


def test_mlx_lms_model_decodes_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "DECODED", 2)
    sizes = ("hidden_size", "intermediate_size", "vocab_size", "head_dim", "global_head_dim")
    config = small("gemma-4-26b-a4b") | dict.fromkeys(sizes, 64)
    rows = synthetic.measure_mlx_lm(config, [40])
    assert [row.context for row in rows] == [40]
    assert rows[0].decode_tps > 0


def test_tensors_make_the_same_llama() -> None:
    """As a checkpoint's, under Hugging Face's names."""
    from tests.tiny import build_model

    config = small("llama-8b")
    model = build_model(config, synthetic.tensors(config), Backend(mx.float32))
    assert model.shape.n_parameters > 0
