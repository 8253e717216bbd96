"""Which loaded models a name means: as it was run, or as it would be run."""

from __future__ import annotations

import os
from pathlib import Path

from anyio import to_thread

from caldrix_protocol.refusals import Refused
from caldrixd.fetcher import demo
from caldrixd.models.resolve import resolve
from caldrixd.worker.pool import Pool
from caldrixd.worker.process import Worker


async def meant(model: str, pool: Pool) -> list[Worker]:
    """The workers that were opened as `model`, else those of what it names now."""
    if named := pool.named(model):
        return named
    loaded = sorted({worker.key.directory for worker in pool})
    same = await to_thread.run_sync(_those_of, model, loaded)
    return [worker for directory in same for worker in pool.named(directory)]


def _those_of(model: str, directories: list[str]) -> list[str]:
    return [directory for directory in directories if _is(Path(directory), model)]


def _is(directory: Path, model: str) -> bool:
    """Whether a model's directory, which has no links, is what the name stands for."""
    if os.path.isabs(model):
        return os.path.realpath(model) == str(directory)
    try:
        repo = resolve(model).repo
    except Refused:
        return False
    if repo is None:
        return directory.parts[-2:] == ("models", demo.NAME)
    storage = directory.parent.parent
    in_cache = storage.name == repo.storage(storage.parent).name
    return in_cache and repo.commit(storage.parent) == directory.name
