"""The inner side of a confined process: limits itself, then answers requests of the process that started it.

Frames on stdin and stdout: a u32 big-endian length and a JSON object. Ends at the end of stdin, so it never
outlives its parent by more than one answer. The outer side is child.py.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from typing import Any

Frame = dict[str, Any]


def limit_process(memory: int) -> None:
    """No more memory than `memory` bytes, no new file, process or core dump."""
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        lowest = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (lowest, lowest))


def limit_seconds(seconds: int) -> None:
    """The processor time from now on; passing it ends the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(
        resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
    )


def serve(answer: Callable[[Frame], Frame], *, seconds: int) -> None:
    """Answer requests until the end of input, or until one used up the memory ("outcome" is "memory")."""
    going = True
    while going and len(prefix := sys.stdin.buffer.read(4)) == 4:
        limit_seconds(seconds)
        going = _exchange(answer, int.from_bytes(prefix))


def _exchange(answer: Callable[[Frame], Frame], length: int) -> bool:
    """Answer one request; whether another may follow. Nothing of it is kept."""
    try:
        request = json.loads(sys.stdin.buffer.read(length).decode("utf-8", "surrogatepass"))
        reply = answer(request)
        body = json.dumps(reply).encode()
    except MemoryError:
        reply = {"outcome": "memory"}
        body = json.dumps(reply).encode()
    sys.stdout.buffer.write(len(body).to_bytes(4) + body)
    sys.stdout.buffer.flush()
    return bool(reply["outcome"] != "memory")
