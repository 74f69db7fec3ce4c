"""Checks the address spaces of a Metal kernel, which the CPU build does not see.

Clang knows address spaces (`__attribute__((address_space(n)))`) and refuses to mix them, as Metal's
compiler does. A second, declarations-only standard library in lint_shim/ uses them; the kernel is
only parsed and type-checked.
"""

import re
import subprocess
from pathlib import Path

from .clang import find_clang
from .translate import (
    ATTRIBUTE,
    FUNCTION_CONSTANT,
    INSTANTIATION,
    THREADGROUP_VARIABLE,
    find_kernel,
    inline_includes,
    preprocess,
)

# A type behind a bracket or comma, then * or &: a parameter, cast or template argument.
POINTER = r"[(,<]\s*(?P<type>(?:const\s+)?(?P<name>\w+)(?:\s*<[^<>()]*>)?(?:\s+const)?)\s*[*&]"
SCALARS = r"u?(?:char|short|int|long)|bool|half|b?float|float16_t|bfloat16_t|u?int\d+_t"
# Clang's vector types cannot be called like a constructor with several arguments.
CONSTRUCTOR = r"\b((?:float|half|bfloat|u?int)[234])\s*\((?!&)"
LAMBDA = r"\[[=&]?\]\s*\("

SHIM = Path(__file__).parent / "lint_shim"
PREAMBLE = """#include "metal_stdlib"
using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
"""
FLAGS = [
    "-std=c++14", "-x", "c++", f"-I{SHIM}", "-fsyntax-only",
    "-Xclang", "-cl-single-precision-constant",
    "-Wall", "-Werror=shadow", "-Wno-unknown-attributes", "-Wno-duplicate-decl-specifier",
    "-Wno-user-defined-literals", "-Wno-reserved-user-defined-literal",
    "-Wno-undefined-inline", "-Wno-undefined-internal", "-Wno-unused",
]  # fmt: skip


def lint(source: str, kernel: str, instantiation: str = "") -> str:
    """The compiler's complaints about a kernel's address spaces; empty if there are none.

    A template is checked only as far as it can be without its arguments; `instantiation`, as in
    "half, 128", checks it wholly. What Clang accepts and Metal does not is refused as well:
    threadgroup variables outside of the kernel function, pointers and references to no address
    space (`thread` must be said too), lambdas, anything newer than C++14.
    """
    source = preprocess(inline_includes(source))
    body = find_kernel(source, kernel)[1]
    complaints = [
        f"threadgroup variable outside of the kernel function: {match['names']}"
        for match in re.finditer(THREADGROUP_VARIABLE, source.replace(body, ""))
    ]
    types = {*re.findall(r"\b(?:struct|typename|class|using)\s+(\w+)", source)}
    complaints += [
        f"a pointer or reference without an address space: {match['type']}"
        for match in re.finditer(POINTER, source)
        if match["name"] in types or re.fullmatch(rf"(?:{SCALARS})[234]?|vec", match["name"])
    ]
    complaints += ["a lambda"] * len(re.findall(LAMBDA, source))
    if instantiation:
        instantiation = f"template decltype({kernel}<{instantiation}>) {kernel}<{instantiation}>;"
    source = re.sub(INSTANTIATION, "", source)
    source = re.sub(FUNCTION_CONSTANT, r"extern constant \g<type> \g<name>;", source)
    source = re.sub(ATTRIBUTE, "", source)
    # A local variable in another address space must be static for Clang.
    source = re.sub(
        THREADGROUP_VARIABLE, r"\g<space>static threadgroup \g<type> \g<names>;", source
    )
    source = re.sub(CONSTRUCTOR, r"msl_make<\1>(", source)
    done = subprocess.run(
        [find_clang(), *FLAGS, "-"], input="\n".join((PREAMBLE, source, instantiation, "")),
        text=True, capture_output=True,
    )  # fmt: skip
    return "\n".join([*complaints, *([done.stderr] if done.stderr else [])])
