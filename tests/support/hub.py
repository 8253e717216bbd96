"""A hub on loopback. It speaks to huggingface_hub as the real one does, says what it was asked, and can fail.

    with hub.serve({"owner/name": tiny("tiny-llama")}) as server:
        home.caldrix("run", "owner/name", **server.environment)
        assert server.files() == ["config.json"]

Three hosts, each at an address of its own: "hub"; "cdn", where the files above `LFS_ABOVE` bytes are; and
"stranger", to which only a fault leads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.hub_http import Host
from tests.support.hub_repo import LFS_ABOVE, Repo, repo
from tests.support.hub_routes import MEMBER, OUTSIDER
from tests.support.hub_state import ADDRESSES, SECONDS, Request, Server

__all__ = ["LFS_ABOVE", "MEMBER", "OUTSIDER", "SECONDS", "Repo", "Request", "Server", "repo", "serve"]


@contextmanager
def serve(repos: Mapping[str, Path | Repo], *, resolve_cache: bool = False) -> Iterator[Server]:
    """Serve repositories until the end of the block: by "owner/name", or "owner/name@branch" beside it.

    With `resolve_cache` the small files are a redirect away too, on the same host, as on the hub since 2025.
    """
    server = Server({}, resolve_cache)
    for name, source in repos.items():
        base, _, branch = name.partition("@")
        made = repo(source) if isinstance(source, Path) else source
        server.repos.setdefault(base, {}).update({branch or "main": made, made.commit: made})
    hosts = [Host(name, server) for name in ADDRESSES]
    server.origins.update({host.name: host.origin for host in hosts})
    threads = [threading.Thread(target=host.serve_forever, args=(0.01,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    try:
        yield server
    finally:
        for host in hosts:
            host.shutdown()
        server.heal()
        for host in hosts:
            host.end()
        for thread in threads:
            thread.join()
        assert server.errors == []
