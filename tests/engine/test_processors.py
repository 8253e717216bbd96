"""The same logits and seeds give the same tokens whatever vector instructions numpy has on a processor.

Run as a program, this file prints a digest of weights and tokens.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from caldrixd.engine.sampling import Sampling, pick
from caldrixd.engine.weights import softmax

ROOT = Path(__file__).parents[2]
KNOBS = (
    Sampling(0.7, seed=1),
    Sampling(1.0, top_p=0.95, seed=2),
    Sampling(1.3, 500, 0.9, 0.02, 1.2, 3),
)
DISPATCHED = "from numpy._core._multiarray_umath import __cpu_dispatch__ as names; print(*names)"


def digest() -> str:
    found = hashlib.sha256()
    rng = np.random.default_rng(5)
    for size in (50, 5000, 50_001):
        logits = rng.normal(0, 4, size).astype(np.float32)
        found.update(softmax(logits.astype(np.float64), 0.7).tobytes())
        tokens = [pick(logits, range(count), sampling) for sampling in KNOBS for count in range(1, 20)]
        found.update(repr(tokens).encode())
    return found.hexdigest()


def run(*arguments: str, disabled: str = "") -> str:
    """What Python prints where numpy uses none of the `disabled` features."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("protocol", "kernels", "."))
    environment = {**os.environ, "PYTHONPATH": paths, "NPY_DISABLE_CPU_FEATURES": disabled}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_no_instruction_set_changes_a_token() -> None:
    names = run("-c", DISPATCHED).split()
    assert names
    here = digest()
    assert run(__file__) == here
    assert run(__file__, disabled=" ".join(names)) == here


if __name__ == "__main__":
    sys.stdout.write(digest())
