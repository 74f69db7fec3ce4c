"""What lies in a model folder, as Hugging Face and MLX write it, found without reading tensors."""

import json
import re
import stat
from pathlib import Path
from typing import Any

from tqchat.models.errors import ModelError
from tqchat.models.multimodal import text_config

# Bits and group size of codes that are small floats.
_FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
INDEX = "model.safetensors.index.json"
_LARGEST_JSON = 64 << 20


def regular(path: Path) -> Path:
    """`path`, if it may be opened: a pipe or a device would wait or act. Raises ModelError."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ModelError(f"There is no folder or file {path}. Check the name.") from None
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.") from None
    if not stat.S_ISREG(mode):
        raise ModelError(f"{path} is not a regular file, so it is not read.")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError."""
    try:
        if regular(path).stat().st_size > _LARGEST_JSON:
            raise ModelError(f"{path} is too large for a model's {path.name}. Fetch it again.")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not JSON: fetch the model again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object: fetch the model again.")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, its text part, with MLX's quantisation under `quantization`.

    Raises ModelError for other quantisations.
    """
    if not (folder / "config.json").exists():
        raise ModelError(f"{folder} holds no config.json, so it is not a model. {_other(folder)}")
    config = text_config(read_json(folder / "config.json"))
    quantization = config.pop("quantization", None) or config.get("quantization_config")
    if not quantization:
        return config
    if not isinstance(quantization, dict):
        raise ModelError(f"{folder}/config.json: quantization is not an object. Fetch it again.")
    method = quantization.get("quant_method") or quantization.get("mode") or "affine"
    if isinstance(method, str) and method in _FLOATS:
        known = dict(zip(("bits", "group_size"), _FLOATS[method], strict=True))
        return config | {"quantization": quantization | known | {"mode": method}}
    if method != "affine":
        raise ModelError(
            f"{folder} is quantised with {method}, which is not supported. Choose a version in "
            "MLX's 4-bit or 8-bit format (mlx-community has many), or one in 16 bits."
        )
    bits, group_size = quantization.get("bits"), quantization.get("group_size")
    if bits not in (2, 3, 4, 5, 6, 8) or group_size not in (32, 64, 128):
        raise ModelError(
            f"{folder} is quantised to {bits} bits in groups of {group_size}, which is not "
            "supported. Choose a 4-bit or 8-bit version in groups of 32, 64 or 128."
        )
    return config | {"quantization": quantization}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, all of them there. Raises ModelError."""
    if not (folder / INDEX).exists():
        if files := sorted(file for file in folder.iterdir() if WEIGHTS.fullmatch(file.name)):
            return [regular(file) for file in files]
        raise ModelError(f"{folder} holds no model*.safetensors. {_other(folder)}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX} has no weight_map: fetch the model again.")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{folder / INDEX} names {name!r}, which is not a shard's file name.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {missing[0]} ({len(missing)} of {len(names)} shards are missing): "
            "fetch the model again."
        )
    return [folder / name for name in names]


def _other(folder: Path) -> str:
    """What to do with a folder that holds something else."""
    if ggufs := sorted(folder.glob("*.gguf")):
        return f"Name the GGUF file in it: {ggufs[0]}"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return (
            "It holds PyTorch pickles, which can run code when they are read: "
            "choose a version of the model in safetensors or GGUF."
        )
    return "Name a folder with config.json and safetensors, or a .gguf file."
