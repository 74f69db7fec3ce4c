"""Runs Metal and CUDA kernels on the CPU, with checks a GPU does not make: see README.md."""

from .clang import ClangMissing, find_clang, why_not
from .cuda import EmulatedCUDAKernel
from .generated import EmulatedKernel, to_mlx, to_numpy
from .kernel import Kernel, KernelError, Report, Traffic
from .lint import lint
from .translate import TranslationError

__all__ = [
    "ClangMissing", "EmulatedCUDAKernel", "EmulatedKernel", "Kernel", "KernelError", "Report",
    "Traffic", "TranslationError", "find_clang", "lint", "to_mlx", "to_numpy", "why_not",
]  # fmt: skip
