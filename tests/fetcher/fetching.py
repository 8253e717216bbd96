"""A fetcher process for one repo, run as the daemon runs it, but step by step."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from caldrix_protocol import codec, framing
from caldrix_protocol.messages import FROM_FETCHER, Done, Message, Planned, Progress, Refusal, Status
from caldrixd.fetcher.process import with_library
from tests.support import hub
from tests.support.models import tiny

NAME = "tiny/llama"
WEIGHTS = "model.safetensors"
MODEL = {
    path.name: path.read_bytes() for path in tiny("tiny-llama").iterdir() if path.name != "reference.json"
}
MIB = 1 << 20


def weighing(size: int) -> hub.Repo:
    """The tiny model with `size` bytes of weights, which a fetcher does not look into."""
    block = bytes(range(251)) * 4177
    data = (block * (size // len(block) + 1))[:size]
    return hub.repo({**MODEL, WEIGHTS: data})


@dataclass
class Fetcher:
    """A running fetcher; `heard` is all it has said that was received."""

    process: subprocess.Popen[bytes]
    heard: list[Message] = field(default_factory=list)
    _reader: framing.FrameReader = field(default_factory=framing.FrameReader)

    def receive(self) -> Message | None:
        """The next message; None when it has ended."""
        assert self.process.stdout is not None
        while (payload := self._reader.next()) is None:
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                return None
            self._reader.feed(data)
        message = codec.decode(payload, FROM_FETCHER)
        self.heard.append(message)
        return message

    def until(self, kind: type[Any]) -> Any:
        while type(message := self.receive()) is not kind:
            assert message is not None, f"ended after {self.heard}"
        return message

    def until_downloaded(self, size: int) -> None:
        """Until that many bytes of weights are in the cache."""
        while self.until(Progress).done < size:
            pass

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def finish(self) -> Any:
        """Let it go on to its end; the last message, `done` or `refused`."""
        while type(message := self.receive()) not in (Done, Refusal):
            assert message is not None, f"ended after {self.heard}"
            if type(message) is Planned:
                self.go_on()
        self.end()
        return message

    def end(self) -> int:
        """Close its stdin and wait; its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait(hub.SECONDS)
        self.process.stdout.close()
        return status

    def kill(self) -> None:
        self.process.kill()
        self.end()

    @property
    def said(self) -> list[str]:
        return [message.code for message in self.heard if type(message) is Status]


@dataclass(frozen=True)
class Cache:
    """A Hugging Face cache of a test's own, and the hub it is filled from."""

    root: Path
    server: hub.Server

    def start(self, name: str = NAME, *, seconds: float = 30.0, **more: str) -> Fetcher:
        repo, _, revision = name.partition("@")
        arguments = ["hub", str(self.root), name, repo, revision or "main", str(seconds)]
        return Fetcher(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "caldrixd.fetcher", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=with_library({**self.environment, **more}, seconds),
                cwd="/",
            )
        )

    @property
    def environment(self) -> dict[str, str]:
        """Of a process beside the test: no proxy and no token of the machine."""
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "HOME": str(self.root.parent),
            **self.server.environment,
        }

    def fill_by_the_library(self) -> None:
        """Fetch as any other program does, which compares no digests."""
        program = f"import huggingface_hub as h; h.snapshot_download({NAME!r}, cache_dir={str(self.root)!r})"
        environment = with_library(self.environment, 30.0)
        subprocess.run((sys.executable, "-c", program), env=environment, check=True, timeout=hub.SECONDS)

    def fetch(self, name: str = NAME, *, seconds: float = 30.0, **more: str) -> tuple[Any, Fetcher]:
        """Fetch to the end."""
        fetcher = self.start(name, seconds=seconds, **more)
        return fetcher.finish(), fetcher

    @property
    def storage(self) -> Path:
        return self.root / "models--tiny--llama"

    def snapshot(self, repo: hub.Repo) -> Path:
        return self.storage / "snapshots" / repo.commit

    def partial(self, repo: hub.Repo) -> Path:
        """The weights as far as they were fetched: what is there, or where a test puts some."""
        blobs, digest = self.storage / "blobs", repo.files[WEIGHTS].etag
        (path,) = [*blobs.glob(f"{digest}*.caldrix-partial"), blobs / f"{digest}.test.caldrix-partial"][:1]
        return path


def whole(cache: Cache, repo: hub.Repo) -> bool:
    """Whether the snapshot has all files of the repo, each a relative link to a blob of its digest."""
    for name, file in repo.files.items():
        path = cache.snapshot(repo) / name
        if not path.is_symlink() or os.readlink(path) != f"../../blobs/{file.etag}":
            return False
        with file.open() as stream:
            if path.read_bytes() != stream.read():
                return False
    return True
