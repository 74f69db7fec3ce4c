"""Charts say what was measured, in the terminal and in files."""

import io
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from tqchat.bench import charts
from tqchat.models.errors import ModelError

LINES = charts.Lines(
    "lines", "Lines", "tokens", "ms", {"a [b]": [(1, 2), (2, 8)], "c": [(1, 4)]}, log_x=True
)
BARS = charts.Bars("bars", "Bars", "KL", {"one": 0.5, "none": 0.0, "two": 1.0}, log=True)
MAP = charts.HeatMap(
    "map", "Map", "depth", "tokens", ["0%", "100%"], ["1,024"], {"fp16": [[1], [0.25]]}
)


def shown(*every: charts.Chart) -> str:
    console = Console(file=io.StringIO(), width=100)
    charts.show(every, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_are_heights_on_one_scale_between_first_and_last() -> None:
    lines = shown(LINES).splitlines()
    assert lines[3].split() == ["a", "[b]", "2", "▁█", "8"]
    assert lines[4].split() == ["c", "4", "▃", "4"]


def test_bars_are_as_long_as_their_values() -> None:
    def length(line: str) -> int:
        return line.count("█")

    one, none, two = shown(charts.Bars("b", "B", "s", {"1": 1, "0": 0, "2": 2})).splitlines()[-3:]
    assert (length(one), length(none), length(two)) == (20, 0, 40)
    one, none, two = shown(BARS).splitlines()[-3:]
    assert 0 == length(none) < length(one) < length(two) == 40


def test_cells_say_their_share() -> None:
    assert [line.split()[-1] for line in shown(MAP).splitlines()[-2:]] == ["100%", "25%"]


def test_files_for_light_and_dark_pages(tmp_path: Path) -> None:
    charts.write([LINES, BARS, MAP], tmp_path)
    names = {f"{n}-{s}.{f}" for n in ("lines", "bars", "map") for s in ("light", "dark")
             for f in ("svg", "png")}  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == names
    texts = [e.text for e in ET.parse(tmp_path / "map-dark.svg").iter() if e.tag.endswith("text")]
    assert {"Map", "depth", "tokens", "100%", "25%", "1,024", "fp16"} <= set(texts)
    assert charts.EDGES["dark"] in (tmp_path / "map-dark.svg").read_text()
    assert (tmp_path / "lines-light.png").read_bytes().startswith(b"\x89PNG")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    charts.write([LINES, BARS, MAP], tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'tqchat\[charts\]'"):
        charts.check_files_can_be_made()
