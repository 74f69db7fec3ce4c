"""Counts the arithmetic a kernel does, by marking every basic block of its LLVM code.

The compiler's output is text in which a function is a list of basic blocks, each a run of
instructions without a branch. A call to `msl_block(n)` at the head of each block counts how often
it runs; what is in it is known. Only code instrumented for checking is marked: the kernel's own.
"""

import re
from collections import Counter

# What an instruction is counted as.
KINDS = {
    "float add or multiply": r"= (?:fadd|fsub|fmul)\b",
    "float multiply-add": r"@llvm\.(?:fmuladd|fma)\.",
    "float divide": r"= fdiv\b",
    "convert": r"= (?:sitofp|uitofp|fptosi|fptoui|fpext|fptrunc)\b",
    "exp2": r"@(?:llvm\.exp2\.|exp2f\b)",
    "exp": r"@(?:llvm\.exp\.|expf\b)",
    "integer": r"= (?:add|sub|mul|and|or|xor|shl|lshr|ashr|udiv|urem|sdiv|srem)\b",
}
PATTERN = re.compile("|".join(f"(?P<k{i}>{p})" for i, p in enumerate(KINDS.values())))


def instrument(llvm: str) -> tuple[str, list[Counter[str]]]:
    """Marks the basic blocks; returns the new text and the arithmetic in each block, by number."""
    checked = set(re.findall(r"^attributes (#\d+) = \{[^}]*\bsanitize_thread\b", llvm, re.M))
    names = list(KINDS)
    blocks: list[Counter[str]] = []
    lines: list[str] = []
    inside = at_head = False
    for line in llvm.split("\n"):
        if line.startswith("define "):
            inside = at_head = bool(checked.intersection(re.findall(r"#\d+", line)))
        elif line == "}":
            inside = at_head = False
        elif inside and re.match(r"[\w.\"$-]+:", line):
            at_head = True
        elif at_head and line.strip() and not re.match(r"\s+%\S+ = phi ", line):
            lines.append(f"  call void @msl_block(i32 {len(blocks)})")
            blocks.append(Counter())
            at_head = False
        if inside and not at_head and (match := PATTERN.search(line)):
            blocks[-1][names[int(str(match.lastgroup)[1:])]] += 1
        lines.append(line)
    return "\n".join(lines) + "\ndeclare void @msl_block(i32)\n", blocks
