"""Stand-ins for MLX's custom kernels that run in the emulator: what they share, and Metal's.

The Metal text that runs is the one MLX itself generates: signature, template and instantiation.
`metal_kernel(..., verbose=True)` prints it, and `mx.export_function` traces the call without
needing a Metal device.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .kernel import Array, Compiled, Dims, Kernel, KernelError, Report

# MLX names its types so in what it generates, and defines them in what it puts before that.
TYPES = "typedef half float16_t; typedef bfloat bfloat16_t;\n"


@dataclass(frozen=True)
class Generated:
    """The Metal text MLX generates for one call."""

    source: str

    @property
    def name(self) -> str:
        match = re.search(r"\[\[kernel\]\] void (\w+)\(", self.source)
        assert match
        return match[1]

    @property
    def template_arguments(self) -> str:
        match = re.search(r"decltype\(\w+<(.*?)>\)", self.source)
        return match[1] if match else ""


def generate(kernel: Callable[..., Any], call: dict[str, Any]) -> Generated:
    """What MLX generates when `kernel` (of mx.fast.metal_kernel) is called with `call`."""
    with tempfile.NamedTemporaryFile(suffix=".mlxfn") as file, tempfile.TemporaryFile() as printed:

        def traced(*inputs: mx.array) -> Any:
            return kernel(**{**call, "inputs": list(inputs), "verbose": True})

        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(printed.fileno(), 1)  # MLX prints from C++
        try:
            mx.export_function(file.name, traced, *call["inputs"])
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        printed.seek(0)
        match = re.search(r"```\n(.*)```", printed.read().decode(), re.S)
    assert match, "MLX printed no source"
    return Generated(match[1])


def to_numpy(array: mx.array) -> Array:
    """The bytes of an MLX array; bfloat16, which numpy lacks, as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def to_mlx(array: Array, dtype: mx.Dtype) -> mx.array:
    result = mx.array(array)
    return result.view(dtype) if dtype == mx.bfloat16 else result


class Emulated:
    """A kernel called as MLX's are; returns MLX arrays.

    orders: the kernel runs once in each, and every run must give the same bytes.
    edit: changes the generated text first; mutation tests use it.
    written: inputs that the kernel writes, behind MLX's back.
    """

    def __init__(
        self,
        input_names: Sequence[str],
        output_names: Sequence[str],
        *,
        checked: bool = True,
        orders: Sequence[int] = (0,),
        reduction_tree: int = 0,
        edit: Callable[[str], str] = lambda source: source,
        written: Sequence[str] = (),
    ) -> None:
        self.input_names, self.output_names = list(input_names), list(output_names)
        self.checked, self.orders, self.reduction_tree = checked, orders, reduction_tree
        self.edit, self.written = edit, written
        self.report = Report()
        """Of the last run."""
        self.compiled: dict[str, Compiled] = {}
        """By source text."""

    def generate(self, call: dict[str, Any]) -> str:
        """The text to run when called so."""
        raise NotImplementedError

    def compile(self, source: str) -> Compiled:
        raise NotImplementedError

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Dims,
        threadgroup: Dims,
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        stream: Any = None,
    ) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        call = {
            "inputs": arrays, "output_shapes": output_shapes, "output_dtypes": output_dtypes,
            "grid": grid, "threadgroup": threadgroup,
        }  # fmt: skip
        if template:
            call["template"] = template
        source = self.edit(self.generate(call))
        if source not in self.compiled:
            self.compiled[source] = self.compile(source)
        first: list[Array] = []
        for order in self.orders:
            outputs = self._run(self.compiled[source], order, arrays, call, init_value)
            for name, a, b in zip(self.output_names, first, outputs, strict=False):
                if a.tobytes() != b.tobytes():
                    raise KernelError(f"ORDER DEPENDENCE: '{name}' differs between lane orders")
            first = outputs
        return [to_mlx(x, dtype) for x, dtype in zip(first, output_dtypes, strict=True)]

    def _run(
        self,
        kernel: Compiled,
        order: int,
        inputs: list[mx.array],
        call: dict[str, Any],
        init_value: float | None,
    ) -> list[Array]:
        arguments: dict[str, Array] = {}
        for name, x in zip(self.input_names, inputs, strict=True):
            arguments[name] = np.ascontiguousarray(to_numpy(x))
            strides = [int(np.prod(x.shape[i + 1 :])) for i in range(x.ndim)]
            arguments[f"{name}_shape"] = np.array(x.shape, np.int32)
            arguments[f"{name}_strides"] = np.array(strides, np.int64)
            arguments[f"{name}_ndim"] = np.array([x.ndim], np.int32)
        outputs = []
        for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True):
            output = to_numpy(mx.full(shape, init_value or 0, dtype))
            if init_value is None:
                output.view(np.uint8)[...] = 0xFF  # NaN, where a kernel leaves a hole
            outputs.append(output)
        arguments |= dict(zip(self.output_names, outputs, strict=True))
        # As dispatchThreads: a threadgroup is no larger than the grid.
        gx, gy, gz = call["grid"]
        tx, ty, tz = call["threadgroup"]
        self.report = kernel(
            arguments, call["grid"], (min(tx, gx), min(ty, gy), min(tz, gz)),
            order=order, reduction_tree=self.reduction_tree,
            initialised=[*self.written, *(() if init_value is None else self.output_names)],
        )  # fmt: skip
        for name, x in zip(self.input_names, inputs, strict=True):
            if name in self.written:
                x[...] = to_mlx(arguments[name], x.dtype)
        return outputs


class EmulatedKernel(Emulated):
    """What `mx.fast.metal_kernel` returns, emulated."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        *,
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(input_names, output_names, **options)
        self.generated = Generated("")
        self._traced: Any = mx.fast.metal_kernel(
            name=name, input_names=input_names, output_names=output_names, source=source,
            header=header, ensure_row_contiguous=ensure_row_contiguous,
            atomic_outputs=atomic_outputs,
        )  # fmt: skip

    def generate(self, call: dict[str, Any]) -> str:
        self.generated = generate(self._traced, call)
        return self.generated.source

    def compile(self, source: str) -> Compiled:
        generated = self.generated
        return Kernel(
            TYPES + source, generated.name, generated.template_arguments, checked=self.checked
        )
