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
from caldrixd.engine.sampling import greedy
from caldrixd.engine.scheduler import Batch, schedule
from caldrixd.engine.session import Request, Session, TokenEvent, Usage
from caldrixd.lanes.lane import Logits, Program, StepCancelled

__all__ = ["Engine", "Request", "TokenEvent", "Usage"]


class Engine:
    """Answers requests on `program`: `max_sessions` at once, the others wait in order of arrival.

    A step holds at most `prefill_chunk` prompt rows beside one row of each running reply.
    `max_cached` slots of finished sequences are kept for their prefixes. `clock` gives seconds.
    """

    def __init__(
        self,
        program: Program,
        *,
        prefill_chunk: int = 128,
        max_sessions: int = 16,
        max_cached: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < max_sessions < program.max_rows or prefill_chunk < 1:
            raise ValueError(f"{max_sessions} sessions, {prefill_chunk} of {program.max_rows} rows")
        self._program = program
        self._prefill_chunk = prefill_chunk
        self._max_sessions = max_sessions
        self._clock = clock
        self._cache = SlotCache(program, max_cached)
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
        """End a request with "cancelled", stopping the running step if it is part of it.

        Nothing happens for a request that is unknown or finished.
        """
        with self._lock:
            if self._knows(id):
                self._cancelled.add(id)
                if id in self._running:
                    self._program.cancel()

    def step(self) -> list[TokenEvent]:
        """Run the next rows of every session once; what came of it."""
        events = self._end_cancelled() + self._admit()
        for batch in schedule(
            self._active.values(), chunk=self._prefill_chunk, max_rows=self._program.max_rows
        ):
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
        """Give waiting requests a slot, in order, as long as sessions are free."""
        events = []
        while len(self._active) < self._max_sessions:
            with self._lock:
                if not self._waiting:
                    break
                request, submitted = self._waiting[0]
            try:
                slot, cached = self._cache.take(request.prompt, request.ctx, request.dtype)
            except Refused as refused:
                with self._lock:
                    self._waiting.popleft()
                events.append(TokenEvent(request.id, None, "refused", Usage(len(request.prompt)), refused))
                continue
            session = Session(request, slot, list(request.prompt), cached, cached, submitted, self._clock())
            with self._lock:
                self._waiting.popleft()
                self._active[request.id] = session
        return events

    def _run(self, batch: Batch) -> list[TokenEvent]:
        with self._lock:
            self._running = frozenset(share.session.request.id for share in batch.shares)
        try:
            logits = self._program.step(batch.rows(), threads=batch.threads, dtype=batch.dtype)
        except StepCancelled:
            return []
        except Refused as refused:
            return [self._fail(share.session, refused) for share in batch.shares]
        finally:
            with self._lock:
                self._running = frozenset()
        return self._postprocess(batch, logits)

    def _postprocess(self, batch: Batch, logits: Logits) -> list[TokenEvent]:
        events = []
        wanted = iter(logits)
        for share in batch.shares:
            completes = share.completes
            share.session.committed += share.count
            self._program.commit(share.session.slot, share.session.committed)
            if completes:
                events.append(self._advance(share.session, next(wanted)))
        return events

    def _advance(self, session: Session, logits: Logits) -> TokenEvent:
        try:
            token = greedy(logits)
        except Refused as refused:
            return self._fail(session, refused)
        now = self._clock()
        reason = session.append(token, now)
        if reason is not None:
            return self._finish(session, token, reason)
        return TokenEvent(session.request.id, token, None, session.usage(now))

    def _finish(self, session: Session, token: int | None, reason: str) -> TokenEvent:
        """End a session and keep its slot with the tokens that are committed."""
        request = session.request
        self._forget(request.id)
        self._cache.keep(session.slot, request.ctx, request.dtype, session.tokens[: session.committed])
        return TokenEvent(request.id, token, reason, session.usage(self._clock()))

    def _fail(self, session: Session, refused: Refused) -> TokenEvent:
        """End a session whose state is not to be trusted."""
        self._forget(session.request.id)
        self._program.release(session.slot)
        return TokenEvent(session.request.id, None, "refused", session.usage(self._clock()), refused)

    def _forget(self, id: int) -> None:
        with self._lock:
            del self._active[id]
            self._cancelled.discard(id)
