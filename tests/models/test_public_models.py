"""What `tqchat plan` says of well-known models, from their config.json, against public figures."""

import json
import shutil
from pathlib import Path

import pytest

from tests.tiny import LLAMA
from tqchat.cli import main
from tqchat.models.config import Config
from tqchat.models.folder import read_config
from tqchat.models.registry import architecture

CONFIGS = Path(__file__).parent.parent / "data" / "configs"

# Parameters in 10**9, context, and bytes of a token's K and V in 16 bits. By hand, layers * KV
# heads * head_dim * 2 (K and V) * 2 bytes:
#   Qwen2.5 7B      28 * 4 * 128 * 4 =  57,344
#   Qwen3 30B-A3B   48 * 4 * 128 * 4 =  98,304
#   Ministral 3 8B  34 * 8 * 128 * 4 = 139,264
#   Phi-4           40 * 10 * 128 * 4 = 204,800
#   SmolLM3         36 * 4 * 128 * 4 =  73,728
MODELS = {
    "ministral-3-8b": (8.49, 262144, 139264),
    "mistral-small-3.1-24b": (23.57, 131072, 163840),
    "phi-4": (14.66, 16384, 204800),
    "phi-4-mini": (3.84, 131072, 131072),
    "qwen2.5-7b": (7.62, 32768, 57344),
    "qwen3-8b": (8.19, 40960, 147456),
    "qwen3-30b-a3b-4bit": (30.53, 40960, 98304),
    "smollm3-3b": (3.08, 65536, 73728),
}
MAC_64GB = 56 << 30
"""What a Mac of 64 GB can be made to give: all but 8 GiB."""


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.copy(CONFIGS / f"{request.param}.json", tmp_path / "config.json")
    return tmp_path


def planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["plan", str(folder), "--json", "--memory", "64GB"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("folder", "name"), [(n, n) for n in MODELS], indirect=["folder"])
def test_plan_gives_weights_kv_and_context(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters, context, token = MODELS[name]
    figures = planned(folder, capsys)
    # 16 bits, or 4 with two 16-bit numbers for 64 of them. Qwen3 30B-A3B in 4 bits: 17.2 GB, as
    # mlx-community has it.
    bits = 4.5 if name.endswith("4bit") else 16
    assert figures["weights_bytes"] / 1e9 == pytest.approx(parameters * bits / 8, rel=2e-3)
    whole = figures["rows"][-1]
    assert (figures["trained_context"], whole["context"]) == (context, context)
    assert whole["kv_fp16_bytes"] == context * token
    assert figures["kv_token_bytes"] == token * 5 / 16
    # 5 bits instead of 16, but for the newest 159 tokens at most and the first 4.
    assert 0 <= whole["kv_bytes"] - context * token * 5 / 16 <= 163 * token
    # By hand for Qwen2.5 7B: (60.1 - 15.2) GB / 17,920 bytes = 2.5 million tokens; room to grow
    # (1/16) and a layer's past in 16 bits (2,048 bytes a token) leave 2.1 million.
    bound = (MAC_64GB - figures["weights_bytes"]) / (token * 5 / 16)
    assert 0.8 * bound < figures["largest_context"] < bound


@pytest.mark.parametrize("folder", ["mistral-7b-v0.1"], indirect=True)
def test_windows_bound_the_cache(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = planned(folder, capsys)
    assert figures["kv_token_bytes"] == 0
    whole = figures["rows"][-1]
    assert whole["context"] == 32768
    # 32 layers * 8 heads * 128 * 4 = 131,072 bytes a token, of a window of 4,096 and some more
    # that can be taken back.
    assert 4096 * 131072 < whole["kv_fp16_bytes"] < 8192 * 131072
    assert main(["plan", str(folder)]) == 0
    assert "KV that ends with its windows, limit" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["phi-4-mini"], indirect=True)
def test_phi_4_mini_turns_96_of_128_channels(folder: Path) -> None:
    config = Config("phi", read_config(folder))
    rotation = architecture(config).parse(config).rotation  # type: ignore[attr-defined]
    # sqrt(1 + ln(131072 / 4096) / ln(4096)), as the model's own code has it.
    assert rotation.factor == pytest.approx(1.1902380714238083)
    assert len(rotation.periods) == 48
    assert rotation.periods[-1] == pytest.approx(47.77 * 10000 ** (94 / 96))


@pytest.mark.parametrize("folder", ["qwen3-8b"], indirect=True)
def test_yarn_extends_the_context(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Qwen's model cards say to switch it on: 4 times 32K tokens."""
    values = json.loads((folder / "config.json").read_text())
    values["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
    (folder / "config.json").write_text(json.dumps(values))
    assert planned(folder, capsys)["trained_context"] == 131072


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"sliding_window": None}, [None, None, None]),
        ({"sliding_window": 64}, [64, 64, 64]),  # Mistral 7B v0.1
        ({"sliding_window": 64, "use_sliding_window": False}, [None, None, None]),  # Qwen2.5
        ({"sliding_window": 64, "max_window_layers": 1}, [None, 64, 64]),  # Qwen2
        ({"sliding_window": 8192}, [None, None, None]),  # Phi-4-mini: longer than its context
        (
            {
                "sliding_window": 64,
                "max_window_layers": 1,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [64, None, 64],
        ),
    ],
)
def test_which_layers_have_a_window(keys: dict, windows: list[int | None]) -> None:
    config = Config("tiny", LLAMA | keys)
    assert [layer.window for layer in architecture(config).parse(config).kv_layers] == windows


def test_which_layers_of_smollm3_have_no_rope() -> None:
    keys = {"model_type": "smollm3", "num_hidden_layers": 8}
    for more in ({}, {"no_rope_layers": [1, 1, 1, 0] * 2}, {"no_rope_layer_interval": 4}):
        config = Config("tiny", LLAMA | keys | more)
        shape = architecture(config).parse(config)
        assert shape.rope_layers == (True, True, True, False) * 2  # type: ignore[attr-defined]
