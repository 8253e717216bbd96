"""Where too few files may be open, the limit is named in client, daemon, fetcher and worker, and no file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from caldrix_protocol.codec import decode
from caldrix_protocol.framing import FrameReader
from caldrix_protocol.messages import FROM_FETCHER, Done, Load
from caldrix_protocol.refusals import Refused
from caldrixd.worker.failures import broken_installation, refusal_for
from tests.support import hub
from tests.support.cli import COMMAND, SECONDS, Home, Result, finish
from tests.support.hub_cli import MODEL, NAME, ONE_TOKEN, model

LIMITED = ("sh", "-c", 'ulimit -n "$0"; exec "$@"')


def limited(home: Home, most: int, *arguments: str, **more: str) -> Result:
    """Run the command, and so what it starts, with `most` descriptors."""
    pipe = subprocess.PIPE
    command = (*LIMITED, str(most), *COMMAND, *arguments)
    return finish(
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=home.environment | more)
    )


def names_the_limit(result: Result, most: int) -> None:
    """Or it was not reached: how many are needed is a matter of the Python."""
    assert "Too many open files" not in result.err
    assert "internal error" not in result.err
    if result.status:
        last = result.err.splitlines()[-1]
        assert result.status == 1
        assert " could not get another open file: " in last
        assert f" under ulimit -n {most}; raise that" in last


@pytest.mark.parametrize("most", [6, 8, 9, 11, 13])
def test_a_run(home: Home, most: int) -> None:
    names_the_limit(limited(home, most, "run", str(MODEL), *ONE_TOKEN), most)


def test_a_daemon_that_somebody_starts(home: Home) -> None:
    pipe = subprocess.PIPE
    command = (*LIMITED, "6", sys.executable, "-m", "caldrixd")
    result = finish(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=home.environment))
    assert result.err == (
        "caldrixd: caldrixd could not get another open file: it runs under ulimit -n 6; "
        "raise that and try again\n"
    )
    assert result.status


@pytest.mark.parametrize("most", [10, 14])
def test_a_download(home: Home, tmp_path: Path, most: int) -> None:
    with hub.serve({NAME: model()}) as server:
        variables = {**server.environment, "HF_HOME": str(tmp_path / "hf")}
        names_the_limit(limited(home, most, "pull", NAME, **variables), most)


@pytest.mark.parametrize("most", [6, 7])
def test_the_fetcher(home: Home, tmp_path: Path, most: int) -> None:
    command = (*LIMITED, str(most), sys.executable, "-m", "caldrixd.fetcher", "hub", str(tmp_path))
    word, ours = os.pipe()
    os.write(ours, b"\n")  # to go on
    with hub.serve({NAME: model()}) as server:
        fetched = subprocess.run(
            (*command, NAME, NAME, "main", "30"),
            stdin=word,
            stdout=subprocess.PIPE,
            env=home.environment | server.environment,
            timeout=SECONDS,
            check=True,
        )
    os.close(ours)
    os.close(word)
    reader = FrameReader()
    reader.feed(fetched.stdout)
    frames = list(iter(reader.next, None))
    last = decode(frames[-1], FROM_FETCHER)
    if type(last) is not Done:
        assert last.text.startswith("the downloading process could not get another open file: caldrixd runs ")
        assert f"under ulimit -n {most}; raise that" in last.text


def unopened(number: int | None, text: str = "") -> Refused:
    """What a file is refused for that could not be opened."""
    try:
        raise ImportError(text) if number is None else OSError(number, os.strerror(number), "file")
    except (ImportError, OSError) as error:
        try:
            raise Refused("weights/header", file="file", reason=error)
        except Refused as refused:
            return refused


def test_a_worker() -> None:
    wanted = Load("model", "/model", "cpu")
    no_library = "libx.so: cannot open shared object file: Too many open files"
    for refused in (unopened(errno.EMFILE), unopened(errno.ENFILE), unopened(None, no_library)):
        assert refusal_for(refused, wanted).text.startswith(
            "the worker process of model could not get another open file: caldrixd runs under "
        )
    for refused in (unopened(errno.EACCES), unopened(errno.EAGAIN), unopened(None, "libx.so: not found")):
        assert refusal_for(refused, wanted).code == "weights/header"
    assert broken_installation(ImportError(no_library), wanted).code == "daemon/limit"
