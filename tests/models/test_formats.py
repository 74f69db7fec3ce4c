"""Formats of matrices: MLX's widths and groups mixed from module to module, experts as Hugging Face
and as MLX lay them out; and what is said of tensors that a model lacks or should not have.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen2, qwen3_moe

from tests.models.test_families import BASE, EXPERTS, native, plain
from tests.tiny import build_model
from tqchat.engine.cache import DenseCache, make_caches
from tqchat.kernels import Backend
from tqchat.models.errors import ModelError

CONFIG = BASE | EXPERTS | {"model_type": "qwen3_moe", "intermediate_size": 128}
CONFIG |= {"moe_intermediate_size": 128}
FORMATS = list(product((2, 3, 4, 5, 6, 8), (32, 64, 128)))
IDS = list(range(40))


def peer() -> Any:
    mx.random.seed(0)
    return qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(CONFIG))


def tensors(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def logits(weights: dict[str, mx.array], backend: Backend) -> np.ndarray:
    backend.cache_dtype = mx.float32
    model = build_model(CONFIG, weights, backend)
    caches = make_caches(DenseCache, backend, model.shape.kv_layers)
    return np.array(model(IDS, caches, len(IDS)))


def distance(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("make", [plain, native])
def test_widths_and_groups_may_differ_from_module_to_module(make: Callable[[], Backend]) -> None:
    model, seen = peer(), set[tuple[int, int]]()

    def each_its_own(path: str, module: Any) -> bool | dict[str, int]:
        if not hasattr(module, "to_quantized"):
            return False
        # An expert's gate and up are of one format, as converters write them.
        number = len(seen) if not path.endswith("switch_mlp.up_proj") else len(seen) - 1
        bits, group_size = FORMATS[number % len(FORMATS)]
        seen.add((bits, group_size))
        return {"bits": bits, "group_size": group_size}

    nn.quantize(model, class_predicate=each_its_own)
    assert seen == set(FORMATS)
    expected = np.array(model(mx.array(IDS)[None])[0])
    assert distance(logits(tensors(model), make()), expected) < 1e-4


@pytest.mark.parametrize("quantised", [False, True])
def test_experts_may_come_one_by_one(quantised: bool) -> None:
    model = peer()
    if quantised:
        nn.quantize(model, group_size=32, bits=4)
    together = tensors(model)
    apart = {}
    for name, tensor in together.items():
        before, found, after = name.partition(".switch_mlp.")
        if found:
            apart |= {f"{before}.experts.{i}.{after}": x for i, x in enumerate(tensor)}
        else:
            apart[name] = tensor
    assert len(apart) > len(together)
    np.testing.assert_array_equal(logits(apart, plain()), logits(together, plain()))


LAYER = "model.layers.1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{LAYER}.mlp.gate.weight": None}, f"tensor {LAYER}.mlp.gate.weight is missing"),
        ({f"{LAYER}.self_attn.q_norm.weight": None}, "q_norm.weight is missing"),
        ({f"{LAYER}.self_attn.sinks": mx.zeros(4)}, f"unexpected tensor {LAYER}.self_attn.sinks"),
        (
            {f"{LAYER}.mlp.switch_mlp.up_proj.weight": mx.zeros((7, 128, 128))},
            r"has shape \(7, 128, 128\), its config.json asks for \(8, 128, 128\)",
        ),
        (
            {f"{LAYER}.mlp.switch_mlp.up_proj.scales": mx.zeros((8, 128, 5))},
            "switch_mlp.up_proj.weight holds float32",
        ),
    ],
    ids=["missing", "missing norm", "extra", "misshapen", "half quantised"],
)
def test_wrong_tensors_are_named(change: dict[str, mx.array | None], message: str) -> None:
    changed = tensors(peer()) | change
    weights = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises(ModelError, match=message):
        build_model(CONFIG, weights, plain())


def test_a_bias_that_qwen2_needs_is_missed() -> None:
    config = BASE | {"model_type": "qwen2"}
    weights = tensors(qwen2.Model(qwen2.ModelArgs.from_dict(config)))
    build_model(config, weights, plain())
    del weights[f"{LAYER}.self_attn.k_proj.bias"]
    with pytest.raises(ModelError, match=r"k_proj\.bias is missing"):
        build_model(config, weights, plain())
