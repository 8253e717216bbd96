"""Whether a model fits into memory: weights, state and workspace against what is free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from caldrix_protocol.refusals import Refused
from caldrixd.plan.plan import Plan

MIB = 1 << 20
# Interpreter, libraries and compiled kernels of a worker.
PROCESS_BYTES = 256 * MIB
STEP_ROWS = 512
# Buffers of a layer that live at the same time, in units of its widest one.
LIVE_BUFFERS = 6


def check(plan: Plan, weight_bytes: int, ctx: int, available_bytes: int, *, model: str) -> None:
    """Refused "run/memory" (with the largest ctx that would fit) or "run/memory-weights"."""
    fixed = weight_bytes + workspace_bytes(plan) + PROCESS_BYTES
    needed = fixed + plan.kv_bytes(ctx)
    if needed <= available_bytes:
        return
    free = available_bytes // MIB
    largest = max(0, available_bytes - fixed) // max(1, plan.kv_bytes(1))
    if largest == 0:
        raise Refused("run/memory-weights", model=model, needed=-(-fixed // MIB), free=free)
    raise Refused("run/memory", model=model, needed=-(-needed // MIB), free=free, ctx=largest)


def workspace_bytes(plan: Plan) -> int:
    """A bound for the buffers of one step, in float32, plus one row of logits."""
    widest = max((plan.widths[op.output] for op in plan.ops[:-1]), default=0)
    return 4 * (STEP_ROWS * LIVE_BUFFERS * widest + plan.vocab_size)


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
