"""`pull`: a model made complete in the cache, without loading it."""

from __future__ import annotations

from pathlib import Path

from anyio import to_thread

from caldrix_protocol.connection import as_status
from caldrix_protocol.messages import Done, Message, Planned, Pull
from caldrixd.architectures import FAMILIES
from caldrixd.handlers.context import Client, Services
from caldrixd.handlers.obtain import obtain
from caldrixd.models import gate, weights
from caldrixd.models.resolve import check_directory, resolve
from caldrixd.text import files as text_files


async def handle(request: Pull, client: Client, services: Services) -> Message:
    """Disk is checked, memory is not: what is fetched now may run elsewhere or later."""
    resolved = await to_thread.run_sync(resolve, request.model)
    directory = await obtain(resolved, request.environment, client.send, services, _accept)
    await to_thread.run_sync(_look, directory)
    client.send(as_status("status/pulled", model=request.model))
    return Done()


def _look(directory: Path) -> None:
    """All that can be said of it without a byte of its weights. Refused for what could not be loaded."""
    check_directory(directory)
    spec = gate.read_spec(directory)
    text_files.check_directory(directory)
    family = FAMILIES[spec.architecture]
    entries = weights.read_entries(directory, family.stacked)
    weights.check(entries, family.build(spec), family.ignored, architecture=spec.architecture)


async def _accept(planned: Planned) -> None:
    """Whatever its size."""
