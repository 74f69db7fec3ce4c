"""The CPU's kernels at the shapes of Gemma's and gpt-oss's layers, and what only these use."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels.test_cpu import (  # noqa: F401 (cpu is a fixture)
    Array,
    a_view,
    close,
    cpu,
    noise,
    reference,
)
from tqchat.kernels import Backend, Weight
from tqchat.kernels.cpu.backend import CPU

LAYERS: list[tuple[int, int, int, dict[str, Any]]] = [
    (256, 4, 2, {"window": 100, "scale": 1.0}),
    (512, 8, 1, {"scale": 1.0}),
    (128, 4, 2, {"window": 70, "scale": 168**-0.5}),
    (64, 16, 2, {"window": 128, "sinks": True, "scale": 0.125}),
]


@pytest.mark.parametrize(("dim", "heads", "kv_heads", "options"), LAYERS, ids=str)
@pytest.mark.parametrize("n_sink", [0, 4])
def test_layers(
    cpu: CPU,  # noqa: F811
    n_sink: int,
    dim: int,
    heads: int,
    kv_heads: int,
    options: dict[str, Any],
) -> None:
    """A step and a chunk; without the sink, as a window leaves it behind."""
    scale = options["scale"]
    options = {key: value for key, value in options.items() if key != "scale"}
    if "sinks" in options:
        options["sinks"] = noise(50, heads)
    view, k, v = a_view(cpu, kv_heads, dim, n_sink, 9, 70)
    q = noise(51, heads, 1, dim) / (scale * dim**0.5)
    close(cpu.attend(q, view, scale, **options), reference(q, k, v, scale, **options), 1e-4)
    q = noise(52, heads, 40, dim) / (scale * dim**0.5)
    new_k, new_v = noise(53, kv_heads, 40, dim), noise(54, kv_heads, 40, dim)
    k, v = np.concatenate([k, new_k], axis=1), np.concatenate([v, new_v], axis=1)
    expected = reference(q, k, v, scale, **options)
    close(cpu.attend_chunk(q, new_k, new_v, view, scale, **options), expected, 1e-4)
    gathered = cpu.gather(view, new_k, new_v)
    for ours, theirs in zip(gathered, (k, v), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def gelu(gate: Array) -> Array:
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return np.asarray(0.5 * gate * (1 + np.tanh(inner)))


def clamped(gate: Array) -> Array:
    gate = np.minimum(gate, 7)
    return np.asarray(gate * 0.5 * (1 + np.tanh(0.5 * 1.702 * gate)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1.0, 6.0, 1000.0])
def test_activations(cpu: CPU, size: float) -> None:  # noqa: F811
    gate_up = size * noise(55, 7, 2 * 96)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    expected = {
        "geglu": gelu(gate) * up,
        "clamped_swiglu": clamped(gate) * (np.clip(up, -7, 7) + 1),
    }
    for name, value in expected.items():
        for backend in (cpu, Backend(mx.float32)):
            x = gate_up if backend is cpu else mx.array(gate_up)
            ours = np.array(getattr(backend, name)(x))
            np.testing.assert_allclose(ours, value, rtol=1e-4, atol=1e-5 * size)


@pytest.mark.parametrize("tokens", [1, 2, 37])
@pytest.mark.parametrize(("rows", "columns"), [(5, 32), (33, 96), (70, 544)])
def test_mxfp4(cpu: CPU, tokens: int, rows: int, columns: int) -> None:  # noqa: F811
    w = mx.array(noise(56, rows, columns))
    data, scales = mx.quantize(w, 32, 4, mode="mxfp4")
    weight = cpu.load(Weight(data, scales, None, 32, 4, "mxfp4"))
    # Half a byte, and two numbers of 16 bits for 32.
    assert weight.nbytes == rows * columns * 5 // 8
    exact = mx.dequantize(data, scales, group_size=32, bits=4, mode="mxfp4", dtype=mx.float32)
    exact64 = np.array(exact).astype(np.float64)
    x, bias = noise(57, tokens, columns), noise(58, rows)
    close(cpu.linear(x, weight, bias), x @ exact64.T + bias, 1e-5)
    np.testing.assert_array_equal(cpu.embed(weight, [rows - 1, 0]), exact64[[rows - 1, 0]])
