"""The CUDA kernels by themselves, against MLX's own: `python benchmarks/cuda_kernels.py`.

Shapes are Llama 3.1 70B's. Times are the device's (%globaltimer before and after), per call, of
chains of dependent calls over several caches or matrices, so that nothing stays in the L2 cache.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from tqchat.kernels import BLOCK, SINK, TAIL_MIN, Backend, KVView, Weight, tile_words
from tqchat.kernels.cuda.backend import CUDA
from tqchat.kernels.layout import TAIL_CAPACITY

N_HEADS, N_KV_HEADS, HEAD_DIM = 64, 8, 128
MATRICES = {
    "qkv 10240 x 8192": (10240, 8192),
    "o 8192 x 8192": (8192, 8192),
    "gate_up 57344 x 8192": (57344, 8192),
    "lm_head 128256 x 8192": (128256, 8192),
}
L2_BYTES = 60e6

STAMP: Any = mx.fast.cuda_kernel(
    name="tqchat_bench_stamp",
    input_names=["x"],
    output_names=["y", "time"],
    source="""
      for (size_t i = threadIdx.x; i < x_shape[0]; i += blockDim.x) y[i] = x[i];
      if (threadIdx.x == 0) {
        unsigned long long t;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
        time[0] = (unsigned int)t;
        time[1] = (unsigned int)(t >> 32);
      }""",
)


def stamp(x: mx.array) -> tuple[mx.array, mx.array]:
    """x again, and the device's clock once x was there."""
    y, time = STAMP(
        inputs=[x.reshape(-1)],
        output_shapes=[(x.size,), (2,)],
        output_dtypes=[x.dtype, mx.uint32],
        grid=(1024, 1, 1),
        threadgroup=(1024, 1, 1),
    )
    return y.reshape(x.shape), time


def nanoseconds(time: mx.array) -> int:
    low, high = (int(word) for word in np.array(time))
    return low + (high << 32)


def microseconds(call: Callable[[mx.array, int], mx.array], x: mx.array, calls: int) -> float:
    """Median over 7 chains of the time per call."""
    times = []
    for _ in range(9):
        y, start = stamp(x)
        for i in range(calls):
            y = call(y, i)
        y, end = stamp(y)
        mx.eval(y, start, end)
        times.append((nanoseconds(end) - nanoseconds(start)) / calls / 1000)
    return statistics.median(times[2:])


def random_words(*shape: int) -> mx.array:
    return mx.random.randint(-(2**31), 2**31 - 1, shape, dtype=mx.int32).view(mx.uint32)


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a copy of 4 GB."""
    x = random_words(1 << 30)
    seed = mx.zeros((16,))
    mx.eval(x, seed)
    kernel: Any = mx.fast.cuda_kernel(
        name="tqchat_bench_copy",
        input_names=["x", "after"],
        output_names=["y", "done"],
        source="""
          const uint4* from = (const uint4*)x;
          uint4* to = (uint4*)y;
          const size_t n = (size_t)x_shape[0] / 4;
          for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
               i += (size_t)gridDim.x * blockDim.x) to[i] = from[i];
          if (blockIdx.x == 0 && threadIdx.x < 16) done[threadIdx.x] = after[threadIdx.x];""",
    )

    def call(after: mx.array, _: int) -> mx.array:
        done: mx.array = kernel(
            inputs=[x, after],
            output_shapes=[x.shape, after.shape],
            output_dtypes=[x.dtype, after.dtype],
            grid=(132 * 16 * 512, 1, 1),
            threadgroup=(512, 1, 1),
        )[1]
        return done

    return 2 * x.nbytes / (microseconds(call, seed, 4) * 1e-6)


def random_tiles(blocks: int) -> mx.array:
    """Random codes; scales of 0.2 to 0.4 and mids of -0.5 to 0.5, in the backend's order."""

    def parameters(low: float, high: float) -> mx.array:
        shape = (N_KV_HEADS, blocks, HEAD_DIM)
        return mx.random.uniform(low, high, shape).astype(mx.float16).view(mx.uint32)

    def codes() -> mx.array:
        return random_words(N_KV_HEADS, blocks, 4 * HEAD_DIM)

    parts = []
    for _ in "KV":
        parts += [codes(), parameters(0.2, 0.4), parameters(-0.5, 0.5)]
    tiles = mx.concatenate(parts, axis=-1)
    assert tiles.shape[-1] == tile_words(HEAD_DIM)
    return tiles


def attention(backend: Backend, tokens: int) -> dict[str, Any]:
    n_tail = TAIL_MIN + (tokens - SINK - TAIL_MIN) % BLOCK
    blocks = (tokens - SINK - n_tail) // BLOCK
    cache_bytes = 2 * 5 / 8 * tokens * N_KV_HEADS * HEAD_DIM
    layers = max(4, min(80, int(4 * L2_BYTES / cache_bytes)))

    def noise(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(mx.float16)

    def view() -> KVView:
        sink_k, sink_v = (noise(N_KV_HEADS, SINK, HEAD_DIM) for _ in "KV")
        tail_k, tail_v = (noise(N_KV_HEADS, TAIL_CAPACITY, HEAD_DIM) for _ in "KV")
        tiles = random_tiles(blocks)
        return KVView(sink_k, sink_v, tiles, tail_k, tail_v, SINK, blocks, n_tail)

    views = [view() for _ in range(layers)]
    q = noise(N_HEADS, 1, HEAD_DIM)
    mx.eval([[v.sink_k, v.sink_v, v.tiles, v.tail_k, v.tail_v] for v in views], q)
    scale = HEAD_DIM**-0.5
    ours = microseconds(lambda x, i: backend.attend(x, views[i % layers], scale), q, 80)
    views.clear()
    shape = (1, N_KV_HEADS, tokens, HEAD_DIM)
    dense = [[noise(*shape) for _ in "KV"] for _ in range(min(layers, 16))]
    mx.eval(dense)
    sdpa = microseconds(
        lambda x, i: mx.fast.scaled_dot_product_attention(
            x[None], *dense[i % len(dense)], scale=scale
        )[0],
        q,
        80,
    )
    return {"tokens": tokens, "int4_us": ours, "sdpa_us": sdpa, "bytes": cache_bytes}


def random_weight(rows: int, columns: int, bits: int = 4, group: int = 64) -> Weight:
    """Random codes, scaled so that a product has about its input's size."""
    scale = columns**-0.5 / (2**bits * 0.29)
    scales = mx.random.uniform(0.9 * scale, 1.1 * scale, (rows, columns // group))
    return Weight(
        random_words(rows, columns * bits // 32),
        scales.astype(mx.float16),
        (scales * -(2**bits / 2)).astype(mx.float16),
        group,
        bits,
    )


def product(
    backend: Backend, rows: int, columns: int, m: int, bits: int = 4, group: int = 64
) -> float:
    """Microseconds of (m, columns) times a matrix of this shape."""
    nbytes = random_weight(16, columns, bits, group).nbytes * rows // 16
    weights = [
        random_weight(rows, columns, bits, group) for _ in range(max(1, int(4 * L2_BYTES / nbytes)))
    ]
    x = mx.random.normal((m, columns)).astype(mx.float16)
    mx.eval([w.arrays for w in weights], x)
    return microseconds(
        lambda y, i: backend.linear(y[:, :columns], weights[i % len(weights)]), x, 40
    )


def down(backend: Backend, m: int) -> float:
    """Microseconds of 8192 x 28672, from a chain with gate_up's first half."""
    first = [random_weight(28672, 8192) for _ in range(2)]
    second = [random_weight(8192, 28672) for _ in range(2)]
    x = mx.random.normal((m, 8192)).astype(mx.float16)
    mx.eval([w.arrays for w in first + second], x)
    both = microseconds(
        lambda y, i: backend.linear(backend.linear(y, first[i % 2]), second[i % 2]), x, 40
    )
    alone = microseconds(lambda y, i: backend.linear(y[:, :8192], first[i % 2]), x, 40)
    return both - alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1024, 4096, 16384, 65536, 131072])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    ours, mlx = CUDA(mx.float16), Backend(mx.float16)
    copy = copy_bandwidth()
    print(f"MLX {version('mlx')}, {mx.device_info()['device_name']}; copy {copy / 1e12:.2f} TB/s")
    results: dict[str, Any] = {"copy_bytes_per_s": copy, "attention": [], "products": []}
    print("\ntokens   int4 us  fp16 SDPA us  times  TB/s  of copy")
    for tokens in options.tokens:
        row = attention(ours, tokens)
        rate = row["bytes"] / row["int4_us"] * 1e6
        print(
            f"{tokens:7,}  {row['int4_us']:6.1f}  {row['sdpa_us']:12.1f}  "
            f"{row['sdpa_us'] / row['int4_us']:5.1f}  {rate / 1e12:4.2f}  {rate / copy:6.0%}",
            flush=True,
        )
        results["attention"].append(row)
        mx.clear_cache()
    print("\nmatrix                    rows  bits  group       us  TB/s  of copy   MLX us")
    cases = [(name, *shape, m, 4, 64) for name, shape in MATRICES.items() for m in options.rows]
    cases += [("down 8192 x 28672", 8192, 28672, m, 4, 64) for m in options.rows]
    cases += [
        ("gate_up 57344 x 8192", 57344, 8192, m, bits, group)
        for bits, group in ((4, 32), (4, 128), (8, 32), (8, 64), (8, 128))
        for m in options.rows[:: len(options.rows) - 1 or 1]
    ]
    for name, rows, columns, m, bits, group in cases:
        if columns == 28672:
            us, theirs = down(ours, m), down(mlx, m) if m == 1 else float("nan")
        else:
            us = product(ours, rows, columns, m, bits, group)
            theirs = product(mlx, rows, columns, m, bits, group) if m == 1 else float("nan")
        nbytes = rows * columns * (bits / 8 + 4 / group)
        rate = nbytes / us * 1e6
        print(
            f"{name:24}  {m:4}  {bits:4}  {group:5}  {us:7.1f}  {rate / 1e12:4.2f}  "
            f"{rate / copy:7.0%}  {theirs:7.1f}",
            flush=True,
        )
        results["products"].append(
            {
                "matrix": name,
                "rows": m,
                "bits": bits,
                "group_size": group,
                "us": us,
                "mlx_us": None if theirs != theirs else theirs,
                "of_copy": rate / copy,
            }
        )
        mx.clear_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
