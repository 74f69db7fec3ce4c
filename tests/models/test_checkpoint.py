"""Folders of safetensors: what is read, and what is said of those that cannot be."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tqchat.models.checkpoint import describe, read_checkpoint
from tqchat.models.errors import ModelError

CONFIG: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 4096}
A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.float16([1, -2, 65504])


def folder(path: Path, config: dict[str, Any] | str = CONFIG) -> Path:
    """One file by the official writer, and a config."""
    text = config if isinstance(config, str) else json.dumps(config)
    (path / "config.json").write_text(text)
    safetensors.numpy.save_file({"a": A, "b": B}, path / "model.safetensors", {"format": "pt"})
    return path


def raw(header: Any, data: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def sharded(path: Path) -> Path:
    folder(path)
    (path / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, tensors in zip(names, ({"a": A}, {"b": B}), strict=True):
        safetensors.numpy.save_file(tensors, path / name)
    index = {"weight_map": dict(zip("ab", names, strict=True))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("layout", [folder, sharded])
def test_one_file_or_several(tmp_path: Path, layout: Any) -> None:
    (layout(tmp_path) / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert checkpoint.gguf_metadata is None
    assert checkpoint.weights_bytes == A.nbytes + B.nbytes
    assert checkpoint.weights.keys() == {"a", "b"}
    assert checkpoint.weights["a"].tolist() == A.tolist()
    assert checkpoint.weights["b"].dtype == mx.float16
    assert checkpoint.weights["b"].tolist() == B.tolist()


def test_several_files_without_an_index(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").unlink()
    assert read_checkpoint(tmp_path).weights.keys() == {"a", "b"}


def test_what_mlx_quantised(tmp_path: Path) -> None:
    folder(tmp_path)
    layer = nn.QuantizedLinear(64, 32, bias=False, group_size=32, bits=4)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(layer.parameters()))
    quantization = {"group_size": 32, "bits": 4, "lm_head": {"group_size": 64, "bits": 8}}
    for key in ("quantization", "quantization_config"):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {key: quantization}))
        checkpoint = read_checkpoint(tmp_path)
        assert checkpoint.config["quantization"] == quantization
        assert mx.array_equal(checkpoint.weights["weight"], layer.weight)
        assert describe(tmp_path).format == "4-bit"


def test_description_of_a_folder(tmp_path: Path) -> None:
    description = describe(sharded(tmp_path))
    assert description.config["model_type"] == "llama"
    assert description.format == "F32"
    assert description.config["max_position_embeddings"] == 4096
    assert description.weights_bytes == A.nbytes + B.nbytes


def test_bf16_keeps_its_type(tmp_path: Path) -> None:
    folder(tmp_path)
    values = mx.array([1.0, 3e38], mx.bfloat16)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"x": values})
    x = read_checkpoint(tmp_path).weights["x"]
    assert x.dtype == mx.bfloat16
    assert mx.array_equal(x, values)


def refused(path: Path, message: str) -> None:
    for read in (read_checkpoint, describe):
        with pytest.raises(ModelError, match=message) as error:
            read(path)
        assert str(error.value).isprintable()


def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path / "none", "There is no folder or file")
    refused(tmp_path, "holds no config.json")


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    refused(tmp_path, "Name the GGUF file in it: .*model.gguf")
    (tmp_path / "model.gguf").unlink()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(tmp_path, r"holds no model\*.safetensors")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, "PyTorch pickles")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ('{"quantization": 4}', "quantization is not an object"),
        ({"quantization": {"bits": 1, "group_size": 64}}, "1 bits"),
        ({"quantization": {"bits": 4, "group_size": 48}}, "groups of 48"),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp2"}}, "with mxfp2"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "with gptq"),
        ({"quantization_config": {"quant_method": "awq"}}, "with awq"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "with bitsandbytes"),
        ({"quantization_config": {"quant_method": "fp8"}}, "with fp8"),
    ],
)
def test_a_config_that_is_not_read(tmp_path: Path, config: Any, message: str) -> None:
    refused(folder(tmp_path, config), message)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "lacks model-00002-of-00002.safetensors .1 of 2 shards")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"a": "../../etc/x.safetensors"}}', "not a shard's file name"),
        ('{"weight_map": {"a": 3}}', "not a shard's file name"),
    ],
)
def test_an_index_that_is_not_read(tmp_path: Path, index: str, message: str) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").write_text(index)
    refused(tmp_path, message)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    safetensors.numpy.save_file({"a": A, "b": B}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match="'a' is in another shard too"):
        read_checkpoint(tmp_path)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a safetensors file"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "not a safetensors file"),
    "huge header": (struct.pack("<Q", 2**63) + b"{}", "not a safetensors file"),
    "cut in the header": (struct.pack("<Q", 1000) + b"{}", "cut short within its header"),
    "not JSON": (raw(b"{{"), "not sound JSON"),
    "deep": (raw(b"[" * 100_000), "not sound JSON"),
    "not an object": (raw([]), "not a JSON object"),
    "no tensors": (raw({"__metadata__": {"format": "pt"}}), "no tensors"),
    "key twice": (raw(b'{"a": 1, "a": 2}'), "not sound JSON"),
    "no dtype": (raw({"a": {"shape": [1], "data_offsets": [0, 4]}}), "'a' is not described"),
    "one offset": (raw({"a": entry(offsets=[0])}), "'a' is not described"),
    "negative": (raw({"a": entry(shape=[-2])}), "cannot be"),
    "true": (raw({"a": entry(shape=[True, 2])}), "cannot be"),
    "fraction": (raw({"a": entry(offsets=[0, 8.0])}), "cannot be"),
    "huge shape": (raw({"a": entry(shape=[2**62, 4])}), "cannot be"),
    "dimensions": (raw({"a": entry(shape=[2] + [1] * 8)}), "cannot be"),
    "wrong bytes": (raw({"a": entry(shape=[3])}), "bytes its shape asks for"),
    "backwards": (raw({"a": entry(shape=[0], offsets=[8, 4])}), "bytes its shape asks for"),
    "overlap": (raw({"a": entry(), "b": entry(offsets=[4, 12])}), "'b' overlaps"),
    "past the end": (raw({"a": entry(offsets=[60, 68])}), "cut short: .* bytes"),
    "FP8": (raw({"a": entry("F8_E4M3", [8])}), "stored as F8_E4M3"),
    "escape codes": (raw({"\x1b[2J": entry(shape=[3])}), "bytes its shape asks for"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_file_that_lies_is_named_in_one_line(tmp_path: Path, case: str) -> None:
    content, message = LIES[case]
    (folder(tmp_path) / "model.safetensors").write_bytes(content)
    refused(tmp_path, f"model.safetensors.*{message}")


def test_metadata_that_only_mlx_dislikes(tmp_path: Path) -> None:
    content = raw({"a": entry(), "__metadata__": {"format": 3}})
    (folder(tmp_path) / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="cannot be read"):
        read_checkpoint(tmp_path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (folder(tmp_path) / "model.safetensors").chmod(0)
    refused(tmp_path, "Cannot read .*model.safetensors: Permission denied")


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (folder, "config.json"),
        (folder, "model.safetensors"),
        (sharded, "model.safetensors.index.json"),
    ],
)
def test_pipes_and_devices_are_not_opened(
    tmp_path: Path, layout: Any, name: str, kind: str
) -> None:
    file = layout(tmp_path) / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    refused(tmp_path, f"{name} is not a regular file")


def test_other_files_that_are_pipes(tmp_path: Path) -> None:
    os.mkfifo(folder(tmp_path) / "generation_config.json")
    with pytest.raises(ModelError, match=r"generation_config\.json is not a regular file"):
        read_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    os.mkfifo(tmp_path / "model.gguf")
    refused(tmp_path / "model.gguf", r"model\.gguf is not a regular file")
    (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    os.mkfifo(tmp_path / "model-00002-of-00002.safetensors")
    refused(tmp_path, "lacks model-00002-of-00002.safetensors")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    file = folder(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    for size in range(len(content)):
        file.write_bytes(content[:size])
        with pytest.raises(ModelError):
            read_checkpoint(tmp_path)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(flips=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 255)), min_size=1, max_size=4))
def test_whatever_the_bytes_it_reads_or_says_why(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.mkdir(exist_ok=True)
    file = folder(path) / "model.safetensors"
    content = bytearray(file.read_bytes())
    for position, value in flips:
        content[position] = value
    file.write_bytes(content)
    try:
        checkpoint = read_checkpoint(path)
    except ModelError as error:
        assert str(error).isprintable()  # noqa: PT017
        return
    mx.eval(checkpoint.weights)
    assert sum(w.nbytes for w in checkpoint.weights.values()) == checkpoint.weights_bytes
