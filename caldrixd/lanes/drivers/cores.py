"""How many threads are worth starting on this machine."""

from __future__ import annotations

import os
from pathlib import Path

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def default_threads() -> int:
    """One thread a physical core this process may use, within its cgroup's quota; at least 1.

    Two hardware threads of a core share its multipliers: a second one brings a matrix product nothing.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota()))


def _siblings(cpu: int) -> str:
    try:
        return Path(_SIBLINGS.format(cpu)).read_text("ascii").strip()
    except OSError:
        return str(cpu)


def _quota() -> int:
    try:
        quota, period = _QUOTA.read_text("ascii").split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return os.cpu_count() or 1
