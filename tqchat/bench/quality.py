"""What kinds of KV cache cost in quality: predictions, retrieval, and the error layer by layer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text as Cell

from tqchat.bench import charts, layers, predictions, retrieval
from tqchat.bench.layers import LayerError
from tqchat.bench.predictions import FP16, Prediction, Text
from tqchat.bench.progress import steps
from tqchat.bench.retrieval import Found, Tasks
from tqchat.bench.schemes import CODED, INT4, ORDERING, Scheme, bits_per_element
from tqchat.chat.documents import read_document
from tqchat.engine.cache import stored
from tqchat.engine.loading import LoadedModel
from tqchat.kernels import SINK, TAIL_MAX, TAIL_MIN
from tqchat.models.errors import ModelError

SEED = 1
DEFAULT_TEXTS = ("alice", "tides", "canals")
SCHEMES = (*ORDERING, *CODED)
_SHOWN = (INT4.name, ORDERING[0].name, "mlx-lm", "polarquant-4", "qjl", "turboquant-4")
SHOWN = tuple(scheme for scheme in SCHEMES if scheme.name in _SHOWN)
"""In charts of many lines."""
LEAST_SHOWN = 1e-9
"""On a logarithmic scale, where two outputs may be equal."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: sizes in tokens."""

    n_texts: int
    text_tokens: int
    scored_from: int
    n_greedy: int
    layer_schemes: tuple[Scheme, ...]
    layer_tokens: int
    contexts: tuple[int, ...]
    depths: tuple[float, ...]
    task_length: int
    repeats: int


FULL = Effort(
    n_texts=3,
    text_tokens=1024,
    scored_from=256,
    n_greedy=64,
    layer_schemes=SCHEMES,
    layer_tokens=768,
    contexts=(1024, 2048, 4096, 8000),
    depths=(0.0, 0.25, 0.5, 0.75, 1.0),
    task_length=2048,
    repeats=3,
)
QUICK = Effort(
    n_texts=1,
    text_tokens=512,
    scored_from=256,
    n_greedy=16,
    layer_schemes=SHOWN,
    layer_tokens=320,
    contexts=(512, 1024),
    depths=(0.0, 0.5, 1.0),
    task_length=1024,
    repeats=1,
)


@dataclass(frozen=True, slots=True)
class Report:
    """bits: per element of what is encoded, by the scheme's name.

    left_out: schemes whose codec does not take this model's head_dim
    """

    model: str
    backend: str
    device: str
    texts: dict[str, int]
    bits: dict[str, float]
    left_out: list[str]
    predictions: list[Prediction]
    layers: list[LayerError]
    found: list[Found]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(loaded: LoadedModel, effort: Effort, texts: Sequence[Text], console: Console) -> Report:
    """Progress goes to `console`."""
    tasks = list(_tasks(loaded, effort))
    bits = {scheme: _bits(loaded, scheme) for scheme in SCHEMES}
    schemes = [scheme for scheme in SCHEMES if bits[scheme]]
    with steps(console, "predictions", "layers", "retrieval") as progress:
        kinds = {scheme.name: scheme.cache for scheme in schemes}
        predicted = predictions.predictions(
            loaded, kinds, texts, effort.scored_from, effort.n_greedy, progress[0]
        )
        ids = texts[0].ids[: effort.layer_tokens]
        measured = [scheme for scheme in effort.layer_schemes if scheme in schemes]
        errors = layers.measure(loaded.model, loaded.backend, measured, ids, progress[1])
        found = retrieval.measure(loaded, tasks, progress[2])
    return Report(
        model=loaded.info.name,
        backend=loaded.info.backend,
        device=loaded.info.device,
        texts={text.name: len(text.ids) for text in texts},
        bits={scheme.name: bits[scheme] for scheme in schemes},
        left_out=[scheme.name for scheme in SCHEMES if scheme not in schemes],
        predictions=predicted,
        layers=errors,
        found=found,
    )


def _bits(loaded: LoadedModel, scheme: Scheme) -> float:
    """0.0 if the codec does not take the model's head_dim."""
    kv_layers = loaded.model.shape.kv_layers
    try:
        bits = bits_per_element(scheme.codec, kv_layers)
    except ValueError:
        return 0.0
    alone = fmean(scheme.own and stored(layer, loaded.backend).k_is_v for layer in kv_layers)
    return bits * (1 - alone / 2)


def texts(loaded: LoadedModel, effort: Effort, file: Path | None) -> list[Text]:
    """The file's beginning, or the program's own texts. Raises ModelError, ChatError."""
    if file is None:
        sources = {name: _own_text(name) for name in DEFAULT_TEXTS[: effort.n_texts]}
    else:
        sources = {file.name: read_document(file).text}
    found = []
    for name, text in sources.items():
        ids = loaded.tokenizer.encode(text)[: min(effort.text_tokens, loaded.info.context)]
        ids = ids[: len(ids) // predictions.CHUNK * predictions.CHUNK]
        if len(ids) <= effort.scored_from:
            raise ModelError(
                f"{name} has {len(ids):,} tokens, more than {effort.scored_from} are needed: "
                "choose a longer text."
            )
        found.append(Text(name, ids))
    return found


def _own_text(name: str) -> str:
    return (files("tqchat.bench") / "texts" / f"{name}.txt").read_text(encoding="utf-8")


def _tasks(loaded: LoadedModel, effort: Effort) -> Iterator[retrieval.Task]:
    running = " ".join(" ".join(_own_text(name) for name in DEFAULT_TEXTS).split())
    make = Tasks(loaded.tokenizer.encode, re.split(r"(?<=[.!?]) ", running), SEED)
    room = loaded.info.context - 64
    for length in effort.contexts:
        if length <= room:
            yield from (make.needle(length, depth) for depth in effort.depths)
    for task in (make.needles, make.variables, make.word_count):
        for _ in range(effort.repeats):
            yield task(min(effort.task_length, room))


def show(report: Report, console: Console) -> None:
    lengths = ", ".join(f"{name} {n:,}" for name, n in report.texts.items())
    console.print(Cell(f"{report.model}, {report.backend}; tokens: {lengths}"))
    console.print(_predictions_table(report))
    console.print(Cell(_ordering(report)))
    if report.left_out:
        console.print(Cell(f"Not for this head_dim: {', '.join(report.left_out)}"))
    console.print()
    console.print(_layers_table(report))
    console.print()
    console.print(_found_table(report))


def _ordering(report: Report) -> str:
    by_kind = {row.kind: row.kl for row in report.predictions}
    steps = [by_kind[scheme.name] for scheme in ORDERING if scheme.name in by_kind]
    text = " > ".join(f"{kl:.4f}" for kl in steps)
    if steps == sorted(steps, reverse=True):
        return f"At 5 bits, each of the first {len(steps)} is closer to fp16 than the last: {text}"
    return f"The first {len(steps)} are not in the order of the design: {text}"


def _predictions_table(report: Report) -> Table:
    table = _table("cache", "bits", "perplexity", "KL", "same top-1", "greedy run")
    for row in report.predictions:
        bits = report.bits.get(row.kind, 16.0)
        table.add_row(
            Cell(row.kind),
            f"{bits:.2f}",
            f"{row.perplexity:.3f}",
            f"{row.kl:.4f}",
            f"{row.same_top1:.1%}",
            f"{row.greedy_run:.1f}",
        )
    table.caption_justify = "left"
    table.caption = (
        f"Unless its name says otherwise, the first {SINK} tokens and the newest {TAIL_MIN} to "
        f"{TAIL_MAX} stay in 16 bits."
    )
    return table


def _layers_table(report: Report) -> Table:
    table = _table(
        "mean of all layers", "K error", "V error", "scores", "output", "K alone", "V alone", "last"
    )
    for name, rows in _by_scheme(report.layers).items():
        means = (
            fmean(getattr(row, field) for row in rows)
            for field in (
                "k_error", "v_error", "score_correlation", "cosine", "k_cosine", "v_cosine"
            )
        )  # fmt: skip
        cells = (f"{mean:.4f}" for mean in (*means, rows[-1].compounded_cosine))
        table.add_row(Cell(name), *cells)
    table.caption_justify = "left"
    table.caption = (
        "Errors are relative; scores: correlation; output: cosine of what a layer alone changes; "
        "last: cosine of the last layer's output after the errors of all."
    )
    return table


def _by_scheme(rows: Sequence[LayerError]) -> dict[str, list[LayerError]]:
    schemes: dict[str, list[LayerError]] = {}
    for row in rows:
        schemes.setdefault(row.scheme, []).append(row)
    return schemes


def _found_table(report: Report) -> Table:
    table = _table("found", "tokens", "times", "fp16", "int4", "same answer")
    groups: dict[tuple[str, int], list[Found]] = {}
    for row in report.found:
        groups.setdefault((row.task, row.length), []).append(row)
    for (task, length), rows in groups.items():
        shares = (
            fmean(row.fp16 for row in rows),
            fmean(row.int4 for row in rows),
            fmean(row.same for row in rows),
        )
        cells = (f"{share:.0%}" for share in shares)
        table.add_row(task, f"{length:,}", str(len(rows)), *cells)
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    return table


def report_charts(report: Mapping[str, Any]) -> list[charts.Chart]:
    """Of a Report's `as_json`, just made or read from a file."""
    model = report["model"]
    divergences = {
        f"{row['kind']} ({report['bits'][row['kind']]:.2f})": row["kl"]
        for row in report["predictions"]
        if row["kind"] != FP16
    }
    distances: dict[str, list[tuple[float, float]]] = {}
    correlations: dict[str, list[tuple[float, float]]] = {}
    for row in report["layers"]:
        if row["scheme"] in _SHOWN:
            off = max(1 - row["compounded_cosine"], LEAST_SHOWN)
            distances.setdefault(row["scheme"], []).append((row["layer"], off))
            point = (row["layer"], row["score_correlation"])
            correlations.setdefault(row["scheme"], []).append(point)
    return [
        charts.Bars(
            "quality-kl", f"KL divergence from fp16, {model} (bits per element)", "KL", divergences,
            log=True,
        ),
        _heat_map(report),
        charts.Lines(
            "quality-depth", f"How far attention's output is from fp16's, {model}", "layer",
            "1 - cosine", distances, log_y=True,
        ),
        charts.Lines(
            "quality-scores", f"Correlation of scores, {model}", "layer", "correlation",
            correlations,
        ),
    ]  # fmt: skip


def _heat_map(report: Mapping[str, Any]) -> charts.HeatMap:
    needles = [row for row in report["found"] if row["task"] == "needle"]
    lengths = sorted({row["length"] for row in needles})
    depths = sorted({row["depth"] for row in needles})
    cells = {(row["depth"], row["length"]): row for row in needles}
    return charts.HeatMap(
        "quality-needle",
        f"A fact found in a long text, {report['model']}",
        "depth",
        "tokens",
        [f"{depth:.0%}" for depth in depths],
        [f"{length:,}" for length in lengths],
        {
            kind: [[cells[depth, length][kind] for length in lengths] for depth in depths]
            for kind in ("fp16", "int4")
        },
    )
