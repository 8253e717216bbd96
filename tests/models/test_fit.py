"""Memory: what a model needs, and what is free."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.models import fit
from caldrixd.plan.memory import Cost

MIB = 1 << 20


def needs(weights: int, *, per_token: int = 100, passing: int = 0) -> fit.Needs:
    """A model of many tokens that memory alone limits."""
    return fit.Needs(1000, 10**9, lambda ctx: Cost(weights, passing, per_token * ctx, 0))


def test_a_worker_is_counted_with_its_vocabulary_and_what_its_lane_holds() -> None:
    fixed = fit.PROCESS_BYTES + fit.LOADED_BYTES + 1000 * (fit.TOKEN_BYTES + fit.ENCODER_TOKEN_BYTES)
    assert needs(5 * MIB).total(70) == fixed + 5 * MIB + 7000
    assert needs(5 * MIB, passing=MIB).total(70) == fixed + 6 * MIB


@pytest.mark.parametrize("passing", [0, 200 * MIB])
def test_the_largest_context_named_is_the_largest_that_fits(passing: int) -> None:
    model, free = needs(100 * MIB, passing=passing), 600 * 10**6
    with pytest.raises(Refused) as caught:
        fit.check(model, 10**8, free, model="tiny")
    refused = caught.value
    assert refused.code == "run/memory"
    assert (refused.fields["model"], refused.fields["free"]) == ("tiny", 600)
    assert int(refused.fields["needed"]) > 600
    largest = int(refused.fields["ctx"])
    fit.check(model, largest, free, model="tiny")
    with pytest.raises(Refused):
        fit.check(model, largest + 1, free, model="tiny")


def test_the_largest_context_is_no_longer_than_the_model_was_made_for() -> None:
    model = fit.Needs(10, 4096, lambda ctx: Cost(0, 0, ctx, 0))
    assert model.largest_ctx(1 << 40) == 4096
    assert model.largest_ctx(model.total(77)) == 77
    assert model.largest_ctx(0) == 0


def test_weights_that_do_not_fit_at_all() -> None:
    with pytest.raises(Refused) as caught:
        fit.check(needs(160 << 30), 2048, 16 << 30, model="huge")
    assert caught.value.code == "run/memory-weights"
    assert int(caught.value.fields["needed"]) >= (160 << 30) // 10**6
    assert caught.value.fields["free"] == (16 << 30) // 10**6


def test_one_more_conversation_needs_its_state_alone() -> None:
    def state(ctx: int) -> int:
        return MIB + 1000 * ctx

    fit.check_further(state, 1000, 2_048_576, model="tiny")
    with pytest.raises(Refused) as caught:
        fit.check_further(state, 1001, 2_048_576, model="tiny")
    assert caught.value.text == (
        "tiny is loaded, and one more conversation needs 3 MB of memory of which 2 MB are free; the "
        "largest --ctx that would fit is 1000"
    )
    with pytest.raises(Refused) as caught:
        fit.check_further(state, 1, 0, model="tiny")
    assert caught.value.fields["ctx"] == 0


def test_what_a_process_has_for_itself(tmp_path: Path) -> None:
    assert MIB < fit.anonymous_memory(os.getpid()) < 1 << 40
    assert fit.anonymous_memory(7, tmp_path) == 0


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
