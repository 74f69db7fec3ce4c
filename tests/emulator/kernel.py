"""Compiles a kernel for the CPU and runs it, with the checks a GPU does not make."""

import ctypes
import functools
import hashlib
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import arithmetic, vectors
from .clang import find_clang, find_symbolizer
from .translate import Translation, translate

Dims = tuple[int, int, int]
Array = npt.NDArray[Any]

SHIM = Path(__file__).parent / "shim"
CACHE = Path(__file__).parent / ".cache"

COMMON = [
    "-std=c++20", "-fdeclspec", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-math-errno",
    "-mf16c", "-mfma",
    # As Metal's compiler: a * b + c fuses within an expression, half rounds after each operation,
    # literals are float.
    "-ffp-contract=on", "-Xclang", "-ffloat16-excess-precision=none",
    "-Xclang", "-cl-single-precision-constant",
    # An uninitialised local variable holds a conspicuous pattern.
    "-ftrivial-auto-var-init=pattern",
    "-Wall", "-Wno-unknown-attributes", "-Wno-user-defined-literals",
    "-Wno-reserved-user-defined-literal", "-Wno-duplicate-decl-specifier", "-Wno-unused",
    "-Wno-ignored-attributes", "-Wno-unknown-pragmas", "-Wno-sign-compare", "-Wno-pass-failed",
]  # fmt: skip
FAST = ["-O2"]
CHECKED = [
    # Vectorised accesses of 32 bytes would go unseen: the sanitizer knows sizes up to 16.
    "-O1", "-g1", "-fno-vectorize", "-fno-slp-vectorize",
    "-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0",
    "-mllvm", "-tsan-instrument-read-before-write=1",
    "-fsanitize=bounds,shift,integer-divide-by-zero,signed-integer-overflow,alignment,float-cast-overflow",
]  # fmt: skip


class KernelError(Exception):
    """The kernel does not compile, or did something wrong: the message says what and where."""


@dataclass(frozen=True)
class Traffic:
    """What all lanes together asked of one buffer, in bytes.

    A load that every lane of a simdgroup makes from one address counts 32 times: `distinct_read`
    says how much there was to read, `shared_read` how much of it more than one threadgroup read.
    """

    read: int
    written: int
    distinct_read: int
    shared_read: int


@dataclass(frozen=True)
class Report:
    """What a checked run counted."""

    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    arithmetic: Counter[str] = field(default_factory=Counter)
    """Operations of all lanes together, by the names in arithmetic.KINDS."""
    simd_operations: Counter[str] = field(default_factory=Counter)
    """Meetings of a simdgroup: shuffles, reductions, matrix operations, barriers."""


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_uint32),
        ("initialised", ctypes.c_uint32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("order", ctypes.c_uint32),
        ("reduction_tree", ctypes.c_uint32),
        ("checked", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("threadgroup_limit", ctypes.c_uint32),
        ("flush_denormals", ctypes.c_uint32),
        ("entry", ctypes.c_void_p),
    )


SIMD_OPERATIONS = ("", "shuffle", "reduce", "broadcast", "vote", "scan", "matrix", "barrier")


def _compile(arguments: list[str | Path]) -> None:
    done = subprocess.run([find_clang(), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise KernelError(f"does not compile:\n{done.stderr[:4000]}")


@functools.cache
def _shim_digest() -> bytes:
    (CACHE / "include").mkdir(parents=True, exist_ok=True)
    header = CACHE / "include" / "vectors.h"
    if not header.exists() or header.read_text() != vectors.header():
        header.write_text(vectors.header())
    files = [*sorted(SHIM.iterdir()), header]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


def _cached(name: str, key: bytes) -> Path:
    digest = hashlib.sha256(_shim_digest() + key + str(find_clang()).encode()).hexdigest()[:20]
    return CACHE / f"{name}-{digest}.so"


@functools.cache
def _runtime() -> ctypes.CDLL:
    library = _cached("runtime", b"")
    if not library.exists():
        # No strict aliasing: the arena is read as whatever the kernel says it is.
        flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-fno-strict-aliasing", "-Wall"]
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder) / "runtime.so"
            _compile([*flags, SHIM / "runtime.cpp", "-o", made])
            made.rename(library)
    runtime = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    runtime.msl_error.restype = ctypes.c_char_p
    for counter in ("msl_block_counts", "msl_op_counts", "msl_buffer_counts"):
        getattr(runtime, counter).restype = ctypes.POINTER(ctypes.c_uint64)
    return runtime


class Compiled:
    """A kernel in C++, compiled.

    checked: build with checks and counts, about five times slower.
    threadgroup_limit: bytes of threadgroup memory that there are.
    flush_denormals: those of float32 count as zero.

    Raises KernelError.
    """

    def __init__(
        self,
        translation: Translation,
        checked: bool = True,
        threadgroup_limit: int = 32 << 10,
        flush_denormals: bool = True,
    ) -> None:
        self._threadgroup_limit = threadgroup_limit
        self._flush_denormals = flush_denormals
        self.buffers = translation.buffers
        self.checked = checked
        self._runtime = _runtime()
        flags = COMMON + (CHECKED if checked else FAST)
        self._path = _cached("kernel", repr((flags, translation.source)).encode())
        if not self._path.exists():
            self._build(translation.source, flags)
        blocks = json.loads(self._path.with_suffix(".json").read_text())
        self._blocks: list[Counter[str]] = [Counter(block) for block in blocks]
        self._library = ctypes.CDLL(str(self._path))

    def _build(self, source: str, flags: list[str]) -> None:
        with tempfile.TemporaryDirectory(dir=CACHE) as name:
            folder = Path(name)
            text, code, made = folder / "kernel.cpp", folder / "kernel.ll", folder / "kernel.so"
            text.write_text(source)
            include = [f"-I{SHIM}", f"-I{CACHE / 'include'}"]
            _compile([*flags, *include, "-S", "-emit-llvm", text, "-o", code])
            blocks: list[Counter[str]] = []
            if self.checked:
                marked, blocks = arithmetic.instrument(code.read_text())
                code.write_text(marked)
            final = ["-O0" if self.checked else "-O2", "-Xclang", "-disable-llvm-passes", "-fPIC"]
            final += ["-mf16c", "-mfma", "-shared", "-Wl,-Bsymbolic-functions"]
            _compile([*final, "-Wno-override-module", code, "-o", made])
            self._path.with_suffix(".json").write_text(json.dumps(blocks))
            made.rename(self._path)

    def __call__(
        self,
        arguments: Mapping[str, Array],
        grid: Dims,
        threadgroup: Dims,
        *,
        order: int = 0,
        reduction_tree: int = 0,
        initialised: Iterable[str] = (),
    ) -> Report:
        """Runs the kernel; its outputs are written into the arrays given for them.

        arguments: a contiguous array for each buffer, by name; one may be left out if the kernel
            never touches it.
        grid: in threads, as `dispatchThreads` and mx.fast.metal_kernel take it.
        order: of lanes, simdgroups and threadgroups: 0 forward, 1 reverse, else random by seed.
        reduction_tree: the order in which simd_sum adds: 0 sequential, 1 halves, 2 neighbours.
        initialised: outputs that may be read before they are written.

        Raises KernelError at the first fault.
        """
        buffers = (_Buffer * len(self.buffers))()
        for slot, buffer in zip(buffers, self.buffers, strict=True):
            array = arguments.get(buffer.name, np.zeros(0, np.uint8))
            if not array.flags.c_contiguous:
                raise ValueError(f"'{buffer.name}' is not contiguous")
            slot.data, slot.size = array.ctypes.data, array.nbytes
            slot.name, slot.writable = buffer.name.encode(), buffer.writable
            slot.initialised = buffer.name in set(initialised)
        entry = ctypes.cast(self._library.msl_entry, ctypes.c_void_p)
        launch = _Launch(
            (ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(*threadgroup),
            order, reduction_tree, self.checked, len(self._blocks),
            self._threadgroup_limit, self._flush_denormals, entry,
        )  # fmt: skip
        if self._runtime.msl_launch(buffers, len(buffers), ctypes.byref(launch)):
            raise KernelError(self._located(self._runtime.msl_error().decode()))
        return self._report() if self.checked else Report()

    def _report(self) -> Report:
        runtime = self._runtime
        counts = runtime.msl_buffer_counts()
        traffic = {b.name: Traffic(*counts[4 * i : 4 * i + 4]) for i, b in enumerate(self.buffers)}
        total: Counter[str] = Counter()
        for times, block in zip(
            runtime.msl_block_counts()[: len(self._blocks)], self._blocks, strict=True
        ):
            for kind, n in block.items():
                total[kind] += times * n
        operations = zip(
            SIMD_OPERATIONS, runtime.msl_op_counts()[: len(SIMD_OPERATIONS)], strict=True
        )
        return Report(traffic, total, Counter({name: n for name, n in operations if n}))

    def _located(self, error: str) -> str:
        """Replaces an address in the kernel by its source line."""
        match = re.search(r"\[(\S+\.so)\+0x([0-9a-f]+)\]", error)
        symbolizer = find_symbolizer()
        if match is None or symbolizer is None:
            return error
        address = hex(int(match[2], 16) - 1)  # the call, not the return
        command = [symbolizer, f"--obj={match[1]}", "--no-inlines", address]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")
        return error.replace(match[0], f"[{lines[1] if len(lines) > 1 else '?'}]")


class Kernel(Compiled):
    """One instantiation of a Metal kernel. Apple's GPUs take float32's denormals for zero.

    source: Metal text; may include MLX's headers, and files by absolute path.
    name: of the kernel function. template_arguments: as text, like "half, 128".

    Raises TranslationError and KernelError.
    """

    def __init__(
        self,
        source: str,
        name: str,
        template_arguments: str = "",
        function_constants: Mapping[str, object] | None = None,
        checked: bool = True,
    ) -> None:
        translation = translate(source, name, template_arguments, function_constants)
        super().__init__(translation, checked)
