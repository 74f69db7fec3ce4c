"""`tqchat plan` against the public figures of Llama 3.1 70B and 8B, and against real caches."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import LLAMA
from tqchat.cli import main
from tqchat.engine import plan
from tqchat.engine.cache import DenseCache, SealedCache
from tqchat.kernels import Backend, KeysOfValues
from tqchat.kernels.cuda.backend import CUDA as CUDABackend
from tqchat.kernels.metal.backend import Metal
from tqchat.models.config import Config
from tqchat.models.registry import architecture
from tqchat.plan import CPU, CUDA, METAL

CONFIGS = Path(__file__).parent / "data" / "configs"
GIB = 1 << 30


def planned(capsys, tmp_path, name: str, *options: str) -> dict:
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(CONFIGS / f"{name}.json", folder / "config.json")
    assert main(["plan", str(folder), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_llama_70b_at_128k_takes_40_and_12_and_a_half_gib(capsys, tmp_path) -> None:
    figures = planned(capsys, tmp_path, "llama-3.1-70b-4bit", "--memory", "64GB")
    # 80 layers, 8 KV heads, 128 channels, K and V, 131,072 tokens, 2 bytes: 40 GiB; 5 bits: 12.5.
    last = figures["rows"][-1]
    assert last["context"] == 131072
    assert last["kv_fp16_bytes"] == 40 * GIB
    assert last["kv_bytes"] / GIB == pytest.approx(12.5, abs=0.05)
    # 70.55e9 parameters at 4.5 bits: 39.7 GB.
    assert figures["weights_bytes"] / 1e9 == pytest.approx(39.7, abs=0.1)
    # macOS's default of 48 GiB stops it; a raised limit does not.
    assert not last["fits"]
    assert last["fits_with_raised_limit"]
    assert figures["command"] == "sudo sysctl iogpu.wired_limit_mb=57344"
    assert figures["largest_context"] > 131072


def test_codes_of_3_bits_take_a_fifth_less(capsys, tmp_path) -> None:
    options = ("--memory", "64GB", "--kv", "int3")
    last = planned(capsys, tmp_path, "llama-3.1-70b-4bit", *options)["rows"][-1]
    assert last["kv_bytes"] / GIB == pytest.approx(10.0, abs=0.05)


def test_llama_8b_at_128k(capsys, tmp_path) -> None:
    figures = planned(capsys, tmp_path, "llama-3.1-8b-4bit", "--memory", "64GB")
    last = figures["rows"][-1]
    assert last["kv_fp16_bytes"] == 16 * GIB
    assert last["kv_bytes"] / GIB == pytest.approx(5.0, abs=0.03)
    assert figures["weights_bytes"] / 1e9 == pytest.approx(4.5, abs=0.05)
    assert last["fits"]
    assert figures["command"] is None


def test_a_plan_for_fp16_does_not_fit(capsys, tmp_path) -> None:
    figures = planned(capsys, tmp_path, "llama-3.1-70b-4bit", "--memory", "64 GB", "--kv", "fp16")
    assert not figures["rows"][-1]["fits_with_raised_limit"]
    assert 50_000 < figures["largest_context"] < 73_000
    assert figures["command"] is None


def test_the_table_names_the_command_and_the_largest_context(capsys, tmp_path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(CONFIGS / "llama-3.1-70b-4bit.json", folder / "config.json")
    assert main(["plan", str(folder), "--memory", "64GB"]) == 0
    out = capsys.readouterr().out
    assert "131,072  40.0 GiB  12.5 GiB  27.5 GiB" in out
    assert "if the limit is raised" in out
    assert "more than it was trained for" in out
    assert "sysctl iogpu.wired_limit_mb=57344" in out


def test_a_model_on_this_machine_needs_no_memory_option(capsys, smollm2_gguf) -> None:
    assert main(["plan", str(smollm2_gguf), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["trained_context"] == 8192
    assert figures["weights_bytes"] == pytest.approx(smollm2_gguf.stat().st_size, rel=0.05)
    assert figures["rows"][-1]["fits"]


def test_a_recommended_model_is_planned_for_without_a_network(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(repo_id: str) -> None:
        raise AssertionError(repo_id)

    monkeypatch.setattr("tqchat.models.hub.look", no_network)
    assert main(["plan", "mlx-community/Llama-3.3-70B-Instruct-4bit", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["weights_bytes"] / 1e9 == pytest.approx(39.7, rel=0.01)
    assert figures["rows"][-1]["kv_fp16_bytes"] == 40 << 30


def test_bad_input_is_one_line(capsys, tmp_path) -> None:
    assert main(["plan", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tqchat: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("size", ["64", "nan", "9" * 400 + "GB", "-1GB", ""])
def test_what_is_no_size_is_refused(capsys, size: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "smollm2", f"--memory={size}"])
    assert ended.value.code == 2
    assert "--memory" in capsys.readouterr().err


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 3000),
    st.sampled_from(["int4", "int3", "fp16"]),
    st.booleans(),
    st.booleans(),
)
def test_a_cache_never_takes_more_than_planned(
    tokens: int, kv: str, k_is_v: bool, derives_keys: bool
) -> None:
    shape = architecture(Config("tiny", LLAMA)).parse(Config("tiny", LLAMA))
    shape = replace(shape, kv_layers=[replace(x, k_is_v=k_is_v) for x in shape.kv_layers])
    backend = Backend(mx.float32, kv_bits=3 if kv == "int3" else 4)
    backend.derives_keys = derives_keys
    make = DenseCache if kv == "fp16" else SealedCache
    cache = make(backend, shape.kv_layers[0])
    keys = KeysOfValues(mx.ones(32), mx.ones(16))
    cache.reserve(tokens)
    cache.attend(mx.ones((4, tokens, 32)), *mx.ones((2, 2, tokens, 32)), 1.0, keys=keys)
    need = plan.kv_bytes(shape, tokens, kv, derives_keys)
    assert shape.n_layers * cache.nbytes <= need
    assert need <= shape.n_layers * (cache.nbytes + 127 * 4 * 2 * 32)
    # With the buffers' room for more.
    assert shape.n_layers * cache.nbytes_allocated == plan.allocated_bytes(
        shape, tokens, kv, derives_keys
    )


def test_plans_count_what_backends_hold() -> None:
    assert METAL.derives_keys == Metal.derives_keys
    assert CUDA.derives_keys == CUDABackend.derives_keys
    assert CPU.derives_keys == Backend.derives_keys


@given(st.integers(1, 200_000), st.integers(30, 80))
def test_the_largest_context_is_the_largest_that_fits(weights: int, gib: int) -> None:
    config = Config("70b", json.loads((CONFIGS / "llama-3.1-70b-4bit.json").read_text()))
    shape = architecture(config).parse(config)
    prefill = plan.Prefill(512)
    longest = plan.largest_context(shape, weights, "int4", prefill, gib * GIB)
    assert plan.need(shape, weights, longest, "int4", prefill).total <= gib * GIB
    assert plan.need(shape, weights, longest + 32, "int4", prefill).total > gib * GIB
