"""`tqchat plan`: what memory a model needs at each context length, and the longest that fits."""

import argparse
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from tqchat.engine import memory, plan
from tqchat.engine.events import KVKind
from tqchat.engine.wired import SYSTEM_RESERVE
from tqchat.models.config import Config
from tqchat.models.errors import ModelError
from tqchat.models.find import installed, resolve
from tqchat.models.folder import WEIGHTS, read_config
from tqchat.models.recommended import recommended
from tqchat.models.registry import Shape, architecture
from tqchat.units import bytes_text

SUMMARY = "What memory a model needs at each context length, and the longest that fits."
METAL = plan.Prefill(chunk=512)
CUDA = plan.Prefill(chunk=512, derives_keys=False)
# Activations in 32 bits, and codes that are read as they lie.
CPU = plan.Prefill(chunk=256, activation_bytes=4, past_bytes=0)
# macOS lets a GPU wire about three quarters of the memory unless the limit is raised.
DEFAULT_SHARE = 0.75
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes: what the device allows as it is set up, and what it can be made to allow.

    prefill: how it reads a prompt.
    """

    default: int
    raised: int
    prefill: plan.Prefill = METAL


@dataclass(frozen=True, slots=True)
class Report:
    """What a model needs. `longest`: the most tokens that fit if the limit is raised."""

    name: str
    shape: Shape
    weights: int
    kv: KVKind
    limit: Limit
    needs: Sequence[plan.Need]
    longest: int

    @property
    def kv_token_bytes(self) -> int:
        return plan.token_bytes(self.shape, self.kv, self.limit.prefill.derives_keys)

    @property
    def command(self) -> str | None:
        """What makes room for the whole context, where the limit's setting is what stops it."""
        if not self.limit.default < self.needs[-1].total <= self.limit.raised:
            return None
        return memory.raising(self.limit.raised)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="tqchat plan", description=SUMMARY)
    what = "a folder with config.json, a .gguf file, or a Hugging Face id"
    made.add_argument("model", metavar="MODEL", help=what)
    made.add_argument("--memory", type=_size, metavar="SIZE", help="plan for a Mac, e.g. 64GB")
    made.add_argument("--kv", choices=("int4", "int3", "fp16"), default="int4")
    made.add_argument("--json", action="store_true")
    return made


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    try:
        made = report(options.model, options.kv, options.memory)
    except ModelError as error:
        print(f"tqchat: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(made)) if options.json else text(made))
    return 0


def report(model: str, kv: KVKind, memory: int | None = None) -> Report:
    """What `model` needs on this device, or on a Mac of `memory` bytes. Raises ModelError."""
    name, shape, weights = _read(model)
    return of(name, shape, weights, kv, device() if memory is None else _mac(memory))


def of(name: str, shape: Shape, weights: int, kv: KVKind, limit: Limit) -> Report:
    """`weights`: bytes as stored."""
    return Report(
        name,
        shape,
        weights,
        kv,
        limit,
        [plan.need(shape, weights, n, kv, limit.prefill) for n in _lengths(shape.context)],
        plan.largest_context(shape, weights, kv, limit.prefill, limit.raised),
    )


def as_json(report: Report) -> dict[str, Any]:
    rows = [
        {
            "context": need.context,
            "kv_fp16_bytes": need.kv_fp16,
            "kv_bytes": need.kv,
            "total_bytes": need.total,
            "fits": need.total <= report.limit.default,
            "fits_with_raised_limit": need.total <= report.limit.raised,
        }
        for need in report.needs
    ]
    return {
        "model": report.name,
        "kv": report.kv,
        "weights_bytes": report.weights,
        "kv_token_bytes": report.kv_token_bytes,
        "limit_bytes": report.limit.default,
        "raised_limit_bytes": report.limit.raised,
        "trained_context": report.shape.context,
        "largest_context": report.longest,
        "command": report.command,
        "rows": rows,
    }


def text(report: Report) -> str:
    limit = report.limit
    table = Table(box=None, pad_edge=False)
    for heading in ("context", "fp16 KV", f"{report.kv} KV", "saved", "total", "fits"):
        table.add_column(heading, justify="right")
    for need in report.needs:
        sizes = (need.kv_fp16, need.kv, need.kv_fp16 - need.kv, need.total)
        fits = "yes" if need.total <= limit.default else "no"
        if fits == "no" and need.total <= limit.raised:
            fits = "if the limit is raised"
        table.add_row(f"{need.context:,}", *map(bytes_text, sizes), fits)
    console = Console(file=io.StringIO(), width=100, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(table)
    beyond = ", more than it was trained for" if report.longest > report.shape.context else ""
    token = report.kv_token_bytes
    growth = f"KV {bytes_text(token)} a token" if token else "KV that ends with its windows"
    parts = [
        f"{report.name}: weights {bytes_text(report.weights)}, {growth}, "
        f"limit {bytes_text(limit.default)}",
        *(line.rstrip() for line in capture.get().splitlines()),
        f"The largest context that fits: {report.longest:,} tokens{beyond}.",
    ]
    if report.command:
        why = "To use the whole context, raise macOS's limit until restart"
        parts.append(f"{why}: {report.command}")
    return "\n".join(parts)


def _read(name: str) -> tuple[str, Shape, int]:
    """The model's name, its shape, and its weights' bytes. Raises ModelError."""
    ref = resolve(name)
    path = ref.path or next((m.path for m in installed() if m.name == ref.name), None)
    weights = 0
    if path is None:
        if ref.repo_id is None or ref.file is not None:
            raise ModelError(f"{ref.name} is not on this machine: tqchat pull {ref.name}")
        if known := next((one.config for one in recommended() if one.id == ref.repo_id), None):
            shape = architecture(known).parse(known)
            return ref.name, shape, weights_bytes(known, shape)
        from tqchat.models.hub import look

        config_file, weights = look(ref.repo_id)
        path = config_file.parent
    if path.is_dir() and not any(WEIGHTS.fullmatch(file.name) for file in path.iterdir()):
        config = Config(ref.name, read_config(path))
        shape = architecture(config).parse(config)
        return ref.name, shape, weights or weights_bytes(config, shape)
    from tqchat.models.checkpoint import describe

    found = describe(path)
    config = Config(ref.name, found.config)
    return ref.name, architecture(config).parse(config), found.weights_bytes


def weights_bytes(config: Config, shape: Shape) -> int:
    """From the config alone: 16 bits, or MLX's quantisation with its two 16-bit numbers a group."""
    quantization = config.get("quantization") or {}
    if quantization.get("quant_method") == "mxfp4":
        # As OpenAI has it: 4 bits and a byte for 32 of them, everything but experts in 16 bits.
        experts = shape.n_expert_parameters
        return int(4.25 / 8 * experts) + 2 * (shape.n_parameters - experts)
    bits = quantization.get("bits", 16)
    if quantization:
        affine = quantization.get("mode", "affine") == "affine"
        bits += (32 if affine else 8) / quantization.get("group_size", 64)
    return int(shape.n_parameters * bits / 8)


def _lengths(context: int) -> list[int]:
    lengths = [n for n in (1 << 10, 1 << 14, 1 << 16, 1 << 17) if n < context]
    return [*lengths, context]


def _mac(memory: int) -> Limit:
    return Limit(
        int(memory * DEFAULT_SHARE), max(int(memory * DEFAULT_SHARE), memory - SYSTEM_RESERVE)
    )


def device() -> Limit:
    limit = memory.measure(0, 0).limit
    prefill = METAL if mx.metal.is_available() else CUDA
    if mx.default_device().type == mx.cpu:
        prefill = CPU
    return Limit(limit, memory.raised_limit(limit), prefill)


def _size(text: str) -> int:
    """Memory as it is sold: GB means 2**30 bytes."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([GMT])i?B?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 64GB")
    scale = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}[match[2].upper()]
    return int(float(match[1]) * scale)
