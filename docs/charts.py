"""Makes docs/charts/*.svg, for light and dark pages, of the figures in benchmarks/results.

Run it from the top of the repository: python docs/charts.py
"""

import json
from pathlib import Path

from tqchat.bench import charts, quality, study

ROOT = Path(__file__).parent.parent
RESULTS, FOLDER = ROOT / "benchmarks" / "results", ROOT / "docs" / "charts"
SOURCES = {
    "quality-smollm2.json": (quality.report_charts, ("quality-kl", "quality-needle")),
    "study-smollm2.json": (study.report_charts, ("study-qjl-depth",)),
}


def main() -> None:
    for file, (made_of, shown) in SOURCES.items():
        report = json.loads((RESULTS / file).read_text())
        drawn = [chart for chart in made_of(report) if chart.name in shown]
        charts.write(drawn, FOLDER, formats=("svg",))


if __name__ == "__main__":
    main()
