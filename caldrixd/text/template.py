"""The chat template of a model, rendered by a limited child process (renderer.py)."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from caldrix_protocol.refusals import Refused
from caldrixd.json_file import read_bytes, reason_of
from caldrixd.text.config import read_config, special_token

MIB = 1 << 20
MAX_SOURCE = 1 << 20
FILE = "chat_template.jinja"
_SCRIPT = Path(__file__).with_name("renderer.py")
_REFUSALS = {"raised": "template/raised", "failed": "template/failed", "invalid": "template/invalid"}


@dataclass(frozen=True)
class Limits:
    """What one render may use. `seconds` are of processor time; four times as long by the clock."""

    seconds: int = 5
    memory: int = 512 * MIB
    output: int = 8 * MIB


def load(
    directory: Path, *, clock: Callable[[], datetime] = datetime.now, limits: Limits | None = None
) -> ChatTemplate | None:
    """The template of a model directory, its renderer started; None where the model has none.

    chat_template.jinja wins over tokenizer_config.json. Nothing is compiled yet.
    Refused "template/invalid" or "config/...".
    """
    config = read_config(directory)
    path = directory / FILE
    source = _text(read_bytes(path, MAX_SOURCE)) if path.exists() else _configured(config)
    if source is None:
        return None
    if len(source) > MAX_SOURCE:
        raise Refused("template/invalid", reason=f"it has {len(source)} characters, over {MAX_SOURCE}")
    names = [name for name in config if name.endswith("_token")]
    variables = {name: token for name in names if (token := special_token(config, name)) is not None}
    return ChatTemplate(source, variables, clock=clock, limits=limits or Limits())


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Refused("template/invalid", reason=reason_of(error)) from None


def _configured(config: Mapping[str, Any]) -> str | None:
    """A text, or a list of {name, template} of which "default" is the one."""
    value = config.get("chat_template")
    if type(value) is list:
        named = [
            item.get("template") for item in value if type(item) is dict and item.get("name") == "default"
        ]
        value = named[0] if named else None
    if value is not None and type(value) is not str:
        raise Refused("template/invalid", reason="chat_template is not a text")
    return value


class ChatTemplate:
    """Turns a conversation into the prompt text. `close` ends its process; any thread may render."""

    def __init__(
        self, source: str, variables: Mapping[str, str], *, clock: Callable[[], datetime], limits: Limits
    ) -> None:
        self._source = source
        self._variables = dict(variables)
        self._clock = clock
        self._limits = limits
        self._lock = threading.Lock()
        self._process = self._start()

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt of messages ({role, content}), ready for the model's answer. Refused "template/..."."""
        request = {
            "source": self._source,
            "messages": [dict(message) for message in messages],
            "variables": self._variables,
            "now": self._clock().isoformat(),
        }
        with self._lock:
            if self._process.poll() is not None:
                self._process = self._start()
            try:
                reply = self._exchange(_frame(request))
            except BaseException:
                self._end()
                raise
            if reply.get("outcome") == "memory":
                self._end()
        outcome, text = reply.get("outcome"), reply.get("text")
        if outcome == "text" and type(text) is str:
            return text
        if outcome == "memory":
            raise self._over_memory()
        if outcome == "too-long":
            raise Refused("template/too-long", limit=self._limits.output)
        raise Refused(_REFUSALS.get(str(outcome), "template/failed"), reason=" ".join(str(text).split()))

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        limits = self._limits
        numbers = (str(limits.memory), str(limits.seconds), str(limits.output))
        return subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _exchange(self, request: bytes) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        # Six bytes of JSON for one of output at most, and the frame around it.
        most = 6 * self._limits.output + 4096
        deadline = time.monotonic() + 4 * self._limits.seconds
        try:
            body = _converse(process.stdin.fileno(), process.stdout.fileno(), request, most, deadline)
            reply = json.loads(body)
        except TimeoutError:
            raise self._too_slow() from None
        except (EOFError, BrokenPipeError):
            raise self._died(process.wait()) from None
        except ValueError as error:
            raise Refused("template/failed", reason=reason_of(error)) from None
        return reply if type(reply) is dict else {}

    def _died(self, status: int) -> Refused:
        if status == -signal.SIGXCPU:
            return self._too_slow()
        if status == -signal.SIGKILL:
            return self._over_memory()
        return Refused("template/failed", reason=f"its process ended with status {status}")

    def _too_slow(self) -> Refused:
        return Refused("template/too-slow", seconds=self._limits.seconds)

    def _over_memory(self) -> Refused:
        return Refused("template/memory", limit=self._limits.memory // MIB)


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
                    raise ValueError(f"its renderer wrote a frame of {length} bytes")
                if len(received) >= 4 + length:
                    return bytes(received[4:])
