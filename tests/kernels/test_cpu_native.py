"""The native CPU kernels under the compiler's sanitizers, without Python around them."""

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels" / "cpu"
SOURCES = [HERE / "cpu_native.c", *(KERNELS / f"{n}.c" for n in ("pool", "base", "avx2", "avx512"))]


def compiler() -> list[str]:
    words = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    return words if shutil.which(words[0]) else []


@pytest.mark.parametrize(
    ("sanitizers", "threads"), [("address,undefined", ["1", "3"]), ("thread", ["3"])]
)
def test_no_kernel_oversteps_its_buffers_or_races(
    sanitizers: str, threads: list[str], tmp_path: Path
) -> None:
    if not compiler():
        pytest.skip("no C compiler")
    flags = ["-std=gnu11", "-O0", "-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    if subprocess.run(
        [*compiler(), *flags, empty, "-o", tmp_path / "empty"], check=False
    ).returncode:
        pytest.skip(f"the C compiler has no {sanitizers} sanitizer")
    program = tmp_path / "check"
    build = [*compiler(), *flags, "-pthread", f"-I{KERNELS}", *SOURCES, "-lm", "-o", program]
    subprocess.run(build, check=True)
    ran = subprocess.run([program, *threads], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "baseline, 3 threads: right" in ran.stdout or "NEON, 3 threads: right" in ran.stdout
