"""Which code a worker of the CPU lane runs, and from where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from caldrix_protocol.refusals import Refused
from caldrixd.lanes.drivers import cpu
from caldrixd.lanes.drivers.compiler import KERNEL_CACHE, worker_environment
from caldrixd.lanes.lane import Variant
from caldrixd.lanes.variant import settle
from tests.lanes.test_choose import NO_COMPILER, V3, V4, environment, executable

ROOT = Path(__file__).parents[2]


@pytest.fixture
def v4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset(V4))


@pytest.fixture
def bin_with_cc(tmp_path: Path) -> str:
    return str(executable(tmp_path / "bin/cc").parent)


@pytest.mark.usefixtures("v4")
@pytest.mark.parametrize(
    ("isa", "settled"),
    [("native", "native"), ("x86-64-v4", "native"), ("x86-64-v3", "x86-64-v3"), ("x86-64-v2", "x86-64-v2")],
)
def test_a_level_has_one_name(isa: str, settled: str) -> None:
    assert settle(isa, "auto", environment()) == Variant(settled, "auto")


def test_a_level_the_host_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset(V3))
    assert settle("x86-64-v3", "auto", environment()).isa == "native"
    with pytest.raises(Refused) as caught:
        settle("x86-64-v4", "auto", environment())
    assert caught.value.text == "--cpu-isa x86-64-v4: this host has x86-64-v3 only"


@pytest.mark.usefixtures("v4")
@pytest.mark.parametrize(
    ("numba", "cc", "wanted", "settled"),
    [
        (True, False, "auto", "auto"),
        (True, True, "auto", "auto"),
        (True, False, "numba", "numba"),
        (True, True, "c", "c"),
        (False, True, "auto", "c"),
        (False, True, "c", "c"),
    ],
)
def test_kernels_are_settled(
    monkeypatch: pytest.MonkeyPatch, bin_with_cc: str, numba: bool, cc: bool, wanted: str, settled: str
) -> None:
    monkeypatch.setattr(cpu, "find_numba", lambda: numba)
    found = environment(PATH=bin_with_cc if cc else "")
    assert settle("native", wanted, found) == Variant("native", settled)


@pytest.mark.usefixtures("v4")
@pytest.mark.parametrize(
    ("numba", "wanted", "text"),
    [
        (True, "c", NO_COMPILER),
        (False, "c", NO_COMPILER),
        (False, "auto", NO_COMPILER),
        (False, "numba", "the CPU lane cannot use numba: No module named 'numba'"),
    ],
)
def test_kernels_that_nothing_can_compile(
    monkeypatch: pytest.MonkeyPatch, numba: bool, wanted: str, text: str
) -> None:
    monkeypatch.setattr(cpu, "find_numba", lambda: numba)
    with pytest.raises(Refused) as caught:
        settle("native", wanted, environment(PATH=""))
    assert caught.value.text == text


def test_native_leaves_the_processor_to_numba(tmp_path: Path) -> None:
    native, v3, v2 = (worker_environment(tmp_path, isa) for isa in ("native", "x86-64-v3", "x86-64-v2"))
    assert native.keys() == {"NUMBA_CACHE_DIR", KERNEL_CACHE}
    assert len({found["NUMBA_CACHE_DIR"] for found in (native, v3, v2)}) == 3
    assert {found[KERNEL_CACHE] for found in (native, v3, v2)} == {str(tmp_path / "kernels")}
    assert "+fma" in v3["NUMBA_CPU_FEATURES"].split(",")
    assert "+fma" not in v2["NUMBA_CPU_FEATURES"].split(",")
    assert "avx512" not in v3["NUMBA_CPU_FEATURES"]


# Loads kernels with a numba that is `broken`; prints their name and how it ended, and the log to stderr.
LOAD = """
import logging, os, sys
from pathlib import Path
from caldrix_protocol.refusals import Refused
from caldrixd.lanes.lane import Variant
from caldrixd.lanes.variant import load_kernels
logging.basicConfig(level=logging.WARNING)
try:
    print(load_kernels(Variant(sys.argv[1], sys.argv[2]), os.environ, lambda code, fields: None).name)
except Refused as refused:
    print(refused.text)
"""


def loaded(isa: str, kernels: str, tmp_path: Path, *, broken: str = "", path: str) -> tuple[str, str]:
    """What was printed, and the log."""
    if broken:
        (tmp_path / "numba.py").write_text(broken)
    paths = os.pathsep.join([str(tmp_path), *(str(ROOT / part) for part in ("protocol", "kernels", "."))])
    done = subprocess.run(
        [sys.executable, "-c", LOAD, isa, kernels],
        env=worker_environment(tmp_path, isa) | {"PYTHONPATH": paths, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip(), done.stderr


BROKEN = "raise ImportError('needs another numpy')"


def test_auto_takes_c_where_numba_fails(tmp_path: Path) -> None:
    name, log = loaded("x86-64-v2", "auto", tmp_path, broken=BROKEN, path=os.environ["PATH"])
    assert name == "C x86-64-v2"
    assert "numba cannot be used: ImportError: needs another numpy" in log


def test_numba_alone_is_refused_where_it_fails(tmp_path: Path) -> None:
    words = "the CPU lane cannot use numba: ImportError: needs another numpy"
    assert loaded("native", "numba", tmp_path, broken=BROKEN, path=os.environ["PATH"]) == (words, "")


def test_where_numba_fails_and_cc_lacks(tmp_path: Path) -> None:
    assert loaded("native", "auto", tmp_path, broken=BROKEN, path="")[0] == NO_COMPILER
