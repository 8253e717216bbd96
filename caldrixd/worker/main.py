"""The worker process: loads one model and answers with it until its socket closes.

The reader thread takes messages and ends the process at end of file. Each request is made into a prompt on
a thread of its own, since a chat template may take long. The main thread loads, then runs the engine; another
tells what came of a step while the next one runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from caldrix_protocol.codec import encode
from caldrix_protocol.connection import as_notice, as_status
from caldrix_protocol.messages import Abort, Attach, Begin, Done, Load, Message, Progress, Refusal, Relay
from caldrix_protocol.refusals import NOTICE, ROWS
from caldrixd import log
from caldrixd.engine.engine import TokenEvent
from caldrixd.worker.behind import Behind
from caldrixd.worker.failures import refusal_for
from caldrixd.worker.loading import Model, load
from caldrixd.worker.pipe import Pipe
from caldrixd.worker.replies import Reply


def serve(pipe: Pipe, wanted: Load, environment: Mapping[str, str]) -> int:
    """Work for the daemon at the other end of `pipe`; the exit status when the work ends early."""
    answers = Answers(pipe, wanted)

    def report(code: str, fields: dict[str, Any]) -> None:
        message = as_notice if ROWS[code].kind == NOTICE else as_status
        pipe.send(message(code, **fields))

    try:
        threading.Thread(target=answers.read, daemon=True).start()
        model = load(wanted, environment, report)
        answers.answer(model)
    except BaseException as error:
        refusal = refusal_for(error, wanted)
        answers.refuse(refusal)
        pipe.send(refusal)
    return 1


class Answers:
    """All replies of this worker. A failure of one reply ends that reply alone."""

    def __init__(self, pipe: Pipe, wanted: Load) -> None:
        self._pipe = pipe
        self._wanted = wanted
        self._model: Model | None = None
        self._attachments: dict[int, list[Attach]] = {}
        self._replies: dict[int, Reply] = {}
        self._lock = threading.Lock()  # guards _replies
        self._work = threading.Event()

    def read(self) -> None:
        """The reader thread. At its end nobody is left to work for, so the process ends, whatever it does."""
        status = 1
        try:
            while (message := self._pipe.receive()) is not None:
                self.take(message)
            status = 0
        except Exception as error:
            log.incident(error)
        finally:
            os._exit(status)

    def take(self, message: Message) -> None:
        """Act on one message of the daemon, at once."""
        match message:
            case Attach():
                self._attachments.setdefault(message.stream, []).append(message)
            case Begin():
                reply = Reply(message, self._attachments.pop(message.stream, []))
                with self._lock:
                    self._replies[message.stream] = reply
                threading.Thread(target=self._prepare, args=(reply,), daemon=True).start()
            case Abort():
                self._abort(message.stream)

    @property
    def _loaded(self) -> Model:
        assert self._model is not None
        return self._model

    def answer(self, model: Model) -> None:
        """Run the engine, for ever. Whatever it raises leaves the model's state in doubt."""
        self._model = model
        engine = model.engine
        self._pipe.send(model.ready())
        telling = Behind(self._tell)
        try:
            while True:
                self._work.wait()
                self._work.clear()
                while engine.busy:
                    # At most one step ahead of what is told: a daemon that does not read holds the engine up.
                    telling.call(engine.step(), engine.prefilling())
                telling.wait()
        finally:
            telling.wait()

    def refuse(self, refusal: Refusal) -> None:
        """End every reply."""
        for number in list(self._replies):
            self._end(number, refusal)

    def _prepare(self, reply: Reply) -> None:
        """On a thread for this reply: from the request to the engine."""
        try:
            for notice in reply.build_prompt(self._loaded):
                self._relay(reply.number, notice)
            reply.submit(self._loaded)
            self._work.set()
        except BaseException as error:
            self._end(reply.number, refusal_for(error, self._wanted))

    def _abort(self, number: int) -> None:
        reply = self._replies.get(number)
        if reply is not None and not reply.cancel(self._loaded.engine):
            self._end(number, reply.cancelled())

    def _tell(self, events: Sequence[TokenEvent], prefilling: Sequence[tuple[int, int, int]]) -> None:
        """What came of a step, to the clients."""
        for event in events:
            self._advance(event)
        for number, done, total in prefilling:
            self._relay(number, Progress("prompt", done, total, "tokens"))

    def _advance(self, event: TokenEvent) -> None:
        reply = self._replies.get(event.id)
        if reply is None:
            return
        try:
            messages = reply.advance(event)
        except BaseException as error:
            self._loaded.engine.cancel(event.id)
            messages = [refusal_for(error, self._wanted)]
        if event.finish is None and messages and type(messages[-1]) is Done:
            self._loaded.engine.cancel(event.id)
        for message in messages:
            if type(message) in (Done, Refusal):
                self._end(event.id, message)
            else:
                self._relay(event.id, message)

    def _end(self, number: int, final: Message) -> None:
        """Send the last event of a reply, if it still runs."""
        with self._lock:
            running = self._replies.pop(number, None) is not None
        if running:
            self._relay(number, final)

    def _relay(self, number: int, message: Message) -> None:
        self._pipe.send(Relay(number, encode(message)))
