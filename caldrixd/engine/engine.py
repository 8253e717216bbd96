"""The engine: schedule, run, postprocess.

It holds the sessions of one program and steps them together. It knows neither text nor
sockets nor processes. `step` belongs to one thread; `submit`, `cancel` and `busy` to any.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from caldrix_protocol.refusals import Refused
from caldrixd.engine.cache import SlotCache
from caldrixd.engine.pace import Pace
from caldrixd.engine.sampling import pick
from caldrixd.engine.scheduler import Batch, schedule
from caldrixd.engine.session import Request, Session, TokenEvent, Usage
from caldrixd.engine.weights import Values
from caldrixd.lanes.lane import Logits, Program, StepCancelled

__all__ = ["Engine", "Request", "TokenEvent", "Usage"]

# Where recurrent state is saved, from the prompt's end: before the opening of the reply, which the next
# turn of a chat may write differently. A prompt of up to twice as many tokens is not worth it.
TAIL = 16


class Engine:
    """Answers requests on `program`: `max_sessions` at once, the others wait in order of arrival.

    A step holds one row of each running reply, and as many prompt rows as it has time for, up to
    `prefill_chunk` (None: what the lane takes). Slots of finished sequences are kept for their
    prefixes, up to `cache_bytes` of state. `clock` gives seconds.
    """

    def __init__(
        self,
        program: Program,
        *,
        prefill_chunk: int | None = None,
        max_sessions: int = 8,
        cache_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        chunk = program.max_rows if prefill_chunk is None else prefill_chunk
        if not 0 < max_sessions < program.max_rows or chunk < 1:
            raise ValueError(f"{max_sessions} sessions, {chunk} of {program.max_rows} rows")
        self._program = program
        self._prefill_chunk = chunk
        self._max_sessions = max_sessions
        self._clock = clock
        self._cache = SlotCache(program, cache_bytes)
        self._pace = Pace(program.plan)
        self._lock = threading.Lock()  # guards the four below
        self._waiting: deque[tuple[Request, float]] = deque()
        self._active: dict[int, Session] = {}
        self._cancelled: set[int] = set()
        self._running: frozenset[int] = frozenset()

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        with self._lock:
            return bool(self._waiting or self._active)

    def submit(self, request: Request) -> None:
        """Queue a request; its events come from `step`.

        Refused "message/..." for a prompt that is empty, fills the context or holds an unknown
        token. ValueError for the id of a request that is not finished.
        """
        vocab_size = self._program.plan.vocab_size
        if not request.prompt:
            raise Refused("message/empty")
        if len(request.prompt) >= request.ctx:
            raise Refused("message/too-long", tokens=len(request.prompt), ctx=request.ctx)
        for token in request.prompt:
            if not 0 <= token < vocab_size:
                raise Refused("message/unknown-token", token=token, count=vocab_size)
        now = self._clock()
        with self._lock:
            if self._knows(request.id):
                raise ValueError(f"request {request.id} is not finished")
            self._waiting.append((request, now))

    def cancel(self, id: int) -> None:
        """End a request with "cancelled". Nothing happens for one that is unknown or finished.

        The running step is stopped when all that are part of it are cancelled: for any other it would have to
        be run once more.
        """
        with self._lock:
            if self._knows(id):
                self._cancelled.add(id)
                if id in self._running and self._running <= self._cancelled:
                    self._program.cancel()

    def step(self) -> list[TokenEvent]:
        """Run the next rows of every session once; what came of it."""
        events = self._end_cancelled() + self._admit()
        limits = {"chunk": self._prefill_chunk, "max_rows": self._program.max_rows}
        for batch in schedule(self._active.values(), self._pace, **limits):
            events += self._run(batch)
        return events + self._end_cancelled()

    def prefilling(self) -> list[tuple[int, int, int]]:
        """(id, tokens held, tokens of the prompt) of each request whose prompt is not through yet.

        For the thread of `step`, after it.
        """
        return [
            (session.request.id, session.committed, len(session.request.prompt))
            for session in self._active.values()
            if session.pending > 1
        ]

    def _knows(self, id: int) -> bool:
        return id in self._active or any(request.id == id for request, _ in self._waiting)

    def _end_cancelled(self) -> list[TokenEvent]:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            waiting = [entry for entry in self._waiting if entry[0].id in cancelled]
            for entry in waiting:
                self._waiting.remove(entry)
        events = [
            TokenEvent(request.id, None, "cancelled", Usage(len(request.prompt))) for request, _ in waiting
        ]
        for id in sorted(cancelled & self._active.keys()):
            events.append(self._finish(self._active[id], None, "cancelled"))
        return events

    def _admit(self) -> list[TokenEvent]:
        """Give waiting requests a slot, in order, as long as there is place for the next one."""
        events = []
        while True:
            with self._lock:
                if not self._waiting or not self._has_place(self._waiting[0][0]):
                    break
                request, submitted = self._waiting[0]
            try:
                session = self._begin(request, submitted)
            except Refused as refused:
                with self._lock:
                    self._waiting.popleft()
                events.append(TokenEvent(request.id, None, "refused", Usage(len(request.prompt)), refused))
                continue
            with self._lock:
                self._waiting.popleft()
                self._active[request.id] = session
        return events

    def _has_place(self, request: Request) -> bool:
        """Whether a request may join the active ones. It always may when there are none."""
        batches = [session.request.max_batch for session in self._active.values()]
        limit = min(self._max_sessions, request.max_batch, *batches)
        return not self._active or len(self._active) < limit

    def _begin(self, request: Request, submitted: float) -> Session:
        prompt = request.prompt
        slot, cached = self._cache.take(prompt, request.ctx, request.dtype)
        saves = not self._program.plan.rewindable and len(prompt) > 2 * TAIL
        mark = len(prompt) - TAIL if saves else 0
        return Session(request, slot, list(prompt), cached, cached, submitted, self._clock(), mark)

    def _run(self, batch: Batch) -> list[TokenEvent]:
        rows = batch.rows()
        running = frozenset(share.session.request.id for share in batch.shares)
        with self._lock:
            if running <= self._cancelled:
                return []
            self._running = running
        started = self._clock()
        try:
            logits = self._program.step(rows, threads=batch.threads, dtype=batch.dtype)
        except StepCancelled:
            return []
        except Refused as refused:
            return [self._fail(share.session, refused) for share in batch.shares]
        finally:
            with self._lock:
                self._running = frozenset()
        self._pace.measured(batch.kind, rows.positions, self._clock() - started)
        return self._postprocess(batch, logits)

    def _postprocess(self, batch: Batch, logits: Logits) -> list[TokenEvent]:
        events = []
        wanted = zip(logits.values, logits.likeliest.tolist(), strict=True)
        for share in batch.shares:
            session, completes = share.session, share.completes
            session.committed += share.count
            self._program.commit(session.slot.number, session.committed)
            if session.committed == session.mark:
                self._cache.snapshot(session.slot)
            if completes:
                events.append(self._advance(session, *next(wanted)))
        return events

    def _advance(self, session: Session, values: Values, likeliest: int) -> TokenEvent:
        if likeliest < 0:
            return self._fail(session, Refused("run/not-finite"))
        sampling = session.request.sampling
        token = likeliest if sampling.greedy else pick(values, session.tokens, sampling)
        now = self._clock()
        reason = session.append(token, now)
        if reason is not None:
            return self._finish(session, token, reason)
        return TokenEvent(session.request.id, token, None, session.usage(now))

    def _finish(self, session: Session, token: int | None, reason: str) -> TokenEvent:
        """End a session and keep its slot with the tokens that are committed."""
        request = session.request
        self._forget(request.id)
        self._cache.keep(session.slot, session.tokens[: session.committed], len(request.prompt))
        return TokenEvent(request.id, token, reason, session.usage(self._clock()))

    def _fail(self, session: Session, refused: Refused) -> TokenEvent:
        """End a session whose state is not to be trusted."""
        self._forget(session.request.id)
        self._program.release(session.slot.number)
        return TokenEvent(session.request.id, None, "refused", session.usage(self._clock()), refused)

    def _forget(self, id: int) -> None:
        with self._lock:
            del self._active[id]
            self._cancelled.discard(id)
