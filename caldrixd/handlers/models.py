"""`models` and `remove`: what has a name or stands in a cache, and taking it from there."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from anyio import to_thread

from caldrix_protocol.address import cache_directory
from caldrix_protocol.messages import Done, Known, Message, Models, Removal, Remove
from caldrix_protocol.refusals import Refused
from caldrixd.fetcher import demo
from caldrixd.handlers.context import Client, Services
from caldrixd.models import aliases, hub, removal
from caldrixd.models.resolve import ResolvedModel, parse_repo, resolve

DEMO_LICENCE = "Apache-2.0"
STORAGE = "models--"


async def list_all(request: Models, client: Client, services: Services) -> Message:
    environment = services.environment(request.environment)
    for known in await to_thread.run_sync(_all, environment):
        client.send(known)
    return Done()


async def remove(request: Remove, client: Client, services: Services) -> Message:
    """A cache's directory of the model goes, whole. Refused while it is loaded or downloaded."""
    environment = services.environment(request.environment)
    resolved = await to_thread.run_sync(resolve, request.model)
    if resolved.directory is not None:
        raise Refused("model/own-directory", path=resolved.directory)
    path = _storage(resolved, environment)
    await to_thread.run_sync(removal.finish, path.parent)
    if not await to_thread.run_sync(_is_own, path):
        raise Refused("model/not-cached", model=request.model, path=path.parent)
    if resolved.repo is not None and services.fetches.busy(path):
        raise Refused("model/downloading", model=request.model)
    inside = os.path.realpath(path)
    for worker in services.pool:
        if Path(worker.key.directory).is_relative_to(inside):
            raise Refused("model/in-use", model=request.model, name=worker.name)
    client.send(Removal(str(path), await to_thread.run_sync(size_of, path)))
    if request.really:
        await to_thread.run_sync(removal.remove, path)
    return Done()


def _storage(resolved: ResolvedModel, environment: Mapping[str, str]) -> Path:
    if resolved.repo is None:
        return demo.model_directory(Path(cache_directory(environment)))
    return resolved.repo.storage(hub.cache_root(environment))


def _is_own(path: Path) -> bool:
    """Whether it is a directory in its cache, and no link to one elsewhere."""
    return path.is_dir() and not path.is_symlink()


def _all(environment: Mapping[str, str]) -> list[Known]:
    """The aliases, then the cached repos without one by name."""
    cache = hub.cache_root(environment)
    named = [
        _known(alias, hub.Repo(at.repo, at.revision), at.licence, cache) for alias, at in aliases.HUB.items()
    ]
    directory = demo.model_directory(Path(cache_directory(environment)))
    state = "whole" if demo.is_complete(directory) else ""
    named.append(Known(aliases.DEMO, demo.NAME, "", DEMO_LICENCE, size_of(directory), state))
    taken = {alias.repo for alias in aliases.HUB.values()}
    others = [repo for repo in _cached(cache) if repo.name not in taken]
    return [*named, *(_known("", repo, "", cache) for repo in others)]


def _known(alias: str, repo: hub.Repo, licence: str, cache: Path) -> Known:
    cached, size = hub.look(repo, cache), size_of(repo.storage(cache))
    state = "whole" if cached is not None and cached.complete else "part" if size else ""
    return Known(alias, repo.name, repo.revision, licence, size, state)


def _cached(cache: Path) -> list[hub.Repo]:
    """Every repo of the cache, at "main" or else at any revision that it knows."""
    try:
        names = sorted(path.name for path in cache.iterdir() if path.name.startswith(STORAGE))
    except OSError:
        return []
    repos = []
    for name in names:
        repo = hub.Repo(name.removeprefix(STORAGE).replace("--", "/", 1), "main")
        if parse_repo(repo.name) and _is_own(repo.storage(cache)):
            repos.append(_at_known_revision(repo, cache))
    return repos


def _at_known_revision(repo: hub.Repo, cache: Path) -> hub.Repo:
    if repo.commit(cache) is not None:
        return repo
    try:
        commits = sorted(os.listdir(repo.storage(cache) / "snapshots"))
    except OSError:
        commits = []
    commit = next((name for name in commits if hub.COMMIT.fullmatch(name)), "main")
    return hub.Repo(repo.name, commit)


def size_of(directory: Path) -> int:
    """Bytes of the files in it; links are none."""
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            with suppress(OSError):
                found = os.lstat(os.path.join(folder, name))
                total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total
