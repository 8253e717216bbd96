"""The outer side of a confined process (confined.py): starts it, asks it, ends it when it takes too much."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """What one request may use. `seconds` are of processor time; four times as long by the clock.

    `output` are the bytes of an answer before they are made into JSON.
    """

    seconds: int
    memory: int
    output: int


class TooSlow(Exception):
    """The request took its seconds."""


class OverMemory(Exception):
    """The request took its memory."""


class Broken(Exception):
    """The process ended or wrote what is no answer; the text says which."""


class Child:
    """One process that runs a module of ours. After any exception it is gone and `alive` is false."""

    def __init__(self, module: str, limits: Limits) -> None:
        self._limits = limits
        numbers = (str(limits.memory), str(limits.seconds), str(limits.output))
        command = [sys.executable, "-P", "-m", module, *numbers]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
        return self._end.alive and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._end()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request. TooSlow, OverMemory, Broken."""
        try:
            reply = self._exchange(_frame(request))
        except BaseException:
            self.close()
            raise
        if reply.get("outcome") == "memory":
            self.close()
            raise OverMemory
        return reply

    def _exchange(self, request: bytes) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        # Six bytes of JSON for one of output at most, and the frame around it.
        most = 6 * self._limits.output + 4096
        deadline = time.monotonic() + 4 * self._limits.seconds
        pipes = process.stdin.fileno(), process.stdout.fileno()
        try:
            reply = json.loads(_converse(*pipes, request, most, deadline))
        except TimeoutError:
            raise TooSlow from None
        except (EOFError, BrokenPipeError):
            raise _death(process.wait()) from None
        except ValueError as error:
            raise Broken(str(error)) from None
        return reply if type(reply) is dict else {}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _death(status: int) -> Exception:
    if status == -signal.SIGXCPU:
        return TooSlow()
    # Code that is not Python's aborts when it is given no memory.
    if status in (-signal.SIGKILL, -signal.SIGABRT):
        return OverMemory()
    return Broken(f"its process ended with status {status}")


def _frame(request: dict[str, Any]) -> bytes:
    body = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(body).to_bytes(4) + body


def _converse(sending: int, receiving: int, request: bytes, most: int, deadline: float) -> bytes:
    """Write a request and read one frame, both before the deadline. TimeoutError, EOFError, ValueError."""
    os.set_blocking(sending, False)
    pending = memoryview(request)
    received = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(sending, selectors.EVENT_WRITE)
        selector.register(receiving, selectors.EVENT_READ)
        while True:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                if key.fd == sending:
                    pending = pending[os.write(sending, pending) :]
                    if not pending:
                        selector.unregister(sending)
                    continue
                chunk = os.read(receiving, 1 << 20)
                if not chunk:
                    raise EOFError
                received += chunk
            if len(received) >= 4:
                length = int.from_bytes(received[:4])
                if length > most:
                    raise ValueError(f"its process wrote a frame of {length} bytes")
                if len(received) >= 4 + length:
                    return bytes(received[4:])
