"""The daemon's handle on the fetcher process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import anyio
import anyio.abc

from caldrix_protocol import codec, framing
from caldrix_protocol.messages import EVENTS, Done, Message, Refusal
from caldrix_protocol.refusals import Refused
from caldrixd.fetcher import demo

STOP_SECONDS = 5.0

Report = Callable[[Message], Awaitable[None]]


async def fetch_demo(cache: Path, environment: Mapping[str, str], report: Report) -> Path:
    """Make the demo model complete in `cache` and return its directory.

    `environment` is the fetcher's whole environment (the daemon's allow-listed one with the client's
    variables over it). `report` gets Status and Progress messages. Raises Refused "demo/...". Cancelling
    stops the fetch.
    """
    target = demo.model_directory(cache)
    if demo.is_complete(target):
        return target
    command = [sys.executable, "-P", "-m", "caldrixd.fetcher", demo.ALIAS, str(cache)]
    process = await anyio.open_process(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None,
        cwd="/",
        env=dict(environment),
        start_new_session=True,
    )
    try:
        last = await _relay(process, report)
    finally:
        await _end(process)
    if type(last) is Refusal:
        raise Refused(last.code, **last.fields)
    if type(last) is not Done:
        raise Refused("demo/fetcher-died", reason=f"status {process.returncode}")
    return target


async def _relay(process: anyio.abc.Process, report: Report) -> Message | None:
    """Report events until the last one; that one, or None when the process ended without it."""
    assert process.stdout is not None
    reader = framing.FrameReader()
    while True:
        while (payload := reader.next()) is not None:
            message = codec.decode(payload, EVENTS)
            if type(message) in (Done, Refusal):
                return message
            await report(message)
        try:
            reader.feed(await process.stdout.receive())
        except anyio.EndOfStream:
            return None


async def _end(process: anyio.abc.Process) -> None:
    """End of input tells the fetcher to stop; one that does not obey is killed."""
    with anyio.CancelScope(shield=True):
        assert process.stdin is not None
        await process.stdin.aclose()
        with anyio.move_on_after(STOP_SECONDS):
            await process.wait()
        if process.returncode is None:
            process.kill()
        await process.aclose()
