"""Hosts that do not go on are given up by a fetcher: all of them at once, since it takes its time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from caldrix_protocol.messages import Done, Planned, Refusal
from tests.fetcher.fetching import MODEL, NAME, WEIGHTS, Cache, whole
from tests.support import hub

REPO = hub.repo(MODEL)
SECONDS = 2.0  # how long a host may be silent here: more than any takes that is well


class Case(NamedTuple):
    """What comes to nothing, and what is said of it: the beginning, and some words."""

    action: str
    what: str
    host: str
    said: str
    words: str


SILENT = f"did not answer within {SECONDS:g} s"
ENDLESS = f"sent less than 1024 bytes a second for {4 * SECONDS:g} s"
HUB = f"{NAME}: 127.0.0.1"
CASES = {
    "a small file, never": Case("silent", "tokenizer.json", "hub", HUB, SILENT),
    "a small file, no more": Case("stall", "tokenizer.json", "hub", HUB, SILENT),
    # A byte comes always soon enough for a limit that begins anew with it.
    "headers of the listing": Case("endless", "info", "hub", HUB, ENDLESS),
    "headers of a small file": Case("endless", "tokenizer.json", "hub", HUB, ENDLESS),
    "headers of the weights": Case(
        "endless", WEIGHTS, "cdn", f"{WEIGHTS}: the download stalled at 0 of", ENDLESS
    ),
}


def planned(cache: Cache) -> None:
    """Have all but the weights."""
    fetcher = cache.start()
    fetcher.until(Planned)
    fetcher.end()


def given_up(cache: Cache, case: Case) -> Any:
    """The last word of a fetcher that waits for what does not come."""
    if case.what == WEIGHTS:
        planned(cache)
    cache.server.fail(case.action, case.what, host=case.host, method="GET", at=100)
    return cache.fetch(seconds=SECONDS)[0]


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Cache, Future[Any]]]]:
    with ExitStack() as stack, ThreadPoolExecutor(len(CASES)) as pool:
        made = {}
        for name, case in CASES.items():
            server = stack.enter_context(hub.serve({NAME: REPO}))
            cache = Cache(tmp_path_factory.mktemp("silence") / "hub", server)
            made[name] = cache, pool.submit(given_up, cache, case)
        yield made


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_come_is_given_up_and_had_when_it_comes(
    caches: dict[str, tuple[Cache, Future[Any]]], name: str
) -> None:
    cache, running = caches[name]
    last = running.result()
    assert type(last) is Refusal
    assert last.text.startswith(CASES[name].said)
    assert CASES[name].words in last.text
    cache.server.heal()
    assert cache.fetch()[0] == Done()
    assert whole(cache, REPO)
