"""What `tqchat plan` says of models with sliding windows, from their config.json, by hand."""

import json
import shutil
from pathlib import Path

import pytest

from tests.models.test_public_models import CONFIGS
from tqchat.cli import main
from tqchat.engine.cache import window_tokens
from tqchat.kernels.layout import TAIL_MAX

GIB = 1 << 30

# Weights in 10**9 bytes; context; bytes of a token's K and V in 16 bits in the layers that see
# everything (their number * KV heads * head_dim * 2 * 2), and how many others there are, with KV
# heads, head_dim and window.
#   Gemma 3 1B       1.00e9 parameters * 2;     4 * 1 * 256 * 4 =   4,096
#   Gemma 3 27B     27.0e9 * 2;                10 * 16 * 128 * 4 = 81,920
#   Gemma 4 E2B      4.63e9 * 2 (5.1e9 with what sees and hears); 15 of 35 layers have K and V of
#                   their own: 3 * 1 * 512 * 4 = 6,144
#   Gemma 4 31B     30.7e9 * 2;                10 * 4 * 512 * 4 =  81,920
#   Gemma 4 26B-A4B 25.2e9 * 4.5 / 8;           5 * 2 * 512 * 4 =  20,480
#   gpt-oss 20B     19.1e9 * 4.25 / 8 + 1.8e9 * 2;  12 * 8 * 64 * 4 = 24,576
#   gpt-oss 120B   114.7e9 * 4.25 / 8 + 2.1e9 * 2;  18 * 8 * 64 * 4 = 36,864
MODELS = {
    "gemma-3-1b": (2.00, 32768, 4096, (22, 1, 256, 512)),
    "gemma-3-27b": (54.0, 131072, 81920, (52, 16, 128, 1024)),
    "gemma-4-e2b": (9.26, 131072, 6144, (12, 1, 256, 512)),
    "gemma-4-31b": (61.4, 262144, 81920, (50, 16, 256, 1024)),
    "gemma-4-26b-a4b-4bit": (14.2, 262144, 20480, (25, 8, 256, 1024)),
    "gpt-oss-20b": (13.76, 131072, 24576, (12, 8, 64, 128)),
    "gpt-oss-120b": (65.2, 131072, 36864, (18, 8, 64, 128)),
}

K_IS_V = {"gemma-4-31b", "gemma-4-26b-a4b-4bit"}
"""int4 holds V alone in the layers that see everything."""


def planned(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    assert main(["plan", str(tmp_path), "--json", "--memory", "64GB"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", MODELS)
def test_windows_are_counted_once_and_the_rest_by_length(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, context, token, (n_layers, n_kv_heads, head_dim, window) = MODELS[name]
    figures = planned(name, tmp_path, capsys)
    assert figures["weights_bytes"] / 1e9 == pytest.approx(weights, rel=5e-3)
    whole = figures["rows"][-1]
    assert (figures["trained_context"], whole["context"]) == (context, context)
    # A window and what can be taken back, 256 that go at once, and the tail.
    held = window_tokens(n_kv_heads, head_dim, window) + 256 + TAIL_MAX
    windows = n_layers * 4 * n_kv_heads * head_dim * held
    assert whole["kv_fp16_bytes"] == context * token + windows
    loose = 163 * (token + n_layers * 4 * n_kv_heads * head_dim)
    held = token // 2 if name in K_IS_V else token
    assert figures["kv_token_bytes"] == held * 5 / 16
    assert 0 <= whole["kv_bytes"] - (context * held + windows) * 5 / 16 <= loose


def test_what_a_window_of_gemma_4_31b_keeps() -> None:
    """1,023 tokens before the next are 32 blocks. A block of 16 heads of 256 channels takes
    16 * 10 * 256 * 4 = 163,840 bytes, of which 4 MiB hold 25."""
    assert window_tokens(16, 256, 1024) == 32 * (32 + 25)


def test_gemma_4_26b_reads_256k_on_a_mac_of_24_gb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = planned("gemma-4-26b-a4b-4bit", tmp_path, capsys)["rows"][-1]
    # 5 GiB of K and V in 16 bits for the layers that see everything, 0.8 GiB of V in int4.
    assert 0.8 * GIB < whole["kv_bytes"] < 1.2 * GIB
    assert whole["total_bytes"] < 18 * GIB
