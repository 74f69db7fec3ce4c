"""Turns the text of a Metal kernel into C++ that Clang compiles for the CPU.

Metal's shading language is C++ with address spaces, attributes on parameters, and `threadgroup`
variables. `shim/metal_stdlib` supplies the library; this file rewrites the rest of the language:
includes, attributes, function constants, and declarations of threadgroup variables.
"""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from .clang import find_clang

MLX_INCLUDE = Path(mx.__file__).parent / "include"

# Headers of MLX that reach for parts of Metal no attention or quantisation kernel uses.
REPLACED_HEADERS = {
    "complex.h": "template <class T> struct complex_t { T real, imag; complex_t(T r, T i);"
    " friend complex_t operator+(complex_t, complex_t); }; typedef complex_t<float> complex64_t;",
    "logging.h": "",
    "bf16_math.h": "",
}

BUILTINS = {
    "thread_position_in_grid": "MslVector{msl::lane->grid_position}",
    "thread_position_in_threadgroup": "MslVector{msl::lane->position}",
    "threadgroup_position_in_grid": "MslVector{msl::geometry.group_position}",
    "threadgroups_per_grid": "MslVector{msl::geometry.groups}",
    "threads_per_grid": "MslVector{msl::geometry.grid}",
    "threads_per_threadgroup": "MslVector{msl::geometry.group_size}",
    "thread_index_in_threadgroup": "msl::lane->index",
    "thread_index_in_simdgroup": "msl::lane->index_in_simd",
    "simdgroup_index_in_threadgroup": "msl::lane->simdgroup->id",
    "simdgroups_per_threadgroup": "msl::geometry.simdgroups",
    "threads_per_simdgroup": "32u",
}

VECTOR_ARGUMENT = """
namespace {
struct MslVector {
  const uint32_t* p;
  operator uint() const { return p[0]; }
  operator ushort() const { return p[0]; }
  operator metal::uint2() const { return metal::uint2(p[0], p[1]); }
  operator metal::uint3() const { return metal::uint3(p[0], p[1], p[2]); }
};
}  // namespace
"""

ATTRIBUTE = r"\[\[(?:[^\[\]]|\[[^\]]*\])*\]\]"
INSTANTIATION = rf"template\s*{ATTRIBUTE}\s*{ATTRIBUTE}\s*decltype[^;]*;"
FUNCTION_CONSTANT = (
    r"\bconstant\s+(?P<type>[\w:]+)\s+(?P<name>\w+)\s*"
    r"\[\[\s*function_constant\(\d+\)\s*\]\]\s*;"
)
DECLARATOR = r"\w+\s*(?:\[[^;\]]*\]\s*)*"
THREADGROUP_VARIABLE = (
    r"(?<=[;{}])(?P<space>\s*)threadgroup\s+(?P<type>[\w:]+(?:\s*<[^;{}()]*>)?)\s+"
    rf"(?P<names>{DECLARATOR}(?:,\s*{DECLARATOR})*);"
)
# One per address space; on the CPU, where there is one space, `thread` stands for all.
ADDRESS_SPACE_SPECIALIZATION = (
    r"template <typename T>\s*struct \w+<(?:device|constant|threadgroup) T\*>\s*\{[^}]*\};"
)
THREADGROUP_POINTER = r"threadgroup\s+(?:(?:const|volatile)\s+)*[\w:]+(?:\s*<[\w\s,:]*>)?\s*[*&]"


class TranslationError(Exception):
    """The kernel uses something this emulator does not know."""


@dataclass(frozen=True)
class Buffer:
    """A buffer parameter of a kernel."""

    name: str
    writable: bool


@dataclass(frozen=True)
class Translation:
    """C++ with an entry function `msl_entry`, and the buffers it expects, in order."""

    source: str
    buffers: tuple[Buffer, ...]


def inline_includes(source: str, seen: set[str] | None = None) -> str:
    """Replaces `#include "..."` by the file, from MLX's headers or by absolute path, once each."""
    seen = set() if seen is None else seen

    def text_of(match: re.Match[str]) -> str:
        path = MLX_INCLUDE / match[1]
        if str(path) in seen:
            return ""
        seen.add(str(path))
        if path.name in REPLACED_HEADERS and path.is_relative_to(MLX_INCLUDE):
            return REPLACED_HEADERS[path.name]
        return f'#line 1 "{path.name}"\n' + inline_includes(path.read_text(), seen)

    source = re.sub(r'^\s*#\s*include\s+"([^"]+)"[^\n]*', text_of, source, flags=re.M)
    return re.sub(r"^\s*#\s*(?:include\s*<metal|pragma once)[^\n]*", "", source, flags=re.M)


def preprocess(source: str) -> str:
    """Expands the kernel's macros and drops comments: what is left is the language alone."""
    command = [str(find_clang()), "-E", "-x", "c++", "-undef", "-nostdinc", "-w"]
    command += ["-D__METAL_VERSION__=310", "-D__METAL__=1", "-"]
    done = subprocess.run(command, input=source, text=True, capture_output=True)
    if done.returncode:
        raise TranslationError(done.stderr)
    return done.stdout.replace("<stdin>", "kernel.metal")


def split_top_level(text: str) -> list[str]:
    """Splits at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def matching(text: str, start: int) -> int:
    """The index just behind the bracket that closes the one at `start`."""
    pairs = {"(": ")", "{": "}"}
    opening, closing, depth = text[start], pairs[text[start]], 0
    for i in range(start, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return i + 1
    raise TranslationError("unbalanced brackets")


def find_kernel(source: str, name: str) -> tuple[str, str]:
    """The parameter list and the body of kernel `name`."""
    match = re.search(rf"\bvoid\s+{re.escape(name)}\s*(?=\()", source)
    if match is None:
        raise TranslationError(f"there is no kernel {name}")
    end = matching(source, match.end())
    body = source.index("{", end)
    return source[match.end() + 1 : end - 1], source[body : matching(source, body)]


def _arguments(parameters: str) -> tuple[list[str], list[Buffer]]:
    arguments: list[str] = []
    buffers: list[Buffer] = []
    for parameter in split_top_level(parameters):
        match = re.search(r"(\w+)\s*\[\[\s*(\w+)", parameter)
        if match is None:
            raise TranslationError(f"a kernel parameter without an attribute: {parameter}")
        name, attribute = match.groups()
        declaration = parameter[: match.start()]
        if attribute == "buffer":
            kind = "MslReference" if "&" in declaration else "MslPointer"
            arguments.append(f"{kind}{{msl::arguments[{len(buffers)}]}}")
            buffers.append(Buffer(name, not re.search(r"\b(const|constant)\b", declaration)))
        elif attribute in BUILTINS:
            arguments.append(BUILTINS[attribute])
        else:
            raise TranslationError(f"unknown parameter attribute [[{attribute}]]")
    return arguments, buffers


def _shared_variables(match: re.Match[str]) -> str:
    text = ""
    for declarator in split_top_level(match["names"]):
        name, dimensions = re.fullmatch(r"(\w+)\s*(.*)", declarator, re.S).groups()  # type: ignore[union-attr]
        text += f"typedef {match['type']} {name}_type {dimensions}; "
        text += f"MSL_THREADGROUP({name}_type, {name}) "
    return match["space"] + " ".join(text.split()) + "\n" * match["names"].count("\n")


def rewrite_threadgroup_variables(source: str) -> str:
    """Makes threadgroup variables shared.

    Raises TranslationError for a use of `threadgroup` that is neither a declaration it understands
    nor a pointer: such a variable would silently become private to each lane.
    """
    source = re.sub(THREADGROUP_VARIABLE, _shared_variables, source)
    for match in re.finditer(r"\bthreadgroup\b", source):
        if not re.match(THREADGROUP_POINTER, source[match.start() :]):
            line = source[match.start() :].split("\n")[0]
            raise TranslationError(f"cannot rewrite this use of threadgroup: {line.strip()}")
    return source


def translate(
    source: str,
    kernel: str,
    template_arguments: str = "",
    function_constants: Mapping[str, object] | None = None,
) -> Translation:
    """Translates one instantiation of one kernel; `template_arguments` is text, as in C++."""
    constants = function_constants or {}
    source = preprocess(inline_includes(source))
    arguments, buffers = _arguments(find_kernel(source, kernel)[0])
    source = re.sub(
        FUNCTION_CONSTANT,
        lambda m: f"static constexpr {m['type']} {m['name']} = {constants.get(m['name'], 0)};",
        source,
    )
    source = re.sub(INSTANTIATION, "", source)
    source = re.sub(ATTRIBUTE, "", source)
    source = re.sub(ADDRESS_SPACE_SPECIALIZATION, "", source)
    source = rewrite_threadgroup_variables(source)
    call = kernel + (f"<{template_arguments}>" if template_arguments else "")
    entry = f'extern "C" MSL_MACHINERY void msl_entry() {{ {call}({", ".join(arguments)}); }}'
    unit = ['#include "metal_stdlib"', "using namespace metal;", source, VECTOR_ARGUMENT, entry, ""]
    return Translation("\n".join(unit), tuple(buffers))
