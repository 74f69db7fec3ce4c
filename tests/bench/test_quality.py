"""`tqchat bench quality` from its arguments to its output, on a tiny model."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest

from tests.folders import write_tiny
from tqchat.bench import command, quality, schemes

SMALL = replace(
    quality.QUICK,
    text_tokens=320,
    n_greedy=4,
    contexts=(500, 700, 9000),
    depths=(0.0, 1.0),
    task_length=900,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    few = (*schemes.ORDERING, *(s for s in schemes.CODED if s.name in ("qjl+int4", "mlx-lm")))
    monkeypatch.setattr(quality, "SCHEMES", few)
    monkeypatch.setattr(quality, "QUICK", SMALL)


def test_json_has_every_figure(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quality", model, "--quick", "--json", "--charts", str(tmp_path)]
    assert command.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    names = [scheme.name for scheme in schemes.ORDERING]
    kinds = [row["kind"] for row in report["predictions"]]
    assert kinds == ["fp16", *names, "qjl+int4"]
    # This model's heads have 32 channels, mlx-lm's groups 64.
    assert report["left_out"] == ["mlx-lm"]
    assert report["texts"] == {"alice": 320}
    assert report["bits"]["int4"] == 5.0
    assert {row["scheme"] for row in report["layers"]} == {names[0], "int4"}
    assert len(report["layers"]) == 2 * 3
    cells = {(row["length"], row["depth"]) for row in report["found"] if row["task"] == "needle"}
    assert cells == {(500, 0.0), (500, 1.0), (700, 0.0), (700, 1.0)}
    tasks = {row["task"] for row in report["found"]}
    assert tasks == {"needle", "several needles", "variable tracking", "word counting"}
    assert (tmp_path / "quality-needle-dark.svg").exists()


def test_the_terminal_shows_tables_and_charts(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["quality", model, "--quick"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for expected in ("same top-1", "first 5", "word counting", "depth", "KL divergence"):
        assert expected in out, expected


def test_a_text_of_ones_own(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0123456789" * 26)
    assert command.main(["quality", model, "--quick", "--text", str(file)]) == 2
    error = capsys.readouterr().err
    assert "mine.txt has 256 tokens, more than 256 are needed: choose a longer text." in error
    file.write_text("0123456789" * 30)
    assert command.main(["quality", model, "--quick", "--json", "--text", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == {"mine.txt": 288}


def test_the_orders_breach_is_said() -> None:
    rows = [
        quality.Prediction(scheme.name, 1.0, kl, 1.0, 1.0)
        for scheme, kl in zip(schemes.ORDERING, (5, 4, 3, 2, 1), strict=True)
    ]
    report = quality.Report("m", "b", "d", {}, {}, [], rows, [], [])
    assert "closer to fp16 than the last: 5.0000 > 4.0000" in quality._ordering(report)
    rows[0], rows[1] = replace(rows[0], kl=4), replace(rows[1], kl=5)
    report = replace(report, predictions=rows)
    assert "not in the order of the design" in quality._ordering(report)


def test_ctrl_c_ends_it_at_once(model: str) -> None:
    child = pexpect.spawn(sys.executable, ["-m", "tqchat", "bench", "quality", model], timeout=300)
    child.expect("predictions")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert b"Traceback" not in child.before
