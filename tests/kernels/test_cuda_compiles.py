"""NVIDIA's own compiler takes every CUDA kernel, for each generation of GPUs; no GPU is needed.

NVRTC is what MLX compiles kernels with where they run. It comes from PyPI with the extra `dev`.
"""

import ctypes
import platform
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import pytest

from tests.emulator.clang import PLATFORM
from tests.kernels.small_gpu import forget_kernels
from tqchat.kernels import KVView, Weight
from tqchat.kernels.cuda import backend as cuda
from tqchat.kernels.cuda.backend import CUDA
from tqchat.kernels.cuda.device import Device
from tqchat.kernels.layout import SINK, TAIL_CAPACITY, tile_words

if (platform.system(), platform.machine()) != PLATFORM:
    pytest.skip("NVIDIA's compiler is for Linux on x86-64", allow_module_level=True)

# Missing there, it is an error: nobody reads that tests were skipped.
TOOLKIT = Path(import_module("nvidia").__path__[0]) / "cu13"

# Shared memory of an A100, an H100 and a card of the RTX 50 series.
GPUS = {"sm_80": 163 << 10, "sm_90a": 227 << 10, "sm_120a": 99 << 10}
TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int",
    mx.uint32: "unsigned",
}
# As MLX has it, but for what the kernels do not use.
PRELUDE = """
struct Shape {
  int sizes[10];
  __device__ int operator[](int i) const { return sizes[i]; }
};
"""


class Written:
    """What `mx.fast.cuda_kernel` returns; notes the text that MLX would compile."""

    def __init__(
        self,
        texts: dict[str, str],
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        shared_memory: int,
    ) -> None:
        self.texts, self.name, self.source, self.header = texts, name, source, header
        self.input_names, self.output_names = input_names, output_names
        self.shared_memory = shared_memory

    def __call__(
        self,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
    ) -> list[mx.array]:
        parameters = []
        for name, x in zip(self.input_names, inputs, strict=True):
            parameters.append(f"const {TYPES[x.dtype]}* {name}")
            if f"{name}_shape" in self.source:
                parameters.append(f"const __grid_constant__ Shape {name}_shape")
        for name, dtype in zip(self.output_names, output_dtypes, strict=True):
            parameters.append(f"{TYPES[dtype]}* {name}")
        self.texts[self.name] = (
            f'{PRELUDE}{self.header}extern "C" __global__ void {self.name}'
            f"({', '.join(parameters)}) {{\n{self.source}\n}}\n"
        )
        outputs = zip(output_shapes, output_dtypes, strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]


def all_kernels(shared_memory: int) -> dict[str, str]:
    texts: dict[str, str] = {}
    forget_kernels()
    with (
        patch.object(mx.fast, "cuda_kernel", lambda **text: Written(texts, **text)),
        patch.object(cuda, "device", lambda: Device(100, shared_memory)),
    ):
        for head_dim, kv_bits, n_heads in ((64, 4, 8), (128, 4, 8), (128, 3, 16), (512, 4, 8)):
            _attention(CUDA(mx.float16, kv_bits), head_dim, n_heads)
        _attention(CUDA(mx.bfloat16), 128, 8)
        _product(CUDA(mx.float16), 4, 64)
        _product(CUDA(mx.bfloat16), 4, 32)
        _product(CUDA(mx.float16), 8, 128)
    forget_kernels()
    return texts


def _attention(backend: CUDA, head_dim: int, n_heads: int) -> None:
    dtype = backend.dtype
    sink, tail = mx.zeros((1, SINK, head_dim), dtype), mx.zeros((1, TAIL_CAPACITY, head_dim), dtype)
    tiles = mx.zeros((1, 8, tile_words(head_dim, backend.kv_bits)), mx.uint32)
    view = KVView(sink, sink, tiles, tail, tail, 4, 8, 70)
    q, k = mx.zeros((n_heads, 1, head_dim), dtype), mx.zeros((1, 1, head_dim), dtype)
    backend.attend(q, view, 1.0)
    backend.append_and_attend(q, k, k, view, 1.0, softcap=5.0, sinks=mx.zeros((n_heads,), dtype))
    backend.seal(*backend.gather(view, k, k))


def _product(backend: CUDA, bits: int, group: int) -> None:
    for columns, m in ((4096, 1), (28672, 8)):
        scales = mx.zeros((16, columns // group), backend.dtype)
        weight = Weight(
            mx.zeros((16, columns * bits // 32), mx.uint32), scales, scales, group, bits
        )
        backend.linear(mx.zeros((m, columns), backend.dtype), weight)
        backend.logits(mx.zeros((m, columns), backend.dtype), weight)


def compile_for(gpu: str, text: str) -> tuple[bool, str]:
    """Whether NVRTC compiles it, and what it says."""
    nvrtc = ctypes.CDLL(str(next((TOOLKIT / "lib").glob("libnvrtc.so.*"))))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert not nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None
    )
    options = [
        b"--device-as-default-execution-space",
        f"--gpu-architecture={gpu}".encode(),
        f"--include-path={TOOLKIT / 'include'}".encode(),
        b"--ptxas-options=-v",
    ]
    failed = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return not failed, log.value.decode()


@pytest.mark.parametrize("gpu", GPUS)
def test_every_kernel_compiles(gpu: str) -> None:
    """Attention to heads of up to 128 channels keeps all it has in registers."""
    texts = all_kernels(GPUS[gpu])
    assert {name.split("_")[1] for name in texts} == {"attend", "merge", "seal", "gather", "matvec"}
    spilled = {}
    for name, text in texts.items():
        compiled, log = compile_for(gpu, text)
        assert compiled, log
        (spilled[name],) = map(int, re.findall(r"(\d+) bytes spill stores", log))
    large = {name for name, n in spilled.items() if n}
    assert all("matvec" in name or "_512_" in name for name in large), spilled
    assert max(spilled.values()) < 512


def test_the_compiler_refuses() -> None:
    compiled, log = compile_for("sm_80", "__global__ void kernel() { nonsense; }")
    assert not compiled
    assert "nonsense" in log
