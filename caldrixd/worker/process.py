"""The daemon's handle on one worker process."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.abc
from anyio import to_thread

from caldrix_protocol import limits
from caldrix_protocol.codec import BadFrame, decode, encode, encoded_delta
from caldrix_protocol.connection import Connection, ProtocolError, as_refusal
from caldrix_protocol.messages import (
    EVENTS,
    MAX_TEXT,
    Abort,
    Attach,
    Begin,
    Done,
    Generate,
    Load,
    Message,
    Ready,
    Refusal,
    Relay,
)
from caldrix_protocol.refusals import Refused
from caldrixd.channel import Channel
from caldrixd.models import weights
from caldrixd.models.changed import Identity

EXIT_SECONDS = 2.0
# An array as long as a vocabulary stays with the process (mallopt(3) of glibc): given back to the system with
# each token, it would come back page by page, which takes longer than what is done with it. The threads that
# the BLAS of numpy would start are never used.
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 20),
    "OPENBLAS_NUM_THREADS": "1",
}

LOADING = "loading"
READY = "ready"
ENDED = "ended"

Deliver = Callable[[Message], None]


@dataclass(frozen=True)
class Key:
    """What one worker is for: a model's files as they were when it was opened, on one lane.

    `isa` and `kernels` are those of the CPU lane's variant.
    """

    directory: str
    identity: Identity
    lane: str
    isa: str = "native"
    kernels: str = "auto"


@dataclass(frozen=True)
class Settings:
    """What a handle fixes for every reply that comes by it."""

    ctx: int
    dtype: str
    threads: int
    max_batch: int


@dataclass
class Stream:
    """One reply of a worker. `deliver` gets its events but the last, which is `final` once `ended` is set."""

    number: int
    deliver: Deliver
    ended: anyio.Event = field(default_factory=anyio.Event)
    final: Message = None

    def end(self, final: Message) -> None:
        if not self.ended.is_set():
            self.final = final
            self.ended.set()


class Worker:
    """A worker process from its start to its end.

    `run` starts the process and returns when it has ended and every stream has its final event.
    `settled` is set when the model is loaded or will never be; `refused` then says why not.
    """

    def __init__(self, key: Key, name: str, environment: Mapping[str, str]) -> None:
        self.key = key
        self.names = {name, key.directory}
        self.name = name
        self.state = LOADING
        self.pid = 0
        self.leases = 0
        self.idle_since = time.monotonic()
        self.ready: Ready | None = None
        self.refused: Refused | None = None
        self.settled = anyio.Event()
        self.ended = anyio.Event()
        self._environment = environment
        self._events: list[Message] = []
        self._listeners: list[Deliver] = []
        self._streams: dict[int, Stream] = {}
        self._next_stream = 1
        self._channel: Channel | None = None
        self._scope = anyio.CancelScope()

    @property
    def alive(self) -> bool:
        """Loaded, and able to begin a reply."""
        return self.state == READY

    @property
    def size(self) -> int:
        """Bytes of its loaded weights; 0 before they are."""
        return self.ready.size if self.ready else 0

    @property
    def busy(self) -> bool:
        return bool(self._streams)

    async def run(self) -> None:
        kills = _memory_kills()
        try:
            process, ours = await self._start()
        except OSError as error:
            refused = limits.exhausted(error, "caldrixd")
            self._end(refused or Refused("worker/did-not-start", reason=error.strerror or error))
            return
        self.pid = process.pid
        logging.info("worker %d loads %s on %s", self.pid, self.key.directory, self.key.lane)
        self._channel = Channel(ours, Connection("parent"))
        try:
            with self._scope:
                await self._converse(self._channel)
        finally:
            self.state = ENDED  # it may take a while to exit, but begins no reply any more
            self._channel.close()
            status = await _reap(process)
            logging.info("worker %d ended: %s", self.pid, _describe(status))
            self._end(self.refused or await self._death(status, kills))

    async def _start(self) -> tuple[anyio.abc.Process, socket.socket]:
        """The process and our end of its socket. OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return await self._spawn(theirs), ours
            except BaseException:
                ours.close()
                raise

    async def _spawn(self, theirs: socket.socket) -> anyio.abc.Process:
        command = [sys.executable, "-P", "-m", "caldrixd.worker"]
        command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        return await anyio.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            stderr=None,
            cwd="/",
            env={**_ENVIRONMENT, **self._environment},
            pass_fds=(theirs.fileno(),),
        )

    async def _converse(self, channel: Channel) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(channel.write)
            key = self.key
            channel.send(Load(self.name, key.directory, key.lane, key.isa, key.kernels))
            try:
                await channel.deliver(self._dispatch)
            except (ProtocolError, BadFrame) as error:
                logging.error("worker %d: %s", self.pid, error.reason)
            tasks.cancel_scope.cancel()

    def _dispatch(self, message: Message) -> None:
        match message:
            case Relay():
                self._relay(message)
            case Ready():
                self.ready, self.state = message, READY
                self.idle_since = time.monotonic()
                self.settled.set()
            case Refusal():
                self.refused = Refused(message.code, **message.fields)
            case _:
                self._events.append(message)
                for listener in self._listeners:
                    listener(message)

    def _relay(self, relay: Relay) -> None:
        stream = self._streams.get(relay.stream)
        if stream is None:
            return
        delta = encoded_delta(relay.event)
        if delta is not None:
            stream.deliver(delta)
            return
        event = decode(relay.event, EVENTS)
        if type(event) in (Done, Refusal):
            self._drop(stream)
            stream.end(event)
        else:
            stream.deliver(event)

    async def loaded(self, deliver: Deliver) -> Ready:
        """Wait until the model is loaded; `deliver` gets all events of the load, if it is under way.

        Raises Refused when the load failed.
        """
        for event in () if self.settled.is_set() else self._events:
            deliver(event)
        self._listeners.append(deliver)
        try:
            await self.settled.wait()
        finally:
            self._listeners.remove(deliver)
        if self.ready is None:
            assert self.refused is not None
            raise self.refused
        return self.ready

    def begin(
        self, request: Generate, blobs: Mapping[int, list[bytes]], settings: Settings, deliver: Deliver
    ) -> Stream:
        """Start one reply of a worker that is `alive`. Refused when the request does not fit one frame."""
        assert self._channel is not None
        payload = encode(request)
        if len(payload) > MAX_TEXT:
            raise Refused(
                "daemon/bad-request", reason=f"it is over {MAX_TEXT} bytes; send long texts as blobs"
            )
        stream = Stream(self._next_stream, deliver)
        self._next_stream += 1
        begin = Begin(
            stream.number, payload, settings.ctx, settings.dtype, settings.threads, settings.max_batch
        )
        self._streams[stream.number] = stream
        for name, pieces in blobs.items():
            for piece in pieces:
                self._channel.send(Attach(stream.number, name, piece))
        self._channel.send(begin)
        return stream

    def abort(self, stream: Stream) -> None:
        """Ask for the end of a reply; its final event still comes."""
        if stream.number in self._streams and self._channel is not None:
            self._channel.send(Abort(stream.number))

    def leave(self, stream: Stream) -> None:
        """The reply has no reader any more: end it if it runs, and drop what still comes."""
        if stream.number in self._streams:
            self.abort(stream)
            self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        del self._streams[stream.number]
        self.idle_since = time.monotonic()

    def stop(self, refused: Refused) -> None:
        """End the process; what still runs on it is refused with `refused`."""
        if self.state != ENDED:
            self.state, self.refused = ENDED, refused
            self._scope.cancel()

    def _end(self, refused: Refused) -> None:
        self.state, self.refused = ENDED, refused
        for stream in self._streams.values():
            stream.end(as_refusal(refused))
        self._streams.clear()
        self.settled.set()
        self.ended.set()

    async def _death(self, status: int, kills_before: int) -> Refused:
        if status == -signal.SIGBUS and self.ready is None:
            with anyio.CancelScope(shield=True):
                return await to_thread.run_sync(weights.lost, Path(self.key.directory), self.key.identity)
        if status == -signal.SIGKILL and _memory_kills() > kills_before:
            return Refused("worker/out-of-memory", model=self.name)
        memory = limits.in_force(*limits.MEMORY)
        if memory and self.ready is None and status not in (0, -signal.SIGKILL):
            return Refused("worker/limited", model=self.name, reason=_describe(status), limits=memory)
        return Refused("worker/died", model=self.name, reason=_describe(status))


def _describe(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


def _memory_kills() -> int:
    """Processes that the kernel has killed for want of memory since it started; 0 where it does not tell."""
    try:
        counters = Path("/proc/vmstat").read_text("ascii").split()
    except OSError:
        return 0
    return int(counters[counters.index("oom_kill") + 1]) if "oom_kill" in counters else 0


async def _reap(process: anyio.abc.Process) -> int:
    """The exit status of a worker whose socket is closed, which makes it end; one that does not is killed."""
    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(EXIT_SECONDS):
            await process.wait()
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert process.returncode is not None
    return process.returncode
