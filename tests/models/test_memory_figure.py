"""What is said of a model's memory, against the peak of a process that loads it and fills its context."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caldrixd.architectures import FAMILIES
from caldrixd.handlers.estimate import guessed, needs, stored
from caldrixd.lanes.drivers.compiler import worker_environment
from caldrixd.models import gate
from caldrixd.models.files import weight_files
from caldrixd.plan.plan import Plan
from tests.support.models import TINY, opened, smollm2, tiny

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
    formats = stored(spec, plan, directory)
    return needs(plan, formats, "cpu", threads=0, arithmetic=arithmetic).peak(ctx)


def check(directory: Path, arithmetic: str, environment: dict[str, str]) -> None:
    """The figure is within 5 % or 5 MB at each length."""
    lengths = [ctx for ctx in LENGTHS if ctx <= gate.read_spec(directory).max_context]
    command = [sys.executable, "-m", "tests.support.peaks", str(directory), arithmetic, *map(str, lengths)]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    for ctx, peak in zip(lengths, map(int, run.stdout.split()), strict=True):
        assert predicted(directory, ctx, arithmetic) == pytest.approx(peak, rel=0.05, abs=5e6), ctx


@pytest.mark.parametrize("name", TINY)
def test_the_size_of_the_files_is_enough_where_all_weights_are_alike(name: str) -> None:
    spec = gate.read_spec(tiny(name))
    plan = FAMILIES[spec.architecture].build(spec)
    size = sum((tiny(name) / file).stat().st_size for file in weight_files(tiny(name)))
    assert peak(plan, guessed(plan, size)) == peak(plan, stored(spec, plan, tiny(name)))


def peak(plan: Plan, formats: dict[str, str]) -> int:
    return needs(plan, formats, "cpu", threads=1, arithmetic="f32").peak(256)


def rewritten(directory: Path, copy: Path, float32: tuple[str, ...] = (), odd: bool = False) -> Path:
    """A copy of a bf16 model that has some of its matrices in float32, or all at an odd address."""
    tensors = opened(directory)[1]
    header: dict[str, Any] = {}
    data, place = [], 0
    for name, tensor in tensors.items():
        dtype, part = tensor.dtype, tensor.data
        if name.endswith(tuple(f"{part}.weight" for part in float32)):
            dtype, part = "F32", (part.view(np.uint16).astype(np.uint32) << 16).view(np.uint8)
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": (place, place + part.size)}
        data.append(part.tobytes())
        place += part.size
    shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    start = json.dumps(header).encode()
    start += b" " * (-len(start) % 8 + odd)
    with open(copy / "model.safetensors", "wb") as file:
        file.write(len(start).to_bytes(8, "little") + start)
        file.writelines(data)
    return copy


def mixed(directory: Path, copy: Path) -> Path:
    return rewritten(directory, copy, ("embed_tokens", "k_proj", "o_proj", "up_proj", "mlp.gate"))


@pytest.mark.parametrize("name", TINIES)
def test_of_tiny_models(name: str, environment: dict[str, str]) -> None:
    check(tiny(name), "f32", environment)


@pytest.mark.parametrize("arithmetic", ["f32", "bf16"])
def test_of_the_demo_model(arithmetic: str, environment: dict[str, str]) -> None:
    check(smollm2(), arithmetic, environment)


@pytest.mark.slow
def test_of_a_model_in_two_formats(tmp_path: Path, environment: dict[str, str]) -> None:
    check(mixed(smollm2(), tmp_path / "mixed"), "f32", environment)


def test_of_a_model_whose_file_has_no_number_where_kernels_could_read_it(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    check(rewritten(smollm2(), tmp_path / "odd", odd=True), "f32", environment)


def test_two_formats_are_both_counted(tmp_path: Path) -> None:
    name = "tiny-qwen3-moe"
    spec = gate.read_spec(tiny(name))
    plan = FAMILIES[spec.architecture].build(spec)
    copy = mixed(tiny(name), tmp_path / "mixed")
    one, two = (stored(spec, plan, directory) for directory in (tiny(name), copy))
    every = dict.fromkeys(one, "F32")
    assert set(two.values()) == {"BF16", "F32"}
    assert peak(plan, one) < peak(plan, two) < peak(plan, every)
