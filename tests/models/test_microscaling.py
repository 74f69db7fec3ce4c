"""MXFP4, MXFP8 and NVFP4 weights as MLX stores them, against MLX; gpt-oss as OpenAI stores it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gpt_oss

from tests.models.test_families import CASES, native, plain
from tests.tiny import build_model
from tqchat.engine.cache import DenseCache, make_caches
from tqchat.engine.loading import _stored_dtype
from tqchat.kernels import Backend, Weight
from tqchat.models.checkpoint import Checkpoint, describe
from tqchat.models.config import Config
from tqchat.models.registry import architecture
from tqchat.plan import weights_bytes

# Group size and bits.
MODES = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
CONFIG = CASES["gpt_oss"].config
IDS = list(range(40))


def peer(mode: str) -> Any:
    mx.random.seed(0)
    model = gpt_oss.Model(gpt_oss.ModelArgs.from_dict(CONFIG))
    group_size, bits = MODES[mode]
    nn.quantize(model, group_size, bits, mode=mode)
    return model


def logits(tensors: dict[str, mx.array], backend: Backend) -> np.ndarray:
    backend.cache_dtype = mx.float32
    model = build_model(CONFIG, tensors, backend)
    caches = make_caches(DenseCache, backend, model.shape.kv_layers)
    return np.array(model(IDS, caches, len(IDS)))


@pytest.mark.parametrize("make", [plain, native])
@pytest.mark.parametrize("mode", MODES)
def test_a_mixture_of_experts_equals_mlx_lms(mode: str, make: Callable[[], Backend]) -> None:
    model = peer(mode)
    ours = logits(dict(tree_flatten(model.parameters())), make())
    expected = np.array(model(mx.array(IDS)[None])[0])
    assert np.linalg.norm(ours - expected) < 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("make", [plain, native])
@pytest.mark.parametrize("mode", MODES)
def test_every_code_is_the_number_that_mlx_reads(mode: str, make: Callable[[], Backend]) -> None:
    group_size, bits = MODES[mode]
    rng = np.random.default_rng(0)
    data = np.concatenate([rng.permutation(256) for _ in range(8)]).astype(np.uint8)
    # Of MXFP8's codes, two are no numbers.
    data[data & 127 == 127] = 0
    words = mx.array(data.view(np.uint32).reshape(4, -1))
    # 2^-20 to 2^20, or positive E4M3.
    low, high = (107, 148) if mode.startswith("mx") else (0, 127)
    shape = (4, words.shape[1] * 32 // bits // group_size)
    scales = mx.array(rng.integers(low, high, shape).astype(np.uint8))
    backend = make()
    weight = backend.load(Weight(words, scales, None, group_size, bits, mode))
    ours = np.array(backend.embed(weight, [0, 1, 2, 3]))
    options = {"group_size": group_size, "bits": bits, "mode": mode, "dtype": mx.float32}
    expected = np.array(mx.dequantize(words, scales, **options))
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(ours, expected)


def test_gpt_oss_as_openai_stores_it() -> None:
    """Rows of gate and up in turns, 16 bytes of codes a group, biases beside the matrices."""
    tensors = dict(tree_flatten(peer("mxfp4").parameters()))
    stored = {name: x for name, x in tensors.items() if ".experts." not in name}

    def blocks(words: mx.array) -> mx.array:
        n, rows, columns = words.shape
        return words.view(mx.uint8).reshape(n, rows, columns // 4, 16)

    for i in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{i}.mlp.experts"
        for part in ("weight", "scales", "bias"):
            gate, up, down = (tensors[f"{prefix}.{p}_proj.{part}"] for p in ("gate", "up", "down"))
            both = mx.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])
            kind = "blocks" if part == "weight" else part
            for name, x in (("gate_up", both), ("down", down)):
                stored[f"{prefix}.{name}_proj_{kind}"] = blocks(x) if part == "weight" else x
    np.testing.assert_array_equal(logits(stored, plain()), logits(tensors, plain()))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_activations_are_of_the_norms_type_where_scales_are_bytes(dtype: mx.Dtype) -> None:
    data, scales = mx.quantize(mx.ones((2, 32)), 32, 4, mode="mxfp4")
    weights = {
        "model.embed_tokens.weight": data,
        "model.embed_tokens.scales": scales,
        "model.norm.weight": mx.ones((32,), dtype),
    }
    checkpoint = Checkpoint(Path(), {}, weights, {}, None, 0)
    assert _stored_dtype(checkpoint) == dtype


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("junk", [{}, {"bits": "four", "group_size": [1]}])
def test_the_formats_are_named_and_planned(tmp_path: Path, mode: str, junk: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | {"quantization": junk | {"mode": mode}})
    )
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"x": mx.zeros((4,), mx.uint8)})
    found = describe(tmp_path)
    assert found.format == mode
    config = Config("tiny", found.config)
    shape = architecture(config).parse(config)
    group_size, bits = MODES[mode]
    # A byte for the scale of each group.
    expected = shape.n_parameters * (bits + 8 / group_size) / 8
    assert weights_bytes(config, shape) == pytest.approx(expected, rel=1e-6)
