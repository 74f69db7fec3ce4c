"""The CUDA kernels against float64.

On a machine with an NVIDIA GPU they run there, elsewhere in the emulator, whose checks find races,
accesses out of bounds and divergence as well: see tests/emulator/README.md.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.emulator import KernelError, why_not
from tests.kernels.small_gpu import small_gpu
from tqchat.kernels import BLOCK, SINK, KVView, Weight, codec
from tqchat.kernels.cuda.backend import CUDA
from tqchat.kernels.layout import TAIL_CAPACITY, tile_bytes, tile_words

ON_GPU = mx.cuda.is_available()
if not ON_GPU and why_not():
    pytest.skip(why_not(), allow_module_level=True)

pytestmark = pytest.mark.cuda
large = pytest.mark.skipif(not ON_GPU, reason="too large for the emulator")
emulated = pytest.mark.skipif(ON_GPU, reason="asks the emulator")


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    with nullcontext() if ON_GPU else small_gpu():
        yield


Float64 = NDArray[np.float64]
DTYPES = {"fp16": mx.float16, "bf16": mx.bfloat16}


def float64(x: mx.array) -> Float64:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def error(ours: mx.array, reference: Float64) -> float:
    got = float64(ours)
    assert got.shape == reference.shape
    assert np.isfinite(got).all()
    return float(np.linalg.norm(got - reference) / np.linalg.norm(reference))


@dataclass
class Held:
    """A cache's view, and its K and V in float64 as its codes and 16-bit tokens give them."""

    view: KVView
    k: Float64
    v: Float64


def hold(
    backend: CUDA,
    n_kv_heads: int,
    head_dim: int,
    n_sink: int,
    n_blocks: int,
    n_tail: int,
    seed: int = 0,
    size: float = 1.0,
) -> Held:
    """Random tokens; whatever of the buffers holds none is NaN or garbage."""
    rng = np.random.default_rng(seed)
    dtype, bits = backend.cache_dtype, backend.kv_bits

    def buffer(capacity: int, filled: int) -> tuple[mx.array, Float64]:
        x = np.full((n_kv_heads, capacity, head_dim), np.nan, np.float32)
        values = size * rng.normal(size=(n_kv_heads, filled, head_dim))
        x[:, :filled] = np.clip(values, -65504, 65504)
        array = mx.array(x).astype(dtype)
        return array, float64(array)[:, :filled]

    sink_k, sink_k64 = buffer(SINK, n_sink)
    sink_v, sink_v64 = buffer(SINK, n_sink)
    tail_k, tail_k64 = buffer(TAIL_CAPACITY, n_tail)
    tail_v, tail_v64 = buffer(TAIL_CAPACITY, n_tail)
    shape = (n_kv_heads, n_blocks * BLOCK, head_dim)
    offsets = rng.normal(size=(1, 1, head_dim))  # K's channels are not centred in real models
    k = size * (rng.normal(size=shape) + offsets)
    v = size * rng.normal(size=shape)
    if n_blocks:
        k32, v32 = (mx.array(x.astype(np.float32)) for x in (k, v))
        canonical = codec.seal(k32, v32, bits)
        k64, v64 = map(float64, codec.unseal(canonical, bits))
    else:
        canonical = mx.zeros((n_kv_heads, 0, tile_words(head_dim, bits)), mx.uint32)
        k64, v64 = (np.zeros(shape),) * 2
    spare_shape = (n_kv_heads, 3, tile_words(head_dim, bits))
    spare = mx.array(rng.integers(0, 2**32, spare_shape, dtype=np.uint32))
    tiles = mx.concatenate([backend.from_canonical(canonical), spare], axis=1)
    return Held(
        KVView(sink_k, sink_v, tiles, tail_k, tail_v, n_sink, n_blocks, n_tail),
        np.concatenate([sink_k64, k64, tail_k64], axis=1),
        np.concatenate([sink_v64, v64, tail_v64], axis=1),
    )


def attention(
    q: Float64,
    held: Held,
    scale: float,
    softcap: float | None = None,
    sinks: Float64 | None = None,
    window: int | None = None,
) -> Float64:
    n_heads, tokens, _ = q.shape
    shared = n_heads // held.k.shape[0]
    k, v = np.repeat(held.k, shared, axis=0), np.repeat(held.v, shared, axis=0)
    scores = scale * q @ k.swapaxes(1, 2)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    length = k.shape[1]
    query, key = np.arange(length - tokens, length)[:, None], np.arange(length)[None]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (n_heads, tokens, 1))
        scores = np.concatenate([scores, column], axis=-1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out: Float64 = weights[..., :length] @ v
    return out


def check(
    held: Held,
    backend: CUDA,
    n_heads: int,
    tokens: int,
    scale: float | None = None,
    sinks: bool = False,
    **options: Any,
) -> None:
    rng = np.random.default_rng(n_heads * 100 + tokens)
    head_dim = held.k.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    q = mx.array(rng.normal(size=(n_heads, tokens, head_dim)).astype(np.float32))
    q = q.astype(backend.dtype)
    logits = mx.array(rng.normal(size=n_heads).astype(np.float32)).astype(backend.dtype)
    ours = backend.attend(q, held.view, scale, sinks=logits if sinks else None, **options)
    reference = attention(
        float64(q), held, scale, sinks=float64(logits) if sinks else None, **options
    )
    assert error(ours, reference) < (1e-3 if backend.dtype == mx.float16 else 4e-3)


@pytest.mark.parametrize("n_kv_heads", [1, 3, 8])
@pytest.mark.parametrize(
    "counts",
    [
        (1, 0, 0),
        (4, 0, 1),
        (4, 0, 127),
        (4, 1, 64),
        (4, 2, 127),
        (4, 31, 65),
        (4, 100, 100),
        pytest.param((4, 700, 100), marks=large),
        (0, 3, 5),
    ],
)
def test_lengths(counts: tuple[int, int, int], n_kv_heads: int) -> None:
    """A single KV head is split over every multiprocessor: on a GPU far more than 64 ways."""
    backend = CUDA(mx.float16)
    check(hold(backend, n_kv_heads, 128, *counts), backend, n_kv_heads * 8, 1)


@pytest.mark.parametrize(("dtype", "kv_bits"), [("fp16", 4), ("bf16", 4), ("fp16", 3)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 256, 512])
def test_head_dims(head_dim: int, dtype: str, kv_bits: int) -> None:
    backend = CUDA(DTYPES[dtype], kv_bits)
    held = hold(backend, 2, head_dim, 4, 37, 70)
    check(held, backend, 8, 1)
    check(held, backend, 8, 5)


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
@pytest.mark.parametrize("shared", [1, 2, 3, 7, 8, 16])
def test_query_rows(shared: int, tokens: int) -> None:
    """Heads that share a KV head, times query tokens, from 1 to 128 rows."""
    backend = CUDA(mx.float16)
    check(hold(backend, 2, 128, 4, 20, 64), backend, 2 * shared, tokens)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("window", [1, 20, 64, 100, 333, 100_000])
def test_sliding_window(window: int, tokens: int) -> None:
    backend = CUDA(mx.float16)
    check(hold(backend, 2, 128, 4, 20, 90), backend, 16, tokens, window=window)


@pytest.mark.parametrize("n_tail", [0, 1, 2])
def test_a_tail_shorter_than_the_query(n_tail: int) -> None:
    """Causal among query tokens that already lie in a sealed block."""
    backend = CUDA(mx.float16)
    check(hold(backend, 2, 128, 4, 3, n_tail), backend, 16, 8)


@pytest.mark.parametrize("tokens", [1, 8])
def test_append_and_attend(tokens: int) -> None:
    """The newest tokens come beside the cache, and are in its tail afterwards."""
    backend = CUDA(mx.float16)
    held = hold(backend, 2, 64, 4, 6, 80)
    view = held.view
    rng = np.random.default_rng(tokens)
    q = mx.array(rng.normal(size=(6, tokens, 64)).astype(np.float32)).astype(mx.float16)
    k, v = (x[:, 80 - tokens : 80] + 0 for x in (view.tail_k, view.tail_v))
    tail_k, tail_v = (
        mx.concatenate([x[:, : 80 - tokens], mx.zeros((2, 48 + tokens, 64), mx.float16)], axis=1)
        for x in (view.tail_k, view.tail_v)
    )
    mx.eval(tail_k, tail_v, k, v)
    short = dataclasses.replace(view, tail_k=tail_k, tail_v=tail_v)
    ours = backend.append_and_attend(q, k, v, short, 0.125)
    assert error(ours, attention(float64(q), held, 0.125)) < 1e-3
    for tail, full in ((tail_k, view.tail_k), (tail_v, view.tail_v)):
        assert mx.array_equal(tail[:, :80], full[:, :80])
        assert not tail[:, 80:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 5.0, 50.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_softcap_and_sinks(softcap: float | None, sinks: bool, dtype: str) -> None:
    backend = CUDA(DTYPES[dtype])
    held = hold(backend, 2, 128, 4, 20, 90)
    check(held, backend, 16, 2, scale=1.0, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("size", [1e-3, 30.0, 15000.0])
def test_sizes_of_values(size: float) -> None:
    """V up to the ends of fp16 and scores far apart: weights never overflow."""
    backend = CUDA(mx.float16)
    held = hold(backend, 2, 128, 4, 20, 90, size=size)
    check(held, backend, 16, 1, scale=0.1 / size)


def test_a_late_maximum() -> None:
    """A key that outweighs all before it, in the last sealed block."""
    backend = CUDA(mx.float16)
    held = hold(backend, 1, 128, 4, 40, 64)
    check(held, backend, 8, 1, scale=3.0)


@pytest.mark.parametrize(("dtype", "kv_bits"), [("fp16", 4), ("bf16", 4), ("fp16", 3)])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256, 512])
def test_seal_and_unseal(head_dim: int, dtype: str, kv_bits: int) -> None:
    """Bit for bit the codec's; also where a channel is constant, huge or not a number."""
    backend = CUDA(DTYPES[dtype], kv_bits)
    rng = np.random.default_rng(head_dim)
    k, v = rng.normal(size=(2, 3, 4 * BLOCK, head_dim)).astype(np.float32)
    k[0, :, 3] = 7.25
    v[1, 5] = -0.125
    k[1, 40, 7], k[2, 41, 8], v[0, 3, 9] = np.nan, np.inf, -np.inf
    k[0, 64:96] *= 1e-8
    k, v = (mx.array(x).astype(backend.dtype) for x in (k, v))
    tiles = backend.seal(k, v)
    canonical = codec.seal(k, v, kv_bits)
    assert mx.array_equal(backend.to_canonical(tiles), canonical)
    assert mx.array_equal(backend.from_canonical(canonical), tiles)
    unsealed = codec.unseal(canonical, kv_bits)
    for ours, reference in zip(backend.unseal(tiles), unsealed, strict=True):
        # A group's maximum may come back a step above fp16's range.
        reference = mx.clip(reference, -65504, 65504) if dtype == "fp16" else reference
        assert mx.array_equal(ours, reference.astype(backend.dtype))


@pytest.mark.parametrize(("dtype", "kv_bits"), [("fp16", 4), ("bf16", 4), ("fp16", 3)])
def test_prefill_attention(dtype: str, kv_bits: int) -> None:
    """A chunk over everything held: sink, tiles, tail, then itself."""
    backend = CUDA(DTYPES[dtype], kv_bits)
    held = hold(backend, 2, 64, 4, 5, 77)
    rng = np.random.default_rng(1)
    q, k, v = (
        mx.array(rng.normal(size=(heads, 50, 64)).astype(np.float32)).astype(backend.dtype)
        for heads in (8, 2, 2)
    )
    ours = backend.attend_chunk(q, k, v, held.view, 0.125)
    longer = Held(
        held.view,
        np.concatenate([held.k, float64(k)], axis=1),
        np.concatenate([held.v, float64(v)], axis=1),
    )
    assert error(ours, attention(float64(q), longer, 0.125)) < 8e-3


def random_weight(rows: int, columns: int, bits: int, group: int, dtype: mx.Dtype) -> Weight:
    rng = np.random.default_rng(rows + columns + bits + group)
    words = rng.integers(0, 2**32, (rows, columns * bits // 32), dtype=np.uint32)
    scales = rng.uniform(0.5, 1.5, (rows, columns // group)).astype(np.float32)
    biases = (-(2**bits) / 2 * scales + rng.normal(size=scales.shape)).astype(np.float32)
    return Weight(
        mx.array(words), mx.array(scales).astype(dtype), mx.array(biases).astype(dtype), group, bits
    )


def dense(weight: Weight) -> Float64:
    per_word = 32 // weight.bits
    shifts = np.arange(per_word, dtype=np.uint32) * weight.bits
    words = np.array(weight.data)
    codes = (words[..., None] >> shifts) & (2**weight.bits - 1)
    codes = codes.reshape(weight.rows, -1, weight.group_size).astype(np.float64)
    values = codes * float64(weight.scales)[..., None] + float64(weight.biases)[..., None]
    matrix: Float64 = values.reshape(weight.rows, weight.columns)
    return matrix


@pytest.mark.parametrize(
    ("rows", "columns", "bits", "group", "dtype"),
    [
        (1, 256, 4, 64, "fp16"),
        (100, 1280, 4, 32, "fp16"),
        (200, 4096, 4, 64, "fp16"),
        (200, 4096, 4, 64, "bf16"),
        pytest.param(2200, 4096, 4, 64, "fp16", marks=large),
        pytest.param(2200, 4096, 4, 64, "bf16", marks=large),
        (40, 4096, 4, 128, "fp16"),
        (40, 4096, 4, 128, "bf16"),
        (40, 4096, 4, 32, "bf16"),
        (300, 8960, 4, 64, "fp16"),
        pytest.param(3000, 8960, 4, 64, "fp16", marks=large),
        (48, 28672, 4, 64, "fp16"),
        pytest.param(9000, 28672, 4, 64, "bf16", marks=large),
        (100, 1280, 8, 32, "fp16"),
        (200, 4096, 8, 64, "fp16"),
        (200, 4096, 8, 64, "bf16"),
        pytest.param(2200, 4096, 8, 64, "fp16", marks=large),
        pytest.param(2200, 4096, 8, 64, "bf16", marks=large),
        (48, 8960, 8, 128, "fp16"),
        (48, 8960, 8, 32, "bf16"),
    ],
)
def test_few_rows(rows: int, columns: int, bits: int, group: int, dtype: str) -> None:
    """Every count of rows in fp32, which leaves no room for more than rounding."""
    backend = CUDA(DTYPES[dtype])
    weight = random_weight(rows, columns, bits, group, backend.dtype)
    reference = dense(weight)
    rng = np.random.default_rng(bits)
    for m in (1, 2, 3, 5, 8):
        x = mx.array(rng.normal(size=(m, columns)).astype(np.float32)).astype(backend.dtype)
        assert error(backend.logits(x, weight), float64(x) @ reference.T) < 2e-5


@pytest.mark.parametrize(("size", "tolerance"), [(1e-4, 1e-3), (1e-2, 2e-5), (1e3, 2e-5)])
def test_few_rows_of_any_size(size: float, tolerance: float) -> None:
    """Activations near the top of fp16, and so small that fp16 itself has but 10 bits left."""
    backend = CUDA(mx.float16)
    weight = random_weight(64, 2048, 4, 64, mx.float16)
    values = size * np.random.default_rng(0).normal(size=(1, 2048))
    x = mx.array(values.astype(np.float32)).astype(mx.float16)
    assert error(backend.logits(x, weight), float64(x) @ dense(weight).T) < tolerance


PRODUCT = 2e-3 if ON_GPU else 5e-3
"""MLX's own products, which sum fp16 on the CPU."""


@pytest.mark.parametrize(("rows", "columns", "group"), [(64, 576, 64), (64, 96, 32), (64, 640, 64)])
def test_columns_that_the_kernel_does_not_take(rows: int, columns: int, group: int) -> None:
    backend = CUDA(mx.float16)
    weight = random_weight(rows, columns, 4, group, mx.float16)
    x = mx.random.normal((2, columns)).astype(mx.float16)
    assert error(backend.linear(x, weight), float64(x) @ dense(weight).T) < PRODUCT


def test_many_rows_and_a_bias() -> None:
    backend = CUDA(mx.float16)
    weight = random_weight(64, 512, 4, 64, mx.float16)
    bias = mx.random.normal((64,)).astype(mx.float16)
    for m in (1, 9, 40):
        x = mx.random.normal((m, 512)).astype(mx.float16)
        expected = float64(x) @ dense(weight).T + float64(bias)
        assert error(backend.linear(x, weight, bias), expected) < PRODUCT


@emulated
@pytest.mark.parametrize("shared_memory", [99 << 10, 163 << 10])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_attention_before_hopper(head_dim: int, shared_memory: int) -> None:
    """Compute capability 8.x copies otherwise, and has less shared memory."""
    with small_gpu(shared_memory=shared_memory, architecture=800):
        backend = CUDA(mx.float16)
        check(hold(backend, 2, head_dim, 4, 37, 70), backend, 14, 3, sinks=True)


@emulated
@pytest.mark.parametrize("shared_memory", [99 << 10, 163 << 10])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_before_hopper(bits: int, shared_memory: int) -> None:
    with small_gpu(shared_memory=shared_memory, architecture=800):
        backend = CUDA(mx.bfloat16)
        weight = random_weight(100, 8960, bits, 64, mx.bfloat16)
        x = mx.array(np.random.default_rng(0).normal(size=(3, 8960))).astype(mx.bfloat16)
        assert error(backend.logits(x, weight), float64(x) @ dense(weight).T) < 2e-5


@emulated
@pytest.mark.parametrize("architecture", [800, 900])
def test_the_order_of_threads_makes_no_difference(architecture: int) -> None:
    """Each kernel gives the same bytes whichever lanes, warps and blocks run first."""
    with small_gpu(architecture=architecture, orders=(0, 1, 7)) as made:
        backend = CUDA(mx.float16, 4 if architecture == 900 else 3)
        check(hold(backend, 2, 512, 4, 9, 70), backend, 16, 1)
        held = hold(backend, 2, 128, 4, 40, 70)
        check(held, backend, 16, 1)
        backend.seal(*backend.unseal(held.view.tiles[:, :3]))
        weight = random_weight(200, 4096, 4, 64, mx.float16)
        backend.logits(mx.ones((2, 4096), mx.float16), weight)
    kinds = {name.split("_")[1] for name in made}
    assert kinds == {"attend", "merge", "gather", "seal", "matvec"}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([64, 128]),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(1, 8),
    st.tuples(st.sampled_from([0, 4]), st.integers(0, 12), st.integers(1, 127)),
    st.one_of(st.none(), st.integers(1, 600)),
    st.booleans(),
    st.sampled_from([3, 4]),
)
def test_any_shape(
    head_dim: int,
    n_kv_heads: int,
    shared: int,
    tokens: int,
    counts: tuple[int, int, int],
    window: int | None,
    sinks: bool,
    kv_bits: int,
) -> None:
    n_sink, n_blocks, n_tail = counts
    tokens = min(tokens, n_sink + 32 * n_blocks + n_tail)
    backend = CUDA(mx.float16, kv_bits)
    held = hold(backend, n_kv_heads, head_dim, *counts)
    check(held, backend, n_kv_heads * shared, tokens, sinks=sinks, window=window)


@emulated
@pytest.mark.parametrize("multiprocessors", [32, 33, 65, 148])
def test_many_splits(multiprocessors: int) -> None:
    """More than a warp has lanes, and more than there are tokens."""
    with small_gpu(multiprocessors):
        backend = CUDA(mx.float16)
        check(hold(backend, 1, 64, 4, 150, 70), backend, 8, 1, sinks=True)
        check(hold(backend, 1, 64, 4, 0, 3), backend, 8, 1)


@emulated
@pytest.mark.parametrize("kv_bits", [3, 4])
@pytest.mark.parametrize("architecture", [800, 900])
def test_every_sealed_byte_is_read_once(architecture: int, kv_bits: int) -> None:
    """By one block of threads, for all the query heads that share it."""
    with small_gpu(architecture=architecture) as made:
        backend = CUDA(mx.float16, kv_bits)
        held = hold(backend, 2, 128, 4, 40, 70)
        check(held, backend, 16, 1)
    (attend,) = (kernel for name, kernel in made.items() if "attend" in name)
    traffic = attend.report.traffic["tiles"]
    assert (
        traffic.read == traffic.distinct_read == held.view.n_blocks * 2 * tile_bytes(128, kv_bits)
    )
    assert traffic.shared_read == 0


BARRIERS = [
    ("__syncwarp();\n    fill", "fill", 900),
    ("copies_wait<STAGES - 1>();\n    __syncwarp();", "__syncwarp();", 800),
    ("copies_wait<STAGES - 1>();\n    __syncwarp();", "copies_wait<STAGES - 1>();", 800),
    ("barrier_wait(barriers + stage * 8, parity);", "", 900),
    ("stage = 0;\n      parity ^= 1;", "stage = 0;", 900),
    ("__syncthreads();\n    queries.shared", "queries.shared", 900),
    ("Shared::put(ring_memory, state, lane);\n  __syncthreads();",
     "Shared::put(ring_memory, state, lane);", 900),
    ("__syncthreads();\n\n  for (int pair", "for (int pair", 900),
]  # fmt: skip


@emulated
@pytest.mark.parametrize("which", range(len(BARRIERS)))
def test_a_missing_barrier_is_caught(which: int) -> None:
    before, after, architecture = BARRIERS[which]
    found = 0

    def edit(text: str) -> str:
        nonlocal found
        found += text.count(before)
        return text.replace(before, after)

    backend = CUDA(mx.float16)
    held = hold(backend, 1, 512, 4, 60, 70)
    with small_gpu(architecture=architecture, edit=edit), pytest.raises(KernelError):
        check(held, backend, 8, 1)
    assert found
