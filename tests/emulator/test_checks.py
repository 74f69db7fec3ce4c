"""What the emulator finds, and what it must not complain about."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from .generated import EmulatedKernel
from .kernel import Kernel, KernelError
from .lint import lint
from .translate import TranslationError, translate

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
REDUCTION = """
  threadgroup T shared[N / 32];
  uint i = thread_position_in_grid.x;
  T s = simd_sum(x[i]);
  if (thread_index_in_simdgroup == 0) shared[simdgroup_index_in_threadgroup] = s;
  BARRIER
  T total = 0;
  for (int j = 0; j < N / 32; j++) total += shared[j];
  o[i] = total;"""
INDEX = "uint i = thread_position_in_grid.x; "
SHARED = INDEX + "threadgroup T s[N]; "


def run(
    source: str, n: int = 256, threadgroup: int = 256, dtype: mx.Dtype = mx.float32, **options: Any
) -> np.ndarray:
    kernel = EmulatedKernel("test", ["x"], ["o"], source, orders=(0, 1, 2), **options)
    out = kernel(
        inputs=[(mx.arange(n) % 7).astype(dtype)], template=[("T", dtype), ("N", n)],
        grid=(n, 1, 1), threadgroup=(threadgroup, 1, 1), output_shapes=[(n,)],
        output_dtypes=[dtype],
    )  # fmt: skip
    return np.array(out[0].astype(mx.float32))


X = np.arange(256) % 7

FAULTS = {
    "missing barrier": (REDUCTION.replace("BARRIER", ""), "DATA RACE|UNINITIALISED"),
    "barrier for the wrong memory": (
        REDUCTION.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_device);"),
        "DATA RACE",
    ),
    "simdgroup barrier across simdgroups": (
        SHARED + "s[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[i ^ 32];",
        "DATA RACE|UNINITIALISED",
    ),
    "write after several reads": (
        SHARED + f"s[i] = x[i]; {BARRIER} o[i] = s[0] + s[1]; if (i == 0) s[0] = 1;",
        "DATA RACE",
    ),
    "race between threadgroups": (
        "o[thread_position_in_threadgroup.x] = x[0]; o[thread_position_in_grid.x] = x[0];",
        "DATA RACE",
    ),
    "read out of bounds": (INDEX + "o[i] = x[i + 1];", "OUT OF BOUNDS read"),
    "write out of bounds": (INDEX + "o[2 * i] = x[i];", "OUT OF BOUNDS write"),
    "threadgroup memory out of bounds": (
        SHARED + f"threadgroup T* p = s; p[i] = x[i]; {BARRIER} o[i] = p[i + 1];",
        "OUT OF BOUNDS",
    ),
    "local array out of bounds": (
        INDEX + "T a[4]; for (int j = 0; j < 4; j++) a[j] = x[i]; o[i] = a[i & 7];",
        "UNDEFINED BEHAVIOUR: array index",
    ),
    "uninitialised threadgroup memory": (
        SHARED + f"if (i % 2) s[i] = x[i]; {BARRIER} o[i] = s[i];",
        "UNINITIALISED",
    ),
    "output not written": (INDEX + "if (i != 200) o[i] = x[i];", "not written at byte 800"),
    "write to an input": (INDEX + "((device T*)x)[i] = 0; o[i] = 0;", "WRITE TO INPUT"),
    "divergent simd_sum": (
        INDEX + "T v = x[i]; if (i % 32 < 8) v = simd_sum(v); o[i] = v;",
        "DIVERGENCE",
    ),
    "early return": (INDEX + "if (i >= 250) return; o[i] = simd_sum(x[i]);", "DIVERGENCE"),
    "divergent barrier": (
        INDEX + f"if (i < 32) {{ {BARRIER} }} o[i] = x[i];",
        "BARRIER DIVERGENCE",
    ),
    "too much threadgroup memory": (
        INDEX + "threadgroup float s[8193]; s[i] = 0; o[i] = x[i];",
        "THREADGROUP MEMORY: 32772",
    ),
    "shift by the width": (INDEX + "o[i] = T(1u << (i / 4));", "UNDEFINED BEHAVIOUR: shift"),
    "misaligned vector": (
        INDEX + "const device float4* p = (const device float4*)(x + 1); o[i] = p[0].x;",
        "UNDEFINED BEHAVIOUR: misaligned",
    ),
    "double precision": (INDEX + "double z = 1; o[i] = z;", "does not compile"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_finds(fault: str) -> None:
    source, message = FAULTS[fault]
    with pytest.raises(KernelError, match=message):
        run(source, threadgroup=64 if fault == "race between threadgroups" else 256)


def test_finds_a_race_by_the_order_of_lanes_alone() -> None:
    with pytest.raises(KernelError, match="ORDER DEPENDENCE"):
        run(SHARED + f"s[0] = i; {BARRIER} o[i] = s[0];", checked=False)


def test_bfloat_needs_explicit_conversion() -> None:
    with pytest.raises(KernelError, match="does not compile"):
        run(INDEX + "o[i] = 1.5f * x[i];", dtype=mx.bfloat16)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_reduction(dtype: mx.Dtype) -> None:
    n = 64
    total = (np.arange(n) % 7).sum()
    assert (run(REDUCTION.replace("BARRIER", BARRIER), n, n, dtype) == total).all()


def test_simdgroup_barrier_orders_a_simdgroup() -> None:
    source = SHARED + "s[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); o[i] = s[i ^ 1];"
    assert (run(source) == X[np.arange(256) ^ 1]).all()


def test_shuffles() -> None:
    source = """
      uint i = thread_index_in_simdgroup;
      float up = simd_shuffle_up(float(i), 2), down = simd_shuffle_down(float(i), 3);
      o[i] = simd_shuffle_xor(float(i), 5) + 64 * up + 4096 * down
          + (simd_any(i == 3) && !simd_all(i < 31) ? 0.5f : 0) + simd_prefix_exclusive_sum(0.0f);"""
    i = np.arange(32)
    up, down = np.where(i < 2, i, i - 2), np.where(i + 3 < 32, i + 3, i)
    assert (run(source, 32, 32) == (i ^ 5) + 64 * up + 4096 * down + 0.5).all()


def test_vectors() -> None:
    source = """
      uint i = thread_position_in_grid.x;
      float4 f = float4(uint4(i, i + 1, i + 2, i + 3) & 15u) * 2.0f;
      f.xy = f.yx;
      o[i] = dot(f.xyz, float3(1, 2, 3)) + as_type<float>(as_type<uint>(f.w));"""
    f = [2 * ((np.arange(256) + j) & 15) for j in range(4)]
    assert (run(source) == f[1] + 2 * f[0] + 3 * f[2] + f[3]).all()


def test_matrices() -> None:
    source = """
      simdgroup_float8x8 a, b, c = simdgroup_float8x8(0.0f);
      simdgroup_load(a, x, 8);
      simdgroup_load(b, x, 8, ulong2(0), true);
      simdgroup_multiply_accumulate(c, a, b, c);
      simdgroup_store(c, o, 8);"""
    kernel = EmulatedKernel("test", ["x"], ["o"], source)
    a = np.arange(64, dtype=np.float32).reshape(8, 8)
    out = kernel(
        inputs=[mx.array(a)], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(8, 8)],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    assert (np.array(out[0]) == a @ a.T).all()


def test_half_rounds_after_each_operation() -> None:
    x = np.float16(3.2345)
    source = "half h = half(3.2345h); half y = h * h; o[thread_position_in_grid.x] = float(y + h);"
    assert (run(source) == np.float32(np.float16(np.float16(x * x) + x))).all()


def test_counts() -> None:
    """Every lane reads its own element and lane 0's: 2 * 256 loads, of 256 distinct elements."""
    source = INDEX + "o[i] = x[i] * 2.0f + x[0] + simd_sum(0.0f);"
    kernel = EmulatedKernel("test", ["x"], ["o"], source)
    kernel(
        inputs=[mx.arange(256).astype(mx.float32)], grid=(256, 1, 1), threadgroup=(64, 1, 1),
        output_shapes=[(256,)], output_dtypes=[mx.float32],
    )  # fmt: skip
    x, o = kernel.report.traffic["x"], kernel.report.traffic["o"]
    assert (x.read, x.distinct_read, x.shared_read) == (2 * 256 * 4, 256 * 4, 4)
    assert (o.read, o.written) == (0, 256 * 4)
    assert kernel.report.arithmetic["float multiply-add"] == 256
    assert kernel.report.arithmetic["float add or multiply"] == 256
    assert kernel.report.simd_operations == {"reduce": 8}


KERNEL = "[[kernel]] void k(device float* o [[buffer(0)]]) { BODY }"


@pytest.mark.parametrize(
    "body",
    [
        "threadgroup float s;",
        "threadgroup float s[4], t[2][3];",
        "int i = 0; threadgroup half4 s[2];",
    ],
)
def test_translates_threadgroup_variables(body: str) -> None:
    assert "MSL_THREADGROUP" in translate(KERNEL.replace("BODY", body), "k").source


@pytest.mark.parametrize(
    "body",
    [
        "threadgroup float s[2] = {0, 0};",
        "threadgroup struct { int a; } s;",
        "threadgroup auto s = 1;",
    ],
)
def test_refuses_threadgroup_variables_it_does_not_understand(body: str) -> None:
    with pytest.raises(TranslationError, match="cannot rewrite"):
        translate(KERNEL.replace("BODY", body), "k")


def test_sees_threadgroup_variables_behind_macros() -> None:
    source = "#define SHARED threadgroup float s[4]\n" + KERNEL.replace("BODY", "SHARED;")
    assert "MSL_THREADGROUP" in translate(source, "k").source


GOOD = """
inline float first(const device float* p) { return p[0]; }
[[kernel]] void k(const device float* x [[buffer(0)]], device float* o [[buffer(1)]]) {
  threadgroup float s[4];
  threadgroup float* p = s;
  p[0] = first(x);
  o[0] = *p;
}"""


def test_lint_accepts() -> None:
    assert lint(GOOD, "k") == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("(const device float* p)", "(const float* p)"),
        ("(const device float* p)", "(const threadgroup float* p)"),
        ("threadgroup float* p = s", "float* p = s"),
        ("threadgroup float* p = s", "device float* p = s"),
        ("p[0] = first(x)", "p[0] = nothing(x)"),
        ("return p[0];", "threadgroup float t[2]; t[0] = p[0]; return t[0];"),
        ("return p[0];", "float a = p[0]; float* b = (float*)&a; return *b;"),
        ("return p[0];", "auto f = [](float x) { return x; }; return f(p[0]);"),
        ("return p[0];", "if constexpr (true) return p[0]; return 0;"),
        ("inline float first(", "inline float second(float& x) { return x; } inline float first("),
    ],
)
def test_lint_refuses(before: str, after: str) -> None:
    assert lint(GOOD.replace(before, after), "k")


def test_the_kernel_must_exist() -> None:
    with pytest.raises(TranslationError, match="no kernel"):
        Kernel(GOOD, "nothing")
