"""Models of the hub through a real daemon: what its cache spares, and what becomes of a download."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from caldrix_protocol.messages import Done, Message, Notice, Open, Opened, Refusal, Status
from tests.fetcher.fetching import MODEL, NAME, WEIGHTS, Cache
from tests.support import hub
from tests.support.daemon import Home, await_end, kernel_cache, private_home, running_daemon

REPO = hub.repo(MODEL)
STOP = 200_000


@pytest.fixture(scope="module")
def home(request: pytest.FixtureRequest) -> Iterator[Home]:
    with private_home(kernel_cache(request.config)) as home:
        yield home


def opening(server: hub.Server, directory: Path, name: str = NAME, ctx: int | None = None) -> Open:
    return Open(name, {**server.environment, "HF_HUB_CACHE": str(directory / "hub")}, ctx=ctx)


def opened(events: list[Message]) -> bool:
    return any(type(event) is Opened for event in events)


def test_a_download_ends_with_its_daemon_and_the_next_goes_on(home: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: REPO}) as server:
        wanted = opening(server, tmp_path)
        server.fail("stall", WEIGHTS, at=STOP, times=1)
        with running_daemon(home) as daemon, daemon.caller() as caller:
            caller.send(wanted)
            server.wait(lambda: server.sent(WEIGHTS) == STOP)
            children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
            daemon.signal(signal.SIGKILL)
            daemon.wait()
            for child in children:
                await_end(int(child))
        blobs = tmp_path / "hub/models--tiny--llama/blobs"
        (partial,) = blobs.glob(f"{REPO.files[WEIGHTS].etag}*.caldrix-partial")
        held = partial.stat().st_size
        with running_daemon(home) as daemon, daemon.caller() as caller:
            events = caller.ask(wanted)
        assert type(events[-1]) is Done, events[-1]
        assert opened(events)
        ranges = [asked.range for asked in server.requests if asked.host == "cdn"]
    assert ranges == [None, f"bytes={held}-" if held else None]
    assert not list(blobs.glob("*partial*"))


def test_a_commit_that_is_whole_is_not_asked_for(home: Home, tmp_path: Path) -> None:
    with hub.serve({NAME: REPO}) as server, running_daemon(home) as daemon, daemon.caller() as caller:
        wanted = opening(server, tmp_path, f"{NAME}@{REPO.commit}")
        assert opened(caller.ask(wanted))
        connections = server.connections
        events = caller.ask(wanted)
        assert opened(events)
        assert server.connections == connections
    said = [event.code for event in events if type(event) is Status]
    assert "status/cached" in said
    assert "status/downloading" not in said


@pytest.mark.parametrize("variable", ["CALDRIX_OFFLINE", "HF_HUB_OFFLINE", "NONE"])
def test_what_another_program_fetched_of_a_commit_is_compared_once(
    home: Home, tmp_path: Path, variable: str
) -> None:
    with running_daemon(home) as daemon, daemon.caller() as caller:
        with hub.serve({NAME: REPO}) as server:
            Cache(tmp_path / "hub", server).fill_by_the_library()
            wanted = opening(server, tmp_path, f"{NAME}@{REPO.commit}")
        wanted = wanted._replace(environment={**wanted.environment, variable: "1"})
        assert opened(caller.ask(wanted))
        weights = tmp_path / "hub/models--tiny--llama/blobs" / REPO.files[WEIGHTS].etag
        record = tmp_path / "hub/models--tiny--llama/.caldrix" / REPO.commit
        assert json.loads(record.read_text())["checked"][WEIGHTS] == weights.stat().st_mtime_ns
        assert "status/cached" in [event.code for event in caller.ask(wanted) if type(event) is Status]
        record.unlink()
        weights.write_bytes(b"x" + weights.read_bytes()[1:])
        (refusal,) = caller.ask(wanted)[-1:]
    assert type(refusal) is Refusal
    assert refusal.code == "hub/damaged"


def test_without_the_hub_the_cache_is_used_and_a_notice_says_so(home: Home, tmp_path: Path) -> None:
    with running_daemon(home) as daemon, daemon.caller() as caller:
        with hub.serve({NAME: REPO}) as server:
            wanted = opening(server, tmp_path)
            assert opened(caller.ask(wanted))
            server.fail("status", "info", at=503)
            unwell = caller.ask(wanted)
        gone = caller.ask(wanted)
        (refusal,) = caller.ask(wanted._replace(model="tiny/other"))[-1:]
    for events, why in ((unwell, "answered with status 503"), (gone, "cannot be reached")):
        assert opened(events)
        (notice,) = [event for event in events if type(event) is Notice]
        assert notice.code == "notice/hub-unreachable"
        assert why in notice.text
    assert type(refusal) is Refusal
    assert refusal.code == "hub/unreachable"


def test_a_model_that_does_not_fit_into_memory_is_not_fetched(home: Home, tmp_path: Path) -> None:
    """Two terabytes for keys and values: eight KiB for each token and layer."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 256}
    long = {"num_hidden_layers": 256, "max_position_embeddings": 1 << 20}
    config = json.loads(MODEL["config.json"]) | heads | long
    repo = hub.repo({**MODEL, "config.json": json.dumps(config).encode()})
    with hub.serve({NAME: repo}) as server, running_daemon(home) as daemon, daemon.caller() as caller:
        (refusal,) = caller.ask(opening(server, tmp_path, ctx=1 << 20))[-1:]
        assert WEIGHTS not in server.files()
    assert type(refusal) is Refusal
    assert refusal.code == "run/memory"
    assert refusal.fields["needed"] > refusal.fields["free"]
    assert 0 < refusal.fields["ctx"] < 1 << 20
