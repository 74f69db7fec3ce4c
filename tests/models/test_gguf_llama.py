"""GGUF told as Hugging Face tells it, against mlx-lm and arithmetic."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.models import gguf_file as g
from tqchat.models.checkpoint import Checkpoint, describe, read_checkpoint
from tqchat.models.errors import ModelError


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Checkpoint:
    return read_checkpoint(smollm2_gguf)


def test_config_of_smollm2(smollm2: Checkpoint) -> None:
    """Against config.json of HuggingFaceTB/SmolLM2-135M-Instruct, as published."""
    expected = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    assert {key: smollm2.config[key] for key in expected} == expected
    assert smollm2.config["rms_norm_eps"] == pytest.approx(1e-5)
    assert smollm2.weights_bytes == sum(w.nbytes for w in smollm2.weights.values())


def test_mlx_lm_reads_sense_from_the_converted_weights(tmp_path: Path, smollm2: Checkpoint) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), smollm2.weights, {"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps(smollm2.config))
    peer, _ = load_model(tmp_path)
    # In float32, which is fast on a CPU.
    peer.set_dtype(mx.float32)
    assert smollm2.gguf_metadata is not None
    tokens = smollm2.gguf_metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in smollm2.gguf_metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()

    ids = tokenizer.encode("The capital of France is").ids
    assert tokenizer.decode([int(peer(mx.array([ids]))[0, -1].argmax())]) == " Paris"

    # Which needs to know who stands where: 0.7 nats a token, and 6.3 with Q and K in llama.cpp's
    # order of rows, in which the model still finds Paris.
    words = " green table seven river quiet stone paper window cloud engine"
    ids = tokenizer.encode(3 * words).ids
    assert len(ids) == 30
    logits = peer(mx.array([ids]))[0, :-1]
    losses = nn.losses.cross_entropy(logits, mx.array(ids[1:]))
    assert losses[-10:].mean().item() < 1.5

    folder = read_checkpoint(tmp_path)
    assert folder.config == smollm2.config
    assert folder.weights_bytes == smollm2.weights_bytes
    assert folder.weights.keys() == smollm2.weights.keys()
    for name, w in folder.weights.items():
        assert mx.array_equal(w, smollm2.weights[name]), name


def pairs_together(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """As llama.cpp writes Q and K: channel i of the first half next to i of the second."""
    heads = np.split(rows, n_heads)
    return np.concatenate([np.stack(np.split(h, 2), axis=1).reshape(h.shape) for h in heads])


def float_llama(**metadata: tuple[int, Any]) -> tuple[g.GGUF, dict[str, np.ndarray]]:
    """A float32 file, and the rows of its Q and K in Hugging Face's order."""
    rng = np.random.default_rng(5)
    file = g.tiny_llama()
    values = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, (_, shape, _) in file.tensors.items()
    }
    values["blk.0.attn_q.bias"] = rng.normal(size=64).astype(np.float32)
    heads = {"blk.0.attn_q.weight": 2, "blk.0.attn_k.weight": 1, "blk.0.attn_q.bias": 2}
    for name, value in values.items():
        stored = pairs_together(value, heads[name]) if name in heads else value
        file.tensors[name] = g.float_tensor(stored)
    for key, value in metadata.items():
        file.metadata[key.replace("__", ".")] = value
    return file, values


def test_rows_of_q_and_k_are_in_hugging_faces_order(tmp_path: Path) -> None:
    file, values = float_llama()
    weights = read_checkpoint(file.write(tmp_path / "x.gguf")).weights
    names = {
        "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
        "blk.0.attn_q.bias": "model.layers.0.self_attn.q_proj.bias",
        "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
        "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
        "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
        "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    assert weights.keys() == set(names.values())
    for name, hugging_face in names.items():
        assert (np.array(weights[hugging_face]) == values[name]).all(), name


def test_widths_that_differ_are_told_as_mlx_tells_them(tmp_path: Path) -> None:
    file = g.tiny_llama("Q4_0")
    file.tensors["output.weight"] = g.random_tensor("Q8_0", (128, 64))
    file.tensors["blk.0.attn_v.weight"] = g.random_tensor("Q8_0", (32, 64))
    path = file.write(tmp_path / "x.gguf")
    eight = {"group_size": 32, "bits": 8}
    config = read_checkpoint(path).config
    assert config["tie_word_embeddings"] is False
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "lm_head": eight,
        "model.layers.0.self_attn.v_proj": eight,
    }
    assert describe(path).format == "Q4_0"


def llama3_factors(head_dim: int, base: float, factor: float) -> np.ndarray:
    """What Llama 3.1's published code divides each frequency by (low 1, high 4, 8,192 tokens)."""
    frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
    lengths = 2 * np.pi / frequencies
    smooth = (8192 / lengths - 1) / (4 - 1)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    new = np.where(lengths > 8192, frequencies / factor, frequencies)
    between = (lengths >= 8192 / 4) & (lengths <= 8192)
    return frequencies / np.where(between, blended, new)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_factors_become_its_scaling(tmp_path: Path, factor: float) -> None:
    file, _ = float_llama(llama__rope__freq_base=(g.F32, 500000.0))
    file.tensors["rope_freqs.weight"] = g.float_tensor(llama3_factors(32, 500000.0, factor))
    checkpoint = read_checkpoint(file.write(tmp_path / "x.gguf"))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in checkpoint.weights)


@pytest.mark.parametrize("factors", [[1.5] * 16, [0.0] * 16, [float("nan")] * 16, [1.0] * 15])
def test_other_rope_factors_are_refused(tmp_path: Path, factors: list[float]) -> None:
    file, _ = float_llama()
    file.tensors["rope_freqs.weight"] = g.float_tensor(np.array(factors))
    with pytest.raises(ModelError, match="stretches RoPE"):
        read_checkpoint(file.write(tmp_path / "x.gguf"))


def test_linear_rope_scaling(tmp_path: Path) -> None:
    file, _ = float_llama(
        llama__rope__scaling__type=(g.STRING, "linear"),
        llama__rope__scaling__factor=(g.F32, 4.0),
    )
    config = read_checkpoint(file.write(tmp_path / "x.gguf")).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__architecture": (g.STRING, "bert")}, "'bert' is not supported"),
        ({"general__architecture": (g.U32, 7)}, "7 is not supported"),
        ({"llama__expert_count": (g.U32, 8)}, "mixture of experts"),
        ({"llama__attention__head_count": (g.U32, 0)}, "no attention heads"),
        ({"llama__attention__head_count": (g.ARRAY, (g.U32, [4, 4]))}, "head_count"),
        ({"llama__rope__dimension_count": (g.U32, 8)}, "heads of a shape"),
        ({"llama__attention__key_length": (g.U32, 15)}, "heads of a shape"),
        ({"llama__context_length": (g.STRING, "long")}, "llama.context_length"),
        ({"llama__rope__freq_base": (g.F32, float("nan"))}, "llama.rope.freq_base"),
    ],
)
def test_metadata_that_cannot_be(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    file, _ = float_llama(**metadata)
    path = file.write(tmp_path / "x.gguf")
    for read in (read_checkpoint, describe):
        with pytest.raises(ModelError, match=message):
            read(path)


def test_an_embedding_is_needed(tmp_path: Path) -> None:
    file, _ = float_llama()
    del file.tensors["token_embd.weight"]
    with pytest.raises(ModelError, match="token_embd"):
        read_checkpoint(file.write(tmp_path / "x.gguf"))
