"""A worker that a limit or a broken installation keeps from starting says so, with what to do."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import anyio
import pytest

from caldrix_protocol import limits
from caldrix_protocol.messages import Open
from caldrix_protocol.refusals import Refused
from caldrixd.worker import process
from caldrixd.worker.process import Key, Worker
from tests.support.daemon import Home, running_daemon
from tests.support.models import tiny

FIX = "; raise that, run `caldrix stop --daemon` and try again"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, ""), "another open file: caldrixd runs under ulimit -n 7"),
        (OSError(errno.ENFILE, ""), f"another open file: caldrixd runs under {limits.OTHERS}"),
        (BlockingIOError(errno.EAGAIN, ""), "another process: caldrixd runs under ulimit -u 7"),
        (
            RuntimeError("can't start new thread"),
            "another thread: caldrixd runs under ulimit -u 7 and ulimit -v 3",
        ),
        (MemoryError(), "more memory: caldrixd runs under ulimit -v 3"),
        (OSError(errno.ENOMEM, ""), "more memory: caldrixd runs under ulimit -v 3"),
    ],
)
def test_every_limit_is_named_as_the_shell_names_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    values = {resource.RLIMIT_AS: 3 * 1024 + 5, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (values.get(limit, 7), 99))
    found = limits.exhausted(error, "it")
    assert found is not None
    assert found.text == f"it could not get {said}{FIX}"


def test_what_no_limit_explains_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (resource.RLIM_INFINITY,) * 2)
    errors = (
        MemoryError(),
        OSError(errno.ENOENT, ""),
        RuntimeError("other"),
        ValueError("can't start new thread"),
    )
    assert [limits.exhausted(error, "it") for error in errors] == [None] * 4


def outcome(environment: dict[str, str]) -> Refused:
    """What is said of a worker that does not come to load its model."""

    async def run() -> Refused:
        worker = Worker(Key(str(tiny("tiny-llama")), (), "cpu"), "tiny", environment)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            await worker.settled.wait()
        assert worker.refused is not None
        return worker.refused

    return anyio.run(run)


def test_a_worker_without_a_socket_is_refused_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left() -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(process, "socket", SimpleNamespace(socketpair=none_left))
    assert outcome({}).code == "daemon/limit"


def test_a_worker_that_cannot_import_its_parts_says_which(home: Home, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('built for another Python')", "ascii")
    paths = f"{tmp_path}{os.pathsep}{home.environment['PYTHONPATH']}"
    refused = outcome(home.environment | {"PYTHONPATH": paths})
    assert refused.text == "the worker process did not start: built for another Python"


def test_a_worker_that_has_no_room_to_start_says_under_which_limit(home: Home) -> None:
    """How far it comes depends on the libraries: one of them may end the process by itself."""
    prelude = "import resource; resource.setrlimit(resource.RLIMIT_AS, (100_000 << 10,) * 2)"
    with running_daemon(home, prelude=prelude) as daemon, daemon.caller() as caller:
        refused = caller.ask(Open(str(tiny("tiny-llama")), {}))[-1]
        assert refused.code in ("worker/limited", "daemon/limit")
        assert "ulimit -v 100000" in refused.text
        assert refused.text.endswith(FIX)
        assert daemon.loaded() == []
