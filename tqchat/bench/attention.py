"""Decode attention of one layer, by the ways there are to store and read a KV cache.

Steps depend on each other, as a model's layers do, and take turns at several caches, so that none
stays in the device's cache memory.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table

from tqchat.bench import charts
from tqchat.engine.memory import measure as measure_memory
from tqchat.kernels import BLOCK, GROUP, SINK, TAIL_MIN, Array, Backend, KVView, codec, tile_words
from tqchat.kernels.layout import TAIL_CAPACITY

ROTATED_BYTES = 256 << 20
MAX_COPIES = 256
COPIED_BYTES = 256 << 20
COPIED_PART = 16 << 20
SECONDS = 0.1
REPEATS = 3

FUSED = "fused int4"
DEQUANTISED = "dequantise, then SDPA"
PRODUCTS = "two quantised products"
FP16 = "fp16 SDPA"


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one layer's attention."""

    name: str
    n_heads: int
    n_kv_heads: int
    head_dim: int

    def fp16_bytes(self, tokens: int) -> int:
        """K and V of so many tokens in 16 bits."""
        return 4 * self.n_kv_heads * self.head_dim * tokens


SHAPES = (
    Shape("llama-70b", 64, 8, 128),
    Shape("llama-8b", 32, 8, 128),
    Shape("smollm2", 9, 3, 64),
)
CONTEXTS = (1024, 16384, 65536, 131072)


@dataclass(frozen=True, slots=True)
class Row:
    """One way at one size: seconds per step, bytes of the cache as it is stored."""

    shape: str
    context: int
    way: str
    seconds: float
    bytes: int
    of_copy_bandwidth: float
    """Bytes per second, as a share of the rate at which the device copies."""
    times_fp16: float
    """How much faster than fp16 SDPA."""


@dataclass(frozen=True, slots=True)
class Report:
    """`copy_bandwidth`: bytes read plus bytes written, per second. `refused`: a line each."""

    backend: str
    copy_bandwidth: float
    rows: list[Row]
    refused: list[str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    backend: Backend,
    shapes: Sequence[Shape] = SHAPES,
    contexts: Sequence[int] = CONTEXTS,
    query_tokens: int = 1,
) -> Report:
    """Time every way at every size; a size for which memory is short is refused, not tried."""
    bandwidth = copy_bandwidth(backend)
    rows: list[Row] = []
    refused: list[str] = []
    for shape, context in itertools.product(shapes, contexts):
        if complaint := _too_large(shape, context):
            refused.append(complaint)
            continue
        times = {}
        for way, prepare in WAYS.items():
            steps, q, stored = prepare(backend, shape, context, query_tokens)
            times[way] = _seconds(steps, q), stored
            del steps, q
            mx.clear_cache()
        for way, (seconds, stored) in times.items():
            share = stored / seconds / bandwidth
            speedup = times[FP16][0] / seconds
            rows.append(Row(shape.name, context, way, seconds, stored, share, speedup))
    return Report(backend.name, bandwidth, rows, refused)


def copy_bandwidth(backend: Backend) -> float:
    """Bytes read plus bytes written per second when a large array is copied."""
    if _is_mlx(backend):
        x = mx.zeros(COPIED_BYTES // 4, mx.uint32)
        return 2 * COPIED_BYTES / _seconds([lambda x: x + 1], x)
    parts = [slice(i, i + COPIED_PART) for i in range(0, COPIED_BYTES, COPIED_PART)]
    buffers = np.ones((2, COPIED_BYTES), np.uint8)
    with ThreadPoolExecutor() as pool:

        def copy(_: Array) -> Array:
            list(pool.map(lambda part: np.copyto(buffers[1, part], buffers[0, part]), parts))
            return buffers[1]

        return 2 * COPIED_BYTES / _seconds([copy], buffers[0])


def _is_mlx(backend: Backend) -> bool:
    """Whether the backend's arrays are MLX's, rather than numpy's."""
    return isinstance(backend.zeros((1,), mx.uint32), mx.array)


def _too_large(shape: Shape, context: int) -> str | None:
    # The caches that take turns, and one in 16 bits with what makes it out of int4.
    needed = ROTATED_BYTES + 3 * shape.fp16_bytes(context)
    free = measure_memory(0, 0).free
    if needed <= free:
        return None
    return (
        f"{shape.name} at {context:,} tokens needs {needed / 2**30:.1f} GiB, "
        f"{max(free, 0) / 2**30:.1f} GiB is free: close other programs, or measure less."
    )


Step = Callable[[Array], Array]
Prepared = tuple[list[Step], Array, int]
"""A step on each of several caches, what the first takes, and the bytes of a cache."""

Quantised = tuple[mx.array, mx.array, mx.array]
"""Words, scales, biases."""


def _seconds(steps: Sequence[Step], x: Array) -> float:
    """Of one step. Each takes the last one's result; the median of several runs."""

    def run(n: int) -> float:
        y, turns = x, itertools.cycle(steps)
        start = time.perf_counter()
        for _ in range(n):
            y = next(turns)(y)
        if isinstance(y, mx.array):
            mx.eval(y)
        return time.perf_counter() - start

    for _ in range(2):
        run(len(steps))
    n = len(steps)
    while (taken := run(n)) < SECONDS:
        n = max(2 * n, int(1.2 * n * SECONDS / max(taken, 1e-6)))
    return statistics.median([taken / n, *(run(n) / n for _ in range(REPEATS - 1))])


def _copies(stored: int) -> int:
    return max(1, min(MAX_COPIES, -(-ROTATED_BYTES // stored)))


def _random(backend: Backend, *shape: int) -> Array:
    """In the cache's 16-bit type."""
    x = mx.random.normal(shape).astype(backend.cache_dtype)
    return x if _is_mlx(backend) else np.array(x)


def _query(backend: Backend, shape: Shape, tokens: int) -> Array:
    q = mx.random.normal((shape.n_heads, tokens, shape.head_dim)).astype(backend.dtype)
    return q if _is_mlx(backend) else np.array(q)


def _random_words(*shape: int) -> mx.array:
    return mx.random.randint(0, 2**31 - 1, shape, dtype=mx.uint32)


def _random_tiles(backend: Backend, shape: Shape, n_blocks: int) -> Array:
    """Tiles of random codes; any are as fast as real ones."""
    codes = _random_words(shape.n_kv_heads, n_blocks, tile_words(shape.head_dim))
    size = (shape.n_kv_heads, n_blocks, shape.head_dim)
    parameters = codec.pack_parameters(
        mx.full(size, 0.2, mx.float16), mx.random.normal(size).astype(mx.float16) * 0.1
    )
    dim = shape.head_dim
    codes[..., 4 * dim : 5 * dim] = parameters
    codes[..., 9 * dim :] = parameters
    return backend.from_canonical(codes)


def _views(backend: Backend, shape: Shape, context: int) -> tuple[list[KVView], int]:
    """Int4 caches of so many tokens, and the bytes that one takes."""
    n_blocks = (context - SINK - TAIL_MIN) // BLOCK
    n_tail = context - SINK - BLOCK * n_blocks
    tile_size = 4 * tile_words(shape.head_dim)
    stored = shape.n_kv_heads * n_blocks * tile_size + shape.fp16_bytes(SINK + n_tail)
    views = []
    for _ in range(_copies(stored)):
        sink = _random(backend, shape.n_kv_heads, SINK, shape.head_dim)
        tail = _random(backend, shape.n_kv_heads, TAIL_CAPACITY, shape.head_dim)
        tiles = _random_tiles(backend, shape, n_blocks)
        backend.evaluate(tiles, sink, tail)
        views.append(KVView(sink, sink, tiles, tail, tail, SINK, n_blocks, n_tail))
    return views, stored


def _fused(backend: Backend, shape: Shape, context: int, tokens: int) -> Prepared:
    views, stored = _views(backend, shape, context)
    scale = shape.head_dim**-0.5

    def step(view: KVView) -> Step:
        return lambda q: backend.attend(q, view, scale)

    return [step(view) for view in views], _query(backend, shape, tokens), stored


def _dequantised(backend: Backend, shape: Shape, context: int, tokens: int) -> Prepared:
    views, stored = _views(backend, shape, context - tokens)
    scale = shape.head_dim**-0.5
    new = _random(backend, shape.n_kv_heads, tokens, shape.head_dim)

    def step(view: KVView) -> Step:
        def run(q: Array) -> Array:
            if isinstance(q, mx.array):
                return backend.attend_chunk(q, new, new, view, scale)
            k, v = backend.unseal(view.tiles)  # the CPU's attend_chunk dequantises nothing
            return backend.attend_dense(q, k, v, scale)

        return run

    return [step(view) for view in views], _query(backend, shape, tokens), stored


def _products(backend: Backend, shape: Shape, context: int, tokens: int) -> Prepared:
    """As mlx-lm does it: quantised matrix products on both sides of a softmax."""
    stored = shape.n_kv_heads * context * tile_words(shape.head_dim) * 4 // BLOCK
    group, scale = shape.n_heads // shape.n_kv_heads, shape.head_dim**-0.5
    dtype = backend.dtype

    def quantised() -> Quantised:
        size = (shape.n_kv_heads, 1, context)
        words = _random_words(*size, shape.head_dim // 8)
        scales = mx.full((*size, shape.head_dim // GROUP), 0.2, dtype)
        biases = mx.full(scales.shape, -1.5, dtype)
        mx.eval(words, scales, biases)
        return words, scales, biases

    def product(x: mx.array, of: Quantised, transpose: bool) -> mx.array:
        words, scales, biases = of
        return mx.quantized_matmul(
            x, words, scales, biases, transpose=transpose, group_size=GROUP, bits=4
        )

    def step(k: Quantised, v: Quantised) -> Step:
        def run(q: Array) -> Array:
            rows = q.reshape(shape.n_kv_heads, group, tokens, shape.head_dim) * scale
            weights = mx.softmax(product(rows, k, True), axis=-1, precise=True)
            return product(weights, v, False).reshape(q.shape)

        return run

    steps = [step(quantised(), quantised()) for _ in range(_copies(stored))]
    return steps, mx.array(_query(backend, shape, tokens)), stored


def _fp16(backend: Backend, shape: Shape, context: int, tokens: int) -> Prepared:
    stored, scale = shape.fp16_bytes(context), shape.head_dim**-0.5

    def caches() -> Iterator[tuple[Array, Array]]:
        for _ in range(_copies(stored)):
            k, v = (_random(backend, shape.n_kv_heads, context, shape.head_dim) for _ in "kv")
            backend.evaluate(k, v)
            yield k, v

    def step(k: Array, v: Array) -> Step:
        return lambda q: backend.attend_dense(q, k, v, scale)

    return [step(k, v) for k, v in caches()], _query(backend, shape, tokens), stored


WAYS: dict[str, Callable[[Backend, Shape, int, int], Prepared]] = {
    FUSED: _fused,
    DEQUANTISED: _dequantised,
    PRODUCTS: _products,
    FP16: _fp16,
}


def show(report: Report) -> None:
    """Print a table, and what was not measured and why."""
    print(f"{report.backend}, copies at {report.copy_bandwidth / 1e9:.0f} GB/s")
    table = Table(box=None, pad_edge=False)
    for heading in ("shape", "context", "way", "us", "MB", "of copy rate", "times fp16"):
        table.add_column(heading, justify="left" if heading in ("shape", "way") else "right")
    for row in report.rows:
        table.add_row(
            row.shape,
            f"{row.context:,}",
            row.way,
            f"{row.seconds * 1e6:,.1f}",
            f"{row.bytes / 1e6:.1f}",
            f"{row.of_copy_bandwidth:.0%}",
            f"{row.times_fp16:.2f}",
        )
    Console().print(table)
    for line in report.refused:
        print(line)


def report_charts(report: Report) -> list[charts.Chart]:
    return [
        charts.Lines(
            f"attention-{shape}",
            f"One layer's decode attention, {shape}'s shape, {report.backend}",
            "tokens",
            "us",
            {
                way: [
                    (row.context, row.seconds * 1e6)
                    for row in report.rows
                    if (row.shape, row.way) == (shape, way)
                ]
                for way in WAYS
            },
            log_x=True,
            log_y=True,
        )
        for shape in dict.fromkeys(row.shape for row in report.rows)
    ]
