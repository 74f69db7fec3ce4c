"""The part of the build that pyproject.toml cannot say: the optional native CPU kernels."""

from glob import glob

import numpy
from setuptools import Extension, setup

native = Extension(
    "tqchat.kernels.cpu._native",
    sources=sorted(glob("kernels/cpu/*.c")),
    depends=sorted(glob("kernels/cpu/*.h")),
    include_dirs=[numpy.get_include()],
    # Instruction sets beyond the architecture's own are chosen in the sources, per function.
    extra_compile_args=[
        "-std=gnu11",
        "-O3",
        "-pthread",
        "-ffp-contract=fast",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-Wall",
    ],
    extra_link_args=["-pthread"],
    optional=True,  # without a compiler the CPU computes with plain MLX, slowly
)

setup(ext_modules=[native])
