"""Tensors of a kind that a model cannot have are named."""

import mlx.core as mx
import pytest

from tests.tiny import LLAMA, build_model, llama_weights
from tqchat.kernels import Backend
from tqchat.models.errors import ModelError

LAYER = "model.layers.1"
INTEGERS = [mx.int32, mx.int8, mx.uint8, mx.bool_, mx.uint64, mx.uint32]


def refused(weights: dict[str, mx.array], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        build_model(LLAMA, weights, Backend(mx.float32))
    assert str(error.value).isprintable()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        f"{LAYER}.self_attn.q_proj.weight",
        f"{LAYER}.self_attn.q_proj.bias",
        f"{LAYER}.mlp.down_proj.weight",
    ],
)
def test_integers_are_no_weights(name: str, dtype: mx.Dtype) -> None:
    weights = llama_weights(LLAMA, bias=True)
    weights[name] = weights[name].astype(dtype)
    refused(weights, f"tensor {name} holds {str(dtype).removeprefix('mlx.core.')},")


def quantised(name: str) -> dict[str, mx.array]:
    weights = llama_weights(LLAMA)
    parts = mx.quantize(weights[f"{name}.weight"], 32, 4)
    weights |= {
        f"{name}.{part}": array
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True)
    }
    return weights


@pytest.mark.parametrize("dtype", INTEGERS[:-1], ids=str)
def test_codes_are_words(dtype: mx.Dtype) -> None:
    name = f"{LAYER}.self_attn.q_proj"
    weights = quantised(name)
    weights[f"{name}.weight"] = weights[f"{name}.weight"].astype(dtype)
    refused(weights, f"tensor {name}.weight holds")


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_scales_and_biases_are_floats(part: str) -> None:
    name = f"{LAYER}.mlp.up_proj"
    weights = quantised(name)
    weights[f"{name}.{part}"] = weights[f"{name}.{part}"].astype(mx.uint32)
    refused(weights, f"tensor {name}.{part} holds uint32")


@pytest.mark.parametrize("shape", [(), (0,), (1,), (96, 0), (1, 1, 1)])
@pytest.mark.parametrize("part", ["weight", "scales"])
def test_quantised_tensors_of_other_shapes(part: str, shape: tuple[int, ...]) -> None:
    name = f"{LAYER}.mlp.up_proj"
    weights = quantised(name)
    for other in ("scales", "biases") if part == "scales" else ("weight",):
        dtype = weights[f"{name}.{other}"].dtype
        weights[f"{name}.{other}"] = mx.zeros(shape, dtype)
    refused(weights, f"quantised tensor {name} has shapes")
