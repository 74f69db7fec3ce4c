"""How many threads the CPU backend starts, and what a machine without native kernels gets."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from tqchat.kernels.cpu import cores
from tqchat.kernels.select import select


def quota(root: Path, group: str, **files: str) -> float | None:
    for name, text in files.items():
        place = root / name.replace("__", "/").replace("cpu_max", "cpu.max")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return cores._quota(root, group)


def test_quota_of_version_2_is_the_smallest_up_the_tree(tmp_path: Path) -> None:
    assert quota(tmp_path, "a/b") is None
    assert quota(tmp_path, "a/b", a__b__cpu_max="max 100000\n") is None
    assert quota(tmp_path, "a/b", a__cpu_max="350000 100000\n") == 3.5
    assert quota(tmp_path, "a/b", a__b__cpu_max="400000 100000\n") == 3.5
    assert quota(tmp_path, "other") is None


def test_quota_of_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cores._quota(tmp_path, "") is None
    (folder / "cpu.cfs_quota_us").write_text("150000\n")
    assert cores._quota(tmp_path, "") == 1.5


def test_a_broken_quota_is_none(tmp_path: Path) -> None:
    assert quota(tmp_path, "a", a__cpu_max="") is None
    assert quota(tmp_path, "a", a__cpu_max="1000 0\n") is None


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 6), (2.0, 2), (1.5, 2), (0.2, 1), (64.0, 6)]
)
def test_cores_are_affinity_or_quota(
    limit: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(cores, "_quota", lambda root, group: limit)
    assert cores.usable_cores() == expected


def test_without_native_kernels_the_slow_path_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqchat.kernels.cpu.backend", None)
    backend = select(mx.float16)
    if mx.default_device().type == mx.cpu:
        assert "compiler" in backend.note
        # So slow a path hears of a stop between small chunks alone.
        assert backend.prefill_chunk <= 32
        assert backend.name == "plain MLX"


def test_threads_sleep_between_jobs_and_survive_a_fork() -> None:
    pytest.importorskip("tqchat.kernels.cpu._native", reason="the kernels are not built")
    script = """
import os, time
import numpy as np
from tqchat.kernels import Weight
from tqchat.kernels.cpu.backend import CPU
cpu = CPU(threads=3)
weight, x = Weight(np.ones((500, 64), np.float32)), np.ones((40, 64), np.float32)
assert (cpu.linear(x, weight) == 64).all()
busy = time.process_time()
time.sleep(0.5)
assert time.process_time() - busy < 0.1
if os.fork() == 0:
    os._exit(0 if (cpu.linear(x, weight) == 64).all() else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)
