"""Set before any test module is imported: where compiled kernels are kept, Ctrl-C, and what is drawn."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from hypothesis import HealthCheck, settings

from caldrix_protocol.address import cache_directory
from caldrixd.lanes.drivers.compiler import worker_environment

# The directory that workers use too: its name is a digest of the kernel sources, so it is never stale.
KERNEL_CACHE = Path(cache_directory(os.environ))
os.environ.update(worker_environment(KERNEL_CACHE))

# A shell starts what it runs in the background with SIGINT ignored, and programs inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in each run, however long one takes: a machine with other work to do is no failure.
settings.register_profile(
    "caldrix", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("caldrix")
