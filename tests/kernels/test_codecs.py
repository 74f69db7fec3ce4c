"""The codecs that the cache's own is compared with: what they lose and take, by their papers."""

import math
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import QuantizedKVCache
from numpy.typing import NDArray

from tests.emulator import EmulatedKernel, KernelError, lint, why_not
from tqchat.kernels import codec
from tqchat.kernels.codecs import CODECS, metal
from tqchat.kernels.codecs.base import group, pack, unpack
from tqchat.kernels.codecs.lloyd_max import codebook, polar, sphere
from tqchat.kernels.codecs.polarquant import PolarQuant
from tqchat.kernels.codecs.projection import gaussian, rotation
from tqchat.kernels.codecs.qjl import QJL, bit_planes, estimate, sketch, unbiased
from tqchat.kernels.codecs.turboquant import TurboQuant, TurboQuantProduct

Floats = NDArray[np.float64]


def random(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float16))


def float64(x: mx.array) -> Floats:
    return np.array(x.astype(mx.float32)).astype(np.float64)


# All of them


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CODECS)
def test_attention_on_codes_is_attention_on_what_they_stand_for(name: str, head_dim: int) -> None:
    chosen, scale = CODECS[name], head_dim**-0.5
    k, v = random(2, 64, head_dim, seed=1), random(2, 64, head_dim, seed=2)
    q = random(6, 3, head_dim, seed=3)
    state = chosen.encode(k, v)
    k64, v64 = (np.repeat(float64(x), 3, axis=0) for x in chosen.decode(state))
    scores = float64(q) @ k64.swapaxes(1, 2)
    weights = np.exp(scores * scale)
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v64
    # QJL rounds the query's sketch to 8 bits.
    tolerance = 2e-2 if "qjl" in name else 1e-5
    assert (
        np.abs(float64(chosen.scores(q, state)) - scores).max() < tolerance * np.abs(scores).max()
    )
    assert np.abs(float64(chosen.attend(q, state, scale)) - expected).max() < tolerance


@pytest.mark.parametrize("name", CODECS)
def test_zeros_and_the_largest_numbers_come_back_finite(name: str) -> None:
    chosen = CODECS[name]
    for value in (0.0, 65504.0, -65504.0):
        x = mx.full((1, 32, 64), value, mx.float16)
        for back in chosen.decode(chosen.encode(x, x)):
            assert mx.isfinite(back).all()
            assert value or not mx.any(back)


def test_bits_per_element_at_head_dim_128() -> None:
    expected = {
        "product": 5, "product-3bit": 4, "product-8bit": 9,
        "open-tq-metal": 5, "mlx-lm": 4.5,
        # 15 / 16 of an angle and a sixteenth of a 16-bit radius per element.
        "polarquant-2": 2, "polarquant-3": 47 / 16, "polarquant-4": 62 / 16,
        "polarquant-5": 77 / 16,
        # Keys of 3 bits and values of 5, each key and vector with a 16-bit length.
        "qjl": 4 + 1 / 16, "qjl+int4": 4 + 1 / 16,
        "turboquant-1": 1.125, "turboquant-2": 2.125, "turboquant-3": 3.125, "turboquant-4": 4.125,
        "turboquant-product-2": 2.1875, "turboquant-product-3": 3.1875,
        "turboquant-product-4": 4.1875,
    }  # fmt: skip
    assert {name: chosen.bits_per_element(128) for name, chosen in CODECS.items()} == expected
    hybrid = CODECS["qjl+int4"]
    assert [hybrid.at_layer(i).name for i in (0, 9, 10)] == ["qjl+int4"] * 2 + ["open-tq-metal"]
    # Llama 3.1 70B: 10 layers of 80.
    assert hybrid.bits_per_element(128, 80) == (10 * (4 + 1 / 16) + 70 * 5) / 80


@settings(max_examples=40, deadline=None)
@given(bits=st.integers(0, 8), width=st.integers(1, 40), seed=st.integers(0, 99))
def test_packing_keeps_every_code_in_bits_bits(bits: int, width: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (2, 64, width))
    words = pack(mx.array(codes), bits)
    assert 8 * words.nbytes == codes.size * bits
    assert (np.array(unpack(words)) == codes).all()


# Affine codecs


def test_product_is_the_caches_codec() -> None:
    k, v = random(2, 96, 64, seed=1), random(2, 96, 64, seed=2)
    product = CODECS["product"]
    expected = codec.unseal(codec.seal(k, v))
    for x, y in zip(product.decode(product.encode(k, v)), expected, strict=True):
        assert mx.array_equal(x, y)


@pytest.mark.parametrize(("name", "bits"), [("product-3bit", 3), ("product-8bit", 8)])
def test_product_in_other_bits_is_within_half_a_step(name: str, bits: int) -> None:
    k, v = random(2, 64, 64, seed=1), random(2, 64, 64, seed=2)
    back = CODECS[name].decode(CODECS[name].encode(k, v))
    for x, y, shape, axis in ((k, back[0], (2, 2, 32, 64), 2), (v, back[1], (2, 64, 2, 32), 3)):
        exact, error = float64(x).reshape(shape), float64(y - x).reshape(shape)
        step = np.ptp(exact, axis=axis, keepdims=True) / (2**bits - 1)
        # The mid is within 2, a step within 1/8: half a unit of fp16 in each.
        rounding = 2.0**-10 + 2 ** (bits - 1) * 2.0**-12
        assert (np.abs(error) <= step / 2 + rounding).all()
        assert np.abs(error).max() > 0.45 * step.min()


def test_mlx_lm_is_mlx_lms_cache() -> None:
    k, v = random(2, 64, 128, seed=1), random(2, 64, 128, seed=2)
    state = CODECS["mlx-lm"].encode(k, v)
    held = QuantizedKVCache(group_size=64, bits=4).update_and_fetch(k[None], v[None])
    for ours, theirs in zip(state, held, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert mx.array_equal(x, y[0])


def test_open_tq_metal_is_within_half_a_step() -> None:
    x = random(2, 64, 64, seed=1)
    chosen = CODECS["open-tq-metal"].keys
    exact = float64(x).reshape(2, 64, 2, 32)
    error = (float64(chosen.decode(chosen.encode(x))) - float64(x)).reshape(exact.shape)
    step = np.ptp(exact, axis=3, keepdims=True) / 15
    # Scale times codes up to 15, and a zero point of fp16 between 4 and 16.
    assert (np.abs(error) <= step * (0.5 + 15 * 2.0**-11 + 2.0**-8)).all()


# Lloyd-Max


# J. Max, "Quantizing for minimum distortion", 1960, table I: positive values and the error.
MAX_1960 = {
    1: ([0.7980], 0.3634),
    2: ([0.4528, 1.510], 0.1175),
    3: ([0.2451, 0.7560, 1.344, 2.152], 0.03454),
    4: ([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 0.009497),
}


@pytest.mark.parametrize("bits", MAX_1960)
def test_codebooks_of_the_normal_distribution_are_the_known_ones(bits: int) -> None:
    values, error = MAX_1960[bits]
    normal = codebook(lambda x: np.exp(-x * x / 2), -9, 9, 2**bits)
    assert np.abs(normal[2 ** (bits - 1) :] - values).max() < 6e-4
    assert np.abs(normal + normal[::-1]).max() < 1e-5
    x = np.linspace(-9, 9, 400_001)
    weight = np.exp(-x * x / 2)
    squares = (x - normal[np.abs(x[:, None] - normal).argmin(axis=1)]) ** 2
    assert (weight * squares).sum() / weight.sum() == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("bits", MAX_1960)
def test_codebooks_of_the_sphere_come_to_the_normal_ones(bits: int) -> None:
    normal = codebook(lambda x: np.exp(-x * x / 2), -9, 9, 2**bits)
    distances = [np.abs(sphere(d, bits) * math.sqrt(d) - normal).max() for d in (64, 512, 2**14)]
    assert distances[0] > 4 * distances[1] > 16 * distances[2]
    assert distances[2] < 1e-3


@pytest.mark.parametrize("level", [2, 3, 4])
def test_codebooks_of_angles_fit_sampled_ones(level: int) -> None:
    """Lloyd's condition on angles of normal numbers: a value is the mean of what it stands for."""
    numbers = np.random.default_rng(level).standard_normal((2, 200_000, 2 ** (level - 1)))
    psi = np.arctan2(*np.linalg.norm(numbers, axis=-1))
    values = polar(level, 2)
    nearest = np.abs(psi[:, None] - values).argmin(axis=1)
    for i, value in enumerate(values):
        assert psi[nearest == i].mean() == pytest.approx(value, abs=3e-3)


# PolarQuant


def cosine(x: Floats, y: Floats) -> float:
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return float(((x * y).sum(axis=-1) / lengths).mean())


def equal_bins(x: Floats, bits: int) -> Floats:
    """Every level's angle, down to one radius, in equal bins of the full circle."""
    if x.shape[-1] == 1:
        return np.abs(x)
    even, odd = x[..., 0::2], x[..., 1::2]
    width = 2 * math.pi / 2**bits
    angle = (np.floor(np.arctan2(odd, even) / width) + 0.5) * width
    radii = np.hypot(even, odd)
    if radii.shape[-1] > 1:
        radii = equal_bins(radii, bits)
    return np.stack([radii * np.cos(angle), radii * np.sin(angle)], axis=-1).reshape(x.shape)


def test_polarquant_round_trip_by_bits() -> None:
    """At 5 bits, Open-TQ-Metal reports a cosine of 0.989: that is what equal bins give."""
    x = float64(random(1, 2048, 128, seed=1))
    assert cosine(x, equal_bins(x, 5)) == pytest.approx(0.989, abs=1e-3)
    found = {}
    for bits in (2, 3, 4, 5):
        chosen = PolarQuant(bits)
        found[bits] = cosine(x, float64(chosen.decode(chosen.encode(mx.array(x, mx.float32)))))
    assert found == pytest.approx({2: 0.810, 3: 0.942, 4: 0.984, 5: 0.9957}, abs=2e-3)


# QJL


@pytest.mark.parametrize("angle", [0.1, 1.0, math.pi / 2, 2.5])
def test_qjl_is_unbiased_and_keeps_its_variance_bound(angle: float) -> None:
    """10,000 sketches of one key; lemma 3.2 and what its proof says of the variance."""
    draws, dim, m = 10_000, 16, 32
    k, q = np.zeros(dim, np.float32), np.zeros(dim, np.float32)
    k[0], q[:2] = 1, (2 * math.cos(angle), 2 * math.sin(angle))
    matrices = np.random.default_rng(7).standard_normal((draws, dim, m)).astype(np.float32)
    s = mx.array(matrices)
    stored = sketch(mx.broadcast_to(mx.array(k), (draws, 1, dim)), s)
    found = float64(estimate(stored, s)[:, 0]) @ q
    exact, size = float(q @ k), float(np.linalg.norm(q) * np.linalg.norm(k))
    assert abs(found.mean() - exact) < 3 * found.std() / math.sqrt(draws)
    variance = (math.pi / 2 * size**2 - exact**2) / m
    # The variance of a sample's variance is 2 / n for a normal one.
    assert found.var() == pytest.approx(variance, rel=4 * math.sqrt(2 / draws))
    assert found.var() < math.pi / (2 * m) * size**2 * (1 + 4 * math.sqrt(2 / draws))


def test_rounding_the_querys_sketch_moves_a_score_by_less_than_a_step() -> None:
    chosen = QJL(3)
    k, q = random(1, 64, 64, seed=1), random(2, 3, 64, seed=2)
    state = chosen.encode(k)
    _, step = bit_planes(group(q, 1) @ gaussian(64, 192), 8)
    bound = float64(step)[0].reshape(2, 3, 1) * 192 * unbiased(192) * float64(state[1])
    exact = float64(q) @ float64(chosen.decode(state)).swapaxes(1, 2)
    assert (np.abs(float64(chosen.scores(q, state)) - exact) <= bound).all()


def test_one_bit_of_the_query_is_the_hamming_distance() -> None:
    """|q| |k| (1 - 2 h / m) with h bits that differ, but for |q|, of which the sketch tells."""
    k, q = random(1, 64, 64, seed=1), random(2, 3, 64, seed=2)
    chosen, s = QJL(3, query_bits=1), float64(gaussian(64, 192))
    differ = ((float64(q) @ s >= 0)[:, :, None] != (float64(k) @ s >= 0)[:, None]).sum(axis=-1)
    size = np.abs(float64(q) @ s).mean(axis=-1, keepdims=True) * math.sqrt(math.pi / 2)
    expected = size * np.linalg.norm(float64(k), axis=-1)[0] * (1 - 2 * differ / 192)
    assert np.allclose(float64(chosen.scores(q, chosen.encode(k))), expected, rtol=1e-3, atol=1e-3)


# TurboQuant


def test_rotation_is_orthogonal() -> None:
    r = float64(rotation(64))
    assert np.abs(r @ r.T - np.eye(64)).max() < 1e-6


@pytest.mark.parametrize("outlier", [0, 100])
@pytest.mark.parametrize("bits", MAX_1960)
def test_turboquants_error(bits: int, outlier: float) -> None:
    """The paper's 0.36, 0.117, 0.03, 0.009 are Max's errors, the last two with digits cut off."""
    x = random(1, 2048, 128, seed=1) + outlier * mx.tile(mx.eye(128), (16, 1))
    chosen = TurboQuant(bits)
    exact = float64(x)
    squares = ((exact - float64(chosen.decode(chosen.encode(x)))) ** 2).sum(axis=-1)
    error = (squares / (exact**2).sum(axis=-1)).mean()
    assert error == pytest.approx(MAX_1960[bits][1], rel=0.05)
    if bits != 3:
        paper = {1: 0.36, 2: 0.117, 4: 0.009}[bits]
        assert error == pytest.approx(paper, rel=0.05)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_turboquants_products_are_not_shrunk(bits: int) -> None:
    """The codebook alone makes products smaller by its error; the residual's sketch mends that.

    What is left is the residual's error under QJL: at most pi / (2 d) * |residual|^2 |q|^2.
    """
    dim, error = 64, MAX_1960[bits - 1][1]
    # Each key with a query that is close to it.
    k = random(1, 8192, dim, seed=1)
    q = float64(k) + float64(random(1, 8192, dim, seed=2))
    exact = (q * float64(k)).sum(axis=-1)

    def products(chosen: TurboQuant | TurboQuantProduct) -> Floats:
        found: Floats = (q * float64(chosen.decode(chosen.encode(k)))).sum(axis=-1)
        return found

    def slope(found: Floats) -> float:
        return float((found * exact).sum() / (exact**2).sum())

    shrunk, mended = products(TurboQuant(bits - 1)), products(TurboQuantProduct(bits))
    assert slope(shrunk) == pytest.approx(1 - error, abs=0.01)
    # One matrix serves all keys: it is off by about 1 / sqrt(2 d^2) of the residual.
    assert slope(mended) == pytest.approx(1, abs=3 * error / math.sqrt(2 * dim**2) + 1e-3)
    sizes = (q**2).sum(axis=-1) * (float64(k) ** 2).sum(axis=-1)
    found = ((mended - exact) ** 2 / sizes).mean()
    bound = math.pi / (2 * dim) * error
    # As in QJL's variance, the square of what is estimated comes off. One matrix is some 3% off.
    assert found == pytest.approx(bound - ((shrunk - exact) ** 2 / sizes).mean() / dim, rel=0.1)
    assert found < bound


# Metal


ON_GPU = mx.metal.is_available()
needs_kernels = pytest.mark.skipif(not ON_GPU and bool(why_not()), reason=why_not())
emulated = pytest.mark.skipif(ON_GPU or bool(why_not()), reason=why_not() or "there is a GPU")
made: dict[str, EmulatedKernel] = {}


def emulate(name: str, *parts: Any) -> Any:
    if ON_GPU:
        return mx.fast.metal_kernel(name, *parts)
    made[name] = EmulatedKernel(name, *parts, checked=True, orders=(0, 1))
    return made[name]


def check_text(name: str) -> None:
    """Address spaces, which the emulator does not know, are right in the text of the last run."""
    if not ON_GPU:
        text = made[name].generated
        assert lint(text.source, text.name, text.template_arguments) == ""


def relative_error(found: mx.array, expected: Floats) -> float:
    error = np.abs(float64(found) - expected.reshape(found.shape)).max()
    return float(error / np.abs(expected).max())


def qjl_error(
    head_dim: int, n_heads: int, n_kv_heads: int, query_bits: int, make: Any = emulate
) -> float:
    chosen = QJL(3, query_bits)
    k, q = random(n_kv_heads, 96, head_dim, seed=1), random(n_heads, 1, head_dim, seed=2)
    state = chosen.encode(k)
    rows = group(q, n_kv_heads) @ gaussian(head_dim, 3 * head_dim)
    planes, step = bit_planes(rows, query_bits)
    found = metal.qjl_scores(planes, step, *state, unbiased(3 * head_dim), make)
    return relative_error(found, float64(chosen.scores(q, state)))


def polarquant_error(
    bits: int, head_dim: int, n_heads: int, n_kv_heads: int, make: Any = emulate
) -> float:
    chosen = PolarQuant(bits)
    k, q = random(n_kv_heads, 160, head_dim, seed=1), random(n_heads, 2, head_dim, seed=2)
    state = chosen.encode(k)
    rotated = group(q, n_kv_heads) @ rotation(head_dim)
    found = metal.polarquant_scores(rotated, *state, chosen.tables(), make)
    expected = float64(rotated) @ float64(chosen.decode_rotated(state)).swapaxes(1, 2)
    return relative_error(found, expected)


def turboquant_error(
    bits: int, head_dim: int, dtype: mx.Dtype = mx.float32, make: Any = emulate
) -> float:
    chosen = TurboQuant(bits)
    words, lengths = chosen.encode(random(2, 64, head_dim, seed=1))
    found = metal.turboquant_decode(words, lengths, chosen.codebook(head_dim), dtype, make)
    values = np.array(chosen.codebook(head_dim))[np.array(unpack(words))]
    expected = mx.array(values * np.array(lengths, np.float32)[..., None]).astype(dtype)
    return relative_error(found, float64(expected))


@needs_kernels
@pytest.mark.parametrize("shape", [(64, 6, 2, 8), (128, 8, 1, 8), (32, 1, 1, 1), (64, 3, 1, 1)])
def test_metal_qjl_scores(shape: tuple[int, int, int, int]) -> None:
    assert qjl_error(*shape) < 1e-5
    check_text("tqchat_qjl_scores")


@needs_kernels
@pytest.mark.parametrize("shape", [(2, 32, 1, 1), (3, 64, 9, 1), (4, 128, 8, 1), (5, 64, 6, 2)])
def test_metal_polarquant_scores(shape: tuple[int, int, int, int]) -> None:
    assert polarquant_error(*shape) < 1e-5
    check_text("tqchat_polarquant_scores")


@needs_kernels
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (2, 512), (3, 96), (4, 128)])
def test_metal_turboquant_decode(shape: tuple[int, int], dtype: mx.Dtype) -> None:
    assert turboquant_error(*shape, dtype) == 0
    check_text("tqchat_turboquant_decode")


@emulated
def test_keys_are_loaded_once_for_all_query_heads() -> None:
    qjl_error(128, 8, 1, 8)
    traffic = made["tqchat_qjl_scores"].report.traffic
    assert traffic["words"].read == 96 * 3 * 128 / 8
    assert traffic["lengths"].read == 96 * 2
    polarquant_error(4, 128, 4, 1)
    traffic = made["tqchat_polarquant_scores"].report.traffic
    # A word holds a bit of 32 tokens, each served by another lane of one simdgroup.
    assert traffic["first"].read == 32 * traffic["first"].distinct_read
    assert traffic["radii"].read <= 8 * traffic["radii"].distinct_read


@emulated
@pytest.mark.parametrize("name", ["qjl", "polarquant-2", "turboquant-3", "turboquant-product-3"])
def test_codecs_attend_with_their_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would do, with the kernels emulated: as plain MLX operations do."""
    chosen = CODECS[name]
    k, v, q = random(2, 64, 64, seed=1), random(2, 64, 64, seed=2), random(6, 2, 64, seed=3)
    state = chosen.encode(k, v)
    expected = float64(chosen.attend(q, state, 1 / 8))
    used = []

    def make(kernel: str, *parts: Any) -> EmulatedKernel:
        used.append(kernel)
        return EmulatedKernel(kernel, *parts)

    monkeypatch.setattr(metal, "is_default", lambda: True)
    for call in ("qjl_scores", "polarquant_scores", "turboquant_decode"):
        monkeypatch.setattr(metal, call, partial(getattr(metal, call), make_kernel=make))
    assert relative_error(chosen.attend(q, state, 1 / 8), expected) < 1e-5
    assert used


QJL_CASE = partial(qjl_error, 64, 6, 2, 8)
POLARQUANT_CASE = partial(polarquant_error, 4, 64, 9, 1)
TURBOQUANT_CASE = partial(turboquant_error, 3, 64)
MUTATIONS = {
    "XOR for XNOR": ("popcount(~(", "popcount((", QJL_CASE),
    "bit planes of one weight": ("(1 << bit)", "1", QJL_CASE),
    "signs of another key": ("words[key * WORDS + w]", "words[token * WORDS + w]", QJL_CASE),
    "length of another key": ("lengths[key]", "lengths[token]", QJL_CASE),
    "step of another row": ("steps[row]", "steps[row % n_rows]", QJL_CASE),
    "cosine for sine": ("turns[turn].y", "turns[turn].x", POLARQUANT_CASE),
    "bit of another token": ("token % 32;", "token / 32 % 32;", POLARQUANT_CASE),
    "codebook of another level": ("codes += 1 << UPPER_BITS;", "", POLARQUANT_CASE),
    "angles of another level": ("angle += width * GROUPS;", "", POLARQUANT_CASE),
    "angles of another group": ("(angle + width * g + i)", "(angle + i)", POLARQUANT_CASE),
    "radius of another group": ("radius[g]", "radius[0]", POLARQUANT_CASE),
    "codes of another block": ("(block * D + channel)", "channel", TURBOQUANT_CASE),
    "order of bits": ("<< i;", "<< (BITS - 1 - i);", TURBOQUANT_CASE),
    "length of another token": ("lengths[token]", "lengths[32 * block]", TURBOQUANT_CASE),
}


def mutated(before: str, after: str) -> Any:
    def edit(text: str) -> str:
        assert text.count(before) == 1
        return text.replace(before, after)

    return partial(EmulatedKernel, checked=True, edit=edit)


@emulated
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(mutation: str) -> None:
    before, after, error = MUTATIONS[mutation]
    assert error(make=mutated(before, after)) > 1e-3


@emulated
def test_a_missing_barrier_and_a_row_too_many_are_caught() -> None:
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    with pytest.raises(KernelError, match=r"DATA RACE|UNINITIALISED"):
        POLARQUANT_CASE(make=mutated(barrier, ""))
    with pytest.raises(KernelError, match=r"OUT OF BOUNDS|DATA RACE"):
        POLARQUANT_CASE(make=mutated("if (first_row + r < n_rows)", ""))
