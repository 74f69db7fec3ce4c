"""Finds the compiler the emulator needs: Clang 17 or newer, on Linux x86-64.

As a program: warns if there is none.
"""

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = 17
PLATFORM = ("Linux", "x86_64")


class ClangMissing(Exception):
    """There is no compiler that can run GPU kernels here; the message says how to get one."""


@functools.cache
def find_clang() -> Path:
    """The path of clang++: $TQCHAT_CLANG, or the newest that is installed.

    Raises ClangMissing.
    """
    if (platform.system(), platform.machine()) != PLATFORM:
        raise ClangMissing("the emulator of GPUs runs on Linux x86-64 only")
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
        f"the tests of GPU kernels need Clang {OLDEST} or newer: apt install clang-19 llvm-19, "
        "or set TQCHAT_CLANG to the path of clang++"
    )


def why_not() -> str:
    """Why GPU kernels cannot be emulated here; empty if they can.

    On a build server that is an error, for there nobody reads that tests were skipped.

    Raises ClangMissing, if $CI is set and a compiler is all that is missing.
    """
    try:
        find_clang()
    except ClangMissing as reason:
        if os.environ.get("CI") and (platform.system(), platform.machine()) == PLATFORM:
            raise
        return str(reason)
    return ""


def find_symbolizer() -> str | None:
    """llvm-symbolizer beside the compiler, which turns an address into a line of the kernel."""
    suffix = re.search(r"-\d+$", find_clang().name)
    return shutil.which("llvm-symbolizer" + (suffix[0] if suffix else ""))


if __name__ == "__main__":
    if reason := why_not():
        print(f"WARNING: the GPU kernels will NOT be tested: {reason}", file=sys.stderr)
