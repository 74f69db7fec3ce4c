"""Metal kernels for codes that MLX has no operations for; each has its text in a file of its own.

make_kernel: `mx.fast.metal_kernel`, or what tests put in its place.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx

from tqchat.kernels.layout import BLOCK

MakeKernel: TypeAlias = Callable[..., Any]

MOST_ROWS = 8
"""Of a query that a thread keeps sums for: more would not stay in registers."""

QJL_SCORES = """
  qjl_scores<WORDS, BITS>(
      planes, steps, words, lengths, scores, planes_shape[1], words_shape[1], unbiased,
      int(thread_position_in_grid.y), int(thread_position_in_grid.x));
"""
POLARQUANT_SCORES = """
  threadgroup float2 table[(1 << BITS) + 3 * (1 << (BITS - 2))];
  for (uint i = thread_position_in_threadgroup.x; i < uint(tables_shape[0]);
       i += threads_per_threadgroup.x)
    table[i] = float2(tables[2 * i], tables[2 * i + 1]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  polarquant_scores<D, BITS, ROWS>(
      q, first, upper, radii, table, scores, q_shape[1], radii_shape[1],
      int(thread_position_in_grid.y), ROWS * int(thread_position_in_grid.z),
      int(thread_position_in_grid.x));
"""
TURBOQUANT_DECODE = """
  turboquant_decode<D, BITS>(
      words, lengths, codebook, out,
      int(thread_position_in_grid.z * words_shape[1] + thread_position_in_grid.y),
      int(thread_position_in_grid.x));
"""


def is_default() -> bool:
    """Whether MLX computes on a GPU that runs these kernels."""
    return mx.metal.is_available() and mx.default_device().type == mx.gpu


@functools.cache
def _kernel(
    make_kernel: MakeKernel, file: str, name: str, inputs: tuple[str, ...], output: str, body: str
) -> Any:
    header = (Path(__file__).parent / file).read_text()
    return make_kernel(f"tqchat_{name}", list(inputs), [output], body, header)


def qjl_scores(
    planes: mx.array,
    steps: mx.array,
    words: mx.array,
    lengths: mx.array,
    unbiased: float,
    make_kernel: MakeKernel = mx.fast.metal_kernel,
) -> mx.array:
    """Estimates of <q, k>: (n_kv_heads, rows, tokens), float32.

    planes: (n_kv_heads, rows, bits, m / 32) uint32 and steps (n_kv_heads, rows) float32, the
        query's sketch as in `qjl.bit_planes`
    words, lengths: what is stored of keys
    unbiased: see `qjl.unbiased`
    """
    heads, rows, bits, n_words = planes.shape
    tokens = words.shape[1]
    inputs = ("planes", "steps", "words", "lengths", "unbiased")
    kernel = _kernel(make_kernel, "qjl.metal", "qjl_scores", inputs, "scores", QJL_SCORES)
    scores: mx.array = kernel(
        inputs=[planes, steps, words, lengths, mx.array(unbiased)],
        template=[("WORDS", n_words), ("BITS", bits)],
        grid=(tokens, heads, 1),
        threadgroup=(min(tokens, 256), 1, 1),
        output_shapes=[(heads, rows, tokens)],
        output_dtypes=[mx.float32],
    )[0]
    return scores


def polarquant_scores(
    q: mx.array,
    first: mx.array,
    upper: mx.array,
    radii: mx.array,
    tables: list[mx.array],
    make_kernel: MakeKernel = mx.fast.metal_kernel,
) -> mx.array:
    """<q, k> for q (n_kv_heads, rows, head_dim) float32, rotated: (n_kv_heads, rows, tokens).

    first, upper, radii: what is stored of keys; tables: as `PolarQuant.tables` has them.
    """
    heads, n_rows, dim = q.shape
    tokens, bits = radii.shape[1], first.shape[-1]
    rows = min(n_rows, MOST_ROWS)
    inputs = ("q", "first", "upper", "radii", "tables")
    kernel = _kernel(
        make_kernel, "polarquant.metal", "polarquant_scores", inputs, "scores", POLARQUANT_SCORES
    )
    # An input cannot be empty.
    upper = upper if upper.size else mx.zeros(8, mx.uint32)
    scores: mx.array = kernel(
        inputs=[q, first, upper, radii, mx.concatenate(tables)],
        template=[("D", dim), ("BITS", bits), ("ROWS", rows)],
        grid=(tokens, heads, -(-n_rows // rows)),
        threadgroup=(min(tokens, 128), 1, 1),
        output_shapes=[(heads, n_rows, tokens)],
        output_dtypes=[mx.float32],
    )[0]
    return scores


def turboquant_decode(
    words: mx.array,
    lengths: mx.array,
    codebook: mx.array,
    dtype: mx.Dtype = mx.float32,
    make_kernel: MakeKernel = mx.fast.metal_kernel,
) -> mx.array:
    """Rotated coordinates (n_kv_heads, tokens, head_dim) of what is stored.

    codebook: (2 ** bits,) float32, values for a vector of length 1
    """
    heads, n, dim, bits = words.shape
    inputs = ("words", "lengths", "codebook")
    kernel = _kernel(
        make_kernel, "turboquant.metal", "turboquant_decode", inputs, "out", TURBOQUANT_DECODE
    )
    out: mx.array = kernel(
        inputs=[words, lengths, codebook],
        template=[("D", dim), ("BITS", bits), ("T", dtype)],
        grid=(dim, n, heads),
        threadgroup=(min(dim, 256), 1, 1),
        output_shapes=[(heads, n * BLOCK, dim)],
        output_dtypes=[dtype],
    )[0]
    return out
