"""A Llama in GGUF, told as Hugging Face tells it: config.json's keys and its tensor names.

GGUF's names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#standardized-tensor-names
"""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tqchat.models.errors import ModelError
from tqchat.models.gguf import Header, Metadata

ROPE_FACTORS = "rope_freqs.weight"

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)")
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
# What Meta's Llama 3.1 to 3.3 were trained with; the file holds only the factors they lead to.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_config(path: Path, header: Header) -> dict[str, Any]:
    """config.json's keys from the metadata, except what the RoPE factors add. Raises ModelError."""
    fields = _Fields(path, header.metadata)
    if fields.integer("llama.expert_count", 0):
        raise ModelError(f"{path} is a mixture of experts, which is not supported yet.")
    hidden_size = fields.integer("llama.embedding_length")
    n_heads = fields.integer("llama.attention.head_count")
    if not n_heads:
        raise ModelError(f"{path} says that it has no attention heads. Choose another file.")
    head_dim = fields.integer("llama.attention.key_length", hidden_size // n_heads)
    same = ("llama.attention.value_length", "llama.rope.dimension_count")
    if head_dim % 2 or any(fields.integer(key, head_dim) != head_dim for key in same):
        raise ModelError(f"{path} has heads of a shape that is not supported. Choose another file.")
    by_name = {tensor.name: tensor for tensor in header.tensors}
    if "token_embd.weight" not in by_name:
        raise ModelError(f"{path} lacks the tensor token_embd.weight. Choose another file.")
    config = {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("llama.feed_forward_length"),
        "num_hidden_layers": fields.integer("llama.block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": fields.integer("llama.attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("llama.attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": fields.number("llama.rope.freq_base", 10000.0),
        "max_position_embeddings": fields.integer("llama.context_length"),
        "vocab_size": by_name["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in by_name,
    }
    kind = header.metadata.get("llama.rope.scaling.type", "none")
    if kind != "none":
        factor = fields.number("llama.rope.scaling.factor", 1.0)
        config["rope_scaling"] = {"rope_type": kind, "factor": factor}
    return config | _quantization(header)


def convert(
    path: Path, header: Header, tensors: dict[str, mx.array]
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """The whole config, and the tensors under Hugging Face's names, emptying `tensors`.

    llama.cpp stores the rows of Q and K in the order of interleaved RoPE (channels 2i and 2i + 1
    turn together); they are put back into Hugging Face's (i and i + head_dim / 2). Raises
    ModelError.
    """
    config = read_config(path, header)
    if ROPE_FACTORS in tensors:
        factors = np.array(tensors.pop(ROPE_FACTORS)).ravel().tolist()
        config["rope_scaling"] = _llama3_scaling(path, config, factors)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for name in list(tensors):
        tensor = tensors.pop(name)
        module, _, part = name.rpartition(".")
        kind = module.rpartition(".")[2]
        if kind in heads:
            tensor = _halves_apart(tensor, heads[kind], config["head_dim"])
        weights[f"{_hugging_face_module(module)}.{part}"] = tensor
    return config, weights


def _hugging_face_module(module: str) -> str:
    """What is not known keeps its name; the architecture then says that it is unexpected."""
    layer = _LAYER.fullmatch(module)
    if layer and layer[2] in _INNER:
        return f"model.layers.{layer[1]}.{_INNER[layer[2]]}"
    return _OUTER.get(module, module)


def _halves_apart(rows: mx.array, n_heads: int, head_dim: int) -> mx.array:
    if rows.shape[0] != n_heads * head_dim:
        # The architecture says so when it asks for this tensor by its shape.
        return rows
    pairs = rows.reshape(n_heads, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _quantization(header: Header) -> dict[str, Any]:
    """MLX's `quantization` key: the most common width, and the modules that differ from it."""
    quantised = [tensor for tensor in header.tensors if tensor.type.name in _BITS]
    if not quantised:
        return {}
    bits = Counter(_BITS[tensor.type.name] for tensor in quantised).most_common(1)[0][0]
    others = {
        _hugging_face_module(tensor.name.removesuffix(".weight")): {
            "group_size": 32,
            "bits": _BITS[tensor.type.name],
        }
        for tensor in quantised
        if _BITS[tensor.type.name] != bits
    }
    return {"quantization": {"group_size": 32, "bits": bits, **others}}


def _llama3_scaling(path: Path, config: dict[str, Any], factors: list[float]) -> dict[str, Any]:
    """The `rope_scaling` that leads to these factors, one for each pair of channels."""
    low, high, trained = _LLAMA3_ROPE.values()
    head_dim, base, factor = config["head_dim"], config["rope_theta"], max(factors)
    turns = [trained / (2 * math.pi * base ** (2 * i / head_dim)) for i in range(head_dim // 2)]
    smooth = [min(max((t - low) / (high - low), 0.0), 1.0) for t in turns]
    known = all(f >= 1 for f in factors) and len(factors) == len(smooth)
    if not known or not all(
        math.isclose(1 / f, (1 - s) / factor + s, rel_tol=1e-3)
        for f, s in zip(factors, smooth, strict=True)
    ):
        raise ModelError(
            f"{path} stretches RoPE in a way of its own, which is not supported. Choose the model "
            "in safetensors."
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


class _Fields:
    """Metadata by key, each checked for its type."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self._path = path
        self._metadata = metadata

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._metadata.get(key, default)
        if type(value) is not int or not 0 <= value < 2**31:
            raise ModelError(f"{self._path} has no sound {key} in its metadata. Fetch it again.")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._metadata.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ModelError(f"{self._path} has no sound {key} in its metadata. Fetch it again.")
        return float(value)
