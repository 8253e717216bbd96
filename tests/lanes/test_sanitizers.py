"""The kernels in C under the address and undefined behaviour sanitizers: a report ends the child process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from caldrixd.lanes.drivers import c_compiler
from caldrixd.lanes.drivers.cpu import cpu_flags, isa_level
from tests.support import models

LEVELS = [level for level in ("x86-64-v2", "x86-64-v3") if level <= isa_level(cpu_flags())]
SANITIZED = (
    "-O1",
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)
# The memory of the lane comes from malloc here, exactly as large as asked for.
CODE = """
import sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from caldrixd.lanes import arena
from caldrixd.lanes.drivers import c_compiler
from tests.support import kernel_cases

def anonymous(_, size, flags):
    return memoryview(kernel_cases.memory((size,), np.uint8))

arena.HUGE_PAGE = 1
arena.mmap = SimpleNamespace(mmap=anonymous, MAP_PRIVATE=0, MAP_ANONYMOUS=0)
kernels = c_compiler.load(Path(sys.argv[1]))
for name in sys.argv[2:]:
    print(name, flush=True)
    if name in kernel_cases.CASES:
        if kernels.bf16_dot or name not in kernel_cases.DOT_CASES:
            kernel_cases.run(kernels, name)
    else:
        for dtype in ("f32", "bf16"):
            kernel_cases.steps(kernels, name, dtype)
print("end", flush=True)
"""


def runtime() -> Path:
    """The address sanitizer's library, which must be loaded before anything else."""
    command = ["cc", "-print-file-name=libasan.so"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()).resolve()


@pytest.fixture(
    scope="module", params=["native", *(pytest.param(level, marks=pytest.mark.slow) for level in LEVELS)]
)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp(request.param) / "kernels.so"
    flags = (*c_compiler.FLAGS, *SANITIZED, f"-march={request.param}")
    c_compiler.build("cc", flags, dict(os.environ), target)
    return target


def run(library: Path, *names: str, code: str = CODE) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(models.DATA.parents[1] / part) for part in ("protocol", "kernels", "."))
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "LD_PRELOAD": str(runtime()),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself frees little at its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, "-c", code, str(library), *names]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_every_kernel(library: Path) -> None:
    from tests.support.kernel_cases import CASES

    done = run(library, *CASES)
    assert done.stdout.splitlines() == [*CASES, "end"], done.stderr
    assert "Sanitizer" not in done.stderr


def test_whole_steps(library: Path) -> None:
    names = ("tiny-llama", "tiny-llama-odd", "tiny-qwen2-window", "tiny-qwen3-moe", "tiny-qwen3_5")
    done = run(library, *names)
    assert done.stdout.splitlines() == [*names, "end"], done.stderr
    assert "Sanitizer" not in done.stderr


def test_a_report_ends_the_child(library: Path) -> None:
    """A row that is one vector shorter than the kernel is told."""
    code = CODE + (
        "short = kernel_cases.memory((32,))\n"
        "kernel_cases.Bench(kernels, '').call(kernel_cases.at.NORM_ROW, 0, short, short, short, 48, 48, 0)\n"
        "print('not reached')\n"
    )
    done = run(library, code=code)
    assert done.stdout.splitlines() == ["end"]
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
