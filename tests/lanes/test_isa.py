"""The same bits from code for AVX2 as from code for this machine, in a process compiled for each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from caldrixd.lanes.drivers.cpu import cpu_flags
from tests.support import models

ROOT = models.DATA.parents[1]
AVX2 = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+movbe,+sse3,+ssse3,+sse4.1,+sse4.2"
CODE = """
import hashlib
import numpy as np
from caldrix_kernels.linear import numba_cpu
from caldrixd.lanes import cpu
from caldrixd.lanes.lane import Rows
from tests.support import models

run = cpu.load(*models.opened(models.tiny("tiny-qwen2")), threads=2, report=lambda code, fields: None)
slot, ids = run.allocate(256), [int(i) for i in np.random.default_rng(3).integers(0, 512, 200)]
logits = run.step(Rows([slot] * 200, range(200), ids, range(200)), threads=2)
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
    wide, narrow = digest(), digest(NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=AVX2)
    assert (wide[0], narrow[0]) == ("True", "False")
    assert wide[1] == narrow[1]
