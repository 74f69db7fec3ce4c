"""Charts of what was measured: in the terminal, and as SVG and PNG for light and dark pages.

Files need matplotlib, the optional dependency `tqchat[charts]`.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tqchat.models.errors import ModelError
from tqchat.paths import write_private

BAR_WIDTH = 40
SPARKS = "▁▂▃▄▅▆▇█"
EDGES = {"light": "#1f2328", "dark": "#e6edf3"}
COLOURS = ("#2f81f7", "#db6d28", "#3fb950", "#a371f7", "#db61a2", "#8b949e", "#c69026", "#39c5cf")
GOOD, BAD = (46, 160, 67), (218, 54, 51)


@dataclass(frozen=True, slots=True)
class Lines:
    """Points (x, y) by the name of their line."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    name: str
    title: str
    label: str
    bars: Mapping[str, float]
    log: bool = False


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Shares from 0 to 1; a panel's cells go by row, then by column."""

    name: str
    title: str
    row_label: str
    column_label: str
    rows: Sequence[str]
    columns: Sequence[str]
    panels: Mapping[str, Sequence[Sequence[float]]]


Chart: TypeAlias = Lines | Bars | HeatMap
"""`name` is the file's, without its ending."""


def check_files_can_be_made() -> None:
    """Raises ModelError, so that nobody waits for a measurement whose charts then fail."""
    if find_spec("matplotlib") is None:
        raise ModelError("Charts as files need matplotlib: pip install 'tqchat[charts]'")


def show(charts: Sequence[Chart], console: Console) -> None:
    for chart in charts:
        console.print()
        console.print(Text(chart.title, style="bold"))
        if isinstance(chart, Lines):
            console.print(_sparks(chart))
        elif isinstance(chart, Bars):
            console.print(_bars(chart))
        else:
            for panel, cells in chart.panels.items():
                console.print(_cells(chart, panel, cells))


def _sparks(chart: Lines) -> Table:
    """A line of eight heights each, all on one scale, between its first and last values."""
    table = _table("", "first", chart.y_label, "last")
    values = [y for line in chart.lines.values() for _, y in line]
    height = math.log10 if chart.log_y else float
    low, high = height(min(values)), height(max(values))
    for name, line in chart.lines.items():
        ys = [y for _, y in line]
        levels = ((height(y) - low) / (high - low) if high > low else 1.0 for y in ys)
        sparks = "".join(SPARKS[round(level * (len(SPARKS) - 1))] for level in levels)
        table.add_row(Text(name), f"{ys[0]:.4g}", sparks, f"{ys[-1]:.4g}")
    return table


def _bars(chart: Bars) -> Table:
    table = _table("", chart.label, "")
    shares = _shares(chart)
    for name, value in chart.bars.items():
        cells = round(8 * BAR_WIDTH * shares[name])
        bar = "█" * (cells // 8) + (" ▏▎▍▌▋▊▉"[cells % 8] if cells % 8 else "")
        table.add_row(Text(name), f"{value:.4g}", Text(bar))
    table.columns[2].justify = "left"
    return table


def _shares(chart: Bars) -> dict[str, float]:
    """Of the longest bar; on a logarithmic scale, a tenth is left for the shortest."""
    longest = max(chart.bars.values())
    if not chart.log:
        return {name: value / longest for name, value in chart.bars.items()}
    least = min(value for value in chart.bars.values() if value > 0)
    decades = math.log10(longest / least) or 1.0
    return {
        name: 0.1 + 0.9 * math.log10(value / least) / decades if value > 0 else 0.0
        for name, value in chart.bars.items()
    }


def _cells(chart: HeatMap, panel: str, cells: Sequence[Sequence[float]]) -> Table:
    table = _table(f"{panel}: {chart.row_label} \\ {chart.column_label}", *chart.columns)
    for label, row in zip(chart.rows, cells, strict=True):
        shades = (Text(f"{x:6.0%} ", Style(color="white", bgcolor=_shade(x))) for x in row)
        table.add_row(Text(label), *shades)
    return table


def _shade(share: float) -> str:
    mixed = (round(b + share * (g - b)) for g, b in zip(GOOD, BAD, strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(Text(heading), justify="right" if i else "left")
    return table


def write(charts: Sequence[Chart], folder: Path, formats: Sequence[str] = ("svg", "png")) -> None:
    """`name`-light and `name`-dark of every chart. Raises OSError."""
    for chart in charts:
        for shade in EDGES:
            for form in formats:
                path = folder / f"{chart.name}-{shade}.{form}"
                write_private(path, _drawn(chart, shade, form))


def _drawn(chart: Chart, shade: str, form: str) -> bytes:
    """The file's bytes; the same figures make the same file."""
    matplotlib: Any = import_module("matplotlib")
    figures: Any = import_module("matplotlib.figure")
    edge = EDGES[shade]
    style: dict[str, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "tqchat",
        "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.labelcolor": edge,
        "font.size": 9,
    }
    style |= dict.fromkeys(
        ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color"), edge
    )
    with matplotlib.rc_context(style):
        figure = figures.Figure(figsize=(7.2, _height(chart)), layout="constrained")
        figure.suptitle(chart.title, fontsize=10)
        _DRAW[type(chart)](figure, chart)
        file = io.BytesIO()
        # Without a date, and on no ground of its own.
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        figure.savefig(file, format=form, dpi=160, transparent=True, metadata=metadata)
    return file.getvalue()


def _height(chart: Chart) -> float:
    """Inches; bars need some each."""
    return max(4.2, 0.6 + 0.24 * len(chart.bars)) if isinstance(chart, Bars) else 4.2


def _draw_lines(figure: Any, chart: Lines) -> None:
    axes = figure.subplots()
    for name, line in chart.lines.items():
        axes.plot(*zip(*line, strict=True), label=name, marker="." if len(line) < 12 else "")
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    if chart.log_y:
        axes.set_yscale("log")
    axes.legend(fontsize=8)


def _draw_bars(figure: Any, chart: Bars) -> None:
    axes = figure.subplots()
    bars = axes.barh(list(chart.bars), list(chart.bars.values()), color=COLOURS[0])
    axes.bar_label(bars, fmt="{:.4g}", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel=chart.label)
    if chart.log:
        axes.set_xscale("log")
    axes.margins(x=0.15)


def _draw_heat_map(figure: Any, chart: HeatMap) -> None:
    colors: Any = import_module("matplotlib.colors")
    shades = colors.ListedColormap([_shade(i / 20) for i in range(21)])
    every = figure.subplots(1, len(chart.panels), sharey=True, squeeze=False)[0]
    for axes, (panel, cells) in zip(every, chart.panels.items(), strict=True):
        axes.imshow(cells, vmin=0, vmax=1, cmap=shades, aspect="auto")
        axes.set(title=panel, xlabel=chart.column_label)
        axes.set_xticks(range(len(chart.columns)), chart.columns)
        axes.set_yticks(range(len(chart.rows)), chart.rows)
        for y, row in enumerate(cells):
            for x, share in enumerate(row):
                axes.text(x, y, f"{share:.0%}", ha="center", va="center", color="white")
    every[0].set_ylabel(chart.row_label)


_DRAW: dict[type, Callable[[Any, Any], None]] = {
    Lines: _draw_lines,
    Bars: _draw_bars,
    HeatMap: _draw_heat_map,
}
