"""What this process may use of its host: CPUs and memory, cgroup limits respected."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 reports "no limit" as a huge number


def cpus_granted() -> int:
    """CPUs by affinity mask, limited by the cgroup's CPU quota (v2 or v1), rounded up, at least 1."""
    granted = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return max(1, min(granted, -int(-quota // 1)) if quota is not None else granted)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. ``total`` is the machine's memory or the cgroup's limit, whichever is less."""

    total: int
    available: int  # can still be had without swapping
    own: int  # held by this process now

    @property
    def used_by_others(self) -> int:
        return max(0, self.total - self.available - self.own)


def host_memory() -> HostMemory:
    """Read /proc/meminfo, /proc/self/statm and the cgroup's memory controller."""
    machine = _meminfo()
    total, available = machine["MemTotal"], machine.get("MemAvailable", machine["MemFree"])
    limit, used = _cgroup_memory()
    if limit is not None and limit < total:
        total = limit
        available = min(available, max(0, limit - used))
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return HostMemory(total, available, resident_pages * os.sysconf("SC_PAGE_SIZE"))


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}


def _cgroup_memory() -> tuple[int | None, int]:
    """(limit, bytes in use that can not be reclaimed); limit None = none."""
    for limit_file, usage_file, stat_file, cache_key in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        limit = _read(_CGROUP / limit_file)
        if limit is None:
            continue
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None, 0
        stat = dict(line.split() for line in (_read(_CGROUP / stat_file) or "").splitlines())
        return int(limit), max(0, int(_read(_CGROUP / usage_file) or 0) - int(stat.get(cache_key, 0)))
    return None, 0


def _cpu_quota() -> float | None:
    """CPUs per period that the cgroup grants; None = no quota."""
    both = _read(_CGROUP / "cpu.max")
    if both is not None:
        quota, period = both.split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _read(_CGROUP / "cpu/cpu.cfs_quota_us"), _read(_CGROUP / "cpu/cpu.cfs_period_us")
    if quota_us is None or period_us is None or int(quota_us) <= 0:
        return None
    return int(quota_us) / int(period_us)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
