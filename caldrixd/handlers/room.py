"""Memory for a model that is to be loaded, and for one more conversation with one that is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from caldrix_protocol.refusals import Refused
from caldrixd.models import fit
from caldrixd.plan.plan import Plan
from caldrixd.worker.pool import Pool
from caldrixd.worker.process import Worker

# Tokens whose keys and values are held together, as the lanes do.
BLOCK = 128
# Recurrent state as it is, as a step makes it, and as it was at the prompt's end.
COPIES = 3

Check = Callable[[int], None]


async def make_for(model: str, needed: fit.Needs, ctx: int, pool: Pool) -> None:
    """Unload idle models, the longest unused first, until this one fits. Refused "run/memory..."."""

    def check(free: int) -> None:
        fit.check(needed, ctx, free, model=model)

    await _make(check, pool.idle(), 0, pool)


async def make_for_another(model: str, plan: Plan, ctx: int, worker: Worker, pool: Pool) -> None:
    """The same for the state of one more conversation with a loaded model. Refused "run/memory-further".

    A worker that answers nothing gives it the memory of finished conversations.
    """

    def state(tokens: int) -> int:
        return plan.kv_bytes(-(-tokens // BLOCK) * BLOCK) + COPIES * plan.recurrent_bytes

    def check(free: int) -> None:
        fit.check_further(state, ctx, free, model=model)

    kept = 0
    if not worker.busy:
        kept = max(0, fit.anonymous_memory(worker.pid) - worker.size - fit.PROCESS_BYTES)
    await _make(check, [idle for idle in pool.idle() if idle is not worker], kept, pool)


async def _make(check: Check, idle: list[Worker], spare: int, pool: Pool) -> None:
    """`check` gets what is free, in bytes, with `spare` of it in a loaded worker."""
    check(fit.available_memory() + spare + sum(worker.size for worker in idle))
    for worker in idle:
        with suppress(Refused):
            check(fit.available_memory() + spare)
            return
        logging.info("worker %d makes room", worker.pid)
        await pool.unload(worker, Refused("worker/unloaded", model=worker.name))
    check(fit.available_memory() + spare)
