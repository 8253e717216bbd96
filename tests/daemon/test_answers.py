"""The worker's inside: a reply between its threads, and failures that must stay in one reply."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from caldrix_protocol.codec import decode, encode
from caldrix_protocol.connection import NEED_DATA, Connection
from caldrix_protocol.messages import (
    EVENTS,
    Begin,
    Delta,
    Done,
    Generate,
    Load,
    Message,
    Ready,
    Refusal,
    Relay,
)
from caldrix_protocol.refusals import Refused
from caldrixd.engine.engine import Engine, Request, TokenEvent
from caldrixd.lanes.lane import Logits
from caldrixd.models import gate
from caldrixd.text import template, tokenizer
from caldrixd.text.detokenize import Detokenizer
from caldrixd.text.template import ChatTemplate
from caldrixd.worker.failures import refusal_for
from caldrixd.worker.loading import Model
from caldrixd.worker.main import Answers
from caldrixd.worker.pipe import Pipe
from caldrixd.worker.replies import Reply, with_texts
from tests.support.daemon import SECONDS, raw
from tests.support.models import oracle_program, reference, tiny

PROMPT = reference("tiny-llama")["prompts"][0]
LOAD = Load("tiny", str(tiny("tiny-llama")), "cpu")


class Panic(BaseException):
    """What a library in another language may raise."""


@pytest.fixture
def model() -> Iterator[Model]:
    directory = tiny("tiny-llama")
    spec = gate.read_spec(directory)
    program = oracle_program(directory)
    turns = template.load(directory)
    yield Model(spec, tokenizer.load(directory, spec), turns, program, Engine(program))
    if turns is not None:
        turns.close()


def begin(stream: int, text: str = PROMPT["prompt"]) -> Begin:
    return Begin(stream, encode(Generate(1, raw=raw(text), max_tokens=24)), 256, "f32", 1)


def test_a_reply_cancelled_before_it_has_a_prompt_never_reaches_the_engine(model: Model) -> None:
    reply = Reply(begin(1), [])
    assert not reply.cancel(model.engine)
    reply.build_prompt(model)
    reply.submit(model)
    assert not model.engine.busy
    assert reply.cancelled() == Done("cancelled", prompt_ids=tuple(PROMPT["prompt_ids"]))


def test_a_reply_cancelled_in_the_engine_ends_there(model: Model) -> None:
    reply = Reply(begin(1), [])
    reply.build_prompt(model)
    reply.submit(model)
    assert reply.cancel(model.engine)
    (event,) = model.engine.step()
    (done,) = reply.advance(event)
    assert (done.finish_reason, done.ids, done.prompt_ids) == ("cancelled", (), tuple(PROMPT["prompt_ids"]))
    assert not model.engine.busy


def test_the_settings_of_a_handle_reach_the_engine(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Request] = []
    monkeypatch.setattr(model.engine, "submit", submitted.append)
    reply = Reply(begin(1)._replace(ctx=128, dtype="bf16", threads=3, max_batch=1), [])
    reply.build_prompt(model)
    reply.submit(model)
    (request,) = submitted
    assert (request.ctx, request.dtype, request.threads, request.max_batch) == (128, "bf16", 3, 1)


def test_thinking_that_the_template_began_begins_the_reply(model: Model) -> None:
    written = ChatTemplate(
        "{{ messages[0].content }}{{ '<think>\\n' }}", {}, clock=datetime.now, limits=template.LIMITS
    )
    request = Generate(1, turns=({"role": "user", "content": raw("hi")},), max_tokens=8)
    reply = Reply(begin(1)._replace(request=encode(request)), [])
    thinking = replace(model, template=written)
    reply.build_prompt(thinking)
    reply.submit(thinking)
    messages: list[Message] = []
    while model.engine.busy:
        for event in model.engine.step():
            messages += reply.advance(event)
    written.close()
    text = "".join(message.text for message in messages if type(message) is Delta)
    (done,) = (message for message in messages if type(message) is Done)
    assert text == "<think>\n" + model.tokenizer.decode(done.ids)
    assert len(done.ids) == 8


class Parent:
    """The daemon's side of a worker that runs on threads of this process."""

    def __init__(self, model: Model) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(SECONDS)
        self._socket = ours
        self._connection = Connection("parent")
        pipe = Pipe(theirs)
        self.send(LOAD)
        assert pipe.receive() == LOAD
        self.answers = Answers(pipe, LOAD)
        # Its reader would end this process; the tests hand it the messages instead.
        threading.Thread(target=self.answers.answer, args=(model,), daemon=True).start()
        assert type(self.receive()) is Ready

    def send(self, message: Message) -> None:
        self._socket.sendall(self._connection.send(message))

    def receive(self) -> Message:
        while (event := self._connection.next_event()) is NEED_DATA:
            self._connection.receive_data(self._socket.recv(1 << 16))
        return event

    def final(self, stream: int) -> Message:
        """The last event of a reply; what comes for other replies before it is dropped."""
        while True:
            relay = self.receive()
            assert type(relay) is Relay
            event = decode(relay.event, EVENTS)
            if relay.stream == stream and type(event) in (Done, Refusal):
                return event


def test_a_panic_ends_its_reply_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Detokenizer.add

    def panics_at_once(self: Detokenizer, id_: int) -> str:
        if threading.current_thread() is threading.main_thread() or id_ != PROMPT["generated_ids"][3]:
            return add(self, id_)
        raise Panic

    parent = Parent(model)
    monkeypatch.setattr(Detokenizer, "add", panics_at_once)
    parent.answers.take(begin(1))
    broken = parent.final(1)
    assert (type(broken), broken.code) == (Refusal, "daemon/internal")
    monkeypatch.undo()
    parent.answers.take(begin(2))
    assert parent.final(2).ids == tuple(PROMPT["generated_ids"])


def test_a_step_runs_while_the_one_before_is_told_and_no_further_one(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    second = threading.Event()
    step, advance = model.engine.step, Reply.advance

    def counted() -> list[TokenEvent]:
        order.append("step")
        if order.count("step") == 2:
            second.set()
        return step()

    def slow(self: Reply, event: TokenEvent) -> list[Message]:
        assert second.wait(SECONDS)
        order.append("told")
        return advance(self, event)

    parent = Parent(model)
    monkeypatch.setattr(model.engine, "step", counted)
    monkeypatch.setattr(Reply, "advance", slow)
    parent.answers.take(begin(1))
    assert parent.final(1).ids == tuple(PROMPT["generated_ids"])
    assert order[:3] == ["step", "step", "told"]
    ahead = [order[:end].count("step") - order[:end].count("told") for end in range(len(order) + 1)]
    assert max(ahead) == 2


def test_a_reply_that_its_stop_text_ends_leaves_the_step_of_another_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = model.tokenizer.decode(PROMPT["generated_ids"][:1]).strip()
    both, inside, ended = threading.Semaphore(0), threading.Event(), threading.Event()
    engine, program = model.engine, model.program
    submit, cancel, step = engine.submit, engine.cancel, engine.step
    run, advance = program.step, Reply.advance
    replying: set[int] = set()
    broken: list[int] = []

    def submitted(request: Request) -> None:
        submit(request)
        both.release()

    def together() -> list[TokenEvent]:
        if not replying:
            assert all(both.acquire(timeout=SECONDS) for _ in range(2))
            replying.add(0)
        events = step()
        replying.update(event.id for event in events)
        return events

    def slow(*rows: Any, **how: Any) -> Logits:
        if 1 in replying:
            inside.set()
            assert ended.wait(SECONDS)
        return run(*rows, **how)

    def told(self: Reply, event: TokenEvent) -> list[Message]:
        assert event.id == 2 or inside.wait(SECONDS)
        return advance(self, event)

    def cancelled(id: int, **how: bool) -> None:
        cancel(id, **how)
        ended.set()

    monkeypatch.setattr(engine, "submit", submitted)
    monkeypatch.setattr(engine, "step", together)
    monkeypatch.setattr(engine, "cancel", cancelled)
    monkeypatch.setattr(program, "step", slow)
    monkeypatch.setattr(program, "cancel", lambda: broken.append(1))
    monkeypatch.setattr(Reply, "advance", told)
    parent = Parent(model)
    request = Generate(1, raw=raw(PROMPT["prompt"]), max_tokens=24, stop=(stop,))
    parent.answers.take(begin(1)._replace(request=encode(request)))
    parent.answers.take(begin(2))
    assert parent.final(2).ids == tuple(PROMPT["generated_ids"])
    assert ended.is_set()
    assert broken == []


def test_a_panic_in_the_prompt_ends_its_reply_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def panics(self: tokenizer.Tokenizer, text: str, *, add_special: bool) -> list[int]:
        raise Panic

    parent = Parent(model)
    monkeypatch.setattr(tokenizer.Tokenizer, "encode", panics)
    parent.answers.take(begin(1))
    assert parent.final(1).code == "daemon/internal"
    monkeypatch.undo()
    parent.answers.take(begin(2))
    assert parent.final(2).ids == tuple(PROMPT["generated_ids"])


def test_what_a_user_reads_of_an_exception() -> None:
    for error in (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")):
        assert refusal_for(error, LOAD).code == "worker/out-of-memory"
    assert refusal_for(Refused("message/empty"), LOAD).code == "message/empty"
    assert refusal_for(Panic(), LOAD).code == "daemon/internal"


def test_blobs_take_the_place_of_texts() -> None:
    content = ({"type": "text", "text": "a"}, {"type": "text", "blob": 3})
    assert with_texts(content, {3: "é".encode()}) == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "é"},
    ]
    with pytest.raises(Refused, match="the blob 3 was not sent"):
        with_texts(content, {})
    with pytest.raises(Refused, match="not valid UTF-8"):
        with_texts(content, {3: b"\xc3"})
