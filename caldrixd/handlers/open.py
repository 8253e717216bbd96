"""`open`: from a model's name to a worker that holds it."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, TypeVarTuple, Unpack

from anyio import to_thread

from caldrix_protocol.connection import as_status
from caldrix_protocol.messages import Done, Message, Open, Opened, Planned, Ready
from caldrix_protocol.refusals import Refused
from caldrixd.architectures import FAMILIES
from caldrixd.config import Config
from caldrixd.fetcher.process import Accept
from caldrixd.handlers import room
from caldrixd.handlers.context import Client, Opening, Services
from caldrixd.handlers.estimate import guessed, needs, stored
from caldrixd.handlers.obtain import obtain
from caldrixd.lanes import choose
from caldrixd.lanes.drivers.compiler import worker_environment
from caldrixd.lanes.drivers.cores import default_threads
from caldrixd.lanes.lane import Variant
from caldrixd.lanes.variant import settle
from caldrixd.models import fit, gate
from caldrixd.models.changed import identity
from caldrixd.models.files import INDEX, weight_files
from caldrixd.models.resolve import check_directory, resolve
from caldrixd.plan.plan import Plan
from caldrixd.spec import ModelSpec
from caldrixd.text import files as text_files
from caldrixd.worker.process import LOADING, Key, Worker

# What a lane's worker needs in its environment, given a private directory for caches and an ISA.
WORKER_ENVIRONMENT: Mapping[str, Callable[[Path, str], dict[str, str]]] = {"cpu": worker_environment}
DEFAULT_CTX = 2048
# Beside the weights: what a loaded model depends on.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    *text_files.NAMES,
    INDEX,
)


Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")
Find = Callable[[Key], object]


@dataclass(frozen=True)
class Found:
    """A model directory that passed the gate."""

    key: Key
    spec: ModelSpec
    plan: Plan


async def handle(request: Open, client: Client, services: Services) -> Message:
    opening = await load(request, client, services)
    handle = client.add(opening)
    client.send(
        Opened(
            handle=handle,
            model=opening.lease.worker.name,
            lane=opening.lease.worker.key.lane,
            settings=opening.summary,
            ctx=opening.ctx,
            chat_template=opening.ready.chat_template,
            load_seconds=opening.waited,
        )
    )
    return Done()


async def load(request: Open, client: Client, services: Services) -> Opening:
    """Lease a loaded worker for `request`; the client gets status lines and progress meanwhile.

    Flags, name and lane are checked before anything is fetched, the files before anything is loaded.
    """
    started = time.monotonic()
    resolved = await _in_thread(resolve, request.model)
    environment = services.config.environment
    lane = await _in_thread(choose.choose, request.backend, environment)
    variant = await _in_thread(settled, lane, request.cpu_isa, request.cpu_kernels, environment)
    accept = _acceptance(request, lane, services)
    directory = await obtain(resolved, request.environment, client.send, services, accept)
    found = await _in_thread(inspect, directory, lane, variant, services.pool.find)
    ctx = context_length(request.ctx, found.spec)
    worker = await _worker(request, found, ctx, services)
    if worker.state == LOADING and worker.leases:
        client.send(as_status("status/queued", model=request.model))
    lease = services.pool.lease(worker)
    try:
        ready = await worker.loaded(client.send)
    except BaseException:
        services.pool.release(lease)
        raise
    if request.backend == "auto":
        client.send(as_status("status/backend", lane=lane))
    summary = _summary(request, ready)
    client.send(as_status("status/lane", lane=lane, settings=summary))
    return Opening(request, lease, ready, ctx, summary, time.monotonic() - started)


def _summary(request: Open, ready: Ready) -> str:
    """How replies on this opening are computed, for the status line."""
    threads = request.threads or default_threads()
    plural = "" if threads == 1 else "s"
    return f"{threads} thread{plural}, {ready.settings}, arithmetic {request.dtype}"


def _acceptance(request: Open, lane: str, services: Services) -> Accept:
    """What stands between a plan and the download of its weights: the model must fit."""

    async def accept(planned: Planned) -> None:
        await _in_thread(_check_fit, request, lane, planned, services.pool.idle())

    return accept


def _check_fit(request: Open, lane: str, planned: Planned, idle: list[Worker]) -> None:
    spec = gate.read_spec(Path(planned.directory))
    plan = FAMILIES[spec.architecture].build(spec)
    ctx = context_length(request.ctx, spec)
    free = fit.available_memory() + sum(worker.size for worker in idle)
    needed = _needs(request, lane, plan, guessed(plan, planned.weight_bytes))
    fit.check(needed, ctx, free, model=request.model)


def _needs(request: Open, lane: str, plan: Plan, formats: Mapping[str, str]) -> fit.Needs:
    return needs(plan, formats, lane, threads=request.threads, arithmetic=request.dtype)


def _needs_of(request: Open, found: Found) -> fit.Needs:
    formats = stored(found.spec, found.plan, Path(found.key.directory))
    return _needs(request, found.key.lane, found.plan, formats)


async def _in_thread(function: Callable[[Unpack[Arguments]], Result], *arguments: *Arguments) -> Result:
    """Call what may block on a file system. A cancelled request does not wait for it."""
    return await to_thread.run_sync(function, *arguments, abandon_on_cancel=True)


def settled(lane: str, isa: str, kernels: str, environment: Mapping[str, str]) -> Variant:
    """The code the lane's worker runs; only the CPU lane has a choice. Refused "lane/...", see `settle`."""
    if lane != "cpu":
        return Variant()
    return settle(isa, kernels, environment)


def inspect(directory: Path, lane: str, variant: Variant, find: Find) -> Found:
    """Look at a model directory, but not into its weights. Refused for what is unusable.

    `find` knows the worker that has loaded it as it is; then its tokenizer needs no second look.
    """
    try:
        check_directory(directory)
        spec = gate.read_spec(directory)
        try:
            found = identity(directory, (*SMALL_FILES, *weight_files(directory)))
        except Refused:
            text_files.check_directory(directory)
            raise
        key = Key(_real_path(directory), found, lane, variant.isa, variant.kernels)
        if find(key) is None:
            text_files.check_directory(directory)
    except OSError as error:
        raise Refused("model/not-readable", path=error.filename or directory, reason=error.strerror) from None
    return Found(key, spec, FAMILIES[spec.architecture].build(spec))


def _real_path(directory: Path) -> str:
    """The path without links. OSError if no message can carry it to a worker."""
    path = os.path.realpath(directory)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise OSError(errno.EILSEQ, "its path is not valid UTF-8", path) from None
    return path


def context_length(wanted: int | None, spec: ModelSpec) -> int:
    """The context in tokens; the default shrinks to the model. Refused "run/ctx-too-long"."""
    if wanted is None:
        return min(DEFAULT_CTX, spec.max_context)
    if wanted > spec.max_context:
        raise Refused("run/ctx-too-long", ctx=wanted, limit=spec.max_context)
    return wanted


async def _worker(request: Open, found: Found, ctx: int, services: Services) -> Worker:
    """The worker of this model, started unless there is one. Refused "run/memory..." when it cannot fit."""
    pool = services.pool
    worker = pool.find(found.key)
    if worker is not None and worker.alive:
        await room.make_for_another(request.model, found.plan, ctx, worker, pool)
        worker = pool.find(found.key)
    if worker is None:
        await pool.gone(found.key)
        needed = await _in_thread(_needs_of, request, found)
        await room.make_for(request.model, needed, ctx, pool)
        environment = await _in_thread(_worker_environment, found.key, services.config)
        # Another request may have started one meanwhile.
        worker = pool.find(found.key) or pool.start(Worker(found.key, request.model, environment))
    worker.names.add(request.model)
    return worker


def _worker_environment(key: Key, config: Config) -> dict[str, str]:
    """The worker's whole environment. Where the cache cannot be written, caches last until logout."""
    variables = WORKER_ENVIRONMENT[key.lane]
    try:
        own = variables(config.cache_directory, key.isa)
    except OSError as error:
        logging.warning("%s is not used: %s", config.cache_directory, error.strerror)
        own = variables(Path(config.address.directory), key.isa)
    return {**config.environment, **own}
