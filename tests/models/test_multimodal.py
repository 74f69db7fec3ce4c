"""Models that see or hear too: their text part is loaded, and what is left out is said once."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.folders import write_tiny
from tqchat import paths
from tqchat.engine.events import EngineOptions
from tqchat.engine.generation import Session
from tqchat.engine.loading import load_path
from tqchat.models.checkpoint import describe, read_checkpoint
from tqchat.models.errors import ModelError
from tqchat.models.quantize import quantized

LEFT_OUT = "left out"
# How Hugging Face and MLX call the parts, by version and converter.
LAYOUTS = {
    "new": ("model.language_model.", "lm_head.", "model.vision_tower."),
    "old": ("language_model.model.", "language_model.lm_head.", "vision_tower."),
    "flat": ("model.", "lm_head.", "visual."),
}


def wrapped(tmp_path: Path, layout: str) -> tuple[Path, Path]:
    """A tiny text model's folder, and one of the same as a part of a larger model."""
    text = write_tiny(tmp_path / "text")
    whole = write_tiny(tmp_path / "whole")
    body, head, vision = LAYOUTS[layout]
    loaded = mx.load(str(text / "model.safetensors"))
    tensors = {}
    for name, tensor in loaded.items():
        start, rest = name.split(".", 1)
        tensors[(body if start == "model" else head) + rest] = tensor
    tensors |= {
        f"{vision}patch_embed.weight": mx.zeros((8, 3, 2, 2)),
        "multi_modal_projector.linear.weight": mx.zeros((64, 8)),
    }
    mx.save_safetensors(str(whole / "model.safetensors"), tensors, metadata={"format": "mlx"})
    config = json.loads((text / "config.json").read_text())
    vision_config = {"hidden_size": 8, "num_hidden_layers": 1, "model_type": "pixtral"}
    if layout == "flat":
        config |= {"vision_config": vision_config}
    else:
        config = {
            "model_type": "mistral3",
            "eos_token_id": config["eos_token_id"],
            "text_config": config,
            "vision_config": vision_config,
        }
    (whole / "config.json").write_text(json.dumps(config))
    return text, whole


def logits(folder: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    loaded = load_path(folder, folder.name, EngineOptions("fp16"))
    return np.array(Session(loaded).feed(list(range(40)))), loaded.info.notes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_text_part_is_loaded_and_the_rest_said(tmp_path: Path, layout: str) -> None:
    text, whole = wrapped(tmp_path, layout)
    expected, silent = logits(text)
    ours, notes = logits(whole)
    np.testing.assert_array_equal(ours, expected)
    assert not any(LEFT_OUT in note for note in silent)
    assert sum(LEFT_OUT in note for note in notes) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_text_part_counts(tmp_path: Path, layout: str) -> None:
    text, whole = wrapped(tmp_path, layout)
    assert describe(whole).weights_bytes == describe(text).weights_bytes
    assert describe(whole).config["model_type"] == "llama"


def test_a_quantised_copy_holds_the_text_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path)
    _, whole = wrapped(tmp_path, "new")
    made = quantized(whole, "whole", 4, lambda progress: None, lambda: False)
    assert not any("vision" in name for name in mx.load(str(next(made.glob("*.safetensors")))))
    assert "model.embed_tokens.scales" in read_checkpoint(made).weights
    assert any(LEFT_OUT in note for note in logits(made)[1])


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    _, whole = wrapped(tmp_path, "new")
    twice = {"language_model.model.norm.weight": mx.ones(64)}
    mx.save_safetensors(str(whole / "model-00001-of-00001.safetensors"), twice)
    with pytest.raises(ModelError, match="in another shard too"):
        read_checkpoint(whole)
