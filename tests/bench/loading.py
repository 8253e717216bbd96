"""What it costs to have a model: memory, packing, loading a second one. Each in a new process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.bench import fresh
from tests.bench.figures import Case, Figure, figure
from tests.bench.loaded import say
from tests.bench.targets import FILE_READ, targets

MEGABYTE = 1e6


def memory(directory: Path, case: Case) -> Iterator[Figure]:
    """The most memory of a process that reads a whole context of 2,048 tokens in float32 arithmetic."""
    found = fresh.run("memory", directory, case.threads)
    sizes = {label: [found[label] / MEGABYTE] for label in ("weights", "state")}
    peak = found["peak"] / MEGABYTE
    yield figure("peak-memory", case, [peak], sizes, unit="MB", digits=0)
    name = "peak-beside-weights-and-state"
    beside = peak - sum(size for (size,) in sizes.values())
    promised = targets(name, case, case.threads)
    yield figure(name, case, [beside], unit="MB", digits=0, targets=promised)


def load(directory: Path, case: Case) -> Iterator[Figure]:
    """The lane's load with compiled kernels and the file in the page cache, and its packing alone."""
    found = fresh.run("load", directory, case.threads)
    yield figure("load", case, [found["load"]], unit="s", digits=3)
    promised = targets("packing", case, case.threads)
    yield figure("packing", case, [found["packing"]], unit="GB/s", digits=2, targets=promised)


def second(directory: Path, case: Case) -> Iterator[Figure]:
    """The same weights as another family, loaded after this model in one process."""
    found = fresh.run("second", directory, case.threads)
    if not found:
        say("no second family: it is made of a LlamaForCausalLM without rope scaling")
        return
    name = "compiled-for-second-family"
    promised = targets(name, case, case.threads)
    yield figure(name, case, [found["compiled"]], unit="compiler passes", digits=0, targets=promised)
    if not found["from_disk"]:
        say("the file stays in the page cache, so load-second-family-from-disk is the same as without disk")
    for name, prefix in (("load-second-family", ""), ("load-second-family-from-disk", "disk_")):
        promised = targets(name, case, case.threads)
        read = {FILE_READ: [found[f"{prefix}read"]]}
        yield figure(name, case, [found[f"{prefix}load"]], read, unit="s", digits=3, targets=promised)
