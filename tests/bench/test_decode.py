"""`tqchat bench decode`: what it reports, not how fast anything is."""

import json
from pathlib import Path

import pytest

from tests.folders import write_tiny
from tqchat.bench import command, decode


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(decode, "DECODED", 2)
    return str(write_tiny(tmp_path / "tiny"))


def test_rates_by_context_and_their_chart(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["decode", model, "--contexts", "64,200", "--json", "--charts", str(tmp_path)]
    assert command.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["context"] for row in report["rows"]] == [64, 200]
    assert all(row["prefill_tps"] > 0 < row["decode_tps"] for row in report["rows"])
    # 3 layers, K and V of 2 heads of 32, 16 bits: the prompt and two runs of the loop.
    assert report["rows"][0]["kv_bytes"] == (64 + 2) * 3 * 2 * 2 * 32 * 2
    assert {path.name for path in tmp_path.glob("decode-*")} == {
        "decode-light.svg", "decode-dark.svg", "decode-light.png", "decode-dark.png",
    }  # fmt: skip


def test_a_step_falls_into_shares(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["decode", model, "--contexts", "150", "--profile", "--json"]) == 0
    shares = json.loads(capsys.readouterr().out)["milliseconds"]["150"]
    assert {"weights", "attention", "sampling", "the rest", "step"} <= set(shares)
    assert all(value > 0 for value in shares.values())
    assert command.main(["decode", model, "--contexts", "150", "--profile"]) == 0
    assert "A decode step of" in capsys.readouterr().out


def test_a_context_too_long_is_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["decode", model, "--contexts", "9000"]) == 2
    assert "ask for shorter --contexts" in capsys.readouterr().err
