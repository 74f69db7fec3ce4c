"""Gemma's checkpoints as Hugging Face stores them, and windows as long as the context."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.models.test_families import CASES, both, plain
from tests.tiny import build_model
from tqchat.engine.cache import DenseCache, make_caches
from tqchat.models.checkpoint import read_checkpoint
from tqchat.models.config import Config
from tqchat.models.errors import ModelError
from tqchat.models.registry import Model, architecture

IDS = list(range(70))


def logits(model: Model) -> np.ndarray:
    caches = make_caches(DenseCache, plain(), model.shape.kv_layers)
    return np.array(model(IDS, caches, len(IDS)))


def tensors(name: str) -> dict[str, mx.array]:
    """A family's random weights as mlx-lm names them."""
    _, peer = both(CASES[name], plain())
    from mlx.utils import tree_flatten

    return dict(tree_flatten(peer.parameters()))


def test_gemma_4_as_hugging_face_stores_it(tmp_path: Path) -> None:
    """Experts' gate and up in one, the language part's names, and tensors of other parts."""
    case, known = CASES["gemma4, experts"], tensors("gemma4, experts")
    stored: dict[str, mx.array] = {"model.embed_vision.proj.weight": mx.zeros((2, 2))}
    for name, x in known.items():
        name = name.replace("model.", "model.language_model.", 1)
        if name.endswith("switch_glu.gate_proj.weight"):
            up = known[name.replace("language_model.", "", 1).replace("gate", "up")]
            stored[name.replace("switch_glu.gate_proj.weight", "gate_up_proj")] = mx.concatenate(
                [x, up], axis=1
            )
        elif name.endswith("switch_glu.down_proj.weight"):
            stored[name.replace("switch_glu.down_proj.weight", "down_proj")] = x
        elif not name.endswith("switch_glu.up_proj.weight"):
            stored[name] = x
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored)
    (tmp_path / "config.json").write_text('{"model_type": "gemma4_text"}')
    checkpoint = read_checkpoint(tmp_path)
    ours = logits(build_model(case.config, checkpoint.weights, plain()))
    np.testing.assert_array_equal(ours, logits(build_model(case.config, known, plain())))


def test_what_layers_that_share_have_of_their_own_is_left_out() -> None:
    """Their checkpoints hold K and V for them, which no layer uses."""
    case, known = CASES["gemma4, shared"], tensors("gemma4, shared")
    expected = logits(build_model(case.config, known, plain()))
    extra = {
        name.replace("layers.0", "layers.3"): x
        for name, x in known.items()
        if name.startswith("model.layers.0.self_attn.k") or "layers.0.self_attn.v" in name
    }
    assert len(extra) == 3
    np.testing.assert_array_equal(
        logits(build_model(case.config, known | extra, plain())), expected
    )


def test_a_window_as_long_as_the_context_leaves_rotations_as_they_are() -> None:
    case = CASES["gemma3"]
    config = case.config | {"max_position_embeddings": 48}
    shape = architecture(Config("tiny", config)).parse(Config("tiny", config))
    assert {layer.window for layer in shape.kv_layers} == {None}
    known = tensors("gemma3")
    ours, wide = (
        logits(build_model(case.config | change, known, plain()))
        for change in ({"max_position_embeddings": 48}, {"sliding_window": 4000})
    )
    np.testing.assert_allclose(ours, wide, atol=1e-4)


@pytest.mark.parametrize("missing", ["layers.1.layer_scalar", "router.scale", "per_expert_scale"])
def test_a_missing_tensor_is_named(missing: str) -> None:
    known: dict[str, Any] = {
        name: x for name, x in tensors("gemma4, experts").items() if not name.endswith(missing)
    }
    with pytest.raises(ModelError, match=f"{missing} is missing"):
        build_model(CASES["gemma4, experts"].config, known, plain())
