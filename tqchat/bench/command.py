"""`tqchat bench`: arguments to measurements, measurements to a table or JSON."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tqchat.chat.errors import ChatError
from tqchat.engine.events import EngineOptions
from tqchat.models.errors import ModelError

if TYPE_CHECKING:
    from tqchat.bench import synthetic, ui
    from tqchat.bench.charts import Chart
    from tqchat.bench.decode import Row
    from tqchat.engine.loading import LoadedModel


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="tqchat bench", description="Measure on this machine.")
    commands = made.add_subparsers(dest="command", required=True, metavar="WHAT")
    _decode_arguments(commands.add_parser("decode", help="prefill and decode speed by context"))
    _attention_arguments(commands.add_parser("attention", help="one layer's decode attention"))
    _memory_arguments(commands.add_parser("memory", help="the KV cache, planned and allocated"))
    _quality_arguments(commands.add_parser("quality", help="what kinds of KV cache cost"))
    _study_arguments(commands.add_parser("study", help="Open-TQ-Metal's claims, measured again"))
    _ui_arguments(commands.add_parser("ui", help="time from a key to the screen"))
    return made


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    try:
        if getattr(options, "charts", None):
            from tqchat.bench.charts import check_files_can_be_made

            check_files_can_be_made()
        return int(options.run(options))
    except (ModelError, ChatError) as error:
        print(f"tqchat: {error}", file=sys.stderr)
        return 2


def _decode_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_decode)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="default: the built-in one")
    parser.add_argument("--contexts", type=_numbers, default=[128, 1024, 4096], metavar="N,N,...")
    parser.add_argument(
        "--synthetic",
        metavar="NAME",
        choices=("llama-70b", "llama-8b"),
        help="random 4-bit weights of this shape on a GPU, beside mlx-lm: %(choices)s",
    )
    parser.add_argument("--kv", choices=("int4", "int3", "fp16"), default="int4")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (all it may use)")
    parser.add_argument("--profile", action="store_true", help="split a decode step into shares")
    _output_arguments(parser)


def _synthetic(options: argparse.Namespace) -> int:
    import mlx.core as mx

    from tqchat.bench import synthetic

    if not mx.cuda.is_available():
        raise ModelError("--synthetic measures the CUDA kernels and needs an NVIDIA GPU.")
    made = synthetic.synthetic(options.synthetic)
    measured = {"tqchat, int4 KV": synthetic.measure(made, options.contexts)}
    config = made.config
    del made
    mx.clear_cache()
    failed = {}
    for kv, bits in (("fp16 KV", None), ("4-bit KV", 4)):
        try:
            measured[f"mlx-lm, {kv}"] = synthetic.measure_mlx_lm(config, options.contexts, bits)
        except (ImportError, RuntimeError, ValueError) as error:
            failed[f"mlx-lm, {kv}"] = str(error)
        mx.clear_cache()
    report = {
        "device": mx.device_info(),
        "model": options.synthetic,
        "rows": {name: [asdict(row) for row in rows] for name, rows in measured.items()},
        "failed": failed,
    }
    show = partial(_show_synthetic, measured, failed)
    return _put_out(options, report, synthetic.report_charts(report), show)


def _show_synthetic(
    measured: dict[str, list["synthetic.Row"]], failed: dict[str, str], console: Console
) -> None:
    table = _table("", "context", "decode tok/s", "with sealing", "GB in use", "MB grown")
    for name, rows in measured.items():
        for row in rows:
            table.add_row(
                name,
                f"{row.context:,}",
                f"{row.decode_tps:.1f}",
                f"{row.mean_tps:.1f}",
                f"{row.active_bytes / 1e9:.1f}",
                f"{row.grown_bytes / 1e6:.1f}",
            )
    console.print(table)
    for name, reason in failed.items():
        print(f"{name}: {reason}")


def _decode(options: argparse.Namespace) -> int:
    if options.synthetic:
        return _synthetic(options)
    from tqchat.bench import decode
    from tqchat.engine.loading import load
    from tqchat.models.find import BUILTIN

    engine = EngineOptions(kv=options.kv, threads=options.threads)
    loaded = load(options.model or BUILTIN, engine, lambda event: None, lambda: False)
    longest = max(options.contexts) + 3 * decode.DECODED
    if longest > loaded.info.context:
        raise ModelError(
            f"{loaded.info.name} holds {loaded.info.context:,} tokens, {longest:,} are needed: "
            "ask for shorter --contexts."
        )
    if options.profile:
        shares = {n: decode.profile(loaded, n) for n in options.contexts}
        report = {"model": loaded.info.name, "milliseconds": shares}
        return _put_out(
            options, report, decode.profile_charts(report), partial(_show_profile, shares)
        )
    rows = decode.measure(loaded, options.contexts)
    report = decode.as_json(loaded, rows)
    show = partial(_show_decode, loaded, rows)
    return _put_out(options, report, decode.report_charts(report), show)


def _show_decode(loaded: "LoadedModel", rows: Sequence["Row"], console: Console) -> None:
    table = _table(
        "context", "prefill tok/s", "decode tok/s", "first token s", "KV MiB", "peak MiB"
    )
    for row in rows:
        table.add_row(
            f"{row.context:,}",
            f"{row.prefill_tps:.1f}",
            f"{row.decode_tps:.1f}",
            f"{row.ttft_s:.2f}",
            f"{row.kv_bytes / 2**20:.1f}",
            f"{row.peak_bytes / 2**20:.0f}",
        )
    info = loaded.info
    print(f"{info.name}, {info.kv} KV, {info.backend}, {info.device}")
    console.print(table)


def _show_profile(shares: dict[int, dict[str, float]], console: Console) -> None:
    names = list(dict.fromkeys(name for share in shares.values() for name in share))
    table = _table("context", *(f"{name} ms" for name in names))
    for context, share in shares.items():
        table.add_row(f"{context:,}", *(f"{share.get(name, 0.0):.3f}" for name in names))
    console.print(table)


def _attention_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_attention)
    parser.add_argument("--contexts", type=_numbers, metavar="N,N,...")
    parser.add_argument("--query-tokens", type=int, default=1, metavar="N", help="up to 8 (1)")
    _output_arguments(parser)


def _attention(options: argparse.Namespace) -> int:
    import mlx.core as mx

    from tqchat.bench import attention
    from tqchat.kernels import select

    contexts = options.contexts or attention.CONTEXTS
    report = attention.measure(
        select(mx.float16), contexts=contexts, query_tokens=options.query_tokens
    )
    drawn = attention.report_charts(report)
    return _put_out(options, report.as_json(), drawn, lambda console: attention.show(report))


def _memory_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_memory)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="default: the built-in one")
    parser.add_argument("--contexts", type=_numbers, metavar="N,N,...")
    _output_arguments(parser)


def _memory(options: argparse.Namespace) -> int:
    from tqchat.bench import memory

    loaded = _loaded(options.model)
    report = memory.measure(loaded, options.contexts or memory.contexts(loaded))
    drawn = memory.report_charts(report.as_json())
    return _put_out(options, report.as_json(), drawn, partial(memory.show, report))


def _quality_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_quality)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="default: the built-in one")
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: three of its own")
    parser.add_argument("--quick", action="store_true", help="a smaller measurement, in 2 minutes")
    _output_arguments(parser)


def _quality(options: argparse.Namespace) -> int:
    from tqchat.bench import quality

    effort = quality.QUICK if options.quick else quality.FULL
    loaded = _loaded(options.model)
    texts = quality.texts(loaded, effort, options.text)
    report = quality.measure(loaded, effort, texts, Console(stderr=True))
    drawn = quality.report_charts(report.as_json())
    return _put_out(options, report.as_json(), drawn, partial(quality.show, report))


def _study_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_study)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="default: the built-in one")
    _output_arguments(parser)


def _study(options: argparse.Namespace) -> int:
    from tqchat.bench import quality, study

    loaded = _loaded(options.model)
    text = quality.texts(loaded, quality.QUICK, None)[0]
    report = study.measure(loaded, text, Console(stderr=True))
    drawn = study.report_charts(report.as_json())
    return _put_out(options, report.as_json(), drawn, partial(study.show, report))


def _ui_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_ui)
    _output_arguments(parser)


def _ui(options: argparse.Namespace) -> int:
    from tqchat.bench import ui

    starts, rates = ui.measure_start(), ui.measure_decode()
    rows = [ui.measure(load) for load in ui.LOADS]
    report = {"start": asdict(starts), "decode": asdict(rates), "keys": list(map(asdict, rows))}
    return _put_out(options, report, _ui_charts(rows), partial(_show_ui, starts, rates, rows))


def _ui_charts(rows: Sequence["ui.Row"]) -> list["Chart"]:
    from tqchat.bench.charts import Bars

    slowest: dict[str, float] = {row.load: row.p95 for row in rows}
    return [Bars("ui", "From a key to the screen, 95 of 100", "ms", slowest)]


def _show_ui(
    starts: "ui.Starts", rates: "ui.Rates", rows: Sequence["ui.Row"], console: Console
) -> None:
    table = _table("meanwhile", "keys", "p50 ms", "p95 ms", "p99 ms")
    for row in rows:
        times = (f"{value:.1f}" for value in (row.p50, row.p95, row.p99))
        table.add_row(row.load, str(row.keys), *times)
    console.print(table)
    print(
        f"First frame after {starts.tqchat:.2f} s, that of an empty application after "
        f"{starts.empty:.2f} s.\nDecoding {rates.screen:.1f} tokens/s beside the screen, "
        f"{rates.headless:.1f} without it: {rates.screen / rates.headless:.1%}."
    )


def _output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--charts", type=Path, metavar="FOLDER", help="write SVG and PNG there")


def _put_out(
    options: argparse.Namespace,
    report: dict[str, Any],
    drawn: Sequence["Chart"],
    show: Callable[[Console], None],
) -> int:
    """JSON, or tables and charts in the terminal; charts as files if asked for."""
    from tqchat.bench import charts

    if options.charts:
        charts.write(drawn, options.charts)
    if options.json:
        versions = {name: version(name) for name in ("mlx", "tqchat")}
        print(json.dumps({"date": f"{date.today()}", "versions": versions, **report}))
        return 0
    console = Console()
    show(console)
    charts.show(drawn, console)
    return 0


def _loaded(model: str | None) -> "LoadedModel":
    from tqchat.engine.loading import load
    from tqchat.models.find import BUILTIN

    return load(model or BUILTIN, EngineOptions(), lambda event: None, lambda: False)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if any(number < 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: lengths must be positive")
    return numbers
