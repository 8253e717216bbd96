"""What is said of a model's memory, against the peak of a process that loads it and fills its context."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from caldrixd.architectures import FAMILIES
from caldrixd.handlers.estimate import needs
from caldrixd.lanes.drivers.compiler import worker_environment
from caldrixd.models import gate
from caldrixd.models.files import weight_files
from tests.support.models import TINY, smollm2, tiny

LENGTHS = (256, 2048)
# One of each kind; the others take as long again.
ALWAYS = {"tiny-llama", "tiny-qwen3-moe", "tiny-qwen3_5"}
TINIES = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in TINY]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """A worker's, with the user's cache of compiled kernels."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "caldrix"
    return {**os.environ, **worker_environment(cache)}


def predicted(directory: Path, ctx: int, arithmetic: str) -> int:
    spec = gate.read_spec(directory)
    plan = FAMILIES[spec.architecture].build(spec)
    weight_bytes = sum((directory / name).stat().st_size for name in weight_files(directory))
    return needs(plan, weight_bytes, "cpu", threads=0, arithmetic=arithmetic).peak(ctx)


def check(directory: Path, arithmetic: str, environment: dict[str, str]) -> None:
    """The figure is within 5 % or 5 MB at each length."""
    lengths = [ctx for ctx in LENGTHS if ctx <= gate.read_spec(directory).max_context]
    command = [sys.executable, "-m", "tests.support.peaks", str(directory), arithmetic, *map(str, lengths)]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    for ctx, peak in zip(lengths, map(int, run.stdout.split()), strict=True):
        assert predicted(directory, ctx, arithmetic) == pytest.approx(peak, rel=0.05, abs=5e6), ctx


@pytest.mark.parametrize("name", TINIES)
def test_of_tiny_models(name: str, environment: dict[str, str]) -> None:
    check(tiny(name), "f32", environment)


@pytest.mark.parametrize("arithmetic", ["f32", "bf16"])
def test_of_the_demo_model(arithmetic: str, environment: dict[str, str]) -> None:
    check(smollm2(), arithmetic, environment)
