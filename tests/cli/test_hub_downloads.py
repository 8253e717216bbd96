"""Downloads that are shared, interrupted or go wrong, from the command line."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from caldrix_protocol import sizes
from caldrix_protocol.messages import Progress, Pull, Refusal
from tests.support import daemon, hub
from tests.support.cli import Home, Screen, finish, new_home
from tests.support.daemon import Caller, await_end, kernel_cache, running_daemon
from tests.support.hub_cli import (
    NAME,
    ONE_TOKEN,
    WEIGHTS,
    below,
    model,
    nothing_outside,
    pull,
    refused,
    start,
)

FILE = "model.safetensors"


@contextmanager
def waiting(request: pytest.FixtureRequest, seconds: float) -> Iterator[Home]:
    """A home whose daemon waits so long for a silent host."""
    cache = kernel_cache(request.config)
    changes = {"fetch_seconds": seconds}
    with new_home(cache) as home, running_daemon(daemon.Home(home.path, home.cache), changes=changes):
        yield home


@pytest.fixture(scope="module")
def hasty(request: pytest.FixtureRequest) -> Iterator[Home]:
    """For hosts that answer at once, wrongly: the pauses between attempts are shorter than the usual ones."""
    with waiting(request, 10.0) as home:
        yield home


@pytest.fixture(scope="module")
def patient(request: pytest.FixtureRequest) -> Iterator[Home]:
    """For hosts that are held until something else has come about, however long that takes."""
    with waiting(request, 600.0) as home:
        yield home


def test_sixteen_clients_make_one_download(patient: Home, tmp_path: Path) -> None:
    """The first weights are held until every client has said that it waits for them."""
    with hub.serve({NAME: model()}) as server:
        server.fail("stall", FILE, at=len(WEIGHTS) // 2, times=1)
        clients = [start(patient, tmp_path, server, "run", NAME, *ONE_TOKEN) for _ in range(16)]
        server.wait(lambda: server.sent(FILE) >= len(WEIGHTS) // 2)
        for client in clients:
            assert client.stderr is not None
            while b"downloading" not in (line := client.stderr.readline()):
                assert line, "ended without a word on the download"
        server.release()
        results = [finish(client) for client in clients]
    assert [result.status for result in results] == [0] * 16
    assert len({result.out for result in results}) == 1
    assert server.sent(FILE) == len(WEIGHTS)
    gets = [(request.host, request.what) for request in server.requests if request.method == "GET"]
    assert [get for get in gets if gets.count(get) > 1] == []


def test_a_client_that_leaves_does_not_end_the_download_of_another(patient: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model()}) as server:
        server.fail("stall", FILE, at=1000, times=1)
        first = start(patient, tmp_path, server, "pull", NAME)
        server.wait(lambda: server.sent(FILE) >= 1000)
        second = start(patient, tmp_path, server, "pull", NAME)
        assert second.stderr is not None
        while b"downloading" not in (line := second.stderr.readline()):
            assert line
        first.send_signal(signal.SIGINT)
        assert finish(first).status == 130
        server.release()
        assert finish(second).status == 0
    assert server.sent(FILE) == len(WEIGHTS)


def test_an_interrupted_download_resumes_inside_the_file(home: Home, tmp_path: Path) -> None:
    """The fetcher asks for what follows a byte when all before it is in its file."""
    there = 200_000
    with hub.serve({NAME: model()}) as server:
        server.fail("cut", FILE, at=there, times=1)
        server.fail("stall", FILE, at=there, times=2)
        first = start(home, tmp_path, server, "pull", NAME)
        server.wait(lambda: ("cdn", f"bytes={there}-") in [(r.host, r.range) for r in server.requests])
        first.send_signal(signal.SIGINT)
        assert finish(first).status == 130
        listed = finish(start(home, tmp_path, server, "models", "list"))
        (partial,) = (tmp_path / "hf/hub/models--tiny--llama/blobs").glob("*.caldrix-partial")
        assert partial.stat().st_size == there
        planned = finish(start(home, tmp_path, server, "models", "plan", NAME))
        server.heal()
        pulled = pull(home, tmp_path, server)
        assert pulled.status == 0
    assert "(incomplete)" in listed.out
    said = f"of which {sizes.size(there)} are there)\n"
    assert f"{NAME}: not in the cache yet: {FILE} 240 kB (240 kB, {said}" in planned.err
    assert f"{NAME}: downloading {FILE} 240 kB (240 kB, {said}" in pulled.err
    assert f"{sizes.size(len(WEIGHTS) - there)} " in planned.out.splitlines()[-1]
    small = [request for request in server.requests if request.what == "tokenizer.json"]
    assert len([request for request in small if request.method == "GET"]) == 1
    ranges = [request.range for request in server.requests if request.host == "cdn"]
    assert ranges == [None, f"bytes={there}-", f"bytes={there}-"]


def large() -> hub.Repo:
    """The tiny model with 200 MB of weights: its layers are only wider inside."""
    length = int.from_bytes(WEIGHTS[:8], "little")
    header, data, width = json.loads(WEIGHTS[8 : 8 + length]), bytearray(), 260_000
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape = entry["shape"] = [width if size == 160 else size for size in entry["shape"]]
        begin, size = len(data), math.prod(shape) * 2
        data += (bytes(range(251)) * (size // 251 + 1))[:size]
        entry["data_offsets"] = [begin, len(data)]
    text = json.dumps(header).encode()
    weights = len(text).to_bytes(8, "little") + text + data
    assert len(weights) > 199_000_000
    return model({"config.json": {"intermediate_size": width}, FILE: weights})


@pytest.mark.slow
@pytest.mark.parametrize("percent", [10, 50, 99])
def test_200_megabytes_go_on_after_the_fetcher_and_the_daemon_were_killed(
    home: Home, tmp_path: Path, percent: int
) -> None:
    repo = large()
    size = repo.files[FILE].size
    at = size * percent // 100
    with hub.serve({NAME: repo}) as server:
        server.fail("drip", FILE, host="cdn", at=at, times=1)
        assert home.caldrix("models", "list").status == 0
        with Caller(home.address.socket) as caller:
            caller.send(Pull(NAME, {**server.environment, "HF_HOME": str(tmp_path / "hf")}))
            while cast(Progress, caller.until(Progress)).done < at:
                pass
            daemon_pid = int((home.path / "run/caldrix/caldrixd.lock").read_text())
            (fetcher,) = Path(f"/proc/{daemon_pid}/task/{daemon_pid}/children").read_text().split()
            os.kill(int(fetcher), signal.SIGKILL)
            refusal = caller.rest()[-1]
        assert type(refusal) is Refusal
        assert refusal.code == "hub/fetcher-died"
        os.kill(daemon_pid, signal.SIGKILL)
        await_end(daemon_pid)
        server.release()
        result = pull(home, tmp_path, server)
        assert result.status == 0, result.err
    assert server.sent(FILE) - size <= 1 << 20
    (snapshot,) = (tmp_path / "hf/hub/models--tiny--llama/snapshots").iterdir()
    assert hashlib.sha256((snapshot / FILE).read_bytes()).hexdigest() == repo.files[FILE].sha256


@pytest.mark.parametrize(
    ("action", "host", "at", "words"),
    [
        ("altered", "cdn", 100_000, (FILE, "does not match the digest")),
        ("short", "cdn", 100, (FILE, "stalled at 240188 of 240288 bytes")),
        ("long", "cdn", 100, (FILE, "240388", "240288")),
        ("login", "cdn", 0, (NAME, "web page")),
        ("login", "hub", 0, (NAME, "web page")),
        ("loop", "cdn", 0, (FILE, "redirects do not end")),
        ("loop", "hub", 0, (FILE, "redirects do not end")),
        ("status", "cdn", 500, (FILE, "500")),
        ("status", "hub", 500, (FILE, "500")),
        ("status", "cdn", 403, (NAME, "403")),
        ("status", "hub", 403, (NAME, "403")),
    ],
)
def test_weights_that_come_wrong_are_refused_and_not_kept(
    hasty: Home, tmp_path: Path, action: str, host: str, at: int, words: tuple[str, ...]
) -> None:
    with hub.serve({NAME: model()}) as server:
        server.fail(action, FILE, host=host, at=at)
        result = pull(hasty, tmp_path, server)
        refused(result, *words)
        assert not [path for path in below(tmp_path) if path.name == FILE]
        server.heal()
        assert pull(hasty, tmp_path, server).status == 0
    nothing_outside(tmp_path)


@pytest.mark.parametrize(
    ("action", "at"),
    [("login", 0), ("loop", 0), ("status", 500), ("bomb", 1 << 30), ("status", 429)],
)
def test_a_hub_that_is_not_well(hasty: Home, tmp_path: Path, action: str, at: int) -> None:
    with hub.serve({NAME: model()}) as server:
        server.fail(action, "info", at=at)
        server.fail(action, "tree", at=at)
        refused(pull(hasty, tmp_path, server), NAME)
        server.heal()
        assert pull(hasty, tmp_path, server).status == 0


def test_a_transfer_cut_in_the_middle_goes_on(hasty: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model()}) as server:
        server.fail("cut", FILE, at=150_000, times=1)
        result = pull(hasty, tmp_path, server)
        assert result.status == 0, result.err
    ranges = [request.range for request in server.requests if request.host == "cdn"]
    assert len(ranges) == 2


@pytest.mark.parametrize("action", ["no-range", "416"])
def test_a_host_without_ranges_sends_the_whole_again(hasty: Home, tmp_path: Path, action: str) -> None:
    with hub.serve({NAME: model()}) as server:
        server.fail("cut", FILE, at=150_000, times=1)
        server.fail(action, FILE, host="cdn", times=1)
        result = pull(hasty, tmp_path, server)
        if result.status:
            refused(result, FILE)
            result = pull(hasty, tmp_path, server)
        assert result.status == 0, result.err


def test_main_moves_while_it_is_fetched(hasty: Home, tmp_path: Path) -> None:
    """All files are of the commit that main was at the beginning."""
    moved = model({"config.json": {"architectures": ["Other"]}, "tokenizer.json": b"{}"})
    with hub.serve({NAME: model()}) as server:
        server.upon("config.json", lambda: server.move(NAME, moved))
        assert pull(hasty, tmp_path, server).status == 0
    (snapshot,) = (tmp_path / "hf/hub/models--tiny--llama/snapshots").iterdir()
    assert snapshot.name == model().commit


def test_a_file_that_the_hub_lists_and_has_not(hasty: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model()}) as server:
        server.fail("absent", "generation_config.json")
        refused(pull(hasty, tmp_path, server), NAME, "generation_config.json and does not have it")
        server.heal()
        assert pull(hasty, tmp_path, server).status == 0


def test_a_file_that_vanishes_leaves_an_incomplete_snapshot(patient: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model()}) as server:
        server.fail("stall", FILE, at=1000, times=1)
        client = start(patient, tmp_path, server, "pull", NAME)
        server.wait(lambda: server.sent(FILE) == 1000)
        (snapshot,) = (tmp_path / "hf/hub/models--tiny--llama/snapshots").iterdir()
        (snapshot / "tokenizer.json").unlink()
        server.release()
        refused(finish(client), f"the download left an incomplete snapshot at {snapshot}", "tokenizer.json")
        assert pull(patient, tmp_path, server).status == 0
    assert server.sent(FILE) == len(WEIGHTS)


def test_a_small_file_without_its_commit(hasty: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model()}) as server:
        server.fail("no-commit", "config.json")
        refused(pull(hasty, tmp_path, server), NAME)


def _screen(home: Home, directory: Path, server: hub.Server) -> Screen:
    variables: dict[str, Any] = {**server.environment, "HF_HOME": str(directory / "hf")}
    return Screen(home, "pull", NAME, **variables)


def test_a_terminal_shows_a_bar_with_the_rate_and_the_time_left(hasty: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model()}) as server:
        server.fail("drip", FILE, host="cdn", at=200_000)
        with _screen(hasty, tmp_path, server) as screen:
            first = screen.expect("\n")
            assert first.startswith(f"caldrix: {NAME}: downloading ")
            assert f"{FILE} 240 kB" in first
            screen.expect("caldrix: downloaded tokenizer.json (21.3 kB)")
            screen.expect("download: [################....] 83 %")
            shown = screen.expect(" left")
            assert re.search(r" of 240 kB, [\d.]+ .?B/s, \d+ s left$", shown), shown
            screen.press("\x03")
            assert screen.end() == 130


def test_what_is_being_downloaded_is_not_removed(patient: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: model()}) as server:
        server.fail("stall", FILE, at=1000, times=1)
        client = start(patient, tmp_path, server, "pull", NAME)
        server.wait(lambda: server.sent(FILE) == 1000)
        refused(
            finish(start(patient, tmp_path, server, "models", "rm", NAME, "--yes")), "is being downloaded"
        )
        server.release()
        assert finish(client).status == 0
