"""Which commits repos of the hub are at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from caldrix_protocol.connection import as_notice
from caldrix_protocol.messages import Known
from caldrix_protocol.refusals import Refused
from caldrixd.fetcher.demo import Send
from caldrixd.fetcher.library import Hub
from caldrixd.models.hub import Repo
from caldrixd.models.resolve import DEFAULT_REVISION

SILENT = ("hub/unreachable", "hub/timeout")


def look_up(names: Sequence[str], cache: Path, endpoint: str, seconds: float, send: Send) -> None:
    """Send a `known` for each repo, or a notice where the hub does not tell.

    Refused for a hub that does not answer at all.
    """
    for name in names:
        try:
            hub = Hub(endpoint, Repo(name, DEFAULT_REVISION), name, cache, seconds)
            send(Known("", name, hub.listing().commit, "", 0, ""))
        except Refused as refused:
            if refused.code in SILENT:
                raise
            send(as_notice("notice/not-pinned", reason=refused.text))
