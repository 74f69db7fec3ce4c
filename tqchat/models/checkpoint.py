"""A model on disk, read: its config, and its tensors as MLX arrays under Hugging Face's names."""

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from tqchat.models import gguf, gguf_llama, registry
from tqchat.models.config import Config
from tqchat.models.errors import ModelError
from tqchat.models.folder import read_config, read_json, weight_files
from tqchat.models.multimodal import text_name

# https://github.com/huggingface/safetensors#format, and MLX's limit on the header.
_MAX_HEADER_BYTES = 100_000_000
# Of a weight; millions would take for ever to multiply.
_MOST_DIMS = 8
_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4,
    "F32": 4, "U64": 8, "I64": 8,
}  # fmt: skip

_GGUF_ARCHITECTURES = {"llama": gguf_llama}
"""From `general.architecture` to the module with its `read_config` and `convert`."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`config` has the keys of config.json; `quantization` in it is as MLX writes it.

    Tensors of safetensors files are read when they are evaluated, those of a GGUF file are in
    memory. `gguf_metadata` is None for a folder. Other parts than the text's are left out.
    """

    path: Path
    config: dict[str, Any]
    weights: dict[str, mx.array]
    generation_config: dict[str, Any]
    gguf_metadata: gguf.Metadata | None
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class Description:
    """What is known of a model before its tensors are read. `format`: "4-bit", "bf16", "Q4_0"."""

    config: dict[str, Any]
    format: str
    weights_bytes: int


def read_checkpoint(
    path: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> Checkpoint:
    """Read the model in a folder of safetensors or in a .gguf file, on the calling thread.

    `progress` hears of the bytes of a GGUF file (done, total); what it raises ends the reading.
    Raises ModelError: nothing there, cut short, shards missing, a format that is not supported.
    """
    if path.is_dir():
        return _read_folder(path)
    header = gguf.read_header(path)
    architecture = _gguf_architecture(path, header)
    config = Config(str(path), architecture.read_config(path, header))
    registry.architecture(config).parse(config)
    tensors = gguf.read_tensors(path, header, progress)
    config, weights = architecture.convert(path, header, tensors)
    weights_bytes = sum(tensor.nbytes for tensor in weights.values())
    return Checkpoint(path, config, weights, {}, header.metadata, weights_bytes)


def describe(path: Path) -> Description:
    """The same checks of headers and config, without the tensors. Raises ModelError."""
    nbytes: Counter[str] = Counter()
    if path.is_dir():
        config = read_config(path)
        for file in weight_files(path):
            nbytes += _check_safetensors(file)
    else:
        header = gguf.read_header(path)
        config = _gguf_architecture(path, header).read_config(path, header)
        for tensor in header.tensors:
            nbytes[tensor.type.name] += tensor.nbytes
    stored = nbytes.most_common(1)[0][0]
    if path.is_dir() and (quantization := config.get("quantization")):
        mode = quantization.get("mode", "affine")
        stored = f"{quantization['bits']}-bit" if mode == "affine" else mode
    return Description(
        config=config,
        format=stored,
        weights_bytes=nbytes.total(),
    )


def _read_folder(folder: Path) -> Checkpoint:
    config = read_config(folder)
    generation = folder / "generation_config.json"
    generation_config = read_json(generation) if generation.exists() else {}
    files = weight_files(folder)
    weights_bytes = sum(_check_safetensors(file).total() for file in files)
    weights: dict[str, mx.array] = {}
    for file in files:
        try:
            shard = mx.load(str(file))
        except Exception as error:
            raise _broken(file, str(error)) from None
        assert isinstance(shard, dict)
        for name, tensor in shard.items():
            own = text_name(name)
            if own in weights:
                raise _broken(file, f"tensor {name!r} is in another shard too")
            if own is not None:
                weights[own] = tensor
    return Checkpoint(folder, config, weights, generation_config, None, weights_bytes)


def _gguf_architecture(path: Path, header: gguf.Header) -> ModuleType:
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _GGUF_ARCHITECTURES:
        raise ModelError(
            f"{path}: architecture {name!r} is not supported. Choose a GGUF file of architecture "
            f"{', '.join(sorted(_GGUF_ARCHITECTURES))}."
        )
    return _GGUF_ARCHITECTURES[name]


def _check_safetensors(file: Path) -> Counter[str]:
    """Bytes by dtype of the text part's tensors, once all are known to lie within the file.

    Raises ModelError.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 0 < length < _MAX_HEADER_BYTES:
                raise _broken(file, "it is not a safetensors file")
            text = stream.read(length)
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror}.") from None
    if len(text) < length:
        raise _broken(file, "it is cut short within its header")
    try:
        header = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError):
        raise _broken(file, "its header is not sound JSON") from None
    if not isinstance(header, dict):
        raise _broken(file, "its header is not a JSON object")
    header.pop("__metadata__", None)
    if not header:
        raise _broken(file, "it holds no tensors")
    spans = []
    nbytes: Counter[str] = Counter()
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
                pass
            case _:
                raise _broken(file, f"tensor {name!r} is not described as it should be")
        if dtype not in _DTYPE_BYTES:
            raise ModelError(
                f"{file}: tensor {name!r} is stored as {dtype}, which is not supported. Choose "
                "a version in 16 bits, or in MLX's 4-bit or 8-bit format."
            )
        numbers = [*shape, begin, end]
        sound = len(shape) <= _MOST_DIMS and all(type(n) is int and n >= 0 for n in numbers)
        if not sound or any(d >= 2**31 for d in shape):
            raise _broken(file, f"tensor {name!r} has a shape or an offset that cannot be")
        if end - begin != prod(shape) * _DTYPE_BYTES[dtype]:
            raise _broken(file, f"tensor {name!r} does not have the bytes its shape asks for")
        spans.append((begin, end, name))
        nbytes[dtype] += end - begin if text_name(name) else 0
    position = 0
    for begin, end, name in sorted(spans):
        if begin < position:
            raise _broken(file, f"tensor {name!r} overlaps another")
        position = end
    if 8 + length + position > size:
        raise _broken(file, f"it is cut short: {size:,} of {8 + length + position:,} bytes")
    return nbytes


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key appears twice")
    return values


def _broken(file: Path, what: str) -> ModelError:
    return ModelError(f"{file} cannot be read: {what}. Fetch it again.")
