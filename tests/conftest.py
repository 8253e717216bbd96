"""Set before any test module is imported: where numba keeps compiled kernels, and what Ctrl-C does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from caldrix_protocol.address import cache_directory
from caldrixd.lanes.drivers.compiler import worker_environment

# The directory that workers use too: its name is a digest of the kernel sources, so it is never stale.
KERNEL_CACHE = Path(cache_directory(os.environ))
os.environ.update(worker_environment(KERNEL_CACHE))

# A shell starts what it runs in the background with SIGINT ignored, and programs inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
