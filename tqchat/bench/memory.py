"""A KV cache's bytes by context length: planned before, held, and really allocated."""

import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from tqchat.bench import charts
from tqchat.bench.caches import append_random
from tqchat.engine import plan
from tqchat.engine.cache import DenseCache, KVCache, SealedCache, make_caches
from tqchat.engine.events import CODE_BITS, KVKind
from tqchat.engine.loading import LoadedModel
from tqchat.engine.memory import measure as measure_memory
from tqchat.kernels import select
from tqchat.models.errors import ModelError
from tqchat.units import bytes_text

CONTEXTS = (1024, 4096, 16384, 65536, 131072)
CHUNK = 512
KINDS: Mapping[KVKind, Callable[..., KVCache]] = {
    "fp16": DenseCache,
    "int4": SealedCache,
    "int3": SealedCache,
}


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes of all layers' caches at one length.

    planned: by `plan`, with the room the buffers grow into
    held: what the tokens take
    allocated: the buffers' sizes
    in_use: what the allocators of MLX and numpy have given out for them
    """

    kv: KVKind
    context: int
    planned: int
    held: int
    allocated: int
    in_use: int


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    backend: str
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def contexts(loaded: LoadedModel) -> list[int]:
    """CONTEXTS as far as the model's own, and that."""
    return [*(n for n in CONTEXTS if n < loaded.info.context), loaded.info.context]


def measure(loaded: LoadedModel, contexts: Sequence[int]) -> Report:
    """Fill caches of every kind with random K and V. Raises ModelError if memory is short."""
    rows = [_row(loaded, kv, n) for kv in KINDS for n in contexts]
    return Report(loaded.info.name, loaded.info.backend, rows)


def _row(loaded: LoadedModel, kv: KVKind, context: int) -> Row:
    derives_keys = loaded.backend.derives_keys
    planned = plan.allocated_bytes(loaded.model.shape, context, kv, derives_keys)
    free = measure_memory(0, 0).free
    if planned > free:
        raise ModelError(
            f"{context:,} tokens take {bytes_text(planned)} in {kv}, {bytes_text(free)} is free: "
            "ask for shorter --contexts."
        )
    backend = select(loaded.backend.dtype, kv_bits=CODE_BITS.get(kv, 4))
    layers = loaded.model.shape.kv_layers
    mx.clear_cache()
    tracemalloc.start()
    try:
        before = _in_use()
        caches = make_caches(KINDS[kv], backend, layers)
        for cache in caches:
            cache.reserve(context)
        for start in range(0, context, CHUNK):
            append_random(backend, layers, caches, min(CHUNK, context - start))
        in_use = _in_use() - before
    finally:
        tracemalloc.stop()
    held = sum(cache.nbytes for cache in caches)
    allocated = sum(cache.nbytes_allocated for cache in caches)
    return Row(kv, context, planned, held, allocated, in_use)


def _in_use() -> int:
    """MLX's own, and numpy's as Python traces it."""
    return mx.get_active_memory() + tracemalloc.get_traced_memory()[0]


def show(report: Report, console: Console) -> None:
    console.print(f"{report.model}, {report.backend}", markup=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("KV", "context", "planned", "held", "allocated", "in use", "in use / planned"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        sizes = (row.planned, row.held, row.allocated, row.in_use)
        share = f"{row.in_use / row.planned:.3f}"
        table.add_row(row.kv, f"{row.context:,}", *map(bytes_text, sizes), share)
    console.print(table)


def report_charts(report: Mapping[str, Any]) -> list[charts.Chart]:
    """Of a Report's `as_json`."""
    lines = {
        f"{kv}, {what.replace('_', ' ')}": [
            (row["context"], row[what] / 2**20) for row in report["rows"] if row["kv"] == kv
        ]
        for kv in KINDS
        for what in ("planned", "in_use")
    }
    return [
        charts.Lines(
            "memory", f"KV cache of {report['model']}", "tokens", "MiB", lines,
            log_x=True, log_y=True,
        )
    ]  # fmt: skip
