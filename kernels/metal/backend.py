"""The kernels of this folder behind the calls of `Backend`.

Decode attention is two dispatches: pass 1 splits the sequence among threadgroups, pass 2 joins
their results. See attention.metal for how, tile.metal for the order of codes in a tile; and
values_attention.metal and values.metal where K is made of V, which is held alone.
"""

import functools
import hashlib
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tqchat.kernels import codec
from tqchat.kernels.backend import Array, Backend
from tqchat.kernels.layout import BLOCK, GROUP, SINK, TAIL_MIN, tile_words
from tqchat.kernels.view import KeysOfValues, KVView

LOG2E = 1.4426950408889634

SIMDGROUPS = 4
"""Per threadgroup of pass 1. More would not fit into threadgroup memory at head_dim 512."""

MAX_HEAD_DIM = 512
"""Larger ones need more than the 32 KB of threadgroup memory there are."""

MAX_SPLITS = 32
"""Pass 2 weighs one split per lane."""

# MLX tells no number of cores, but the architecture's last letter tells the size of the chip:
# phone, base or Pro, Max, Ultra.
CORES = {"p": 6, "g": 16, "s": 32, "d": 64}
THREADGROUPS_PER_CORE = 3

DENSE_UNITS = -(-(SINK + TAIL_MIN) // BLOCK)
"""Blocks that sink and tail take at least, once anything is sealed."""

# What the kernel functions are called with. A threadgroup variable may only be declared here.
ATTEND = """
  threadgroup float2 query[ROWS * (D / 8) * 32];
  threadgroup uint scratch[SIMDGROUPS * scratch_words(D, DV)];
  threadgroup float2 row_statistics[SIMDGROUPS * ROWS * 8];
  const Lengths held = make_lengths(lengths);
  const Options look = make_options(options);
  const uint3 group = threadgroup_position_in_grid;
  const Place at = {group.y, group.x / (D / DV), group.x % (D / DV), group.z,
                    simdgroup_index_in_threadgroup, thread_index_in_simdgroup};
  const int n_tokens = q_shape[1], n_rows = q_shape[0] / sink_k_shape[0] * n_tokens;
  RESULTS
  attend<D, DV, ROWS, SIMDGROUPS>(
      q, sink_k, sink_v, tiles, tail_k, tail_v, held, look, n_rows, n_tokens, tiles_shape[1],
      sink_k_shape[1], tail_k_shape[1], at, query, scratch, row_statistics, results);
"""
ATTEND_VALUES = """
  threadgroup vec<T, 2> query[ROWS * (D / 8) * 32];
  threadgroup uint4 parameters[D / 4];
  threadgroup float2 shares[PARTS * ROWS * 32 * 4];
  const Lengths held = make_lengths(lengths);
  const Options look = make_options(options);
  const uint3 group = threadgroup_position_in_grid;
  const uint simdgroup = simdgroup_index_in_threadgroup;
  const Place at = {
      group.y, group.x, simdgroup, group.z, simdgroup, thread_index_in_simdgroup};
  const int n_tokens = q_shape[1], n_rows = q_shape[0] / sink_shape[0] * n_tokens;
  RESULTS
  attend_values<D, PARTS, ROWS, TURNED>(
      q, sink, tiles, tail, weight, turns, held, look, n_rows, n_tokens, tiles_shape[1],
      sink_shape[1], tail_shape[1], at, query, parameters, shares, results);
"""
# Where the results go: to pass 2, or they are all.
SPLIT = """const int first = (at.head * look.n_splits + at.split) * n_rows;
  Partial<D> results = {partial + ulong(first) * D, (device float2*)statistics + first};"""
WHOLE = """auto results = make_whole<D, HAS_LOGITS>(
      out + at.head * n_rows * D, logits, int(at.head) * (n_rows / n_tokens), n_tokens);"""
MERGE = """
  const int n_tokens = HAS_LOGITS ? statistics_shape[0] * statistics_shape[2] / logits_shape[0] : 1;
  merge<D, HAS_LOGITS>(
      partial, statistics, logits, out, statistics_shape[1],
      statistics_shape[2], n_tokens, threadgroup_position_in_grid.z,
      simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
SEAL = """
  const uint channel = thread_position_in_grid.x;
  const uint block = thread_position_in_grid.z * (k_shape[1] / BLOCK) + thread_position_in_grid.y;
  seal<D>(k + block * BLOCK * D, v + block * BLOCK * D, tiles + block * tile_words(D), channel);
"""
GATHER = """
  const Lengths held = make_lengths(lengths);
  const uint channel = thread_position_in_grid.x, head = thread_position_in_grid.z;
  const int position = thread_position_in_grid.y, token = position - held.n_sink;
  const int sealed = BLOCK * held.n_blocks;
  const ulong to = (ulong(head) * threads_per_grid.y + position) * D + channel;
  if (token < 0) {
    const uint from = (head * sink_k_shape[1] + position) * D + channel;
    k[to] = T(sink_k[from]);
    v[to] = T(sink_v[from]);
  } else if (token < sealed) {
    const ulong block = ulong(head) * tiles_shape[1] + token / BLOCK;
    k[to] = T(k_element<D>(tiles + block * tile_words(D), token % BLOCK, channel));
    v[to] = T(v_element<D>(tiles + block * tile_words(D), token % BLOCK, channel));
  } else if (token < sealed + held.n_tail) {
    const uint from = (head * tail_k_shape[1] + token - sealed) * D + channel;
    k[to] = T(tail_k[from]);
    v[to] = T(tail_v[from]);
  } else {
    const ulong from =
        (ulong(head) * new_k_shape[1] + token - sealed - held.n_tail) * D + channel;
    k[to] = T(new_k[from]);
    v[to] = T(new_v[from]);
  }
"""
SEAL_VALUES = """
  threadgroup uchar codes[BLOCK * D];
  const uint channel = thread_position_in_grid.x;
  const uint block = thread_position_in_grid.z * (v_shape[1] / BLOCK) + thread_position_in_grid.y;
  seal_values<D>(v + block * BLOCK * D, tiles + block * value_tile_words(D), codes, channel);
"""
GATHER_VALUES = """
  const Lengths held = make_lengths(lengths);
  const uint channel = thread_position_in_grid.x, head = thread_position_in_grid.z;
  const int position = thread_position_in_grid.y, token = position - held.n_sink;
  const int sealed = BLOCK * held.n_blocks, fresh = token - sealed - held.n_tail;
  const ulong to = (ulong(head) * threads_per_grid.y + position) * D + channel;
  if (fresh >= 0) {
    const ulong from = (ulong(head) * new_k_shape[1] + fresh) * D + channel;
    for (uint i = 0; i < D; i += D / 2) {
      k[to + i] = T(new_k[from + i]);
      v[to + i] = T(new_v[from + i]);
    }
    return;
  }
  Complex<float> x;
  if (token < 0) {
    x = pair_of<D>(sink + (head * sink_shape[1] + position) * D + channel);
  } else if (token < sealed) {
    const ulong block = ulong(head) * tiles_shape[1] + token / BLOCK;
    const device uint* tile = tiles + block * value_tile_words(D);
    x = {value_element<D>(tile, token % BLOCK, channel),
         value_element<D>(tile, token % BLOCK, channel + D / 2)};
  } else {
    x = pair_of<D>(tail + (head * tail_shape[1] + token - sealed) * D + channel);
  }
  v[to] = T(x.x);
  v[to + D / 2] = T(x.y);
  x = {x.x * float(weight[channel]), x.y * float(weight[channel + D / 2])};
  x = turned(x, angle(position, turns[channel]));
  k[to] = T(x.x);
  k[to + D / 2] = T(x.y);
"""


@functools.cache
def _header(*names: str, kv_bits: int = 4) -> str:
    """What goes before a kernel: MLX puts together and hashes the text anew at every call.

    So it is one line per file if Metal's compiler opens files here, which the first call tries
    out, else the files without comments and indentation.
    """
    paths = [Path(__file__).parent / name for name in names]
    bits = f"#define BITS {kv_bits}\n"
    if mx.metal.is_available() and _opens_files():
        return bits + _include(paths)
    text = re.sub(r"//[^\n]*", "", "\n".join(path.read_text() for path in paths))
    return bits + "\n".join(line.strip() for line in text.split("\n") if line.strip()) + "\n"


def _include(paths: Sequence[Path]) -> str:
    # The digest makes the text differ when a file does: compiled kernels are kept by their text.
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
    return "".join(f'#include "{path}"\n' for path in paths) + f"// {digest}\n"


@functools.cache
def _opens_files() -> bool:
    header = "#define BITS 4\n" + _include([Path(__file__).parent / "tile.metal"])
    kernel: Any = mx.fast.metal_kernel("tqchat_include", [], ["out"], "out[0] = BLOCK;", header)
    try:
        out = kernel(
            inputs=[],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )
        return bool(out[0].item() == BLOCK)
    except RuntimeError:
        return False


def rows_per_simdgroup(n_rows: int, channels: int) -> int:
    """How many groups of 8 query rows a simdgroup serves at once.

    As many as 128 registers hold: a group takes channels / 4 for the output it accumulates and 11
    for scores and sums. Rows are then shared out evenly.
    """
    groups = -(-n_rows // 8)
    most = max(1, 96 // (channels // 4 + 11))
    return -(-groups // -(-groups // most))


def value_parts(head_dim: int) -> int:
    """Into how many parts V's channels are shared out: one holds at most 256."""
    parts = 1
    while head_dim // parts > 256 or head_dim % (GROUP * parts):
        parts += 1
    return parts


def channel_parts(head_dim: int) -> int:
    """Among how many simdgroups a tile that holds V alone is shared out."""
    return next(n for n in range(SIMDGROUPS, 0, -1) if head_dim % (GROUP * n) == 0)


def split_count(units: int, threadgroups: int, cores: int) -> int:
    """Splits of a sequence of `units` blocks of 32 tokens, of which each takes `threadgroups`.

    Enough to fill the device, but each simdgroup should have a unit or more to work on.
    """
    wanted = -(-cores * THREADGROUPS_PER_CORE // threadgroups)
    return max(1, min(wanted, MAX_SPLITS, units // SIMDGROUPS))


@functools.lru_cache(maxsize=64)
def _lengths(n_sink: int, n_blocks: int, n_tail: int, n_new: int) -> mx.array:
    """The same array for all layers."""
    return mx.array([n_sink, n_blocks, n_tail, n_new], dtype=mx.int32)


@functools.lru_cache(maxsize=64)
def _options(n_splits: int, window: int, query_scale: float, softcap: float) -> mx.array:
    """Two integers and the bits of two floats."""
    floats = struct.unpack("ii", struct.pack("ff", query_scale, softcap))
    return mx.array([n_splits, window, *floats], dtype=mx.int32)


class Metal(Backend):
    """MLX on an Apple GPU, with our kernels for the sealed cache.

    make_kernel: `mx.fast.metal_kernel`, or what tests put in its place.
    cores: of the GPU; None: by the architecture's name.
    compile_ahead: at the first step of a shape, when the engine warms up, compile what only longer
        contexts use as well.
    """

    name = "Metal kernels"

    def __init__(
        self,
        dtype: mx.Dtype = mx.float16,
        cache_dtype: mx.Dtype | None = None,
        kv_bits: int = 4,
        *,
        make_kernel: Callable[..., Any] = mx.fast.metal_kernel,
        cores: int | None = None,
        compile_ahead: bool = True,
    ) -> None:
        super().__init__(dtype, cache_dtype, kv_bits)
        if cores is None:
            architecture = str(mx.device_info().get("architecture", ""))
            cores = CORES.get(architecture[-1:], CORES["g"])
        self._cores = cores
        cache = ["sink_k", "sink_v", "tiles", "tail_k", "tail_v", "lengths"]
        values = ["sink", "tiles", "tail", "weight", "turns", "lengths"]
        files = ("tile.metal", "merge.metal", "attention.metal")
        attention = _header(*files, kv_bits=kv_bits)
        self._attend_split, self._attend_whole = _attention(
            make_kernel, "tqchat_attend", cache, ATTEND, attention
        )
        attention = _header(*files, "values.metal", "values_attention.metal", kv_bits=kv_bits)
        self._attend_values_split, self._attend_values_whole = _attention(
            make_kernel, "tqchat_attend_values", values, ATTEND_VALUES, attention
        )
        self._merge = make_kernel(
            "tqchat_merge",
            ["partial", "statistics", "logits"],
            ["out"],
            MERGE,
            _header("merge.metal"),
        )
        cached = _header("tile.metal", "cache.metal", kv_bits=kv_bits)
        self._seal = make_kernel("tqchat_seal", ["k", "v"], ["tiles"], SEAL, cached)
        self._gather = make_kernel(
            "tqchat_gather", [*cache, "new_k", "new_v"], ["k", "v"], GATHER, cached
        )
        cached = _header(
            "tile.metal", "cache.metal", "values.metal", "values_cache.metal", kv_bits=kv_bits
        )
        self._seal_values = make_kernel("tqchat_seal_values", ["v"], ["tiles"], SEAL_VALUES, cached)
        self._gather_values = make_kernel(
            "tqchat_gather_values", [*values, "new_k", "new_v"], ["k", "v"], GATHER_VALUES, cached
        )
        self._compile_ahead = compile_ahead
        self._compiled: set[tuple[int, int, int, bool]] = set()
        self._turns: dict[int, _Turns] = {}
        # Not mx.zeros, which is lazy: a lazy array belongs to the thread that made it.
        self._no_logits = mx.array([0.0] * 8)
        self._no_tiles = mx.array([[[0] * 8]], dtype=mx.uint32)

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
        n_heads, tokens, dim = q.shape
        if dim > MAX_HEAD_DIM or not _is_ours(view):
            return super().attend(q, view, scale, softcap=softcap, sinks=sinks, window=window)
        n_kv_heads, keys = view.sink_v.shape[0], view.keys
        shape = n_heads, n_kv_heads, dim, keys is not None
        if self._compile_ahead and shape not in self._compiled:
            self._compiled.add(shape)
            self._compile(n_heads, n_kv_heads, dim, q.dtype, keys)
        n_blocks, lengths = view.n_blocks, view.lengths
        if lengths is None:
            lengths = _lengths(view.n_sink, n_blocks, view.n_tail, 0)
        else:
            n_blocks = view.tiles.shape[1]
        if window is not None:
            n_blocks = min(n_blocks, -(-(window + tokens) // BLOCK))
        plan = _plan(
            n_heads,
            n_kv_heads,
            tokens,
            dim,
            n_blocks + DENSE_UNITS,
            self._cores,
            sinks is not None,
            q.dtype,
            None if keys is None else self._turns_of(keys).count,
        )
        options = _options(
            plan.n_splits,
            window or 0,
            scale * LOG2E if softcap is None else scale / softcap,
            0.0 if softcap is None else softcap * LOG2E,
        )
        logits = self._no_logits if sinks is None else sinks
        split, whole = self._attend_split, self._attend_whole
        if keys is not None:
            split, whole = self._attend_values_split, self._attend_values_whole
        inputs = [q, *self._buffers(view), lengths, options]
        if plan.merge is None:
            return whole(inputs=[*inputs, logits], **plan.attend)[0]
        partial, statistics = split(inputs=inputs, **plan.attend)
        return self._merge(inputs=[partial, statistics, logits], **plan.merge)[0]

    def _compile(
        self,
        n_heads: int,
        n_kv_heads: int,
        dim: int,
        dtype: mx.Dtype,
        keys: KeysOfValues | None,
    ) -> None:
        """Run every kernel once, on a short cache and on one long enough to be split."""
        q = mx.zeros((n_heads, 1, dim), dtype)
        few = mx.zeros((n_kv_heads, BLOCK, dim), self.cache_dtype)
        one = self.seal(few, few) if keys is None else self.seal_values(few)
        for n_blocks in (1, 2 * SIMDGROUPS):
            tiles = mx.repeat(one, n_blocks, axis=1)
            view = KVView(few, few, tiles, few, few, 0, n_blocks, BLOCK, keys=keys)
            mx.eval(self.attend(q, view, 1.0), self._held(view))

    def _turns_of(self, keys: KeysOfValues) -> "_Turns":
        periods = keys.periods
        if id(periods) not in self._turns:
            # Its layers share a model's periods, which must live on for their id to stay theirs.
            self._turns[id(periods)] = _Turns.of(periods)
        return self._turns[id(periods)]

    def gather(self, view: KVView, k: Array, v: Array) -> tuple[Array, Array]:
        if not _is_ours(view):
            return super().gather(view, k, v)
        return self._gathered(view, k, v, k.shape[1])

    def seal(self, k: Array, v: Array) -> Array:
        return self._sealed(self._seal, [k, v], tile_words(k.shape[2], self.kv_bits))

    def seal_values(self, v: Array) -> Array:
        words = tile_words(v.shape[2], self.kv_bits, k_is_v=True)
        return self._sealed(self._seal_values, [v], words)

    def _sealed(self, kernel: Any, inputs: Sequence[Array], words: int) -> Array:
        heads, tokens, dim = inputs[0].shape
        if tokens == 0:
            return mx.zeros((heads, 0, words), mx.uint32)
        return kernel(
            inputs=inputs,
            template=[("D", dim)],
            grid=(dim, tokens // BLOCK, heads),
            threadgroup=(dim, 1, 1),
            output_shapes=[(heads, tokens // BLOCK, words)],
            output_dtypes=[mx.uint32],
        )[0]

    def unseal(self, tiles: Array) -> tuple[Array, Array]:
        heads, n, words = tiles.shape
        none = mx.zeros((heads, 1, words // (2 * (self.kv_bits + 1))), self.dtype)
        return self._held(KVView(none, none, tiles, none, none, 0, n, 0))

    def unseal_values(self, tiles: Array) -> Array:
        canonical = self.to_canonical(tiles, k_is_v=True)
        return codec.unseal_channels(canonical, self.kv_bits).astype(self.dtype)

    def _held(self, view: KVView) -> tuple[Array, Array]:
        if not _is_ours(view):
            return super()._held(view)
        return self._gathered(view, view.tail_v, view.tail_v, 0)

    def _gathered(self, view: KVView, k: Array, v: Array, n_new: int) -> tuple[Array, Array]:
        """K and V of what is held, followed by the first n_new tokens of k and v, in one piece."""
        heads, _, dim = view.sink_v.shape
        shape = (heads, view.length + n_new, dim)
        if not shape[1]:
            return mx.zeros(shape, self.dtype), mx.zeros(shape, self.dtype)
        lengths = _lengths(view.n_sink, view.n_blocks, view.n_tail, n_new)
        kernel, threads = self._gather, dim
        if view.keys is not None:
            kernel, threads = self._gather_values, dim // 2
        all_k, all_v = kernel(
            inputs=[*self._buffers(view), lengths, k, v],
            template=[("D", dim), ("T", self.dtype)],
            grid=(threads, shape[1], heads),
            threadgroup=(threads, 1, 1),
            output_shapes=[shape, shape],
            output_dtypes=[self.dtype, self.dtype],
        )
        return all_k, all_v

    def _buffers(self, view: KVView) -> list[Array]:
        tiles = view.tiles if view.tiles.size else self._no_tiles
        if view.keys is None:
            return [view.sink_k, view.sink_v, tiles, view.tail_k, view.tail_v]
        turns = self._turns_of(view.keys).turns
        return [view.sink_v, tiles, view.tail_v, view.keys.weight, turns]

    def to_canonical(self, tiles: Array, k_is_v: bool = False) -> mx.array:
        if k_is_v:
            return _reordered_values(tiles, self.kv_bits, to_canonical=True)
        if self.kv_bits == 4:
            return _reordered(tiles, to_canonical=True)
        return codec.narrow_tiles(_reordered(_widened(tiles), to_canonical=True))

    def from_canonical(self, tiles: mx.array, k_is_v: bool = False) -> Array:
        if k_is_v:
            return _reordered_values(tiles, self.kv_bits, to_canonical=False)
        if self.kv_bits == 4:
            return _reordered(tiles, to_canonical=False)
        return _narrowed(_reordered(codec.widen_tiles(tiles), to_canonical=False))


def _attention(
    make_kernel: Callable[..., Any], name: str, cache: Sequence[str], source: str, header: str
) -> tuple[Any, Any]:
    """Pass 1 in two forms: one whose results go to pass 2, and one whose results are all."""
    inputs = ["q", *cache, "options"]
    split, whole = (source.replace("RESULTS", results) for results in (SPLIT, WHOLE))
    return (
        make_kernel(f"{name}_split", inputs, ["partial", "statistics"], split, header),
        make_kernel(f"{name}_whole", [*inputs, "logits"], ["out"], whole, header),
    )


def _is_ours(view: KVView) -> bool:
    """Whether the kernels read it: they turn a channel together with the one half a head away."""
    return view.keys is None or 2 * view.keys.periods.shape[0] == view.sink_v.shape[2]


@dataclass(frozen=True)
class _Turns:
    """RoPE's periods as values.metal takes them, of which the first `count` are finite."""

    periods: Array
    turns: mx.array
    count: int

    @classmethod
    def of(cls, periods: Array) -> "_Turns":
        numbers = periods.tolist()
        turns = [round(2**64 / (2 * math.pi * x)) % 2**64 for x in numbers]
        return cls(periods, mx.array(np.array(turns, np.uint64)), sum(map(math.isfinite, numbers)))


@dataclass(frozen=True)
class _Plan:
    """How a decode step is dispatched: what the kernels are called with besides their inputs."""

    n_splits: int
    attend: dict[str, Any]
    merge: dict[str, Any] | None


def _plan(
    n_heads: int,
    n_kv_heads: int,
    tokens: int,
    dim: int,
    units: int,
    cores: int,
    has_logits: bool,
    dtype: mx.Dtype,
    n_turned: int | None = None,
) -> _Plan:
    """n_turned: pairs of channels that turn, where V alone is held."""
    n_rows = n_heads // n_kv_heads * tokens
    template: tuple[tuple[str, Any], ...]
    if n_turned is None:
        parts, simdgroups = value_parts(dim), SIMDGROUPS
        rows = rows_per_simdgroup(n_rows, dim // parts)
        groups = -(-n_rows // (8 * rows)) * parts
        template = (("D", dim), ("DV", dim // parts), ("ROWS", rows), ("SIMDGROUPS", simdgroups))
    else:
        simdgroups = channel_parts(dim)
        # No more than 32 KB of threadgroup memory.
        rows = rows_per_simdgroup(n_rows, max(128, dim // simdgroups))
        groups = -(-n_rows // (8 * rows))
        turned = max(1, -(-n_turned // (GROUP // 2 * simdgroups)))
        template = (("D", dim), ("PARTS", simdgroups), ("ROWS", rows), ("TURNED", turned))
        template += (("T", dtype),)
    n_splits = split_count(units, n_kv_heads * groups, cores)
    return _dispatches(
        n_heads, n_kv_heads, tokens, dim, template, simdgroups, groups, n_splits, has_logits, dtype
    )


@functools.cache
def _dispatches(
    n_heads: int,
    n_kv_heads: int,
    tokens: int,
    dim: int,
    template: tuple[tuple[str, Any], ...],
    simdgroups: int,
    groups: int,
    n_splits: int,
    has_logits: bool,
    dtype: mx.Dtype,
) -> _Plan:
    n_rows = n_heads // n_kv_heads * tokens
    attend: dict[str, Any] = {
        "grid": (32 * simdgroups * groups, n_kv_heads, n_splits),
        "threadgroup": (32 * simdgroups, 1, 1),
    }
    out = {"output_shapes": [(n_heads, tokens, dim)], "output_dtypes": [dtype]}
    if n_splits == 1:
        return _Plan(
            1, {"template": [*template, ("HAS_LOGITS", has_logits)], **attend, **out}, None
        )
    attend |= {
        "template": template,
        "output_shapes": [(n_kv_heads, n_splits, n_rows, n) for n in (dim, 2)],
        "output_dtypes": [mx.float32, mx.float32],
    }
    merge = {
        "template": [("D", dim), ("HAS_LOGITS", has_logits)],
        "grid": (dim, 1, n_kv_heads * n_rows),
        "threadgroup": (dim, 1, 1),
        **out,
    }
    return _Plan(n_splits, attend, merge)


# The axes of a tile's parts as tile.metal orders them, by the letters of canonical order: a token
# is (n, p, q, e) for K and (n, r, s) for V; a channel is (j, r, s, i) for K and (j, p, q) for V's
# words. r, s and p, q are the high and low bits of a lane's matrix row and pair. Where V alone is
# held, half words have 4 channels each, and h is the half of the head.
_SIZES = {"K": "n4 p2 q2 e2 j r2 s4 i4", "V": "n4 r2 s4 j p2 q2", "k": "j r8 i4", "v": "n4 r8 j"}
_METAL = {"K": "j r p s q i n e", "V": "j r p s q n", "k": "j i r", "v": "j r n"}
_SIZES["values"], _METAL["values"] = "n4 r2 s4 h2 j p2 q2", "j r p s q n h"


def _permuted(x: mx.array, part: str, to_canonical: bool) -> mx.array:
    """Reorders (heads, n, elements) of one part of the tiles."""
    sizes = {axis[0]: int(axis[1:] or 0) for axis in _SIZES[part].split()}
    known = math.prod(size for size in sizes.values() if size)
    sizes["j"] = x.shape[-1] // known
    canonical, metal = list(sizes), _METAL[part].split()
    before, after = (metal, canonical) if to_canonical else (canonical, metal)
    shaped = x.reshape(*x.shape[:2], *(sizes[axis] for axis in before))
    order = [0, 1, *(2 + before.index(axis) for axis in after)]
    return shaped.transpose(order).reshape(x.shape)


def _reordered(tiles: mx.array, to_canonical: bool) -> mx.array:
    if tiles.size == 0:
        return tiles
    dim = tiles.shape[-1] // 10
    own, canonical = [4 * dim, 8 * dim, 9 * dim], [4 * dim, 5 * dim, 9 * dim]
    if to_canonical:
        k, v, k_params, v_params = mx.split(tiles, own, axis=-1)
    else:
        k, k_params, v, v_params = mx.split(tiles, canonical, axis=-1)
    # K's words hold other codes in the two orders: take them apart to one byte per code.
    pairs = k.reshape(*k.shape[:2], -1).view(mx.uint8)
    codes = mx.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*k.shape[:2], -1)
    codes = _permuted(codes, "K", to_canonical).reshape(*pairs.shape, 2)
    k = (codes[..., 0] | (codes[..., 1] << 4)).view(mx.uint32)
    v = _permuted(v, "V", to_canonical)
    k_params = _permuted(k_params, "k", to_canonical)
    v_params = _permuted(v_params, "v", to_canonical)
    parts = [k, k_params, v, v_params] if to_canonical else [k, v, k_params, v_params]
    return mx.concatenate(parts, axis=-1)


def _reordered_values(tiles: Array, bits: int, to_canonical: bool) -> mx.array:
    """Tiles that hold V alone: their parameters lie as in canonical order."""
    dim = tiles.shape[-1] // (bits + 1)
    words, parameters = mx.split(tiles, [bits * dim], axis=-1)
    if bits == 3:
        words = _of_thirds(words) if to_canonical else codec.widen_words(words)
    words = _permuted(words.view(mx.uint16), "values", to_canonical).view(mx.uint32)
    if bits == 3:
        words = codec.narrow_words(words) if to_canonical else _thirds(words)
    return mx.concatenate([words, parameters], axis=-1)


def _of_thirds(words: mx.array) -> mx.array:
    """Code words of 3 bits in Metal's order as with 4: (..., 3 head_dim) to (..., 4 head_dim)."""
    widened = mx.stack(codec.widen([*mx.split(words, 3, axis=-1)]), axis=-1)
    return widened.reshape(*words.shape[:-1], -1)


def _thirds(words: mx.array) -> mx.array:
    """The reverse of `_of_thirds`."""
    fours = words.reshape(*words.shape[:-1], words.shape[-1] // 4, 4)
    return mx.concatenate(codec.narrow([fours[..., i] for i in range(4)]), axis=-1)


def _widened(tiles: mx.array) -> mx.array:
    """Tiles of 3 bits, in Metal's order, with code words as with 4."""
    dim = tiles.shape[-1] // 8
    k, v, parameters = mx.split(tiles, [3 * dim, 6 * dim], axis=-1)
    return mx.concatenate([_of_thirds(k), _of_thirds(v), parameters], axis=-1)


def _narrowed(tiles: mx.array) -> mx.array:
    """The reverse of `_widened`."""
    dim = tiles.shape[-1] // 10
    k, v, parameters = mx.split(tiles, [4 * dim, 8 * dim], axis=-1)
    return mx.concatenate([_thirds(k), _thirds(v), parameters], axis=-1)
