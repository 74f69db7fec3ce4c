"""What a config.json of a stranger's may hold: an architecture, or one line that says why not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import gguf_file as g
from tests.tiny import LLAMA
from tqchat.cli import main
from tqchat.models.checkpoint import read_checkpoint
from tqchat.models.config import Config
from tqchat.models.errors import ModelError
from tqchat.models.registry import architecture

INFINITY, NAN, HUGE = float("inf"), float("nan"), 10**400
NO_NUMBERS = ["1", [1.0], {}, True, 0, -5, INFINITY, NAN, HUGE, 1e300, 1e-300]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
LONG = {"original_max_position_embeddings": 4096, "max_position_embeddings": 8192}
SMOLLM3 = {"model_type": "smollm3"}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
GEMMA3 = {"model_type": "gemma3_text"}
GEMMA4 = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
DAMAGED: list[tuple[dict[str, Any], str]] = [
    *(({"num_hidden_layers": n}, "num_hidden_layers") for n in (0, 1025, 2**31 - 1, "4")),
    *(({"rope_scaling": YARN | {key: x}}, key) for key in [*YARN][1:] for x in NO_NUMBERS),
    *(({"rope_scaling": YARN | {"beta_fast": x}}, "beta_fast") for x in NO_NUMBERS),
    *(({"rope_scaling": YARN | {"attention_factor": x}}, "attention_factor") for x in NO_NUMBERS),
    ({"rope_scaling": YARN | {"factor": 1e30}}, "float32's range"),
    ({"rope_scaling": YARN, "rope_theta": 0.5}, "rope_theta above 1"),
    *(
        ({"rope_scaling": LONGROPE | {"long_factor": x}} | LONG, "long_factor")
        for x in (None, "1", [1.0] * 15, ["1"] * 16, [NAN] * 16, [0.0] * 16, [[1.0]] * 16)
    ),
    *(({"partial_rotary_factor": x}, "partial_rotary_factor") for x in (0.05, 1.1, NAN, "1", [1])),
    *(
        ({"sliding_window": 64, "layer_types": x}, "layer_types")
        for x in ("full_attention", [], ["full_attention"] * 2, [{}] * 3, ["linear_attention"] * 3)
    ),
    *(({"sliding_window": x}, "sliding_window") for x in ("64", -5, [64], True)),
    ({"sliding_window": 64, "max_window_layers": "all"}, "max_window_layers"),
    *((SMOLLM3 | {"no_rope_layers": x}, "no_rope_layers") for x in ([], "1110", [1] * 4, 7)),
    *((EXPERTS | {"num_experts": x}, "num_experts") for x in (0, None, "8")),
    (EXPERTS | {"num_experts_per_tok": 9}, "9 of 8 experts"),
    (EXPERTS | {"mlp_only_layers": "all"}, "mlp_only_layers"),
    *((GEMMA3 | {"query_pre_attn_scalar": x}, "query_pre_attn_scalar") for x in NO_NUMBERS),
    (GEMMA3 | {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers"),
    *((GEMMA3 | {"sliding_window_pattern": x}, "sliding_window_pattern") for x in (0, "6", -6)),
    *(
        (family | {"layer_types": x}, "layer_types")
        for family in (GEMMA3, GEMMA4, GPT_OSS)
        for x in ("full_attention", [], [{}] * 3, ["linear_attention"] * 3, 7)
    ),
    *((GEMMA4 | {"num_kv_shared_layers": x}, "num_kv_shared_layers") for x in (-1, "1", [1], True)),
    *((GEMMA4 | {"num_kv_shared_layers": x}, "cannot share") for x in (2, 3, 99)),
    *((GEMMA4 | {"global_head_dim": x}, "are not supported") for x in (16, 48, 1024)),
    *((GEMMA4 | {"global_head_dim": x}, "global_head_dim") for x in (0, -64, "64", 2**31 - 2)),
    *((family | {"head_dim": 2**31 - 2}, "head_dim") for family in (GEMMA3, GEMMA4, {})),
    (GEMMA4 | {"num_global_key_value_heads": 3}, "3 KV heads"),
    *((GEMMA4 | {"final_logit_softcapping": x}, "softcapping") for x in ("30", -1, [1], NAN)),
    *((GEMMA4 | {"hidden_size_per_layer_input": x}, "per_layer_input") for x in ("8", -8, [8])),
    *((GEMMA4 | GEMMA4_EXPERTS | {"num_experts": x}, "num_experts") for x in (0, None, "8")),
    (GEMMA4 | GEMMA4_EXPERTS | {"top_k_experts": 5}, "5 of 4 experts"),
    (GEMMA4 | GEMMA4_EXPERTS, "moe_intermediate_size"),
    *(
        (GEMMA4 | {"rope_parameters": {"full_attention": x}}, "full_attention")
        for x in (3, "a", [1])
    ),
    *((GPT_OSS | {"num_local_experts": x}, "num_local_experts") for x in (0, None, "8")),
    (GPT_OSS | {"num_experts_per_tok": 5}, "5 of 4 experts"),
    *(({"model_type": "ministral3", "rope_parameters": x}, "llama_4") for x in ({}, {"a": 1})),
    *(({"head_dim": n}, "even numbers from 32 to 512") for n in (1, 8, 30, 81, 514)),
    *(({"model_type": kind}, "model type") for kind in (["llama"], {"a": 1}, None, 3, "bert")),
    *(({"rope_theta": x}, "rope_theta") for x in NO_NUMBERS),
    *(({"rms_norm_eps": x}, "rms_norm_eps") for x in NO_NUMBERS),
    *(({"rope_parameters": {"rope_theta": x}}, "rope_theta") for x in NO_NUMBERS),
    *(({"rope_scaling": {"type": "linear", "factor": x}}, "factor") for x in NO_NUMBERS),
    *(({"rope_scaling": LLAMA3 | {key: x}}, key) for key in [*LLAMA3][1:] for x in NO_NUMBERS),
    *(({"rope_scaling": LLAMA3 | {key: None}}, key) for key in [*LLAMA3][1:]),
    ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "not below high_freq_factor"),
    ({"rope_scaling": {"rope_type": ["a"], "factor": 2}}, "RoPE scaling"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "RoPE scaling 'dynamic'"),
    ({"rope_theta": 1e30, "rope_scaling": {"type": "linear", "factor": 1e30}}, "float32's range"),
    ({"rope_theta": 1e-30, "rope_scaling": {"type": "linear", "factor": 1e-30}}, "float32's range"),
    *(
        ({key: value}, f"'{key}' in config.json is not an object")
        for key in ("rope_parameters", "rope_scaling")
        for value in ("yarn", ["a"], 7, True)
    ),
    *(({"quantization": value}, "quanti") for value in ("4", [4], {"bits": [4]}, {"mode": [1]})),
]


@pytest.mark.parametrize(("change", "message"), DAMAGED)
def test_plan_says_what_is_wrong_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    assert main(["plan", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("tqchat: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.mark.parametrize(
    ("head_dim", "cached"), [(32, 32), (80, 96), (100, 128), (120, 128), (512, 512)]
)
def test_heads_are_filled_up_to_a_multiple_of_32(head_dim: int, cached: int) -> None:
    config = Config("tiny", LLAMA | {"head_dim": head_dim})
    shape = architecture(config).parse(config)
    assert shape.head_dim == head_dim
    assert {layer.head_dim for layer in shape.kv_layers} == {cached}


def test_a_gguf_file_is_refused_before_its_tensors_are_read(tmp_path: Path) -> None:
    file = g.tiny_llama()
    file.metadata["llama.attention.head_count"] = (g.U32, 4)
    heard: list[int] = []
    with pytest.raises(ModelError, match="head_dim of 16"):
        read_checkpoint(file.write(tmp_path / "x.gguf"), lambda done, total: heard.append(done))
    assert not heard


NUMBERS = st.one_of(
    st.floats(), st.integers(), st.sampled_from(NO_NUMBERS), st.floats(1e-37, 1e37), st.none()
)
SCALING = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "llama3", "yarn", "default"])},
    optional=dict.fromkeys(
        ("rope_theta", *[*LLAMA3][1:], "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        NUMBERS,
    ),
)


@given(
    config=st.fixed_dictionaries(
        {}, optional={"rope_theta": NUMBERS, "rope_scaling": SCALING, "rope_parameters": SCALING}
    ),
    head_dim=st.integers(1, 16).map(lambda n: 32 * n),
)
def test_periods_and_their_inverses_are_finite_and_positive(
    config: dict[str, Any], head_dim: int
) -> None:
    values = Config("tiny", LLAMA | {"head_dim": head_dim} | config)
    try:
        shape = architecture(values).parse(values)
    except ModelError:
        return
    rotation = shape.rotation  # type: ignore[attr-defined]
    assert 0 < np.float32(rotation.factor) < np.inf
    periods = np.array(rotation.periods, np.float32)
    assert len(periods) == head_dim // 2
    for numbers in (periods, 1 / periods):
        assert np.isfinite(numbers).all()
        assert (numbers > 0).all()
