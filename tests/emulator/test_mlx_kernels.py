"""The emulator against kernels nobody here wrote: MLX's own, from the installed wheel's headers.

What MLX computes on the CPU for the same inputs is the reference.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from .generated import to_mlx, to_numpy
from .kernel import Kernel, KernelError
from .translate import find_kernel, inline_includes

DTYPES = {"float": mx.float32, "half": mx.float16, "bfloat16_t": mx.bfloat16}
TOLERANCE = {"float": 2e-6, "half": 2e-3, "bfloat16_t": 2e-2}
FOLDER = "mlx/backend/metal/kernels"
SDPA = f'#include "{FOLDER}/utils.h"\n#include "{FOLDER}/sdpa_vector.h"\n'
QUANTIZED = "".join(
    f'#include "{FOLDER}/{name}"\n'
    for name in ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
)


def scalar(value: float, dtype: Any = np.int32) -> np.ndarray:
    return np.array([value], dtype)


class Attention:
    """One attention problem, MLX's answer, and the arguments its kernels take."""

    def __init__(
        self, dtype: str, heads: int, kv_heads: int, queries: int, length: int, dim: int,
        causal: bool = False, mask: bool = False, sinks: bool = False,
    ) -> None:  # fmt: skip
        mx.random.seed(length)
        self.dtype, self.heads, self.kv_heads = dtype, heads, kv_heads
        self.queries, self.dim = queries, dim
        t = DTYPES[dtype]
        q = mx.random.normal((1, heads, queries, dim)).astype(t)
        k = mx.random.normal((1, kv_heads, length, dim)).astype(t)
        v = mx.random.normal((1, kv_heads, length, dim)).astype(t)
        logits = mx.random.normal((heads,)).astype(t) if sinks else None
        seen = mx.random.uniform(shape=(1, heads, queries, length)) > 0.3 if mask else None
        self.reference = np.array(
            mx.fast.scaled_dot_product_attention(
                q, k, v, scale=dim**-0.5, mask="causal" if causal else seen, sinks=logits
            ).astype(mx.float32)
        )
        self.constants = {
            "has_mask": int(mask), "bool_mask": int(mask), "float_mask": 0,
            "query_transposed": 0, "do_causal": int(causal), "has_sinks": int(sinks),
            "blocks": 32,
        }  # fmt: skip
        self.arguments = {
            "queries": to_numpy(q), "keys": to_numpy(k), "values": to_numpy(v),
            "gqa_factor": scalar(heads // kv_heads), "N": scalar(length),
            "k_head_stride": scalar(length * dim, np.uint64),
            "k_seq_stride": scalar(dim, np.uint64),
            "v_head_stride": scalar(length * dim, np.uint64),
            "v_seq_stride": scalar(dim, np.uint64),
            "scale": scalar(dim**-0.5, np.float32), "num_q_heads": scalar(heads),
        }  # fmt: skip
        if logits is not None:
            self.arguments["sinks"] = to_numpy(logits)
        if seen is not None:
            self.arguments |= {
                "bmask": to_numpy(seen), "mask_kv_seq_stride": scalar(1),
                "mask_q_seq_stride": scalar(length),
                "mask_head_stride": scalar(length * queries),
            }  # fmt: skip

    def _out(self, *shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32 if self.dtype == "float" else np.uint16)

    def one_pass(self, source: str = SDPA, checked: bool = True, order: int = 0) -> np.ndarray:
        arguments = f"{self.dtype}, {self.dim}, {self.dim}"
        kernel = Kernel(source, "sdpa_vector", arguments, self.constants, checked)
        out = self._out(1, self.heads, self.queries, self.dim)
        grid = (1024 * self.heads, self.queries, 1)
        kernel({**self.arguments, "out": out}, grid, (1024, 1, 1), order=order)
        return out

    def two_passes(self, source: str = SDPA, checked: bool = True, order: int = 0) -> np.ndarray:
        rows, blocks, group = self.heads * self.queries, 32, self.heads // self.kv_heads
        partial = self._out(rows, blocks, self.dim)
        sums, maxs = np.zeros((rows, blocks), np.float32), np.zeros((rows, blocks), np.float32)
        arguments = f"{self.dtype}, {self.dim}"
        first = Kernel(
            source, "sdpa_vector_2pass_1", f"{arguments}, {self.dim}", self.constants, checked
        )
        first(
            {**self.arguments, "out": partial, "sums": sums, "maxs": maxs},
            (32 * self.kv_heads, group, self.queries * blocks), (32, group, self.queries),
            order=order,
        )  # fmt: skip
        second = Kernel(source, "sdpa_vector_2pass_2", arguments, self.constants, checked)
        out = self._out(1, self.heads, self.queries, self.dim)
        second(
            {"partials": partial, "sums": sums, "maxs": maxs, "out": out, "blocks": scalar(blocks)},
            (1024 * self.heads, self.queries, 1), (1024, 1, 1), order=order,
        )  # fmt: skip
        return out

    def error(self, out: np.ndarray) -> float:
        dtype = DTYPES[self.dtype]
        result = to_mlx(out.view(np.float16) if dtype == mx.float16 else out, dtype)
        return float(np.abs(np.array(result.astype(mx.float32)) - self.reference).max())


CASES = {
    "float": Attention("float", 4, 2, 1, 77, 64),
    "half, causal": Attention("half", 4, 1, 3, 100, 128, causal=True),
    "bfloat, mask": Attention("bfloat16_t", 4, 2, 2, 65, 64, mask=True),
    "half, sinks": Attention("half", 4, 2, 1, 50, 64, sinks=True),
}


@pytest.mark.parametrize("case", CASES)
def test_sdpa_vector(case: str) -> None:
    problem = CASES[case]
    assert problem.error(problem.one_pass()) < TOLERANCE[problem.dtype]


@pytest.mark.parametrize("case", ["float", "half, causal"])
def test_sdpa_vector_in_two_passes(case: str) -> None:
    problem = CASES[case]
    assert problem.error(problem.two_passes()) < TOLERANCE[problem.dtype]


def test_the_order_of_lanes_does_not_matter() -> None:
    problem = CASES["float"]
    results = [problem.one_pass(checked=False, order=order) for order in (0, 1, 2, 3)]
    assert all((result == results[0]).all() for result in results)


# Their barriers, in the order of the text.
BARRIERS = [("sdpa_vector", i) for i in range(3)] + [("sdpa_vector_2pass_2", i) for i in range(2)]


@pytest.mark.parametrize(("kernel", "which"), BARRIERS)
def test_a_missing_barrier_is_found(kernel: str, which: int) -> None:
    source = inline_includes(SDPA)
    body = find_kernel(source, kernel)[1]
    parts = body.split("threadgroup_barrier(")
    assert len(parts) - 1 == sum(name == kernel for name, _ in BARRIERS)
    without = "threadgroup_barrier(".join(parts[: which + 1]) + "(void)("
    without += "threadgroup_barrier(".join(parts[which + 1 :])
    source = source.replace(body, without)
    problem = CASES["float"]
    with pytest.raises(KernelError, match=r"DATA RACE|UNINITIALISED"):
        problem.one_pass(source) if kernel == "sdpa_vector" else problem.two_passes(source)


@pytest.mark.parametrize(("dtype", "group", "bits"), [("float", 32, 8), ("half", 64, 4)])
def test_affine_quantize(dtype: str, group: int, bits: int) -> None:
    """MLX's Metal kernel rounds half away from zero, its CPU one to even: codes may differ by 1."""
    mx.random.seed(1)
    w = mx.random.normal((16, 512)).astype(DTYPES[dtype])
    packed, scales, biases = (np.array(x) for x in mx.quantize(w, group, bits))
    out = np.zeros(packed.nbytes, np.uint8)
    got_scales, got_biases = np.zeros_like(scales), np.zeros_like(biases)
    per_thread = group // 32
    Kernel(QUANTIZED, "affine_quantize", f"{dtype}, {group}, {bits}")(
        {"w": to_numpy(w), "out": out, "scales": got_scales, "biases": got_biases},
        (512 // per_thread, 16, 1), (512 // per_thread, 1, 1),
    )  # fmt: skip

    def codes(data: np.ndarray) -> np.ndarray:
        per_byte = range(8 // bits)
        return np.stack([data.view(np.uint8) >> bits * j & 2**bits - 1 for j in per_byte]).astype(
            int
        )

    difference = np.abs(codes(out) - codes(packed.ravel().view(np.uint8)))
    assert (got_scales == scales).all()
    assert (got_biases == biases).all()
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3
