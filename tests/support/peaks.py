"""The peaks of a worker's memory: `python -m tests.support.peaks <directory> <arithmetic> <ctx>...`.

Prints for each context, which rise, the bytes that the process has grown by at its peak, from a worker that
has its libraries and kernels to one that has loaded the model and filled the context.
"""

from __future__ import annotations

import os
import sys

from caldrix_protocol.messages import Load
from caldrixd.engine.engine import Engine, Request
from caldrixd.lanes.lane import Variant
from caldrixd.lanes.variant import load_kernels
from caldrixd.worker import loading
from caldrixd.worker import main as _worker  # noqa: F401 - all that a worker imports


def main(directory: str, arithmetic: str, *lengths: str) -> None:
    load_kernels(Variant(), os.environ, lambda *_: None)
    before = memory("VmRSS")
    program = loading.load(Load(directory, directory, "cpu"), os.environ, lambda *_: None).program
    for number, ctx in enumerate(map(int, lengths)):
        _fill(Engine(program, cache_bytes=0), Request(number, (5,) * (ctx * 15 // 16), ctx, dtype=arithmetic))
        sys.stdout.write(f"{memory('VmHWM') - before}\n")


def _fill(engine: Engine, request: Request) -> None:
    engine.submit(request)
    while engine.busy:
        engine.step()


def memory(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines[field].split()[0]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
