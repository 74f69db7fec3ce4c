"""How many cores this process may use."""

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """The cores that affinity allows, or fewer if the control group's quota is smaller."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _quota(_CGROUPS, _own_group())
    return max(1, min(cores, round(quota))) if quota else cores


def _own_group() -> str:
    """This process's path in the unified hierarchy (cgroups(7))."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")


def _quota(root: Path, group: str) -> float | None:
    """The smallest quota in cores from `group` up to `root` (version 2), or version 1's; or None.

    Source: the kernel's admin-guide/cgroup-v2 (cpu.max) and scheduler/sched-bwc (cpu.cfs_*).
    """
    quotas = []
    folder = root / group
    for place in (folder, *folder.parents):
        if place.is_relative_to(root):
            quotas.append(_ratio(*_words(place / "cpu.max")))
    quotas.append(
        _ratio(*_words(root / "cpu/cpu.cfs_quota_us"), *_words(root / "cpu/cpu.cfs_period_us"))
    )
    return min((quota for quota in quotas if quota), default=None)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _ratio(quota: str = "", period: str = "") -> float | None:
    """None where there is no limit ("max", -1) or nothing to read."""
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return None
    return int(quota) / int(period)
