"""A daemon that dies in the middle of a download, and the next one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from caldrix_protocol.messages import Done, Open, Opened
from tests.fetcher.fetching import MODEL, NAME, WEIGHTS
from tests.support import hub
from tests.support.daemon import await_end, kernel_cache, private_home, running_daemon

STOP = 200_000


def test_a_download_ends_with_its_daemon_and_the_next_goes_on(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    repo = hub.repo(MODEL)
    with hub.serve({NAME: repo}) as server, private_home(kernel_cache(request.config)) as home:
        wanted = Open(NAME, {**server.environment, "HF_HUB_CACHE": str(tmp_path / "hub")})
        server.fail("stall", WEIGHTS, at=STOP, times=1)
        with running_daemon(home) as daemon, daemon.caller() as caller:
            caller.send(wanted)
            server.wait(lambda: server.sent(WEIGHTS) == STOP)
            children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
            daemon.signal(signal.SIGKILL)
            daemon.wait()
            for child in children:
                await_end(int(child))
        partial = tmp_path / "hub/models--tiny--llama/blobs" / f"{repo.files[WEIGHTS].etag}.caldrix-partial"
        held = partial.stat().st_size
        with running_daemon(home) as daemon, daemon.caller() as caller:
            events = caller.ask(wanted)
        assert type(events[-1]) is Done, events[-1]
        assert any(type(event) is Opened for event in events)
        ranges = [asked.range for asked in server.requests if asked.host == "cdn"]
    assert ranges == [None, f"bytes={held}-"]
    assert held > 0
    assert not partial.exists()
