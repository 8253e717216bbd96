"""Benchmarks. Set before any module imports numba: where it keeps compiled kernels, the place workers use."""

import os
from pathlib import Path

from caldrix_protocol.address import cache_directory
from caldrixd.lanes.drivers.compiler import worker_environment

CACHE = Path(cache_directory(os.environ))
os.environ.update(worker_environment(CACHE))
