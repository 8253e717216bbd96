"""Hosts that say too little are given up, and named: all of them at once, since it takes its time."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import daemon, hub
from tests.support.cli import Home, finish, new_home
from tests.support.daemon import kernel_cache, running_daemon
from tests.support.hub_cli import NAME, below, model, nothing_outside, pull, refused, start

FILE = "model.safetensors"
SECONDS = 3.0  # how long the daemon waits here: more than any host takes that is well


class Case(NamedTuple):
    """Which requests come to nothing, from which byte on, and what is said of it."""

    action: str
    what: str
    at: int
    words: tuple[str, ...]


SLOW = f"sent less than 1024 bytes a second for {2 * SECONDS:g} s"
CASES = {
    "listing": Case("drip", "info", 0, (SLOW,)),
    "small file": Case("drip", "config.json", 10, (SLOW,)),
    "weights, never": Case("silent", FILE, 0, (FILE, f"did not answer within {SECONDS:g} s")),
    "weights, no more": Case("stall", FILE, 1000, (FILE, "stalled at 1000 of 240288 bytes")),
    "weights, slowly": Case("drip", FILE, 1000, (FILE, "stalled at", "127.0.0.2", SLOW)),
}


class Pull(NamedTuple):
    """A download that runs, its hub, and the directory of its cache."""

    client: subprocess.Popen[bytes]
    server: hub.Server
    directory: Path


@pytest.fixture(scope="module")
def impatient(request: pytest.FixtureRequest) -> Iterator[Home]:
    cache = kernel_cache(request.config)
    changes = {"fetch_seconds": SECONDS}
    with new_home(cache) as home, running_daemon(daemon.Home(home.path, home.cache), changes=changes):
        yield home


@pytest.fixture(scope="module")
def pulls(
    impatient: Home, shared: Home, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Pull]]:
    """All cases, begun. What is no weights is in the cache already where the weights are what is to come."""
    with ExitStack() as stack:
        made: dict[str, Pull] = {}
        for name, case in CASES.items():
            directory = tmp_path_factory.mktemp("silence")
            server = stack.enter_context(hub.serve({NAME: model()}))
            if case.what == FILE:
                assert finish(start(shared, directory, server, "models", "plan", NAME)).status == 0
            server.fail(case.action, case.what, host="cdn" if case.what == FILE else "hub", at=case.at)
            made[name] = Pull(start(impatient, directory, server, "pull", NAME), server, directory)
        yield made
        for each in made.values():
            with each.client:
                each.client.kill()


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_come_is_given_up_and_had_when_it_comes(
    pulls: dict[str, Pull], shared: Home, name: str
) -> None:
    client, server, directory = pulls[name]
    refused(finish(client), NAME if CASES[name].what != FILE else FILE, *CASES[name].words)
    assert not [path for path in below(directory) if path.name == FILE]
    server.heal()
    assert pull(shared, directory, server).status == 0
    nothing_outside(directory)
