"""The claims of Open-TQ-Metal (its paper and its README), measured again on what is at hand.

What nothing here can decide is said to be so.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text as Cell

from tqchat.bench import charts, evidence
from tqchat.bench.claims import FINDINGS, Finding
from tqchat.bench.evidence import TIMED_TOKENS, Evidence
from tqchat.bench.predictions import Text
from tqchat.engine.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class Report:
    evidence: Evidence
    findings: list[Finding]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(loaded: LoadedModel, text: Text, console: Console) -> Report:
    """`text`: longer than evidence.LAYER_TOKENS. Progress goes to `console`."""
    seen = evidence.measure(loaded, text, console)
    return Report(seen, [finding(seen) for finding in FINDINGS])


def show(report: Report, console: Console) -> None:
    console.print(Cell(f"{report.evidence.model}, {report.evidence.backend}"))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(ratio=4)
    table.add_column(no_wrap=True)
    table.add_column(ratio=7)
    styles = {"holds": "green", "does not hold here": "red", "cannot be judged here": "dim"}
    for each in report.findings:
        verdict = Cell(each.verdict, style=styles[each.verdict])
        table.add_row(Cell(each.claim), verdict, Cell(each.why))
    console.print(table)


def report_charts(report: Mapping[str, Any]) -> list[charts.Chart]:
    """Of a Report's `as_json`."""
    seen = report["evidence"]
    model = seen["model"]
    qjl = {model: seen["layers"]["qjl"]}
    qjl |= {f"{depth} random layers": rows for depth, rows in seen["stacks"].items()}

    def by_layer(of: str) -> dict[str, list[tuple[float, float]]]:
        return {name: [(row["layer"], row[of]) for row in rows] for name, rows in qjl.items()}

    off = {
        f"{row['codec']}, {row['shape']}, {row['scale']:.4g}": 1 - row["cosine"]
        for row in seen["scales"]
    }
    times = {name: 1e3 * seconds for name, seconds in seen["seconds"].items()}
    return [
        charts.Lines(
            "study-qjl-scores", "Correlation of QJL's scores", "layer", "correlation",
            by_layer("score_correlation"),
        ),
        charts.Lines(
            "study-qjl-depth", "Cosine of attention's output with fp16's, keys by QJL", "layer",
            "cosine", by_layer("compounded_cosine"),
        ),
        charts.Bars(
            "study-scale", "What attention's scale does to an error (made-up activations)",
            "1 - cosine", off, log=True,
        ),
        charts.Bars(
            "study-times", f"Attention on the encoded form, {TIMED_TOKENS:,} tokens, "
            f"{seen['backend']}, without fused kernels", "ms", times,
        ),
    ]  # fmt: skip
