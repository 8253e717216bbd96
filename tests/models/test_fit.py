"""Memory: what a model needs, and what is free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.architectures import FAMILIES
from caldrixd.models import fit, gate
from caldrixd.plan.plan import Plan
from tests.models.conftest import ModelDirectory

MIB = 1 << 20


@pytest.fixture
def plan(model: ModelDirectory) -> Plan:
    """A tiny plan that memory alone limits."""
    spec = replace(gate.read_spec(model.path), max_context=10**9)
    return FAMILIES[spec.architecture].build(spec)


def test_the_largest_context_named_is_the_largest_that_fits(plan: Plan) -> None:
    free = 600 * MIB
    with pytest.raises(Refused) as caught:
        fit.check(plan, 100 * MIB, 10**8, free, model="tiny")
    refused = caught.value
    assert refused.code == "run/memory"
    assert (refused.fields["model"], refused.fields["free"]) == ("tiny", 600)
    assert int(refused.fields["needed"]) > 600
    largest = int(refused.fields["ctx"])
    fit.check(plan, 100 * MIB, largest, free, model="tiny")
    with pytest.raises(Refused):
        fit.check(plan, 100 * MIB, largest + 1, free, model="tiny")


def test_weights_that_do_not_fit_at_all(plan: Plan) -> None:
    with pytest.raises(Refused) as caught:
        fit.check(plan, 160 << 30, 2048, 16 << 30, model="huge")
    assert caught.value.code == "run/memory-weights"
    assert int(caught.value.fields["needed"]) >= 160 << 10
    assert caught.value.fields["free"] == 16 << 10


class Machine:
    """A made-up /proc and /sys."""

    def __init__(self, root: Path, available_kib: int, cgroup: str = "0::/a/b\n") -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:  {available_kib} kB\n")
        (root / "proc/self/cgroup").write_text(cgroup)

    def limit(self, group: str, most: str, used: int, cache: int = 0) -> None:
        path = self.root / "sys/fs/cgroup" / group
        path.mkdir(parents=True, exist_ok=True)
        (path / "memory.max").write_text(f"{most}\n")
        (path / "memory.current").write_text(f"{used}\n")
        (path / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")


def test_free_memory_is_the_systems_without_limits(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 5000)
    assert fit.available_memory(tmp_path) == 5000 * 1024
    machine.limit("a/b", "max", 10)
    assert fit.available_memory(tmp_path) == 5000 * 1024


def test_the_tightest_cgroup_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 5000)
    machine.limit("a/b", "4000000", 1000000)
    assert fit.available_memory(tmp_path) == 3000000
    machine.limit("a", "3000000", 1000000, cache=500000)
    assert fit.available_memory(tmp_path) == 2500000
    machine.limit("", "1000", 2000)
    assert fit.available_memory(tmp_path) == 0


def test_damaged_files_do_not_count(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 5000, cgroup="1:memory:/x\n")
    machine.limit("x", "1000", 0)
    assert fit.available_memory(tmp_path) == 5000 * 1024
    (tmp_path / "proc/meminfo").write_text("nonsense")
    assert fit.available_memory(tmp_path) > 1 << 20


def test_this_machine_has_memory() -> None:
    assert fit.available_memory() > 16 * MIB
