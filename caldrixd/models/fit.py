"""Whether a model fits into memory: what its worker will hold at most, against what is free."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from caldrix_protocol.refusals import Refused
from caldrix_protocol.sizes import MB
from caldrixd.plan.memory import Cost

MIB = 1 << 20
# A worker before it has a model: interpreter, libraries and kernels (of which compiling takes more the first
# time), and the processes beside it.
PROCESS_BYTES = 256 * MIB
# A token of the vocabulary in the worker: its text, and its place in two tables.
TOKEN_BYTES = 300
# A token of the vocabulary in the encoder: the tokenizer's tables, and the file while it is read.
ENCODER_TOKEN_BYTES = 1000
# Stacks of threads, libraries' own memory and small objects, once there is a model.
LOADED_BYTES = 3 * MIB // 2


@dataclass(frozen=True)
class Needs:
    """What a model needs in memory; `cost` says what its lane holds at a context in tokens."""

    vocab_size: int
    max_context: int
    cost: Callable[[int], Cost]

    @property
    def vocabulary(self) -> int:
        return TOKEN_BYTES * self.vocab_size

    def peak(self, ctx: int) -> int:
        """The most bytes that its worker has beyond a worker without a model."""
        return LOADED_BYTES + self.vocabulary + self.cost(ctx).total

    @property
    def beside(self) -> int:
        """Bytes of a worker without a model, and of the processes that it starts."""
        return PROCESS_BYTES + ENCODER_TOKEN_BYTES * self.vocab_size

    def total(self, ctx: int) -> int:
        return self.beside + self.peak(ctx)

    def together(self, ctx: int, sequences: int) -> int:
        """The total with so many sequences in place of one, each with a full context."""
        cost = self.cost(ctx)
        return self.total(ctx) - cost.total + cost.together(sequences)

    def largest_ctx(self, free: int) -> int:
        """The longest context in tokens, up to the model's own, that needs at most `free` bytes; or 0."""
        return _largest(self.total, self.max_context, free)


def _largest(total: Callable[[int], int], most: int, free: int) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if total(middle) <= free:
            low = middle
        else:
            high = middle - 1
    return low


def check(needs: Needs, ctx: int, available_bytes: int, *, model: str) -> None:
    """Refused "run/memory" (with the largest ctx that would fit) or "run/memory-weights"."""
    if needs.total(ctx) > available_bytes:
        largest = needs.largest_ctx(available_bytes)
        raise refusal(model, needs.total(ctx if largest else 1), available_bytes, largest)


def check_further(state: Callable[[int], int], ctx: int, available_bytes: int, *, model: str) -> None:
    """Whether one more conversation with a loaded model fits, whose `state` is in bytes by its context.

    Refused "run/memory-further" with the largest ctx that would fit.
    """
    if state(ctx) > available_bytes:
        raise Refused(
            "run/memory-further",
            model=model,
            needed=-(-state(ctx) // MB),
            free=available_bytes // MB,
            ctx=_largest(state, ctx, available_bytes),
        )


def anonymous_memory(pid: int, root: Path = Path("/")) -> int:
    """Bytes that a process has and no file stands for; 0 where the system does not say."""
    return _kib(root / f"proc/{pid}/status", "RssAnon") or 0


def refusal(model: str, needed: int, free: int, largest_ctx: int) -> Refused:
    """Why a model that needs so many bytes does not fit; `largest_ctx` 0: not with any context."""
    sizes = {"needed": -(-needed // MB), "free": free // MB}
    if not largest_ctx:
        return Refused("run/memory-weights", model=model, **sizes)
    return Refused("run/memory", model=model, ctx=largest_ctx, **sizes)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still use: free system memory, lowered by every cgroup limit above it.

    `root` is where /proc and /sys are found.
    """
    candidates = [_system_bytes(root / "proc/meminfo")]
    candidates += list(_cgroup_bytes(root))
    return max(0, min(candidates))


def _system_bytes(meminfo: Path) -> int:
    return _kib(meminfo, "MemAvailable") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _kib(path: Path, field: str) -> int | None:
    """Bytes in a line such as "MemAvailable: 12 kB"."""
    try:
        for line in path.read_text("ascii", "replace").splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


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
