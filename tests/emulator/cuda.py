"""A stand-in for `mx.fast.cuda_kernel` that runs the kernel in the emulator.

MLX built without CUDA does not make the kernel's signature, so it is made here, as MLX does: a
pointer for each input, its shape where the text mentions it, a pointer for each output.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from .generated import Emulated
from .kernel import SHIM, Compiled
from .translate import Buffer, Translation, split_top_level

TYPES = {
    mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int32_t", mx.uint32: "uint32_t",
}  # fmt: skip
SHARED_VARIABLE = (
    r"__shared__\s+(?:alignas\(\d+\)\s*)?(?P<type>unsigned char|\w+)\s+(?P<names>\w+\s*\[[^;]*);"
)
DYNAMIC_SHARED = r"extern __shared__ __align__\(\d+\) unsigned char (\w+)\[\];"


def _inline(path: Path, seen: set[Path]) -> str:
    """A file with what it includes by relative path; PTX instructions are the emulator's."""
    if path.name == "instructions.cuh":
        path = SHIM / path.name
    if path in seen:
        return ""
    seen.add(path)
    text = re.sub(
        r'^#include "([^"]+)"', lambda m: _inline(path.parent / m[1], seen), path.read_text(),
        flags=re.M,
    )  # fmt: skip
    text = re.sub(r"^#(?:pragma once|include <).*", "", text, flags=re.M)
    return f'#line 1 "{path.name}"\n{text}'


def _shared_variable(match: re.Match[str]) -> str:
    text = ""
    for declarator in split_top_level(match["names"]):
        name, dimensions = re.fullmatch(r"(\w+)\s*(.*)", declarator, re.S).groups()  # type: ignore[union-attr]
        text += f"typedef {match['type']} {name}_type {dimensions}; "
        text += f"MSL_THREADGROUP({name}_type, {name}) "
    return text


class EmulatedCUDAKernel(Emulated):
    """What `mx.fast.cuda_kernel` returns, emulated.

    architecture: 100 times the compute capability. Threads of a grid must fill its blocks.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        shared_memory: int = 0,
        *,
        architecture: int = 900,
        **options: Any,
    ) -> None:
        # A cast that takes `const` away tells that an input is written.
        written = re.findall(r"\(\w+\*\)(\w+)", source)
        super().__init__(input_names, output_names, written=written, **options)
        self._name, self._source, self._header = name, source, header
        self._shared_memory, self._architecture = shared_memory, architecture
        self._buffers: tuple[Buffer, ...] = ()

    def generate(self, call: dict[str, Any]) -> str:
        sizes = zip(call["grid"], call["threadgroup"], strict=True)
        assert all(grid % block == 0 for grid, block in sizes)
        parameters, buffers = [], []
        for name, x in zip(self.input_names, call["inputs"], strict=True):
            parameters.append(f"const {TYPES[x.dtype]}* {name}")
            buffers.append(Buffer(name, name in self.written))
            if f"{name}_shape" in self._source:
                parameters.append(f"const int32_t* {name}_shape")
                buffers.append(Buffer(f"{name}_shape", False))
        for name, dtype in zip(self.output_names, call["output_dtypes"], strict=True):
            parameters.append(f"{TYPES[dtype]}* {name}")
            buffers.append(Buffer(name, True))
        self._buffers = tuple(buffers)
        seen: set[Path] = set()
        header = re.sub(r'#include "([^"]+)"', lambda m: _inline(Path(m[1]), seen), self._header)
        return f"{header}\nvoid {self._name}({', '.join(parameters)}) {{\n{self._source}\n}}\n"

    def compile(self, source: str) -> Compiled:
        size = self._shared_memory
        shared = rf"typedef unsigned char \1_type[{size}]; MSL_THREADGROUP(\1_type, \1)"
        source = re.sub(DYNAMIC_SHARED, shared, source)
        source = re.sub(SHARED_VARIABLE, _shared_variable, source)
        assert "__shared__" not in source
        numbers = range(len(self._buffers))
        pointers = ", ".join(f"MslPointer{{msl::arguments[{i}]}}" for i in numbers)
        entry = f'extern "C" MSL_MACHINERY void msl_entry() {{ {self._name}({pointers}); }}'
        unit = [f"#define __CUDA_ARCH__ {self._architecture}", '#include "cuda.h"', source]
        unit += [entry, ""]
        return Compiled(Translation("\n".join(unit), self._buffers), self.checked, 227 << 10, False)
