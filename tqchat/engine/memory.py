"""What this process may use on its device, and what it uses."""

import os
import resource
import sys
from pathlib import Path

import mlx.core as mx

from tqchat.engine.events import Memory
from tqchat.engine.wired import SYSTEM_RESERVE


def measure(weights: int, kv: int) -> Memory:
    """`weights` and `kv` are the engine's own sums, in bytes."""
    used, limit, free = _device()
    return Memory(weights, kv, max(0, used - weights - kv), max(0, free), limit)


def _device() -> tuple[int, int, int]:
    """Bytes this process uses, may use, and could still take."""
    info = mx.device_info()
    if mx.default_device().type == mx.gpu:
        used = mx.get_active_memory() + mx.get_cache_memory()
        total = info.get("total_memory")
        if total is not None:
            return used, int(total), int(info.get("free_memory", 0)) + mx.get_cache_memory()
        limit = int(info["max_recommended_working_set_size"])
        return used, limit, limit - mx.get_active_memory()
    used, limit = _resident(), machine_memory()
    return used, limit, min(limit - used, _available(limit))


def raised_limit(limit: int) -> int:
    """Bytes that the device's limit can be raised to: on a Mac, all but the system's reserve."""
    if not mx.metal.is_available():
        return limit
    return max(limit, machine_memory() - SYSTEM_RESERVE)


def raising(limit: int) -> str:
    """The command that raises macOS's limit, until restart."""
    return f"sudo sysctl iogpu.wired_limit_mb={limit >> 20}"


def machine_memory() -> int:
    """Bytes of memory this process may use on a CPU: the cgroup's limit or the machine's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path("/sys/fs/cgroup", name).read_text()))
        except (OSError, ValueError):
            continue
    return total


def _resident() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def _available(limit: int) -> int:
    """Bytes the system could hand out now without swapping; `limit` where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return limit
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else limit
