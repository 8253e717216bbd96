"""Whether a model fits into memory: weights, state and workspace against what is free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from caldrix_protocol.refusals import Refused
from caldrixd.plan import memory
from caldrixd.plan.plan import Plan

MIB = 1 << 20
# Interpreter, libraries and compiled kernels of a worker.
PROCESS_BYTES = 256 * MIB
STEP_ROWS = 512


def check(plan: Plan, weight_bytes: int, ctx: int, available_bytes: int, *, model: str) -> None:
    """Refused "run/memory" (with the largest ctx that would fit) or "run/memory-weights"."""
    needed = PROCESS_BYTES + memory.cost(plan, weight_bytes, ctx=ctx, max_rows=STEP_ROWS).total
    if needed <= available_bytes:
        return
    free = available_bytes // MIB
    left = available_bytes - PROCESS_BYTES
    largest = memory.largest_ctx(plan, weight_bytes, free=left, max_rows=STEP_ROWS)
    if largest == 0:
        fixed = needed - plan.kv_bytes(ctx)
        raise Refused("run/memory-weights", model=model, needed=-(-fixed // MIB), free=free)
    raise Refused("run/memory", model=model, needed=-(-needed // MIB), free=free, ctx=largest)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still use: free system memory, lowered by every cgroup limit above it.

    `root` is where /proc and /sys are found.
    """
    candidates = [_system_bytes(root / "proc/meminfo")]
    candidates += list(_cgroup_bytes(root))
    return max(0, min(candidates))


def _system_bytes(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text("ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_bytes(root: Path) -> Iterator[int]:
    """What each cgroup v2 from this process's own up to the root leaves free; reclaimable cache is free."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        if line.startswith("0::/"):
            own = mount / line.removeprefix("0::/")
            for group in (own, *own.parents):
                if group == mount.parent:
                    break
                free = _group_bytes(group)
                if free is not None:
                    yield free


def _group_bytes(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text("ascii").strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text("ascii"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
        return int(limit) - used + int(statistics.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
