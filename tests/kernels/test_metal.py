"""The Metal kernels against float64 arithmetic on what the tiles stand for.

On a Mac they run on the GPU, elsewhere in the emulator, whose checks find races, accesses out of
bounds and divergence as well: see tests/emulator/README.md.
"""

import dataclasses
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.emulator import EmulatedKernel, KernelError, lint, why_not
from tqchat.engine.cache import SealedCache
from tqchat.kernels import BLOCK, GROUP, SINK, Backend, KeysOfValues, KVView, codec
from tqchat.kernels.layout import MAX_DECODE_TOKENS, TAIL_CAPACITY, tile_words
from tqchat.kernels.metal import backend as metal
from tqchat.kernels.metal.backend import Metal
from tqchat.models.kv import KVLayer

Array = NDArray[Any]

ON_GPU = mx.metal.is_available()
emulated = pytest.mark.skipif(ON_GPU, reason="the emulator is for machines without Metal")
if not ON_GPU and why_not():
    pytest.skip(why_not(), allow_module_level=True)

TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
"""Relative to the largest element: half a unit in the last place is 5e-4 and 4e-3."""


class Kernels:
    """Makes the backend's kernels and remembers them."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.made: dict[str, EmulatedKernel] = {}

    def __call__(
        self, name: str, inputs: list[str], outputs: list[str], source: str, header: str
    ) -> Any:
        if ON_GPU:
            return mx.fast.metal_kernel(name, inputs, outputs, source, header)
        self.made[name] = EmulatedKernel(name, inputs, outputs, source, header, **self.options)
        return self.made[name]


def metal_backend(
    make_kernel: Any, dtype: mx.Dtype = mx.float16, cores: int = 8, kv_bits: int = 4
) -> Metal:
    return Metal(dtype, kv_bits=kv_bits, make_kernel=make_kernel, cores=cores, compile_ahead=False)


@functools.cache
def backend(dtype: mx.Dtype = mx.float16, kv_bits: int = 4) -> Metal:
    return metal_backend(Kernels(checked=True), dtype, kv_bits=kv_bits)


def codes(words: Array, bits: int) -> Array:
    """Codes (heads, n, BLOCK, head_dim) of canonical words (heads, n, bits * head_dim)."""
    heads, n, size = words.shape
    nibbles = (
        words.reshape(heads, n, size // bits, bits, 1) >> (4 * np.arange(8, dtype=np.uint32)) & 15
    )
    if bits == 3:
        last = (nibbles >> 3 << np.arange(3, dtype=np.uint32)[:, None]).sum(-2, keepdims=True)
        nibbles = np.concatenate([nibbles & 7, last], axis=-2)
    return nibbles.reshape(heads, n, BLOCK, size // bits).astype(np.float64) - 2 ** (bits - 1)


def parameters(words: Array, *shape: int) -> Array:
    halves = np.ascontiguousarray(words).view(np.float16).astype(np.float64)
    return halves.reshape(*words.shape[:2], *shape, 2)


def exact_channels(tiles: Array, bits: int = 4) -> Array:
    """K (heads, tokens, head_dim) in float64 of the halves of tiles that hold it; or V alone."""
    heads, n, words = tiles.shape
    dim = words // (bits + 1)
    pair = parameters(tiles[..., bits * dim :], 1, dim)
    x = pair[..., 1] + pair[..., 0] * codes(tiles[..., : bits * dim], bits)
    return x.reshape(heads, n * BLOCK, dim)


def exact(tiles: Array, bits: int = 4) -> tuple[Array, Array]:
    """K and V (heads, tokens, head_dim) in float64 of canonical tiles, as layout.py has them."""
    heads, n, words = tiles.shape
    k_tiles, v_tiles = np.split(tiles, 2, axis=-1)
    dim = words // (2 * bits + 2)
    pair = parameters(v_tiles[..., bits * dim :], BLOCK, dim // GROUP)
    pair = np.repeat(pair, GROUP, axis=3)
    v = pair[..., 1] + pair[..., 0] * codes(v_tiles[..., : bits * dim], bits)
    return exact_channels(k_tiles, bits), v.reshape(heads, n * BLOCK, dim)


def float64(x: mx.array) -> Array:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def keys_of(v: Array, keys: KeysOfValues) -> Array:
    """K of V (heads, tokens, head_dim), from position 0 on."""
    n = keys.periods.shape[0]
    angles = np.arange(v.shape[1])[:, None] / float64(keys.periods)
    x = (v * float64(keys.weight)).astype(np.complex128)
    turned = (x[..., :n] + 1j * x[..., n : 2 * n]) * np.exp(1j * angles)
    k: Array = np.concatenate([turned.real, turned.imag, x[..., 2 * n :].real], axis=-1)
    return k


@dataclass
class Problem:
    """A decode step on a random cache. What is not filled holds NaN: it must not be looked at."""

    dim: int
    n_heads: int
    n_kv_heads: int
    n_blocks: int = 3
    n_tail: int = 37
    n_sink: int = SINK
    tokens: int = 1
    dtype: mx.Dtype = mx.float16
    options: dict[str, Any] = field(default_factory=dict)
    spare: int = 2
    """Blocks of capacity that are not filled."""
    kv_bits: int = 4
    n_turned: int | None = None
    """Pairs of channels that turn, where V alone is held and K made of it."""

    def __post_init__(self) -> None:
        mx.random.seed(self.n_blocks + self.n_tail)
        heads, dim = self.n_kv_heads, self.dim

        def random(*shape: int) -> mx.array:
            return mx.random.normal(shape).astype(self.dtype)

        def partly(n: int, capacity: int) -> mx.array:
            nan = mx.full((heads, capacity - n, dim), float("nan"), self.dtype)
            return mx.concatenate([random(heads, n, dim), nan], axis=1)

        # Channels of unlike size, as K has them.
        size = mx.exp(mx.random.normal((dim,)))
        blocks = self.n_blocks * BLOCK
        self.canonical = mx.full(
            (heads, self.spare, tile_words(dim, self.kv_bits, self.n_turned is not None)),
            2**32 - 1,
            mx.uint32,
        )
        if blocks:
            k, v = random(heads, blocks, dim) * size, random(heads, blocks, dim)
            if self.n_turned is None:
                tiles = codec.seal(k, v, self.kv_bits)
            else:
                tiles = codec.seal_channels(k, self.kv_bits)
            self.canonical = mx.concatenate([tiles, self.canonical], axis=1)
        self.q = random(self.n_heads, self.tokens, dim)
        self.sink_k, self.sink_v = partly(self.n_sink, SINK), partly(self.n_sink, SINK)
        self.tail_k = partly(self.n_tail, TAIL_CAPACITY)
        self.tail_v = partly(self.n_tail, TAIL_CAPACITY)
        self.scale = self.options.get("scale", dim**-0.5)
        self.softcap = self.options.get("softcap")
        self.window = self.options.get("window")
        self.logits = 2 * random(self.n_heads) if self.options.get("logits") else None
        self.keys: KeysOfValues | None = None
        if self.n_turned is not None:
            # Gemma 4's: the periods of a whole head, of which the first turn.
            periods = 1e6 ** (2 * mx.arange(dim // 2) / dim)
            periods[self.n_turned :] = float("inf")
            self.keys = KeysOfValues(1 + random(dim) / 4, periods)
            self.sink_k = self.tail_k = mx.zeros((heads, 1, 0), self.dtype)

    def tiles(self, kernels: Metal) -> Any:
        return kernels.from_canonical(self.canonical, k_is_v=self.keys is not None)

    def view(self, tiles: mx.array) -> KVView:
        return KVView(
            self.sink_k, self.sink_v, tiles, self.tail_k, self.tail_v,
            self.n_sink, self.n_blocks, self.n_tail, keys=self.keys,
        )  # fmt: skip

    def held(self) -> tuple[Array, Array]:
        tiles = np.array(self.canonical[:, : self.n_blocks])
        if self.keys is not None:
            ends = float64(self.sink_v[:, : self.n_sink]), float64(self.tail_v[:, : self.n_tail])
            v = np.concatenate([ends[0], exact_channels(tiles, self.kv_bits), ends[1]], axis=1)
            return keys_of(v, self.keys), v
        sealed = exact(tiles, self.kv_bits)
        parts = []
        for sink, middle, tail in zip(
            (self.sink_k, self.sink_v), sealed, (self.tail_k, self.tail_v), strict=True
        ):
            ends = float64(sink[:, : self.n_sink]), float64(tail[:, : self.n_tail])
            parts.append(np.concatenate([ends[0], middle, ends[1]], axis=1))
        return parts[0], parts[1]

    def expected(self) -> Array:
        k, v = self.held()
        length, group = k.shape[1], self.n_heads // self.n_kv_heads
        k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
        scores = float64(self.q) @ k.swapaxes(1, 2) * self.scale
        if self.softcap is not None:
            scores = self.softcap * np.tanh(scores / self.softcap)
        position = np.arange(length - self.tokens, length)[:, None]
        seen = np.arange(length) <= position
        if self.window is not None:
            seen &= np.arange(length) > position - self.window
        scores = np.where(seen, scores, -np.inf)
        highest = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - highest)
        total = weights.sum(axis=-1, keepdims=True)
        if self.logits is not None:
            total += np.exp(float64(self.logits)[:, None, None] - highest)
        out: Array = weights / total @ v
        return out

    def error(self, kernels: Metal) -> float:
        """The largest error, relative to the largest element; NaN if there is one in the result."""
        out = kernels.attend(
            self.q, self.view(self.tiles(kernels)), self.scale,
            softcap=self.softcap, sinks=self.logits, window=self.window,
        )  # fmt: skip
        assert out.dtype == self.dtype
        assert out.shape == self.q.shape
        expected = self.expected()
        difference = np.abs(float64(out) - expected)
        return float(difference.max() / np.abs(expected).max())

    def check(self) -> None:
        assert self.error(backend(self.dtype, self.kv_bits)) < TOLERANCE[self.dtype]


@pytest.mark.parametrize(
    ("dim", "n_heads", "n_kv_heads", "tokens"),
    [
        (64, 3, 1, 1),
        (64, 9, 3, 8),
        (96, 4, 4, 1),
        (128, 16, 2, 1),
        (128, 16, 1, 1),
        (128, 8, 1, 4),
        (160, 2, 1, 2),
        (256, 8, 2, 1),
        (512, 8, 1, 1),
    ],
)
def test_shapes(dim: int, n_heads: int, n_kv_heads: int, tokens: int) -> None:
    Problem(dim, n_heads, n_kv_heads, n_blocks=9, tokens=tokens).check()


# Gemma 3's and 4's local layers, without a sink once it has gone by, and Gemma 4's global ones,
# whose scores are not scaled; gpt-oss's.
@pytest.mark.parametrize(
    ("dim", "n_heads", "n_kv_heads", "n_sink", "options"),
    [
        (128, 4, 2, 0, {"window": 70}),
        (256, 4, 2, 0, {"window": 70, "scale": 1.0}),
        (256, 8, 1, SINK, {"window": 300, "scale": 1.0}),
        (512, 8, 1, SINK, {"scale": 1.0}),
        (64, 16, 2, 0, {"window": 128, "logits": True}),
        (64, 16, 2, SINK, {"logits": True}),
    ],
    ids=str,
)
def test_layers_of_families(
    dim: int, n_heads: int, n_kv_heads: int, n_sink: int, options: dict[str, Any]
) -> None:
    problem = Problem(dim, n_heads, n_kv_heads, n_blocks=9, n_sink=n_sink, options=options)
    if "scale" in options:
        # As their norms make them; else all is taken from one key.
        problem.q *= dim**-0.5
    problem.check()


@pytest.mark.parametrize(
    ("dim", "n_heads", "n_kv_heads", "tokens"),
    [(64, 9, 3, 8), (96, 4, 4, 1), (128, 16, 1, 1), (256, 8, 2, 1), (512, 8, 1, 1)],
)
def test_codes_of_3_bits(dim: int, n_heads: int, n_kv_heads: int, tokens: int) -> None:
    Problem(dim, n_heads, n_kv_heads, n_blocks=9, tokens=tokens, kv_bits=3).check()


@pytest.mark.parametrize(
    ("dim", "n_heads", "n_kv_heads", "tokens", "n_turned", "kv_bits"),
    [
        (64, 3, 1, 1, 32, 4),
        (64, 9, 3, 8, 8, 3),
        (96, 2, 2, 2, 48, 4),
        (128, 16, 1, 1, 16, 4),
        (128, 16, 1, 8, 64, 4),
        (160, 2, 1, 2, 20, 4),
        (256, 8, 2, 1, 32, 3),
        (512, 8, 1, 1, 64, 4),
        (512, 16, 1, 1, 64, 3),
    ],
)
def test_keys_of_values(
    dim: int, n_heads: int, n_kv_heads: int, tokens: int, n_turned: int, kv_bits: int
) -> None:
    Problem(
        dim, n_heads, n_kv_heads, n_blocks=9, tokens=tokens, n_turned=n_turned, kv_bits=kv_bits
    ).check()


def test_short_context_is_one_pass() -> None:
    Problem(128, 8, 1, n_blocks=2).check()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 1.0, "softcap": 3.0},
        {"window": 100},
        {"window": 20},
        {"logits": True},
        {"logits": True, "window": 70, "softcap": 8.0},
    ],
    ids=str,
)
def test_options(options: dict[str, Any], tokens: int) -> None:
    Problem(64, 4, 2, n_blocks=9, tokens=tokens, options=options).check()


@pytest.mark.parametrize("n_blocks", [1, 9])
@pytest.mark.parametrize("options", [{"scale": 1.0, "softcap": 3.0}, {"logits": True}], ids=str)
def test_options_with_keys_of_values(options: dict[str, Any], n_blocks: int) -> None:
    Problem(64, 4, 2, n_blocks, tokens=3, options=options, n_turned=32).check()


@pytest.mark.parametrize("n_blocks", [1, 9])
@pytest.mark.parametrize("n_turned", [None, 16])
def test_bfloat16(n_blocks: int, n_turned: int | None) -> None:
    Problem(64, 4, 2, n_blocks=n_blocks, dtype=mx.bfloat16, n_turned=n_turned).check()


@pytest.mark.parametrize("n_blocks", [1, 9])
def test_logits_of_few_heads(n_blocks: int) -> None:
    """MLX passes arrays of less than 8 elements in another address space."""
    for n_heads in (7, 8):
        Problem(64, n_heads, 1, n_blocks=n_blocks, options={"logits": True}).check()


@settings(max_examples=60, deadline=None)
@given(
    n_sink=st.integers(0, SINK),
    n_blocks=st.sampled_from([0, 1, 2, 7, 8, 31, 128]) | st.integers(0, 40),
    n_tail=st.sampled_from([0, 1, 31, 32, 33, 64, 127]) | st.integers(0, 127),
    group=st.integers(1, 16),
    n_kv_heads=st.integers(1, 3),
    tokens=st.integers(1, MAX_DECODE_TOKENS),
    window=st.none() | st.integers(1, 300),
    n_turned=st.none() | st.integers(0, 32),
)
def test_any_length(
    n_sink: int,
    n_blocks: int,
    n_tail: int,
    group: int,
    n_kv_heads: int,
    tokens: int,
    window: int | None,
    n_turned: int | None,
) -> None:
    n_sink = SINK if n_blocks or n_tail else max(1, n_sink)
    tokens = min(tokens, n_sink + BLOCK * n_blocks + n_tail)
    Problem(
        64, group * n_kv_heads, n_kv_heads, n_blocks, n_tail, n_sink, tokens,
        options={"window": window} if n_turned is None else {},
        spare=n_blocks % 3, n_turned=n_turned,
    ).check()  # fmt: skip


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 1000, 4097])
@pytest.mark.parametrize("kv_bits", [3, 4])
def test_awkward_lengths(length: int, kv_bits: int) -> None:
    """Sink, sealed blocks and tail as the cache divides so many tokens, and the new one."""
    n_sink = min(SINK, length)
    n_blocks = max(0, (length - n_sink - 64) // BLOCK)
    n_tail = length - n_sink - BLOCK * n_blocks
    Problem(64, 3, 1, n_blocks, n_tail + 1 if length >= SINK else 0,
            n_sink if length >= SINK else n_sink + 1, kv_bits=kv_bits).check()  # fmt: skip


def test_large_scores() -> None:
    """Scores of some hundreds overflow a softmax without a running maximum."""
    Problem(64, 4, 2, n_blocks=9, options={"scale": 8.0}).check()


@emulated
@pytest.mark.parametrize("kv_bits", [3, 4])
def test_any_order_of_lanes_gives_the_same_bytes(kv_bits: int) -> None:
    kernels = metal_backend(Kernels(checked=True, orders=(0, 1, 2, 3)), kv_bits=kv_bits)
    for n_turned in (None, 16):
        problem = Problem(64, 12, 2, n_blocks=9, tokens=2, kv_bits=kv_bits, n_turned=n_turned)
        assert problem.error(kernels) < TOLERANCE[mx.float16]
    kernels.unseal(kernels.seal(*mx.random.normal((2, 1, 64, 64)).astype(mx.float16)))
    kernels.seal_values(mx.random.normal((1, 64, 64)).astype(mx.float16))


@emulated
@pytest.mark.parametrize("tree", [1, 2])
def test_any_order_of_reductions(tree: int) -> None:
    kernels = metal_backend(Kernels(checked=False, reduction_tree=tree))
    assert Problem(64, 12, 2, n_blocks=9, tokens=2).error(kernels) < TOLERANCE[mx.float16]


# Llama 3.1 70B's attention, 4,096 tokens, on a chip of the size of a Max.
LLAMA_70B: dict[str, Any] = {
    "dim": 128,
    "n_heads": 64,
    "n_kv_heads": 8,
    "n_blocks": 125,
    "n_tail": 92,
}


def test_realistic_size() -> None:
    kernels = metal_backend(Kernels(checked=False), cores=32)
    assert Problem(**LLAMA_70B).error(kernels) < TOLERANCE[mx.float16]


@emulated
@pytest.mark.parametrize("kv_bits", [3, 4])
def test_every_byte_is_loaded_once(kv_bits: int) -> None:
    make = Kernels(checked=True)
    problem = Problem(**LLAMA_70B, spare=0, kv_bits=kv_bits)
    problem.error(metal_backend(make, cores=32, kv_bits=kv_bits))
    report = make.made["tqchat_attend_split"].report
    traffic = report.traffic
    tiles = traffic["tiles"]
    assert tiles.distinct_read == problem.canonical.nbytes
    assert tiles.shared_read == 0
    assert tiles.read == problem.canonical.nbytes
    for name in ("sink_k", "sink_v", "tail_k", "tail_v"):
        assert traffic[name].shared_read == 0
        assert traffic[name].read == traffic[name].distinct_read
    # Both passes' traffic of partial results is what the shapes say: see the next test.
    merged = make.made["tqchat_merge"].report.traffic
    assert merged["partial"].read == traffic["partial"].written
    assert merged["statistics"].distinct_read == traffic["statistics"].written
    # 32 tokens take 64 matrix products for the scores of 128 channels and 64 for the output, one
    # exp2 per query row and key, and one step of softmax.
    units = 8 * (125 + 3)
    assert report.simd_operations["matrix"] == 128 * units
    assert report.simd_operations["vote"] == units
    assert report.arithmetic["exp2"] < 1.5 * 8 * 32 * units


# Attention of Gemma 4 31B's layers that see everything, on a chip of the size of a Max.
GEMMA_31B: dict[str, Any] = {
    "dim": 512,
    "n_heads": 32,
    "n_kv_heads": 4,
    "n_blocks": 61,
    "n_tail": 92,
    "n_turned": 64,
}


@emulated
@pytest.mark.parametrize("kv_bits", [3, 4])
def test_every_byte_of_values_is_loaded_once(kv_bits: int) -> None:
    make = Kernels(checked=True)
    problem = Problem(**GEMMA_31B, spare=0, kv_bits=kv_bits)
    kernels = metal_backend(make, cores=32, kv_bits=kv_bits)
    assert problem.error(kernels) < TOLERANCE[mx.float16]
    report = make.made["tqchat_attend_values_split"].report
    tiles = report.traffic["tiles"]
    assert tiles.distinct_read == problem.canonical.nbytes == 4 * 61 * 4 * (kv_bits + 1) * 512
    assert tiles.shared_read == 0
    assert tiles.read == problem.canonical.nbytes
    for name in ("sink", "tail"):
        assert report.traffic[name].shared_read == 0
        assert report.traffic[name].read == 2 * report.traffic[name].distinct_read
    # 32 tokens take 256 matrix products for the scores of 512 channels and 256 for the output;
    # four simdgroups each take the step of softmax and turn what the unit's first token turns by.
    units = 4 * (61 + 1 + 3)
    assert report.simd_operations["matrix"] == 512 * units
    assert report.simd_operations["vote"] == 4 * units
    assert report.arithmetic["exp2"] < 1.5 * 4 * 8 * 32 * units


@emulated
@pytest.mark.parametrize(
    ("n_heads", "tokens", "groups"), [(1, 1, 1), (8, 2, 1), (16, 1, 1), (17, 1, 2), (8, 8, 4)]
)
def test_row_groups_of_values(n_heads: int, tokens: int, groups: int) -> None:
    make = Kernels(checked=True)
    problem = Problem(512, n_heads, 1, n_blocks=9, tokens=tokens, spare=0, n_turned=64)
    assert problem.error(metal_backend(make)) < TOLERANCE[mx.float16]
    tiles = make.made["tqchat_attend_values_split"].report.traffic["tiles"]
    assert tiles.read == groups * problem.canonical.nbytes


@pytest.mark.parametrize("cores", sorted(metal.CORES.values()))
def test_partial_results_are_small(cores: int) -> None:
    """Extrapolated from the split rule to 128K tokens; the test above counts that it holds."""
    blocks = 128 * 1024 // BLOCK
    plan = metal._plan(64, 8, 1, 128, blocks, cores, False, mx.float16)
    written = sum(4 * int(np.prod(shape)) for shape in plan.attend["output_shapes"])
    assert 2 * written < 0.03 * 8 * blocks * 4 * tile_words(128)


@emulated
@pytest.mark.parametrize(
    ("n_heads", "tokens", "groups"), [(2, 1, 1), (8, 1, 1), (16, 1, 1), (17, 1, 2), (8, 8, 4)]
)
def test_row_groups(n_heads: int, tokens: int, groups: int) -> None:
    """One simdgroup's registers hold 16 query rows of 128 channels; more rows load tiles again."""
    make = Kernels(checked=True)
    problem = Problem(128, n_heads, 1, n_blocks=9, tokens=tokens, spare=0)
    problem.error(metal_backend(make))
    tiles = make.made["tqchat_attend_split"].report.traffic["tiles"]
    assert tiles.read == groups * problem.canonical.nbytes


@emulated
def test_growing_compiles_nothing_and_copies_nothing() -> None:
    make = Kernels(checked=True)
    kernels = metal_backend(make)
    sources = set()
    for n_blocks, n_tail in ((9, 64), (9, 65), (40, 127), (200, 70)):
        Problem(64, 3, 1, n_blocks, n_tail).error(kernels)
        sources.add(
            (make.made["tqchat_attend_split"].generated, make.made["tqchat_merge"].generated)
        )
    assert len(sources) == 1


def test_lengths_are_shared_by_layers() -> None:
    assert metal._lengths(4, 9, 64, 0) is metal._lengths(4, 9, 64, 0)
    options = np.array(metal._options(2, 0, 0.5, 0.0))
    assert options[:2].tolist() == [2, 0]
    assert options[2:].view(np.float32).tolist() == [0.5, 0.0]


def test_lengths_on_the_device() -> None:
    """A compiled step knows them only there; its splits follow from the capacity."""
    problem = Problem(64, 4, 2, n_blocks=9, spare=40)
    tiles = backend().from_canonical(problem.canonical)
    lengths = mx.array([SINK, problem.n_blocks, problem.n_tail, 0], mx.int32)
    view = dataclasses.replace(problem.view(tiles), n_sink=0, n_blocks=0, n_tail=0, lengths=lengths)
    out = backend().attend(problem.q, view, problem.scale)
    expected = problem.expected()
    assert np.abs(float64(out) - expected).max() < TOLERANCE[mx.float16] * np.abs(expected).max()


@emulated
def test_compiles_ahead() -> None:
    """The first step of a shape runs every kernel, so that a later one meets none for the first."""
    make = Kernels(checked=False)
    kernels = Metal(make_kernel=make, cores=8)
    for n_turned in (None, 8):
        Problem(32, 2, 1, n_blocks=0, n_turned=n_turned).error(kernels)
        used = {name for name in make.made if ("values" in name) == (n_turned is not None)}
        assert len(used) == (5 if n_turned is None else 4)
        assert all(bool(make.made[name].generated.source) for name in used)
        compiled = {name: set(kernel.compiled) for name, kernel in make.made.items()}
        Problem(32, 2, 1, n_blocks=40, n_turned=n_turned).error(kernels)
        x = mx.zeros((1, 64, 32), mx.float16)
        if n_turned is None:
            kernels.unseal(kernels.seal(x, x))
        else:
            kernels.unseal_values(kernels.seal_values(x))
        assert {name: set(kernel.compiled) for name, kernel in make.made.items()} == compiled


def test_split_rule() -> None:
    assert metal.split_count(units=3, threadgroups=8, cores=32) == 1
    assert metal.split_count(units=34, threadgroups=8, cores=32) == 8
    assert metal.split_count(units=4100, threadgroups=8, cores=32) == 12
    assert metal.split_count(units=4100, threadgroups=1, cores=64) == metal.MAX_SPLITS


@emulated
def test_kernels_may_lie_in_files() -> None:
    """The header that names the files gives the same bytes as the one that holds their text."""
    folder = Path(metal.__file__).parent
    by_path = "#define BITS 4\n" + metal._include([folder / "tile.metal", folder / "cache.metal"])
    assert metal._header("tile.metal", "cache.metal") != by_path
    k, v = mx.random.normal((2, 1, 64, 64)).astype(mx.float16)
    kernel = EmulatedKernel("test", ["k", "v"], ["tiles"], metal.SEAL, by_path)
    tiles = kernel(
        inputs=[k, v],
        template=[("D", 64)],
        grid=(64, 2, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(1, 2, tile_words(64))],
        output_dtypes=[mx.uint32],
    )[0]
    assert mx.array_equal(tiles, backend().seal(k, v))


# Sealing


def sealed_as_oracle(k: mx.array, v: mx.array, kv_bits: int = 4) -> mx.array:
    """Seals with the kernel and holds the result against the oracle, bit by bit."""
    kernels = backend(k.dtype, kv_bits)
    expected, tiles = codec.seal(k, v, kv_bits), kernels.seal(k, v)
    assert mx.array_equal(kernels.to_canonical(tiles), expected)
    assert mx.array_equal(kernels.from_canonical(expected), tiles)
    result: mx.array = tiles
    return result


@pytest.mark.parametrize("dim", [64, 96, 128, 256, 512])
@pytest.mark.parametrize("kv_bits", [3, 4])
def test_seal(dim: int, kv_bits: int) -> None:
    k, v = mx.random.normal((2, 2, 2 * BLOCK, dim)).astype(mx.float16)
    sealed_as_oracle(k, v, kv_bits)


@pytest.mark.parametrize("dim", [64, 96, 128, 256, 512])
@pytest.mark.parametrize("kv_bits", [3, 4])
def test_seal_values(dim: int, kv_bits: int) -> None:
    v = mx.random.normal((2, 2 * BLOCK, dim)).astype(mx.float16)
    v[0, 7, 9], v[0, 3, 8], v[1, :, 5] = float("nan"), float("inf"), 3.0
    kernels, expected = backend(kv_bits=kv_bits), codec.seal_channels(v, kv_bits)
    tiles = kernels.seal_values(v)
    assert mx.array_equal(kernels.to_canonical(tiles, k_is_v=True), expected)
    assert mx.array_equal(kernels.from_canonical(expected, k_is_v=True), tiles)
    values = np.clip(exact_channels(np.array(expected), kv_bits), -65504, 65504)
    assert (float64(kernels.unseal_values(tiles)) == values.astype(np.float16)).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.floats(1e-8, 6e4), bfloat=st.booleans())
def test_seal_any_size(seed: int, size: float, bfloat: bool) -> None:
    x = np.random.default_rng(seed).standard_normal((2, 1, BLOCK, 64)) * size
    k, v = mx.array(x).astype(mx.bfloat16 if bfloat else mx.float16)
    sealed_as_oracle(k, v)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 6e4, float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("everywhere", [True, False])
def test_seal_extremes(value: float, everywhere: bool) -> None:
    """A constant block; one outlier, infinity or NaN among ordinary values."""
    mx.random.seed(0)
    x = mx.random.normal((2, 1, BLOCK, 64)).astype(mx.float16)
    if everywhere:
        x = mx.full(x.shape, value, mx.float16)
    else:
        x[:, 0, 7, 9] = value
    tiles = sealed_as_oracle(x[0], x[1])
    k, v = (float64(y) for y in backend().unseal(tiles))
    assert np.isfinite(k).all()
    assert np.isfinite(v).all()
    if everywhere and np.isfinite(value):
        assert (k == np.float16(value)).all()
        assert (v == np.float16(value)).all()


def test_gather() -> None:
    for n_blocks, n_tail, n_new in ((3, 37, 5), (0, 37, 1), (2, 0, 33), (2, 5, 0)):
        problem = Problem(64, 2, 2, n_blocks, n_tail)
        view = problem.view(backend().from_canonical(problem.canonical))
        new_k, new_v = mx.random.normal((2, 2, 40, 64)).astype(mx.float16)
        gathered = backend()._gathered(view, new_k, new_v, n_new)
        for got, held, new in zip(gathered, problem.held(), (new_k, new_v), strict=True):
            expected = np.concatenate([held, float64(new[:, :n_new])], axis=1)
            assert (float64(got) == expected.astype(np.float16)).all()


@pytest.mark.parametrize("kv_bits", [3, 4])
@pytest.mark.parametrize("n_turned", [0, 16, 32])
def test_gather_values(n_turned: int, kv_bits: int) -> None:
    kernels = backend(kv_bits=kv_bits)
    for n_blocks, n_tail, n_new in ((3, 37, 5), (0, 37, 1), (2, 0, 33), (2, 5, 0)):
        problem = Problem(64, 2, 2, n_blocks, n_tail, n_turned=n_turned, kv_bits=kv_bits)
        new_k, new_v = mx.random.normal((2, 2, 40, 64)).astype(mx.float16)
        view = problem.view(problem.tiles(kernels))
        k, v = (float64(x) for x in kernels._gathered(view, new_k, new_v, n_new))
        held_k, held_v = problem.held()
        held = held_v.shape[1]
        assert (v[:, :held] == held_v.astype(np.float16)).all()
        # Rounded to fp16 once; where a sum cancels, float's own error shows.
        assert np.allclose(k[:, :held], held_k, rtol=2**-11, atol=1e-5)
        assert (k[:, held:] == float64(new_k[:, :n_new])).all()
        assert (v[:, held:] == float64(new_v[:, :n_new])).all()


def test_far_positions_are_turned_exactly() -> None:
    """A float's product of a position and a frequency would be off by 1e-2 there."""
    source = """
      const uint i = thread_position_in_grid.x;
      const Complex<float> x = angle(positions[i], turns[i]);
      out[2 * i] = x.x;
      out[2 * i + 1] = x.y;
    """
    header = metal._header("tile.metal", "values.metal")
    kernel = Kernels(checked=True)("angle", ["positions", "turns"], ["out"], source, header)
    position, period = np.meshgrid(
        [0, 1, 31, 4095, 131_071, 262_143, 1_048_575], np.exp(np.linspace(0, 14, 40))
    )
    positions, periods = position.ravel(), period.ravel().astype(np.float32)
    periods[:7] = np.inf
    out = kernel(
        inputs=[mx.array(positions.astype(np.int32)), metal._Turns.of(mx.array(periods)).turns],
        grid=(positions.size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(positions.size, 2)],
        output_dtypes=[mx.float32],
    )[0]
    expected = np.exp(1j * positions / periods.astype(np.float64))
    got = np.array(out).astype(np.float64)
    # The angle, at most pi, is rounded twice (4e-7 together); then cosine and sine are.
    assert np.abs(got[:, 0] + 1j * got[:, 1] - expected).max() < 1e-6


def test_pairs_of_less_than_a_head() -> None:
    """RoPE that pairs channels otherwise is left to MLX's operations."""
    problem = Problem(64, 4, 2, n_turned=16)
    assert problem.keys is not None
    problem.keys = dataclasses.replace(problem.keys, periods=problem.keys.periods[:16])
    problem.check()
    k, v = mx.random.normal((2, 2, 5, 64)).astype(mx.float16)
    gathered, _ = backend().gather(problem.view(problem.tiles(backend())), k, v)
    expected = np.concatenate([problem.held()[0], float64(k)], axis=1)
    assert np.allclose(float64(gathered), expected, rtol=2e-3, atol=8e-3)


@pytest.mark.parametrize("kv_bits", [3, 4])
def test_unseal(kv_bits: int) -> None:
    k, v = mx.random.normal((2, 1, 3 * BLOCK, 96)).astype(mx.float16)
    expected = exact(np.array(codec.seal(k, v, kv_bits)[:, :2]), kv_bits)
    kernels = backend(kv_bits=kv_bits)
    for got, values in zip(kernels.unseal(kernels.seal(k, v)[:, :2]), expected, strict=True):
        assert (float64(got) == values.astype(np.float16)).all()


def test_prefill_chunk() -> None:
    """Against the oracle, which puts the parts together with MLX's operations."""
    problem = Problem(64, 4, 2)
    k, v = mx.random.normal((2, 2, 40, 64)).astype(mx.float16)
    q = mx.random.normal((4, 40, 64)).astype(mx.float16)
    view = problem.view(backend().from_canonical(problem.canonical))
    out = backend().attend_chunk(q, k, v, view, 0.1, window=50)
    oracle = Backend(mx.float16)
    expected = oracle.attend_chunk(q, k, v, problem.view(problem.canonical), 0.1, window=50)
    assert np.abs(float64(out) - float64(expected)).max() < TOLERANCE[mx.float16]


def test_nothing_to_seal() -> None:
    none = mx.zeros((2, 0, 64), mx.float16)
    tiles = backend().seal(none, none)
    assert tiles.shape == (2, 0, tile_words(64))
    assert backend().to_canonical(tiles).shape == tiles.shape
    assert backend().unseal(tiles)[0].shape == (2, 0, 64)
    tiles = backend().seal_values(none)
    assert tiles.shape == (2, 0, tile_words(64, k_is_v=True))
    assert backend().to_canonical(tiles, k_is_v=True).shape == tiles.shape
    empty = Problem(64, 2, 2, 0, 0, 0, n_turned=16)
    assert backend().gather(empty.view(tiles), none, none)[0].shape == (2, 0, 64)


@pytest.mark.parametrize("k_is_v", [False, True])
def test_in_a_cache(k_is_v: bool) -> None:
    """Prefill in chunks, decode across sealing, trim into a block: as the oracle's cache does."""
    layer = KVLayer(2, 64, k_is_v=k_is_v)
    caches = [SealedCache(kernels, layer) for kernels in (backend(), Backend(mx.float16))]
    keys = Problem(64, 1, 1, n_turned=16).keys
    assert keys is not None
    mx.random.seed(0)

    def step(tokens: int) -> None:
        q = mx.random.normal((4, tokens, 64)).astype(mx.float16)
        k, v = mx.random.normal((2, 2, tokens, 64)).astype(mx.float16)
        if k_is_v:
            k = Backend(mx.float16).rope(v * keys.weight, keys.periods, caches[0].offset)
        out, expected = (float64(cache.attend(q, k, v, 0.125, keys=keys)) for cache in caches)
        assert np.abs(out - expected).max() < TOLERANCE[mx.float16] * np.abs(expected).max()

    for tokens in (100, 50, *[1] * 14, 8, 3, 1):
        step(tokens)
    for length in (90, 3):
        for cache in caches:
            cache.trim(length)
        step(1)


# What the CPU does not see


@emulated
@pytest.mark.parametrize("n_heads", [1, 12])
@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("kv_bits", [3, 4])
def test_address_spaces(n_heads: int, logits: bool, kv_bits: int) -> None:
    """With one head, logits and pass 1's statistics are small enough to come in constant memory."""
    make = Kernels(checked=False)
    kernels = metal_backend(make, kv_bits=kv_bits)
    for n_blocks in (1, 9):
        for n_turned in (None, 8):
            Problem(
                32, n_heads, 1, n_blocks, options={"logits": logits}, kv_bits=kv_bits,
                n_turned=n_turned,
            ).error(kernels)  # fmt: skip
    kernels.unseal(kernels.seal(*mx.zeros((2, 1, BLOCK, 32), mx.float16)))
    view = Problem(32, 1, 1, n_turned=8, kv_bits=kv_bits)
    x = kernels.seal_values(mx.zeros((1, BLOCK, 32), mx.float16))
    kernels.gather(view.view(x), view.tail_v, view.tail_v)
    assert len(make.made) == 9
    for kernel in make.made.values():
        text = kernel.generated
        assert lint(text.source, text.name, text.template_arguments) == ""


# Names of kernels begin so; pass 1 comes in two forms.
MERGE, ATTEND, VALUES = "tqchat_merge", "tqchat_attend_", "tqchat_attend_values_"
BASE: dict[str, Any] = {"dim": 64, "n_heads": 12, "n_kv_heads": 2, "n_blocks": 9, "tokens": 2}
PLAIN = Problem(**BASE)
WINDOW = Problem(**BASE, options={"window": 70, "softcap": 4.0})
NARROW = Problem(**BASE, options={"window": 20})
# Later scores exceed earlier ones by far.
LARGE = Problem(**{**BASE, "n_blocks": 40}, options={"scale": 2.0})
THREE = Problem(**BASE, kv_bits=3)
LOGITS = Problem(**BASE, options={"logits": True})
TURNED = Problem(**BASE, n_turned=20)
NARROW_TURNED = Problem(**{**BASE, "n_blocks": 0, "n_tail": 5, "tokens": 5}, n_turned=20)
WIDE = Problem(128, 12, 2, n_blocks=9, tokens=2, n_turned=64)

# Kernel, what to replace by what, and a problem that shows it.
MUTATIONS = {
    "split begins late": (
        ATTEND,
        "at.split / options.n_splits;",
        "at.split / options.n_splits + 1;",
        PLAIN,
    ),
    "split ends late": (ATTEND, "unit < end;", "unit <= end;", PLAIN),
    "wrong head": (ATTEND, "q += at.head * n_rows * D;", "", PLAIN),
    "wrong capacity": (
        ATTEND,
        "ulong(at.head) * capacity",
        "ulong(at.head) * held.n_blocks",
        PLAIN,
    ),
    "word given to another": (ATTEND, "(b & TOP_BITS) >> 2", "(b & TOP_BITS) >> 3", THREE),
    "top bits kept": (ATTEND, "c & ~TOP_BITS", "c", THREE),
    "wrong nibble": (ATTEND, "(8 * i + 4)", "(8 * i)", PLAIN),
    "wrong zero": (ATTEND, "- HALF * float(pair.x)", "- 7.0f * float(pair.x)", PLAIN),
    "neighbour's scale": (ATTEND, "x.y * q.scale", "x.y * p.scale", PLAIN),
    "zero of a lane": (ATTEND, "row_sum(zero[a])", "4.0f * zero[a]", PLAIN),
    "wrong V parameters": (ATTEND, "8 * j + row]", "8 * j + (row ^ 1)]", PLAIN),
    "output not rescaled": (ATTEND, "output[a][f] *= factor;", ";", LARGE),
    "sum not rescaled": (ATTEND, "sum[a] *= factor;", "", LARGE),
    "maximum of a lane": (ATTEND, "row_max(highest[a])", "highest[a]", LARGE),
    "sum of a lane": (ATTEND, "row_sum(rows.sum[a])", "4.0f * rows.sum[a]", PLAIN),
    "sums not weighed": (
        ATTEND,
        "other.y * metal::fast::exp2(other.x - maximum[a])",
        "other.y",
        PLAIN,
    ),
    "outputs not weighed": (
        ATTEND,
        "rows.output[a][f] * factor[a]",
        "rows.output[a][f]",
        PLAIN,
    ),
    "tail off by the sink": (ATTEND, "(token - n_sink) * D", "token * D", PLAIN),
    "reads past the tail": (ATTEND, "token >= count", "token >= count + 32", PLAIN),
    "causal off by one": (
        ATTEND,
        "length - n_tokens + token;",
        "length - n_tokens + token - 1;",
        NARROW,
    ),
    "token of a row": (ATTEND, "+ int(row)) % n_tokens", "+ int(row)) / 8 % n_tokens", NARROW),
    "sink not counted": (
        ATTEND,
        "position = held.n_sink + BLOCK * block",
        "position = BLOCK * block",
        WINDOW,
    ),
    "window off by one": (ATTEND, "last - options.window + 1 :", "last - options.window :", NARROW),
    "block too late": (
        ATTEND,
        "(seen - held.n_sink) / BLOCK",
        "(seen - held.n_sink) / BLOCK + 1",
        WINDOW,
    ),
    "blocks not masked": (ATTEND, "position < unseen ||", "", WINDOW),
    "no tanh": (ATTEND, "metal::precise::tanh(score)", "score", WINDOW),
    "splits not weighed": (MERGE, "exp2(maximum - highest)", "exp2(0.0f * maximum)", PLAIN),
    "split's weight": (MERGE, "simd_shuffle(weight, s)", "simd_shuffle(weight, s ^ 1)", PLAIN),
    "K not weighed": (VALUES, "two_of(weight + D / 2)", "float2(1.0f)", TURNED),
    "partner's weight": (VALUES, "two_of(weight + D / 2)", "two_of(weight)", TURNED),
    "turned the other way": (VALUES, "a.x * by.x - a.y * by.y", "a.x * by.x + a.y * by.y", TURNED),
    "turned by a turn's half": (VALUES, "* turn >> 32", "* turn >> 33", TURNED),
    "low bits of a turn": (
        VALUES,
        "ulong(position) * turn",
        "ulong(position) * uint(turn)",
        TURNED,
    ),
    "turned by the lane": (VALUES, "turned(both, by_row[m][i])", "both", TURNED),
    "not turned on": (VALUES, "by = turned(by, keys.by_8[m][i])", "", TURNED),
    "turned by another's start": (VALUES, "16 * j + lane % 16", "16 * j + lane % 8", TURNED),
    "another simdgroup's turns": (VALUES, "keys.turns[16 * j +", "keys.turns[16 * m +", WIDE),
    "sink off by one": (VALUES, "first < 0 ? 0 :", "first < 0 ? 1 :", NARROW_TURNED),
    "tail off by a block": (VALUES, "held.n_sink + sealed + first", "sealed + first", TURNED),
    "a share left out": (VALUES, "p < PARTS", "p < 1", TURNED),
    "token by row": (
        VALUES,
        "(p * ROWS + a) * 32 + token) * 8 + row",
        "(p * ROWS + a) * 32 + row) * 8 + token",
        TURNED,
    ),
    "last token seen by all": (VALUES, "position + token + e <= last[a]", "true", NARROW_TURNED),
    "reads past what is held": (VALUES, "8 * n < count", "8 * n < count + 32", TURNED),
    "query of another row": (VALUES, "q[(r + 1) * D + channel]", "q[r * D + channel]", TURNED),
    "another channel's parameters": (VALUES, "+ 2 * pair + i % 2]", "+ 2 * pair]", TURNED),
    "another half's parameters": (VALUES, "D / 2 * (i / 4 % 2)", "0", TURNED),
    "values of another capacity": (
        VALUES,
        "tiles += ulong(at.head) * capacity",
        "tiles += ulong(at.head) * held.n_blocks",
        TURNED,
    ),
    "logit in the wrong base": (MERGE, "* M_LOG2E_F", "", LOGITS),
    "logit of another head": (MERGE, "head_row / n_tokens)", "head_row / n_rows)", LOGITS),
}


def mutated(kernel: str, edit: Any, checked: bool, kv_bits: int = 4) -> Metal:
    """The backend with one kernel's text changed."""

    def make(name: str, *parts: Any) -> EmulatedKernel:
        return EmulatedKernel(
            name,
            *parts,
            checked=checked,
            edit=edit if name.startswith(kernel) else lambda text: text,
        )

    return metal_backend(make, kv_bits=kv_bits)


@emulated
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_of_the_arithmetic_are_caught(mutation: str) -> None:
    kernel, before, after, problem = MUTATIONS[mutation]

    def edit(text: str) -> str:
        assert text.count(before) == 1
        return text.replace(before, after)

    kernels = mutated(kernel, edit, checked=False, kv_bits=problem.kv_bits)
    assert not problem.error(kernels) < TOLERANCE[mx.float16]


BARRIER = re.compile(r"(?:simdgroup|threadgroup)_barrier\([^;]*\);")


@emulated
@pytest.mark.parametrize("which", range(6))
def test_a_missing_barrier_is_caught(which: int) -> None:
    def edit(text: str) -> str:
        found = list(BARRIER.finditer(text))
        assert len(found) == 6
        return text[: found[which].start()] + text[found[which].end() :]

    with pytest.raises(KernelError, match=r"DATA RACE|UNINITIALISED"):
        LARGE.error(mutated(ATTEND, edit, checked=True))


@emulated
@pytest.mark.parametrize("which", range(4))
def test_a_missing_barrier_among_values_is_caught(which: int) -> None:
    def edit(text: str) -> str:
        start = text.index("struct SealedChannels")
        found = list(BARRIER.finditer(text, start))
        assert len(found) == 4
        return text[: found[which].start()] + text[found[which].end() :]

    with pytest.raises(KernelError, match=r"DATA RACE|UNINITIALISED"):
        WIDE.error(mutated(VALUES, edit, checked=True))


@emulated
def test_a_missing_barrier_of_sealing_is_caught() -> None:
    kernels = mutated("tqchat_seal_values", lambda text: BARRIER.sub("", text), checked=True)
    with pytest.raises(KernelError, match=r"DATA RACE|UNINITIALISED"):
        kernels.seal_values(mx.zeros((1, BLOCK, 64), mx.float16))
