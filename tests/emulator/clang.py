"""Finds the compiler the emulator needs: Clang 17 or newer, on Linux x86-64."""

import functools
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

OLDEST = 17


class ClangMissing(Exception):
    """There is no compiler that can run Metal kernels here; the message says how to get one."""


@functools.cache
def find_clang() -> Path:
    """The path of clang++: $TQCHAT_CLANG, or the newest that is installed.

    Raises ClangMissing.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise ClangMissing("the Metal emulator runs on Linux x86-64 only")
    names = [f"clang++-{version}" for version in range(30, OLDEST - 1, -1)] + ["clang++"]
    if chosen := os.environ.get("TQCHAT_CLANG"):
        names = [chosen]
    for name in names:
        if path := shutil.which(name):
            text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            version = re.search(r"clang version (\d+)", text)
            if version and int(version[1]) >= OLDEST:
                return Path(path)
    raise ClangMissing(
        f"the Metal kernels' tests need Clang {OLDEST} or newer: apt install clang-19 llvm-19, "
        "or set TQCHAT_CLANG to the path of clang++"
    )


def find_symbolizer() -> str | None:
    """llvm-symbolizer beside the compiler, which turns an address into a line of the kernel."""
    suffix = re.search(r"-\d+$", find_clang().name)
    return shutil.which("llvm-symbolizer" + (suffix[0] if suffix else ""))
