"""Verdicts follow from what was measured, and so does what they say."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.folders import write_tiny
from tqchat.bench import claims, command, study
from tqchat.bench.activations import GEMMA_4, LLAMA_70B, Shape, activations
from tqchat.bench.evidence import SCALES, Evidence, ScaleEffect
from tqchat.bench.layers import LayerError
from tqchat.bench.predictions import FP16, Prediction
from tqchat.kernels.codecs import CODECS

KINDS = (
    FP16, "int4", "open-tq-metal", "product", "mlx-lm", "polarquant-5", "qjl",
    "turboquant-2", "turboquant-3", "turboquant-4",
)  # fmt: skip


def errors(scheme: str, n: int, **values: float) -> list[LayerError]:
    each = dict.fromkeys(
        ("k_error", "v_error", "score_correlation", "cosine", "k_cosine", "v_cosine",
         "compounded_cosine"), 0.9,
    )  # fmt: skip
    return [LayerError(scheme, i, **(each | values)) for i in range(n)]


EVIDENCE = Evidence(
    model="[model]",
    backend="CPU",
    on_metal=False,
    n_layers=30,
    predictions={kind: Prediction(kind, 20.0, 0.01, 0.9, 8.0) for kind in KINDS},
    layers={kind: errors(kind, 30) for kind in KINDS},
    scales=[
        ScaleEffect(shape.name, codec, scale, scale, 1 - 0.001 * scale)
        for shape in (LLAMA_70B, GEMMA_4)
        for codec in ("open-tq-metal", "polarquant-5", "turboquant-4", "qjl")
        for scale in SCALES
    ],
    stacks={depth: errors("qjl", depth) for depth in (32, 80)},
    seconds=dict.fromkeys(KINDS, 0.001),
    bits={name: codec.bits_per_element(128) for name, codec in CODECS.items()},
    model_bits={name: codec.bits_per_element(64) for name, codec in CODECS.items()},
)


def verdicts(evidence: Evidence) -> dict[str, str]:
    return {f.claim.split(",")[0]: f.verdict for f in (c(evidence) for c in claims.FINDINGS)}


def changed(**values: object) -> dict[str, tuple[str, str]]:
    """The claims whose verdict is another with other evidence: before and after."""
    before, after = verdicts(EVIDENCE), verdicts(replace(EVIDENCE, **values))  # type: ignore[arg-type]
    return {
        claim: (before[claim], after[claim]) for claim in before if before[claim] != after[claim]
    }


def test_values_decide_against_keys() -> None:
    layers = EVIDENCE.layers | {"open-tq-metal": errors("open-tq-metal", 30, v_cosine=0.8)}
    assert changed(layers=layers) == {
        "int4 V costs more than int4 K (cosines of 0.994 and 0.998)": (
            "does not hold here", "holds",
        )
    }  # fmt: skip


def test_compounding_is_seen_in_the_last_layer() -> None:
    """0.9 to the 80th is 0.0002: with a cosine like that, errors would multiply."""
    gone = {n: errors("qjl", n, compounded_cosine=0.9**n) for n in (30, 32, 80)}
    layers = EVIDENCE.layers | {"qjl": gone[30]}
    found = changed(layers=layers, stacks={n: gone[n] for n in (32, 80)})
    assert list(found.values()) == [("does not hold here", "holds")]
    assert next(iter(found)).startswith("QJL's correlations multiply")


def test_what_is_arithmetic() -> None:
    said = verdicts(EVIDENCE)
    assert said["int4 in groups of 32 takes 3.2 times less than fp16"] == "holds"
    assert said["Llama 70B's cache at 128K takes 40 GB in fp16 and 12.5 GB in int4"] == "holds"
    fits = "Llama 70B with 128K fits on a Mac of 64 GB with 10.4 GB to spare"
    assert said[fits] == "does not hold here"


def test_kernels_are_judged_on_metal_alone() -> None:
    claim = "PolarQuant's kernel is slower than int4's"
    assert verdicts(EVIDENCE)[claim] == "cannot be judged here"
    slower = replace(EVIDENCE, on_metal=True, seconds=EVIDENCE.seconds | {"polarquant-5": 0.002})
    assert verdicts(slower)[claim] == "holds"


def test_quality_at_equal_bits() -> None:
    worse = {kind: replace(row, kl=0.02) for kind, row in EVIDENCE.predictions.items()}
    worse["open-tq-metal"] = EVIDENCE.predictions["open-tq-metal"]
    found = changed(predictions=worse)
    assert found["Of all at about 5 bits"] == ("does not hold here", "holds")


def test_bits_are_those_of_the_model_that_was_measured() -> None:
    """A vector's length in 16 bits weighs twice as much with 64 channels as with 128."""
    said = next(
        finding.why
        for finding in (claim(EVIDENCE) for claim in claims.FINDINGS)
        if finding.claim.startswith("TurboQuant loses")
    )
    assert "at 2.25 bits" in said


def test_a_model_that_codecs_do_not_take_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_tiny(tmp_path / "tiny"))  # heads of 32 channels, mlx-lm's groups have 64
    assert command.main(["study", model]) == 2
    assert "not every codec takes its head_dim" in capsys.readouterr().err


def test_the_report_names_every_claim(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    report = study.Report(EVIDENCE, [claim(EVIDENCE) for claim in claims.FINDINGS])
    study.show(report, Console(width=160))
    out = capsys.readouterr().out
    assert "[model]" in out
    assert all(finding.claim.split()[0] in out for finding in report.findings)
    assert len(report.findings) == len({finding.claim for finding in report.findings}) == 21
    names = {chart.name for chart in study.report_charts(report.as_json())}
    assert names == {"study-qjl-scores", "study-qjl-depth", "study-scale", "study-times"}


@pytest.mark.parametrize("shape", [LLAMA_70B, GEMMA_4])
def test_activations_are_as_described(shape: Shape) -> None:
    q, k, v = activations(shape, 64, 4, seed=3)
    assert q.shape == (shape.n_heads, 4, shape.head_dim)
    assert k.shape == v.shape == (shape.n_kv_heads, 64, shape.head_dim)
    keys = np.array(k, np.float64)
    channels = np.abs(keys.mean(axis=(0, 1)))
    assert channels[:4].min() > 5 * channels[4:].max()
    if shape.normalised:
        assert np.sqrt((keys**2).mean(axis=-1)) == pytest.approx(1, abs=1e-5)
    again = activations(shape, 64, 4, seed=3)
    assert all(mx.array_equal(a, b) for a, b in zip((q, k, v), again, strict=True))
