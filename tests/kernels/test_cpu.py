"""The native CPU kernels against float64 arithmetic on what the weights and tiles stand for."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tqchat.kernels import BLOCK, SINK, Backend, KeysOfValues, KVView, Weight, codec, tile_words
from tqchat.kernels.layout import TAIL_CAPACITY

native = pytest.importorskip("tqchat.kernels.cpu._native", reason="the kernels are not built")
from tqchat.kernels.cpu.backend import CPU  # noqa: E402

Array = NDArray[Any]
INSTRUCTION_SETS = native.instruction_sets()


@pytest.fixture(params=INSTRUCTION_SETS)
def cpu(request: pytest.FixtureRequest) -> Iterator[CPU]:
    """The backend with each instruction set that this machine has."""
    native.use(request.param)
    yield CPU(threads=2)
    native.use(INSTRUCTION_SETS[0])


@pytest.fixture(autouse=True, scope="module")
def oracle_on_the_cpu() -> Iterator[None]:
    """A GPU's division need not be rounded correctly, and sealing is compared bit for bit."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


def noise(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def unaligned(x: Array) -> Array:
    """A copy that starts one byte past any alignment."""
    buffer = np.zeros(x.nbytes + 1, np.uint8)
    copy = buffer[1:].view(np.uint8)[: x.nbytes]
    copy[:] = np.frombuffer(x.tobytes(), np.uint8)
    return np.ndarray(x.shape, x.dtype, buffer=copy.data)


def close(y: Array, expected: Array, tolerance: float) -> None:
    """Relative to the largest element: single ones may cancel to nothing."""
    y = np.asarray(y)
    assert y.shape == expected.shape
    assert np.isfinite(y).all()
    assert np.abs(y - expected).max(initial=0) <= tolerance * np.abs(expected).max(initial=1e-30)


# Products


def quantised(
    rows: int, columns: int, bits: int, group_size: int, dtype: mx.Dtype = mx.float16
) -> tuple[Weight, Array]:
    """A random weight and what it stands for in float64."""
    w = mx.array(noise(rows, rows, columns)).astype(dtype)
    data, scales, biases = mx.quantize(w, group_size=group_size, bits=bits)
    scales, biases = scales.astype(dtype), biases.astype(dtype)
    exact = [np.asarray(part.astype(mx.float32)).astype(np.float64) for part in (scales, biases)]
    stream = np.unpackbits(np.asarray(data).view(np.uint8), bitorder="little").reshape(-1, bits)
    codes = (stream @ (1 << np.arange(bits))).reshape(rows, -1, group_size)
    value = codes * exact[0][..., None] + exact[1][..., None]
    return Weight(data, scales, biases, group_size, bits), value.reshape(rows, columns)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 200),
    groups=st.integers(1, 9),
    tokens=st.one_of(st.just(1), st.integers(2, 40)),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from([mx.float16, mx.bfloat16, mx.float32]),
    biased=st.booleans(),
    instruction_set=st.sampled_from(INSTRUCTION_SETS),
)
def test_quantised_products(
    rows: int,
    groups: int,
    tokens: int,
    bits: int,
    group_size: int,
    dtype: mx.Dtype,
    biased: bool,
    instruction_set: str,
) -> None:
    weight, exact = quantised(rows, groups * group_size, bits, group_size, dtype)
    x, bias = noise(1, tokens, groups * group_size), noise(2, rows) if biased else None
    cpu = CPU(threads=2)
    native.use(instruction_set)
    y = cpu.linear(x, cpu.load(weight), bias)
    native.use(INSTRUCTION_SETS[0])
    close(y, x.astype(np.float64) @ exact.T + (0 if bias is None else bias), 1e-5)


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_other_widths_are_loaded_as_bytes(cpu: CPU, bits: int) -> None:
    weight, exact = quantised(33, 128, bits, 64)
    x = noise(1, 3, 128)
    close(cpu.linear(x, cpu.load(weight)), x.astype(np.float64) @ exact.T, 1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 33), (50, 576), (64, 1000)])
@pytest.mark.parametrize("tokens", [1, 2, 29])
def test_dense_products(cpu: CPU, dtype: mx.Dtype, rows: int, columns: int, tokens: int) -> None:
    w = mx.array(noise(3, rows, columns)).astype(dtype)
    exact = np.asarray(w.astype(mx.float32)).astype(np.float64)
    weight, x = cpu.load(Weight(w)), noise(4, tokens, columns)
    assert weight.nbytes == w.nbytes
    close(cpu.linear(x, weight), x.astype(np.float64) @ exact.T, 1e-5)


def test_a_long_prompt_and_a_wide_matrix(cpu: CPU) -> None:
    weight, exact = quantised(40, 4096, 4, 64)
    x = noise(5, 8192, 4096)
    close(cpu.linear(x, cpu.load(weight)), x @ exact.T.astype(np.float32), 2e-5)
    close(cpu.linear(x[:1], cpu.load(weight)), x[:1].astype(np.float64) @ exact.T, 1e-5)


def test_any_array_may_be_unaligned_or_strided(cpu: CPU) -> None:
    weight, exact = quantised(65, 96, 4, 32)
    w = Weight(*(unaligned(np.asarray(a)) for a in weight.arrays), 32, 4)
    loaded = Weight(*(np.require(a, requirements="A") for a in w.arrays), 32, 4)
    for tokens in (1, 14):
        wide = noise(6, tokens, 200)
        x = wide[:, 50:146]
        expected = x.astype(np.float64) @ exact.T
        close(cpu.linear(x, loaded), expected, 1e-5)
        close(cpu.linear(unaligned(x), loaded), expected, 1e-5)
    with pytest.raises(ValueError, match="aligned"):
        cpu.linear(x, w)


def test_weights_stay_as_they_are_stored(cpu: CPU) -> None:
    weights = [quantised(50, 64 * i, 4, 32, mx.bfloat16)[0] for i in range(1, 4)]
    loaded = [cpu.load(weight) for weight in weights]
    for ours, stored in zip(loaded, weights, strict=True):
        assert np.array_equal(ours.data, np.asarray(stored.data))
        assert np.array_equal(ours.scales, np.asarray(stored.scales.view(mx.uint16)))
        assert ours.nbytes == stored.nbytes
        assert (ours.rows, ours.columns) == (stored.rows, stored.columns)


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_embedding(cpu: CPU, bits: int) -> None:
    if bits:
        weight, exact = quantised(50, 96, bits, 32)
    else:
        weight = Weight(mx.array(noise(7, 50, 96)).astype(mx.bfloat16))
        exact = np.asarray(weight.data.astype(mx.float32)).astype(np.float64)
    loaded = cpu.load(weight)
    close(cpu.embed(loaded, [3, 49, 0, 3]), exact[[3, 49, 0, 3]], 1e-6)
    with pytest.raises(ValueError, match="vocabulary"):
        cpu.embed(loaded, [50])


def test_logits_are_an_mlx_array(cpu: CPU) -> None:
    weight, exact = quantised(100, 64, 8, 32)
    x = noise(8, 2, 64)
    logits = cpu.logits(x, cpu.load(weight))
    assert isinstance(logits, mx.array)
    assert logits.dtype == mx.float32
    close(np.asarray(logits), x.astype(np.float64) @ exact.T, 1e-5)


def test_shapes_that_do_not_fit_are_errors(cpu: CPU) -> None:
    weight = cpu.load(quantised(8, 64, 4, 32)[0])
    with pytest.raises(ValueError, match="width"):
        cpu.linear(noise(0, 1, 32), weight)
    with pytest.raises(ValueError, match="bias"):
        cpu.linear(noise(0, 1, 64), weight, noise(0, 9))
    with pytest.raises(ValueError, match="groups"):
        cpu.linear(noise(0, 1, 64), Weight(weight.data, weight.scales, weight.biases, 48, 4))
    with pytest.raises(ValueError, match="per group"):
        cpu.linear(noise(0, 1, 64), Weight(weight.data, weight.scales[:4], weight.biases, 32, 4))
    with pytest.raises(ValueError, match="head_dim"):
        cpu.attend_dense(noise(0, 1, 1, 48), noise(0, 1, 1, 48), noise(0, 1, 1, 48), 1.0)
    with pytest.raises(ValueError, match="evenly"):
        cpu.attend_dense(noise(0, 3, 1, 32), noise(0, 2, 1, 32), noise(0, 2, 1, 32), 1.0)


# Elementwise


@pytest.mark.parametrize("shape", [(1, 576), (3, 5, 64), (700, 50)])
def test_rms_norm(cpu: CPU, shape: tuple[int, ...]) -> None:
    x, weight = noise(9, *shape), noise(10, shape[-1])
    exact = x.astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * weight
    close(cpu.rms_norm(x, weight, 1e-5), expected, 1e-6)


@pytest.mark.parametrize(("tokens", "size"), [(1, 3), (3, 37), (400, 96)])
def test_swiglu(cpu: CPU, tokens: int, size: int) -> None:
    x = 10 * noise(11, tokens, 2 * size)
    x[0, 0] = -1000
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    with np.errstate(over="ignore"):
        close(cpu.swiglu(x), gate / (1 + np.exp(-gate)) * up, 1e-6)


@pytest.mark.parametrize(("offset", "tokens", "pairs"), [(0, 1, 32), (131071, 3, 20), (5, 600, 16)])
def test_rope(cpu: CPU, offset: int, tokens: int, pairs: int) -> None:
    x = noise(12, tokens, 4, 64).swapaxes(0, 1)
    periods = cpu.load_table(mx.array(10000.0 ** (np.arange(pairs) / pairs)))
    angles = np.arange(offset, offset + tokens)[:, None] / periods.astype(np.float64)
    a, b = x[..., :pairs].astype(np.float64), x[..., pairs : 2 * pairs].astype(np.float64)
    expected = x.astype(np.float64)
    expected[..., :pairs] = a * np.cos(angles) - b * np.sin(angles)
    expected[..., pairs : 2 * pairs] = b * np.cos(angles) + a * np.sin(angles)
    close(cpu.rope(x, periods, offset), expected, 1e-6)
    if offset < 1000:
        plain = Backend().rope(mx.array(np.ascontiguousarray(x)), mx.array(periods), offset)
        close(np.asarray(plain), expected, 1e-4)


# The codec


def extremes(seed: int, heads: int, tokens: int, dim: int) -> Array:
    """Noise of every magnitude, with runs of equal values and what fp16 does not hold."""
    x = noise(seed, heads, tokens, dim) * 10.0 ** np.random.default_rng(seed).integers(-9, 5, dim)
    x[:, ::7] = x[:, :1]
    x[0, 3, :32] = 0.25
    x[0, 1, 0], x[0, 2, 1], x[-1, 4, 2], x[-1, 5, 3] = np.nan, np.inf, -np.inf, 1e30
    return x.astype(np.float32)


@pytest.mark.parametrize("dim", [32, 64, 128, 512])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kv_bits", [3, 4])
def test_sealing_is_the_oracles_bit_for_bit(cpu: CPU, kv_bits: int, dim: int, dtype: Any) -> None:
    cpu.kv_bits = kv_bits
    with np.errstate(over="ignore"):
        k, v = (extremes(i, 3, 2 * BLOCK, dim).astype(dtype) for i in (13, 14))
    tiles = cpu.seal(k, v)
    expected = codec.seal(mx.array(k), mx.array(v), kv_bits)
    assert np.array_equal(np.asarray(cpu.to_canonical(tiles)), np.asarray(expected))
    assert np.array_equal(cpu.from_canonical(expected), tiles)
    for mine, oracles in zip(cpu.unseal(tiles), codec.unseal(expected, kv_bits), strict=True):
        close(mine, np.asarray(oracles), 1e-6)


@pytest.mark.parametrize("dim", [32, 64, 512])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kv_bits", [3, 4])
def test_sealing_v_alone_is_the_oracles_bit_for_bit(
    cpu: CPU, kv_bits: int, dim: int, dtype: Any
) -> None:
    cpu.kv_bits = kv_bits
    with np.errstate(over="ignore"):
        v = extremes(14, 3, 2 * BLOCK, dim).astype(dtype)
    tiles = cpu.seal_values(v)
    expected = codec.seal_channels(mx.array(v), kv_bits)
    assert np.array_equal(np.asarray(cpu.to_canonical(tiles, k_is_v=True)), np.asarray(expected))
    assert np.array_equal(cpu.from_canonical(expected, k_is_v=True), tiles)
    oracles = np.asarray(codec.unseal_channels(expected, kv_bits))
    close(cpu.unseal_values(tiles), oracles, 1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_writing_rows_converts_in_place(cpu: CPU, dtype: Any) -> None:
    with np.errstate(over="ignore"):
        x = extremes(46, 3, 70, 64)[:, :64]
        buffer = np.zeros((3, 100, 64), dtype)
        expected = buffer.copy()
        expected[:, 7:71] = x
    cpu.write_tokens(buffer, 7, x)
    assert np.array_equal(buffer, expected, equal_nan=True)
    expected[:, :60] = expected[:, 20:80]
    cpu.write_tokens(buffer, 0, buffer[:, 20:80])
    assert np.array_equal(buffer, expected, equal_nan=True)
    with pytest.raises(ValueError, match=r"fit|broadcast"):
        cpu.write_tokens(buffer, 90, x)


def test_sealing_reads_strided_views(cpu: CPU) -> None:
    k, v = noise(15, BLOCK, 3, 64).swapaxes(0, 1), noise(16, 3, 100, 64)[:, 10 : 10 + BLOCK]
    expected = codec.seal(mx.array(np.ascontiguousarray(k)), mx.array(np.ascontiguousarray(v)))
    assert np.array_equal(np.asarray(cpu.to_canonical(cpu.seal(k, v))), np.asarray(expected))


# Attention


def reference(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    window: int | None = None,
) -> Array:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    n_heads, tokens, _ = q.shape
    repeat, length = n_heads // k.shape[0], k.shape[1]
    scores = q @ np.repeat(k, repeat, axis=0).swapaxes(1, 2) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    query, key = np.arange(length - tokens, length)[:, None], np.arange(length)
    allowed = (key <= query) & (key > query - (window or length))
    scores = np.where(allowed, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (n_heads, tokens, 1))
        scores = np.concatenate([scores, column], axis=-1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.asarray(weights[..., :length] @ np.repeat(v, repeat, axis=0))


def a_view(
    cpu: CPU, heads: int, dim: int, n_sink: int, n_blocks: int, n_tail: int
) -> tuple[KVView, Array, Array]:
    """A cache, and K and V as it stands for them. What it does not hold is NaN."""
    k, v = noise(17, heads, n_blocks * BLOCK, dim), noise(18, heads, n_blocks * BLOCK, dim)
    size = tile_words(dim, cpu.kv_bits)
    tiles = np.full((heads, n_blocks + 2, size), 0xFFFFFFFF, np.uint32)
    tiles[:, :n_blocks] = cpu.seal(k + 2 * noise(19, heads, 1, dim), v)
    canonical = cpu.to_canonical(tiles[:, :n_blocks])
    sealed = [np.asarray(x) for x in codec.unseal(canonical, cpu.kv_bits)]
    ends = [np.full((heads, n, dim), np.nan, np.float16) for n in [SINK, TAIL_CAPACITY] * 2]
    for i, end in enumerate(ends):
        held = [n_sink, n_tail][i % 2]
        end[:, :held] = noise(20 + i, heads, held, dim)
    sink_k, tail_k, sink_v, tail_v = ends
    view = KVView(sink_k, sink_v, tiles, tail_k, tail_v, n_sink, n_blocks, n_tail)
    k, v = (
        np.concatenate([sink[:, :n_sink], middle, tail[:, :n_tail]], axis=1)
        for sink, middle, tail in zip((sink_k, sink_v), sealed, (tail_k, tail_v), strict=True)
    )
    return view, k, v


def keys_of(v: Array, keys: KeysOfValues) -> Array:
    """K of V from position 0 on, in float64."""
    x, n = v * np.float64(keys.weight), len(keys.periods)
    angles = np.arange(v.shape[1])[:, None] / np.float64(keys.periods)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :n], x[..., n : 2 * n]
    turned = [a * cos - b * sin, b * cos + a * sin]
    return np.concatenate([*turned, x[..., 2 * n :]], axis=-1)


def a_view_of_v(
    cpu: CPU, heads: int, dim: int, n_pairs: int, n_turning: int, held: tuple[int, int, int]
) -> tuple[KVView, Array, Array]:
    """As `a_view`, of V alone. Of the pairs of channels n_turning turn, the last one slowly."""
    n_sink, n_blocks, n_tail = held
    periods = np.full(n_pairs, np.inf, np.float32)
    periods[:n_turning] = np.geomspace(1, 1e4, n_turning)
    keys = KeysOfValues(1 + 0.3 * noise(27, dim), periods)
    tiles = np.full(
        (heads, n_blocks + 2, tile_words(dim, cpu.kv_bits, True)), 0xFFFFFFFF, np.uint32
    )
    v = noise(28, heads, n_blocks * BLOCK, dim)
    tiles[:, :n_blocks] = cpu.seal_values(v + 2 * noise(29, heads, 1, dim))
    canonical = cpu.to_canonical(tiles[:, :n_blocks], k_is_v=True)
    sealed = np.asarray(codec.unseal_channels(canonical, cpu.kv_bits))
    ends = [np.full((heads, n, dim), np.nan, np.float16) for n in (SINK, TAIL_CAPACITY)]
    for i, (end, n) in enumerate(zip(ends, (n_sink, n_tail), strict=True)):
        end[:, :n] = noise(25 + i, heads, n, dim)
    sink, tail = ends
    view = KVView(sink[..., :0], sink, tiles, tail[..., :0], tail, *held, keys=keys)
    v = np.concatenate([sink[:, :n_sink], sealed, tail[:, :n_tail]], axis=1)
    return view, keys_of(v, keys), v


VARIANTS: list[dict[str, Any]] = [
    {},
    {"softcap": 20.0},
    {"window": 1},
    {"window": 70},
    {"sinks": True},
    {"softcap": 5.0, "window": 100, "sinks": True},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("held", [(1, 0, 0), (4, 0, 30), (4, 1, 64), (4, 0, 127), (4, 13, 77)])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_decode_on_the_sealed_cache(
    cpu: CPU, tokens: int, held: tuple[int, int, int], variant: dict[str, Any]
) -> None:
    view, k, v = a_view(cpu, 2, 64, *held)
    tokens = min(tokens, view.length)
    q = 2 * noise(30, tokens, 6, 64).swapaxes(0, 1)
    options = {**variant, "sinks": noise(31, 6)} if "sinks" in variant else variant
    close(cpu.attend(q, view, 0.125, **options), reference(q, k, v, 0.125, **options), 1e-4)


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(32, 1, 1), (96, 5, 1), (512, 8, 4)])
@pytest.mark.parametrize("kv_bits", [3, 4])
def test_decode_with_other_heads(
    cpu: CPU, kv_bits: int, dim: int, heads: int, kv_heads: int
) -> None:
    cpu.kv_bits = kv_bits
    view, k, v = a_view(cpu, kv_heads, dim, 4, 5, 70)
    q = noise(32, heads, 2, dim)
    close(cpu.attend(q, view, dim**-0.5), reference(q, k, v, dim**-0.5), 1e-4)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("held", [(0, 0, 0), (4, 0, 100), (4, 13, 77)])
@pytest.mark.parametrize("tokens", [1, 9, 64, 201])
def test_a_chunk_of_prefill(
    cpu: CPU, tokens: int, held: tuple[int, int, int], variant: dict[str, Any]
) -> None:
    view, past_k, past_v = a_view(cpu, 2, 64, *held)
    q = 2 * noise(33, tokens, 6, 64).swapaxes(0, 1)
    k, v = noise(34, tokens, 2, 64).swapaxes(0, 1), noise(35, 2, tokens, 64)
    options = {**variant, "sinks": noise(36, 6)} if "sinks" in variant else variant
    all_k, all_v = np.concatenate([past_k, k], axis=1), np.concatenate([past_v, v], axis=1)
    expected = reference(q, all_k, all_v, 0.125, **options)
    close(cpu.attend_chunk(q, k, v, view, 0.125, **options), expected, 1e-4)


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(32, 1, 1), (96, 5, 1), (512, 8, 4)])
@pytest.mark.parametrize("kv_bits", [3, 4])
def test_a_chunk_with_other_heads(
    cpu: CPU, kv_bits: int, dim: int, heads: int, kv_heads: int
) -> None:
    cpu.kv_bits = kv_bits
    view, past_k, past_v = a_view(cpu, kv_heads, dim, 4, 9, 70)
    q, k, v = noise(37, heads, 40, dim), noise(38, kv_heads, 40, dim), noise(39, kv_heads, 40, dim)
    all_k, all_v = np.concatenate([past_k, k], axis=1), np.concatenate([past_v, v], axis=1)
    expected = reference(q, all_k, all_v, dim**-0.5)
    close(cpu.attend_chunk(q, k, v, view, dim**-0.5), expected, 1e-4)


@pytest.mark.parametrize("held", [(1, 0, 0), (4, 0, 30), (4, 1, 64), (4, 13, 77)])
@pytest.mark.parametrize("tokens", [1, 8, 50])
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "n_pairs", "n_turning"),
    [(32, 1, 1, 16, 16), (96, 5, 1, 48, 12), (64, 4, 4, 9, 9), (512, 16, 2, 256, 64)],
)
@pytest.mark.parametrize("kv_bits", [3, 4])
def test_keys_made_of_values(
    cpu: CPU,
    kv_bits: int,
    dim: int,
    heads: int,
    kv_heads: int,
    n_pairs: int,
    n_turning: int,
    tokens: int,
    held: tuple[int, int, int],
) -> None:
    cpu.kv_bits = kv_bits
    view, k, v = a_view_of_v(cpu, kv_heads, dim, n_pairs, n_turning, held)
    options: dict[str, Any] = {"softcap": 20.0, "sinks": noise(31, heads)}
    if tokens <= 8:
        q = noise(32, heads, min(tokens, view.length), dim)
        out = cpu.attend(q, view, 2 * dim**-0.5, **options)
    else:
        q, *new = noise(37, heads, tokens, dim), *noise(38, 2, kv_heads, tokens, dim)
        out = cpu.attend_chunk(q, *new, view, 2 * dim**-0.5, **options)
        k, v = (np.concatenate(pair, axis=1) for pair in zip((k, v), new, strict=True))
    close(out, reference(q, k, v, 2 * dim**-0.5, **options), 1e-4)


def test_a_rule_for_keys_that_does_not_fit_is_an_error(cpu: CPU) -> None:
    view, _, _ = a_view_of_v(cpu, 1, 32, 16, 4, (4, 2, 64))
    rule = cpu._rule(view)
    assert rule is not None
    weight, starts, places, half = rule
    for wrong, why in (
        (None, "do not fit"),
        ((weight[:31], starts, places, half), "rule does not fit"),
        ((weight, starts, places[:31], half), "rule does not fit"),
        ((weight, starts[..., :3], places, half), "rule does not fit"),
        ((weight, starts, places, 17), "rule does not fit"),
        ((weight, starts, places, 3), "rule does not fit"),
        ((weight, starts[:4], places, half), "do not cover"),
    ):
        with pytest.raises(ValueError, match=why):
            native.attend(noise(0, 1, 1, 32), view, None, None, 1.0, None, None, None, wrong)


def test_keys_are_turned_as_exactly_far_away(cpu: CPU) -> None:
    """Two far tokens share nearly all the weight, by the difference of their scores, some 60 each.

    Cosines are right to 2^-24, and of two angles put together to three times that: a score is off
    by 1e-5. An angle of 260,000 in float32 is off by up to 0.016, such a score by 0.1.
    """
    view, k, v = a_view_of_v(cpu, 1, 32, 16, 16, (4, 8150, 77))
    assert view.length > 260_000
    near = k[:, -30_000::17] / (k[:, -30_000::17] ** 2).sum(-1, keepdims=True)
    q = (40 * (near[:, :5] + near[:, 1000:1005])).swapaxes(0, 1).astype(np.float32)
    close(cpu.attend(q, view, 1.0), reference(q, k, v, 1.0), 3e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("tokens", "length"), [(1, 1), (1, 700), (8, 33), (100, 100), (40, 333)])
def test_dense_attention(
    cpu: CPU, tokens: int, length: int, dtype: Any, variant: dict[str, Any]
) -> None:
    q = 2 * noise(40, 6, tokens, 64)
    k, v = (noise(i, 2, length + 9, 64).astype(dtype)[:, :length] for i in (41, 42))
    options = {**variant, "sinks": noise(43, 6)} if "sinks" in variant else variant
    expected = reference(q, k, v, 0.125, **options)
    close(cpu.attend_dense(q, k, v, 0.125, **options), expected, 1e-4)


def test_scores_may_be_enormous(cpu: CPU) -> None:
    view, k, v = a_view(cpu, 1, 64, 4, 3, 70)
    q = 1000 * noise(44, 1, 1, 64)
    close(cpu.attend(q, view, 1.0), reference(q, k, v, 1.0), 1e-3)


def test_heads_are_split_and_merged_without_loss(cpu: CPU) -> None:
    x = noise(45, 5, 6 * 32)
    heads = cpu.split_heads(x, 6)
    assert heads.shape == (6, 5, 32)
    assert np.array_equal(cpu.merge_heads(heads), x)
    assert np.array_equal(heads[2, 3], x[3, 64:96])
