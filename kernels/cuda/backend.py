"""The backend for NVIDIA GPUs: fused attention on the quantised cache, products with few rows.

Everything else is MLX's own. Tiles are in the order that attention.cuh describes.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx

from tqchat.kernels import codec
from tqchat.kernels.backend import Backend
from tqchat.kernels.cuda.device import build, device
from tqchat.kernels.layout import BLOCK, MAX_DECODE_TOKENS, tile_bytes, tile_words
from tqchat.kernels.view import KVView
from tqchat.kernels.weight import Weight

Array = mx.array

TYPES = {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}
SHARED = "extern __shared__ __align__(128) unsigned char shared[];\n"
CODEC_THREADS = 256
MERGE_WARPS = 8
RING_BYTES = 10240  # of a warp's tiles under way, at least two
NO_WINDOW = float(1 << 30)

# Of the matrix product: nibbles of a matrix row that a warp takes, and rows of a tile.
SLICE = 512
MATRIX_TILE = 16
RESIDENT_WARPS = 16  # per multiprocessor, with 128 registers a thread
SUMS_BYTES = MATRIX_TILE * 8 * 4
# Tiles at a time where a warp cannot hold the activations of all its slices at once.
TILES_AT_A_TIME = 4
BLOCK_RESERVE = 1024  # bytes of shared memory that the driver takes for each block


class CUDA(Backend):
    """fp16 or bf16 activations on a GPU of compute capability 8.0 or newer."""

    name = "CUDA kernels"
    prefill_chunk = 2048
    asynchronous = True
    compiles_steps = True
    derives_keys = False

    def __init__(self, dtype: mx.Dtype = mx.float16, kv_bits: int = 4) -> None:
        super().__init__(dtype, kv_bits=kv_bits)

    # Layers

    def linear(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        if not _few_rows(x, weight):
            y: Array = super().linear(x, weight, bias)
            return y
        y = _matvec(x, weight, x.dtype)
        return y if bias is None else y + bias

    def logits(self, x: Array, weight: Weight) -> mx.array:
        if not _few_rows(x, weight):
            return super().logits(x, weight)
        return _matvec(x, weight, mx.float32)

    def swiglu(self, gate_up: Array) -> Array:
        return _swiglu(gate_up)

    def rope(self, x: Array, periods: Array, offset: Any) -> Array:
        # MLX takes the first of three axes for a batch, and an array of offsets for one of each.
        y: Array = super().rope(x[None], periods, offset)[0]
        return y

    # The sealed cache

    def seal(self, k: Array, v: Array) -> Array:
        n_kv_heads, tokens, head_dim = k.shape
        n = tokens // BLOCK
        shape = (n_kv_heads, n, tile_words(head_dim, self.kv_bits))
        if n == 0:
            return mx.zeros(shape, mx.uint32)
        tiles: Array = _seal_kernel(self.kv_bits, head_dim, k.dtype)(
            inputs=[k, v.astype(k.dtype)],
            output_shapes=[shape],
            output_dtypes=[mx.uint32],
            grid=(n * CODEC_THREADS, n_kv_heads, 1),
            threadgroup=(CODEC_THREADS, 1, 1),
        )[0]
        return tiles

    def gather(self, view: KVView, k: Array, v: Array) -> tuple[Array, Array]:
        return self._gather(view, k.astype(self.dtype), v.astype(self.dtype), k.shape[1])

    def unseal(self, tiles: Array) -> tuple[Array, Array]:
        n_kv_heads, n, words = tiles.shape
        none = mx.zeros((n_kv_heads, 1, words // (2 * (self.kv_bits + 1))), self.dtype)
        return self._gather(KVView(none, none, tiles, none, none, 0, n, 0), none, none, 0)

    def _held(self, view: KVView) -> tuple[Array, Array]:
        return self._gather(view, view.tail_k, view.tail_v, 0)

    def _gather(self, view: KVView, k: Array, v: Array, new: int) -> tuple[Array, Array]:
        """K and V of what `view` holds, followed by the first `new` tokens of k and v."""
        n_kv_heads, _, words = view.tiles.shape
        head_dim, length = words // (2 * (self.kv_bits + 1)), view.length + new
        shape = (n_kv_heads, length, head_dim)
        if length == 0:
            return mx.zeros(shape, self.dtype), mx.zeros(shape, self.dtype)
        dense = view.n_sink + view.n_tail + new
        gather = _gather_kernel(self.kv_bits, head_dim, self.dtype, view.tail_k.dtype, k.dtype)
        gathered_k, gathered_v = gather(
            inputs=[
                view.tiles,
                view.sink_k,
                view.sink_v,
                view.tail_k,
                view.tail_v,
                k,
                v,
                _lengths(view.n_sink, view.n_blocks, view.n_tail, new),
            ],
            output_shapes=[shape, shape],
            output_dtypes=[self.dtype, self.dtype],
            grid=((view.n_blocks + -(-dense // BLOCK)) * CODEC_THREADS, n_kv_heads, 1),
            threadgroup=(CODEC_THREADS, 1, 1),
        )
        return gathered_k, gathered_v

    def to_canonical(self, tiles: Array, k_is_v: bool = False) -> mx.array:
        if self.kv_bits == 4:
            return _to_canonical(tiles)
        return codec.narrow_tiles(_to_canonical(codec.widen_tiles(tiles)))

    def from_canonical(self, tiles: mx.array, k_is_v: bool = False) -> Array:
        if self.kv_bits == 4:
            return _from_canonical(tiles)
        return codec.narrow_tiles(_from_canonical(codec.widen_tiles(tiles)))

    def attend(
        self,
        q: Array,
        view: KVView,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: Array | None = None,
        window: int | None = None,
    ) -> Array:
        if not _supported(q):
            out: Array = super().attend(q, view, scale, softcap=softcap, sinks=sinks, window=window)
            return out
        return _attend(self.kv_bits, q, [], view, scale, softcap, sinks, window)

    def append_and_attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        view: KVView,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: Array | None = None,
        window: int | None = None,
    ) -> Array:
        """`attend`, where the query tokens' k and v are counted in `view` but not yet held there.

        The kernel writes them to the end of the view's tail, in place and behind MLX's back: what
        else reads the tail has to wait until the result of this is there.
        Raises ValueError where `attend` would not use the kernel.
        """
        if not _supported(q):
            raise ValueError(f"no kernel for queries of shape {q.shape}")
        new = [x.astype(view.tail_k.dtype) for x in (k, v)]
        return _attend(self.kv_bits, q, new, view, scale, softcap, sinks, window)


# The order of tiles, with codes of 4 bits


def _to_canonical(tiles: mx.array) -> mx.array:
    heads, n, words = tiles.shape
    dim, groups = words // 10, words // 320
    if n == 0:
        return tiles
    k_codes, k_scales, k_mids, v_codes, v_scales, v_mids = _split(tiles, dim)
    # k_codes: [group][g][j][i], token 8 i + g, word 4 group + j of the token.
    k_codes = k_codes.reshape(heads, n, groups, 8, 4, 4).transpose(0, 1, 5, 3, 2, 4)
    # Half words [group][j][p][high]: channel 32 group + 8 j + 4 high + p.
    k_scales, k_mids = (
        _halves(x).reshape(heads, n, groups, 4, 4, 2).swapaxes(-1, -2).reshape(heads, n, dim)
        for x in (k_scales, k_mids)
    )
    # Half words [group][g][j][i][odd]: token 8 i + 2 j + odd, channels 32 group + 4 g.
    v_codes = _halves(v_codes).reshape(heads, n, groups, 8, 4, 4, 2)
    v_codes = v_codes.transpose(0, 1, 5, 4, 6, 2, 3).reshape(heads, n, -1)
    # Half words [group][j][i][odd].
    v_scales, v_mids = (
        _halves(x)
        .reshape(heads, n, groups, 4, 4, 2)
        .transpose(0, 1, 4, 3, 5, 2)
        .reshape(heads, n, dim)
        for x in (v_scales, v_mids)
    )
    parts = [
        k_codes.reshape(heads, n, -1),
        _words(mx.stack([k_scales, k_mids], axis=-1)),
        _words(v_codes),
        _words(mx.stack([v_scales, v_mids], axis=-1)),
    ]
    return mx.concatenate(parts, axis=-1)


def _from_canonical(tiles: mx.array) -> mx.array:
    heads, n, words = tiles.shape
    dim, groups = words // 10, words // 320
    if n == 0:
        return tiles
    k_codes, k_params, v_codes, v_params = mx.split(tiles, [4 * dim, 5 * dim, 9 * dim], axis=-1)
    k_codes = k_codes.reshape(heads, n, 4, 8, groups, 4).transpose(0, 1, 4, 3, 5, 2)
    k_params = _halves(k_params).reshape(heads, n, groups, 4, 2, 4, 2)
    k_params = k_params.transpose(0, 1, 6, 2, 3, 5, 4)
    v_codes = _halves(v_codes).reshape(heads, n, 4, 4, 2, groups, 8)
    v_codes = v_codes.transpose(0, 1, 5, 6, 3, 2, 4)
    v_params = _halves(v_params).reshape(heads, n, 4, 4, 2, groups, 2)
    v_params = v_params.transpose(0, 1, 6, 5, 3, 2, 4)
    parts = [k_codes, *(_words(x) for x in (k_params, v_codes, v_params))]
    parts = [part.reshape(heads, n, -1) for part in parts]
    return mx.concatenate(parts, axis=-1)


def _split(tiles: Array, dim: int) -> list[Array]:
    """K codes, scales, mids, then V's."""
    half = dim // 2
    bounds = [4 * dim, 4 * dim + half, 5 * dim, 9 * dim, 9 * dim + half]
    return list(mx.split(tiles, bounds, axis=-1))


def _halves(words: Array) -> Array:
    return mx.contiguous(words).view(mx.uint16)


def _words(halves: Array) -> Array:
    return mx.contiguous(halves.reshape(*halves.shape[:2], -1)).view(mx.uint32)


# Decode attention


@dataclass(frozen=True, slots=True)
class Plan:
    """How decode attention is cut: `warps` per block of threads, each with a ring of `stages`
    tiles; `tiles_n` times 8 query rows per block; the sequence into `splits`."""

    warps: int
    stages: int
    tiles_n: int
    row_groups: int
    splits: int
    shared_memory: int


@cache
def _plan(kv_bits: int, head_dim: int, rows: int, n_kv_heads: int) -> Plan:
    tiles_n = 2 if rows > 8 and head_dim <= 128 else 1
    row_groups = -(-rows // (8 * tiles_n))
    tile = tile_bytes(head_dim, kv_bits)
    # At the end a warp's rows, with their maxima and sums, take the place of its tiles.
    results = 8 * tiles_n * (head_dim + 10) * 4
    stages = max(2, RING_BYTES // tile, -(-results // tile))
    queries = 16 * tiles_n * head_dim if head_dim > 256 else 0
    warps = 8
    while (shared := warps * stages * (tile + 8) + queries) > device().shared_memory:
        warps //= 2
    # One block of threads per multiprocessor: a second wave costs more than an idle one.
    splits = max(1, device().multiprocessors // (n_kv_heads * row_groups))
    return Plan(warps, stages, tiles_n, row_groups, splits, shared)


@lru_cache(maxsize=4)
def _lengths(n_sink: int, n_blocks: int, n_tail: int, new: int) -> Array:
    """The same array for all layers of a step. Smaller ones would lie in memory that is slow."""
    return mx.array([n_sink, n_blocks, n_tail, new], dtype=mx.int32)


@cache
def _options(scale: float, softcap: float, window: float) -> Array:
    return mx.array([scale, softcap, window, 0.0], dtype=mx.float32)


def _supported(q: Array) -> bool:
    _, tokens, head_dim = q.shape
    return 64 <= head_dim <= 512 and head_dim % 32 == 0 and tokens <= MAX_DECODE_TOKENS


def _attend(
    kv_bits: int,
    q: Array,
    new: list[Array],
    view: KVView,
    scale: float,
    softcap: float | None,
    sinks: Array | None,
    window: int | None,
) -> Array:
    n_heads, tokens, head_dim = q.shape
    n_kv_heads = view.tiles.shape[0]
    plan = _plan(kv_bits, head_dim, n_heads // n_kv_heads * tokens, n_kv_heads)
    attend = _attend_kernel(
        kv_bits, head_dim, plan, softcap is not None, bool(new), q.dtype, view.tail_k.dtype
    )
    lengths = view.lengths
    if lengths is None:
        lengths = _lengths(view.n_sink, view.n_blocks, view.n_tail, 0)
    threads = 32 * plan.warps
    partial = attend(
        inputs=[
            q,
            view.tiles,
            view.sink_k,
            view.sink_v,
            view.tail_k,
            view.tail_v,
            lengths,
            _options(scale, softcap or 0.0, window or NO_WINDOW),
            *new,
        ],
        output_shapes=[(n_heads * tokens * plan.splits * (head_dim + 2),)],
        output_dtypes=[mx.float32],
        grid=(plan.splits * threads, n_kv_heads, plan.row_groups),
        threadgroup=(threads, 1, 1),
    )[0]
    merge = _merge_kernel(head_dim, q.dtype, None if sinks is None else sinks.dtype)
    out: Array = merge(
        inputs=[partial] if sinks is None else [partial, sinks],
        output_shapes=[q.shape],
        output_dtypes=[q.dtype],
        grid=(n_heads * tokens * 32 * MERGE_WARPS, 1, 1),
        threadgroup=(32 * MERGE_WARPS, 1, 1),
    )[0]
    return out


@cache
def _attend_kernel(
    kv_bits: int,
    head_dim: int,
    plan: Plan,
    softcap: bool,
    new: bool,
    dtype: mx.Dtype,
    cache_dtype: mx.Dtype,
) -> Any:
    cut = f"{kv_bits}, {head_dim}, {plan.tiles_n}, {plan.warps}, {plan.stages}"
    cut += f", {str(softcap).lower()}"
    held = TYPES[cache_dtype]
    new_k, new_v = ("k", "v") if new else (f"(const {held}*)nullptr",) * 2
    return build(
        f"attend_{cut.replace(', ', '_')}_{new}_{_suffix(dtype)}_{_suffix(cache_dtype)}",
        "attention.cuh",
        SHARED + f"tq::attend<{cut}>(shared, q, tiles, sink_k, sink_v, ({held}*)tail_k, "
        f"({held}*)tail_v, {new_k}, {new_v}, lengths, options, partial, "
        "{q_shape[0] / tiles_shape[0] * q_shape[1], q_shape[1], tiles_shape[1]}, "
        "sink_k_shape[1], tail_k_shape[1]);",
        ["q", "tiles", "sink_k", "sink_v", "tail_k", "tail_v", "lengths", "options"]
        + (["k", "v"] if new else []),
        ["partial"],
        32 * plan.warps,
        plan.shared_memory,
    )


@cache
def _merge_kernel(head_dim: int, dtype: mx.Dtype, sinks: mx.Dtype | None) -> Any:
    splits = f"partial_shape[0] / (gridDim.x * {head_dim + 2})"
    sink = "gridDim.x / sinks_shape[0], sinks" if sinks else "1, (const float*)nullptr"
    return build(
        f"merge_{head_dim}_{_suffix(dtype)}_{_suffix(sinks) if sinks else 'none'}",
        "attention.cuh",
        f"tq::merge_splits<{head_dim}, {MERGE_WARPS}, {str(bool(sinks)).lower()}>"
        f"(partial, gridDim.x, {splits}, {sink}, out);",
        ["partial", "sinks"] if sinks else ["partial"],
        ["out"],
        32 * MERGE_WARPS,
    )


# Codec


@cache
def _seal_kernel(kv_bits: int, head_dim: int, dtype: mx.Dtype) -> Any:
    return build(
        f"seal_{kv_bits}_{head_dim}_{_suffix(dtype)}",
        "codec.cuh",
        f"tq::seal<{kv_bits}, {head_dim}, {CODEC_THREADS}>(k, v, tiles);",
        ["k", "v"],
        ["tiles"],
        CODEC_THREADS,
    )


@cache
def _gather_kernel(
    kv_bits: int, head_dim: int, dtype: mx.Dtype, cache_dtype: mx.Dtype, new: mx.Dtype
) -> Any:
    return build(
        f"gather_{kv_bits}_{head_dim}_{_suffix(dtype)}_{_suffix(cache_dtype)}_{_suffix(new)}",
        "codec.cuh",
        f"tq::gather<{kv_bits}, {head_dim}, {CODEC_THREADS}>(tiles, tiles_shape[1], "
        "sink_k, sink_v, sink_k_shape[1], tail_k, tail_v, tail_k_shape[1], k, v, k_shape[1], "
        "lengths, out_k, out_v);",
        ["tiles", "sink_k", "sink_v", "tail_k", "tail_v", "k", "v", "lengths"],
        ["out_k", "out_v"],
        CODEC_THREADS,
    )


# Products with few rows


def _few_rows(x: Array, weight: Weight) -> bool:
    if weight.mode != "affine" or weight.bits not in (4, 8):
        return False
    if x.shape[0] > MAX_DECODE_TOKENS or x.dtype not in TYPES:
        return False
    # Rows of the matrix in pieces of 16 bytes, its scales in pieces of 4.
    groups = weight.columns // weight.group_size
    return weight.columns % 32 == 0 and groups % 2 == 0 and weight.scales.dtype == x.dtype


@dataclass(frozen=True, slots=True)
class MatvecPlan:
    """How a product is cut: `blocks` of `warps` per multiprocessor, each warp with a ring of
    `stages` slices; `tiles` of 16 matrix rows at a time; scales read `copy` bytes at a time."""

    blocks: int
    warps: int
    stages: int
    tiles: int
    copy: int
    shared_memory: int


@cache
def _matvec_plan(bits: int, group_size: int, columns: int, m: int) -> MatvecPlan:
    slices = -(-columns * bits // (4 * SLICE))
    parameters = 2 * (SLICE * 4 // bits // group_size)  # bytes of a row's scales in a slice
    stage = MATRIX_TILE * (SLICE // 2 + 2 * parameters)
    resident = RESIDENT_WARPS
    while resident * (2 * stage + SUMS_BYTES) > device().shared_memory:
        resident //= 2
    kept = 8 // (1 << (m - 1).bit_length())  # slices whose activations a warp holds at a time
    # Two small blocks get in each other's way less, if they need not read activations again.
    passes = -(-slices // (resident // 2))
    if passes > kept:
        passes = -(-slices // resident)
    warps = -(-slices // passes)
    blocks = resident // warps
    shared = (device().shared_memory + BLOCK_RESERVE) // blocks - BLOCK_RESERVE
    stages = min(3, (shared // warps - SUMS_BYTES) // stage)
    row = 2 * columns // group_size
    copy = next(size for size in (16, 8, 4) if parameters % size == 0 and row % size == 0)
    tiles = 1 if passes <= kept else TILES_AT_A_TIME
    return MatvecPlan(blocks, warps, stages, tiles, copy, warps * (stages * stage + SUMS_BYTES))


def _matvec(x: Array, weight: Weight, dtype: mx.Dtype) -> Array:
    plan = _matvec_plan(weight.bits, weight.group_size, weight.columns, x.shape[0])
    threads = 32 * plan.warps
    blocks = min(plan.blocks * device().multiprocessors, -(-weight.rows // MATRIX_TILE))
    y: Array = _matvec_kernel(weight.bits, weight.group_size, plan, x.dtype, dtype)(
        inputs=[x, weight.data, weight.scales, weight.biases],
        output_shapes=[(x.shape[0], weight.rows)],
        output_dtypes=[dtype],
        grid=(blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
    )[0]
    return y


@cache
def _matvec_kernel(
    bits: int, group_size: int, plan: MatvecPlan, dtype: mx.Dtype, out: mx.Dtype
) -> Any:
    parameters = f"{bits}, {group_size}, {plan.warps}, {plan.stages}, {plan.tiles}, {plan.copy}"
    return build(
        f"matvec_{parameters.replace(', ', '_')}_{_suffix(dtype)}_{_suffix(out)}",
        "matvec.cuh",
        SHARED + f"tq::matvec<{parameters}>(shared, x, codes, scales, biases, y, x_shape[0], "
        "codes_shape[0], x_shape[1]);",
        ["x", "codes", "scales", "biases"],
        ["y"],
        32 * plan.warps,
        plan.shared_memory,
        plan.blocks,
    )


@mx.compile
def _swiglu(gate_up: Array) -> Array:
    gate, up = mx.split(gate_up, 2, axis=-1)
    return gate * mx.sigmoid(gate) * up


def _suffix(dtype: mx.Dtype) -> str:
    return str(dtype).rsplit(".", 1)[-1]
