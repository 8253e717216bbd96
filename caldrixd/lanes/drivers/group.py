"""Runs a program together with whatever it starts: all of it ends at a deadline, and with this process.

A compiler is a driver that runs other programs; who kills the driver alone leaves those behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

# Reads the end of file that comes when its starter ends, in whatever way, and kills its process group.
WATCH = ("/bin/sh", "-c", "read -r _; kill -s KILL 0")


def run(
    command: Sequence[str], environment: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[bytes]:
    """The status and output of a program that works in `/` and reads nothing.

    subprocess.TimeoutExpired after `seconds`; OSError when it cannot be started.
    """
    with (
        subprocess.Popen(WATCH, stdin=subprocess.PIPE, env={}, process_group=0, cwd="/") as watch,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            cwd="/",
            process_group=watch.pid,
        ) as process,
    ):
        try:
            output, errors = process.communicate(timeout=seconds)
        finally:
            os.killpg(watch.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
