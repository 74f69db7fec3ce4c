"""A model in 16 bits becomes one of 4 bits in the cache folder, once."""

import fcntl
import json
import resource
import stat
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.folders import write_tiny
from tqchat import paths
from tqchat.engine.cache import DenseCache, make_caches
from tqchat.engine.events import EngineOptions
from tqchat.engine.loading import load
from tqchat.kernels import Backend
from tqchat.models.checkpoint import read_checkpoint
from tqchat.models.config import Config
from tqchat.models.download import Progress
from tqchat.models.errors import ModelError, Stopped
from tqchat.models.quantize import quantized
from tqchat.models.registry import build
from tqchat.models.weights import Weights

IDS = list(range(60))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = paths.private_dir(tmp_path / "cache")
    monkeypatch.setattr(paths, "cache_dir", lambda: folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny")


def make(folder: Path, bits: int = 4) -> Path:
    return quantized(folder, "tiny", bits, lambda progress: None, lambda: False)


def logits(config: dict, weights: dict[str, mx.array]) -> np.ndarray:
    backend = Backend(mx.float32, cache_dtype=mx.float32)
    model = build(Config("tiny", config), Weights("tiny", weights, backend), backend)
    caches = make_caches(DenseCache, backend, model.shape.kv_layers)
    return np.array(model(IDS, caches, len(IDS)))


@pytest.mark.parametrize("bits", [4, 8])
def test_matrices_are_rounded_and_all_else_is_as_it_was(folder: Path, bits: int) -> None:
    original = read_checkpoint(folder)
    rounded = {}
    for name, tensor in original.weights.items():
        rounded[name] = tensor
        if tensor.ndim == 2:
            # hidden_size 64 makes groups of 64, intermediate_size 96 groups of 32.
            group = 32 if name.endswith("down_proj.weight") else 64
            own = 8 if name.startswith(("model.embed", "lm_head")) else bits
            codes, *scale = mx.quantize(tensor.astype(mx.bfloat16), group, own)
            scale = [x.astype(mx.float32) for x in scale]
            rounded[name] = mx.dequantize(codes, *scale, group_size=group, bits=own)
    expected = logits(original.config, rounded)
    made = read_checkpoint(make(folder, bits))
    assert made.config["quantization"] == {"group_size": 64, "bits": bits}
    assert made.weights_bytes < original.weights_bytes * 9.5 / 32
    ours = logits(made.config, made.weights)
    assert np.linalg.norm(ours - expected) < 1e-4 * np.linalg.norm(expected)


def test_it_is_made_once_and_loads_with_its_tokenizer_and_template(folder: Path) -> None:
    told: list[str] = []
    options = EngineOptions(quantize=4)
    first = load(str(folder), options, lambda event: told.append(event.label), lambda: False)
    assert any(label.startswith("Quantising") for label in told)
    assert first.info.name == str(folder)
    assert not first.template.is_default
    told.clear()
    again = load(str(folder), options, lambda event: told.append(event.label), lambda: False)
    assert not any(label.startswith("Quantising") for label in told)
    assert again.fingerprint == first.fingerprint
    plain = load(str(folder), EngineOptions(), lambda event: None, lambda: False)
    assert first.info.weights_bytes < plain.info.weights_bytes / 3


def test_what_is_written_is_for_its_owner_alone(folder: Path) -> None:
    made = make(folder)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in made.iterdir()} == {0o600}


def test_another_model_in_the_same_place_is_made_anew(folder: Path) -> None:
    made = make(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    assert make(folder) != made


def test_progress_reaches_the_end_and_a_stop_leaves_nothing(folder: Path, cache: Path) -> None:
    heard: list[Progress] = []
    with pytest.raises(Stopped):
        quantized(folder, "tiny", 4, heard.append, lambda: len(heard) == 5)
    assert list((cache / "quantized").iterdir()) == []
    heard.clear()
    quantized(folder, "tiny", 4, heard.append, lambda: False)
    done = [progress.done_bytes for progress in heard]
    assert done == sorted(done)
    assert done[-1] > 0.9 * heard[-1].total_bytes


def test_what_is_quantised_already_stays_as_it_is(folder: Path, smollm2_gguf: Path) -> None:
    made = make(folder)
    assert make(made) == made
    assert make(smollm2_gguf) == smollm2_gguf


@pytest.mark.parametrize("kind", ["16 bits", "4 bits", "gguf"])
def test_a_model_that_stays_as_it_is_says_so(folder: Path, smollm2_gguf: Path, kind: str) -> None:
    path = {"16 bits": folder, "4 bits": make(folder), "gguf": smollm2_gguf}[kind]
    loaded = load(str(path), EngineOptions(quantize=8), lambda event: None, lambda: False)
    assert [note for note in loaded.info.notes if "8 bits" in note] == {
        "16 bits": [],
        "4 bits": ["Not made into 8 bits: the model is quantised already."],
        "gguf": ["Not made into 8 bits: the model comes as GGUF."],
    }[kind]


def test_a_disk_that_cannot_be_written_is_said(folder: Path, cache: Path) -> None:
    (cache / "quantized").write_text("in the way")
    with pytest.raises(ModelError, match="Cannot write to"):
        make(folder)


def test_one_at_a_time(folder: Path, cache: Path) -> None:
    """Another program's lock is waited for; what one that was killed left behind goes."""
    left = cache / "quantized" / "quantize-left"
    left.mkdir(parents=True)
    (left / "model.safetensors").touch()
    heard: list[str] = []
    with (cache / "quantized.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Stopped):
            quantized(folder, "tiny", 4, lambda p: heard.append(p.label), lambda: len(heard) == 2)
    assert set(heard) == {"Waiting for another tqchat that quantises"}
    assert left.exists()
    made = make(folder)
    assert list((cache / "quantized").iterdir()) == [made]


def test_a_full_disk_is_said(folder: Path, cache: Path) -> None:
    """A limit on a file's size cuts a write short in the same way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(ModelError, match="The disk is full: make room for"):
            make(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((cache / "quantized").iterdir()) == []
