"""Writes the C++ header with Metal's vector types: constructors, operators and every swizzle.

C++ has no swizzles; `__declspec(property)`, a Clang extension, gives a member that calls functions.
"""

from collections.abc import Iterator
from itertools import product

SCALARS = {
    "bool": "bool",
    "char": "signed char",
    **{t: t for t in ("uchar", "short", "ushort", "int", "uint", "long", "ulong")},
    **{t: t for t in ("half", "float", "bfloat")},
}


def _partitions(n: int) -> Iterator[tuple[int, ...]]:
    """The ways to write n as an ordered sum: a vector is built from scalars and shorter vectors."""
    if n == 0:
        yield ()
    for first in range(1, n + 1):
        for rest in _partitions(n - first):
            yield (first, *rest)


def _constructors(n: int) -> Iterator[str]:
    yield "vec() = default;"
    splat = ", ".join(["T(s)"] * n)
    yield f"template <class S> requires detail::is_scalar<S> constexpr vec(S s) : d{{{splat}}} {{}}"
    converted = ", ".join(f"T(v.d[{i}])" for i in range(n))
    yield (
        "template <class S> requires(!std::is_same_v<S, T>) "
        f"constexpr explicit vec(const vec<S, {n}>& v) : d{{{converted}}} {{}}"
    )
    for parts in _partitions(n):
        if len(parts) == 1:
            continue
        types, arguments, values = [], [], []
        for i, size in enumerate(parts):
            if size == 1:
                types.append(f"class A{i}")
                arguments.append(f"A{i} a{i}")
                values.append(f"T(a{i})")
            else:
                arguments.append(f"vec<T, {size}> a{i}")
                values += [f"a{i}.d[{j}]" for j in range(size)]
        needs = " && ".join(f"detail::is_scalar<{t[6:]}>" for t in types)
        template = f"template <{', '.join(types)}> requires({needs}) " if types else ""
        yield f"{template}constexpr vec({', '.join(arguments)}) : d{{{', '.join(values)}}} {{}}"


def _swizzles(n: int) -> Iterator[str]:
    for letters in ("xyzw"[:n], "rgba"[:n]):
        for size in (2, 3, 4):
            for places in product(range(n), repeat=size):
                name = "".join(letters[i] for i in places)
                values = ", ".join(f"d[{i}]" for i in places)
                yield f"vec<T, {size}> get_{name}() const {{ return vec<T, {size}>({values}); }}"
                put = ""
                if len(set(places)) == size:
                    writes = " ".join(f"d[{i}] = v.d[{j}];" for j, i in enumerate(places))
                    yield f"void put_{name}(vec<T, {size}> v) {{ {writes} }}"
                    put = f", put = put_{name}"
                yield f"__declspec(property(get = get_{name}{put})) vec<T, {size}> {name};"


def _operators(n: int) -> Iterator[str]:
    for op in ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>"):
        values = ", ".join(f"T(a.d[{i}] {op} b.d[{i}])" for i in range(n))
        yield f"friend constexpr vec operator{op}(vec a, vec b) {{ return vec({values}); }}"
        yield f"vec& operator{op}=(vec b) {{ return *this = *this {op} b; }}"
    for op in ("==", "!=", "<", ">", "<=", ">=", "&&", "||"):
        values = ", ".join(f"a.d[{i}] {op} b.d[{i}]" for i in range(n))
        mask = f"vec<bool, {n}>"
        yield f"friend constexpr {mask} operator{op}(vec a, vec b) {{ return {mask}({values}); }}"
    for op in ("-", "~"):
        values = ", ".join(f"T({op}d[{i}])" for i in range(n))
        yield f"constexpr vec operator{op}() const {{ return vec({values}); }}"


def header() -> str:
    """The text of vectors.h, to be included inside namespace metal."""
    lines = ["#pragma once", "template <class T, int N> struct vec;"]
    for n in (2, 3, 4):
        names = " ".join(f"struct {{ T {', '.join(s[:n])}; }};" for s in ("xyzw", "rgba"))
        lines += [
            f"template <class T> struct alignas(sizeof(T) * {4 if n == 3 else n}) vec<T, {n}> {{",
            f"union {{ {names} T d[{n}]; }};",
            "T& operator[](int i) { return d[i]; }",
            "constexpr const T& operator[](int i) const { return d[i]; }",
            *_constructors(n),
            *_swizzles(n),
            *_operators(n),
            "};",
        ]
    for name, scalar in SCALARS.items():
        lines += [f"using {name}{n} = vec<{scalar}, {n}>;" for n in (2, 3, 4)]
    return "\n".join(lines) + "\n"
