"""`tqchat bench`: arguments to measurements, measurements to a table or JSON."""

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tqchat.chat.errors import ChatError
from tqchat.engine.events import EngineOptions
from tqchat.models.errors import ModelError


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tqchat bench", description="Measure on this machine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="WHAT")
    _decode_arguments(commands.add_parser("decode", help="prefill and decode speed by context"))
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (ModelError, ChatError) as error:
        print(f"tqchat: {error}", file=sys.stderr)
        return 2


def _decode_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_decode)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="default: the built-in one")
    parser.add_argument("--contexts", type=_numbers, default=[128, 1024, 4096], metavar="N,N,...")
    parser.add_argument("--kv", choices=("int4", "fp16"), default="int4")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (all it may use)")
    parser.add_argument("--profile", action="store_true", help="split a decode step into shares")
    parser.add_argument("--json", action="store_true")


def _decode(options: argparse.Namespace) -> int:
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
        if options.json:
            print(json.dumps({"model": loaded.info.name, "milliseconds": shares}))
        else:
            _print_profile(shares)
        return 0
    rows = decode.measure(loaded, options.contexts)
    if options.json:
        print(json.dumps(decode.as_json(loaded, rows)))
        return 0
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
    print(f"{loaded.info.name}, {loaded.info.kv} KV, {loaded.info.backend}, {loaded.info.device}")
    Console().print(table)
    return 0


def _print_profile(shares: dict[int, dict[str, float]]) -> None:
    names = list(dict.fromkeys(name for share in shares.values() for name in share))
    table = _table("context", *(f"{name} ms" for name in names))
    for context, share in shares.items():
        table.add_row(f"{context:,}", *(f"{share.get(name, 0.0):.3f}" for name in names))
    Console().print(table)


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
