"""The same bits from code for AVX2 as from code for this machine, in a process compiled for each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from caldrixd.lanes.drivers.compiler import worker_environment
from caldrixd.lanes.drivers.cpu import cpu_flags
from tests.conftest import KERNEL_CACHE
from tests.support import models

ROOT = models.DATA.parents[1]
CODE = """
import hashlib
import numpy as np
from caldrix_kernels.linear import numba_cpu
from caldrixd.lanes import cpu
from caldrixd.lanes.lane import Rows
from tests.support import models

run = cpu.load(*models.opened(models.tiny("tiny-qwen2")), threads=2, report=lambda code, fields: None)
slot, ids = run.allocate(256), [int(i) for i in np.random.default_rng(3).integers(0, 512, 200)]
logits = run.step(Rows([slot] * 200, range(200), ids, range(200)), threads=2).values
print(numba_cpu.WIDE, hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest())
run.close()
"""


def digest(**environment: str) -> list[str]:
    paths = os.pathsep.join(str(ROOT / part) for part in ("protocol", "kernels", "."))
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.skipif("avx512f" not in cpu_flags(), reason="this CPU has no AVX-512 to compare with")
def test_avx2_and_avx512_give_the_same_bits() -> None:
    wide, narrow = (digest(**worker_environment(KERNEL_CACHE, isa)) for isa in ("native", "x86-64-v3"))
    assert (wide[0], narrow[0]) == ("True", "False")
    assert wide[1] == narrow[1]
