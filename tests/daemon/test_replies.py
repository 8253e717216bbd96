"""Replies through the whole path: client connection, daemon, worker, lane."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from caldrix_protocol.messages import (
    Blob,
    Cancel,
    Delta,
    Done,
    Generate,
    Loaded,
    Message,
    Notice,
    Open,
    Opened,
    Progress,
    Refusal,
    Status,
)
from caldrixd.lanes.holding import MAX_ROWS
from tests.daemon.conftest import LONG_CTX
from tests.support.daemon import SECONDS, Daemon, Home, ask_raw, raw, running_daemon, text_of
from tests.support.models import TINY, reference, tiny

PROMPT = reference("tiny-llama")["prompts"][0]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": raw(text)}


def loaded_when(daemon: Daemon, holds: Callable[[list[Loaded]], bool]) -> list[Loaded]:
    """Ask `ps` until the answer is as wanted."""
    deadline = time.monotonic() + SECONDS
    while not holds(loaded := daemon.loaded()):
        assert time.monotonic() < deadline, loaded
    return loaded


@pytest.mark.parametrize("name", TINY)
def test_raw_replies_are_the_reference(shared: Daemon, name: str) -> None:
    with shared.caller() as caller:
        opened = caller.open(tiny(name), backend="cpu")
        for prompt in reference(name)["prompts"]:
            events = caller.ask(ask_raw(opened.handle, prompt["prompt"], len(prompt["generated_ids"])))
            done = events[-1]
            assert type(done) is Done, done
            assert done.prompt_ids == tuple(prompt["prompt_ids"])
            assert done.ids == tuple(prompt["generated_ids"])[: len(done.ids)]
            assert done.finish_reason == ("length" if prompt["eos_step"] is None else "stop")
            assert done.timings.reply_tokens == len(done.ids)
            told = [id_ for event in events if type(event) is Delta for id_ in event.ids]
            assert told == list(done.ids)[: len(told)]


def test_what_open_tells(shared: Daemon) -> None:
    with shared.caller() as caller:
        caller.open(tiny("tiny-llama"))
        events = caller.ask(Open(str(tiny("tiny-llama")), {}))
    codes = [event.code for event in events if type(event) is Status]
    assert codes == ["status/directory", "status/backend", "status/lane"]
    opened = events[-2]
    assert type(opened) is Opened
    assert (opened.handle, opened.lane, opened.ctx, opened.chat_template) == (2, "cpu", 2048, True)
    assert opened.model == str(tiny("tiny-llama"))


def test_a_conversation_is_stateless_and_repeats_itself(shared: Daemon) -> None:
    with shared.caller() as caller:
        handle = caller.open(tiny("tiny-llama")).handle
        turns = (user("hello"),)
        first = caller.ask(Generate(handle, turns=turns, max_tokens=12))
        longer = (*turns, {"role": "assistant", "content": raw(text_of(first))}, user("and?"))
        second = caller.ask(Generate(handle, turns=longer, max_tokens=12))[-1]
        again = caller.ask(Generate(handle, turns=turns, max_tokens=12))[-1]
        once_more = caller.ask(Generate(handle, turns=longer, max_tokens=12))[-1]
    assert again.ids == first[-1].ids
    assert min(second.timings.cached_tokens, once_more.timings.cached_tokens) > 0
    assert once_more.ids == second.ids
    assert once_more.prompt_ids == second.prompt_ids


def test_two_clients_share_a_worker_and_get_what_each_would_get_alone(shared: Daemon) -> None:
    prompts = reference("tiny-llama")["prompts"][:4]
    callers = [shared.caller() for _ in prompts]
    handles = [caller.open(tiny("tiny-llama")).handle for caller in callers]
    for caller, handle, prompt in zip(callers, handles, prompts, strict=True):
        caller.send(ask_raw(handle, prompt["prompt"], len(prompt["generated_ids"])))
    replies = [caller.rest()[-1] for caller in callers]
    workers = [found for found in shared.loaded() if found.model == str(tiny("tiny-llama"))]
    assert len(workers) == 1
    assert workers[0].leases == len(callers)
    for caller, reply, prompt in zip(callers, replies, prompts, strict=True):
        caller.close()
        assert reply.ids == tuple(prompt["generated_ids"])[: len(reply.ids)]


def test_a_long_prompt_tells_how_far_it_is(shared: Daemon) -> None:
    with shared.caller() as caller:
        handle = caller.open(tiny("tiny-llama")).handle
        *events, done = caller.ask(ask_raw(handle, "far away " * 200, 1))
    told = [event for event in events if type(event) is Progress]
    assert {(event.what, event.total, event.unit) for event in told} == {
        ("prompt", done.timings.prompt_tokens, "tokens")
    }
    tokens = [event.done for event in told]
    assert tokens == sorted(set(tokens))
    assert 0 < tokens[0] <= MAX_ROWS
    assert done.timings.prompt_tokens - MAX_ROWS <= tokens[-1] < done.timings.prompt_tokens


def test_text_in_blobs_is_the_same_text(shared: Daemon) -> None:
    text = PROMPT["prompt"].encode()
    with shared.caller() as caller:
        handle = caller.open(tiny("tiny-llama")).handle
        request = Generate(handle, raw=({"type": "text", "blob": 5},), max_tokens=24)
        done = caller.ask(Blob(5, text[:3]), Blob(5, text[3:]), request)[-1]
        assert done.ids == tuple(PROMPT["generated_ids"])
        gone = caller.ask(request)[-1]
        assert (gone.code, gone.fields["reason"]) == ("daemon/bad-request", "the blob 5 was not sent")
        broken = caller.ask(Blob(5, b"\xff"), request)[-1]
        assert broken.fields["reason"] == "the blob 5 is not valid UTF-8"


def test_refused_messages_leave_the_handle_usable(shared: Daemon) -> None:
    with shared.caller() as caller:
        handle = caller.open(tiny("tiny-llama"), ctx=32).handle
        long = caller.ask(ask_raw(handle, "word " * 200))[-1]
        assert (type(long), long.code, long.kind) == (Refusal, "message/too-long", "message")
        assert caller.ask(Generate(handle, turns=()))[-1].code == "message/empty"
        assert caller.ask(ask_raw(handle, PROMPT["prompt"], 8))[-1].ids == tuple(PROMPT["generated_ids"][:8])


@pytest.mark.parametrize("ctx", [None, 2048])
def test_a_prompt_over_what_the_model_was_made_for_is_not_told_of_a_larger_context(
    shared: Daemon, ctx: int | None
) -> None:
    with shared.caller() as caller:
        opened = caller.open(tiny("tiny-llama"), ctx=ctx)
        assert opened.ctx == 2048
        refused = caller.ask(ask_raw(opened.handle, "word " * 5000))[-1]
    assert (refused.code, refused.kind) == ("message/over-model", "message")
    assert refused.text.endswith(
        " tokens and this model was made for 2048; send a shorter message, or use a model made for more"
    )


def test_a_reply_ends_exactly_at_the_context(shared: Daemon, talkative: Path) -> None:
    with shared.caller() as caller:
        done = caller.ask(ask_raw(caller.open(talkative, ctx=64).handle, PROMPT["prompt"]))[-1]
    assert done.finish_reason == "length"
    assert len(done.prompt_ids) + len(done.ids) == 64


def test_dropped_turns_are_told(shared: Daemon) -> None:
    with shared.caller() as caller:
        handle = caller.open(tiny("tiny-llama"), ctx=96).handle
        turns: tuple[dict[str, Any], ...] = ()
        for number in range(8):
            turns += (user(f"message {number}"), {"role": "assistant", "content": raw("yes")})
        events = caller.ask(Generate(handle, turns=(*turns, user("last")), max_tokens=4))
    notices = [event for event in events if type(event) is Notice]
    assert [notice.code for notice in notices] == ["notice/dropped-turns"]
    assert events[-1].dropped_turns == notices[0].fields["count"] > 0


# --- cancelling -------------------------------------------------------------------------------


def clean(events: list[Message]) -> None:
    assert events[-1].ids == tuple(PROMPT["generated_ids"])


@pytest.mark.parametrize("prompt", ["Once", "word " * 9000], ids=["decode", "prefill"])
def test_cancel_and_the_next_reply_is_clean(shared: Daemon, talkative: Path, prompt: str) -> None:
    with shared.caller() as caller:
        handle = caller.open(talkative, ctx=LONG_CTX).handle
        caller.send(ask_raw(handle, prompt))
        if len(prompt) < 9:
            caller.until(Delta)
        caller.send(Cancel())
        done = caller.rest()[-1]
        assert (type(done), done.finish_reason) == (Done, "cancelled")
        clean(caller.ask(ask_raw(handle, PROMPT["prompt"], 24)))


def test_cancel_at_every_token_of_a_prefix(shared: Daemon, talkative: Path) -> None:
    """An interrupted reply must not leave the cache ahead of its text, or behind it."""
    with shared.caller() as caller:
        handle = caller.open(talkative, ctx=LONG_CTX).handle
        for count in range(1, 8):
            caller.send(ask_raw(handle, PROMPT["prompt"]))
            for _ in range(count):
                caller.until(Delta)
            caller.send(Cancel())
            told = caller.rest()[-1]
            assert told.finish_reason == "cancelled"
            assert told.prompt_ids == tuple(PROMPT["prompt_ids"])
            assert len(told.ids) >= count
            assert told.ids[:24] == tuple(PROMPT["generated_ids"])[: len(told.ids)]
            clean(caller.ask(ask_raw(handle, PROMPT["prompt"], 24)))


@pytest.mark.parametrize("prompt", ["Once", "word " * 9000], ids=["decode", "prefill"])
def test_a_client_that_goes_away_ends_its_reply(shared: Daemon, talkative: Path, prompt: str) -> None:
    caller = shared.caller()
    caller.send(ask_raw(caller.open(talkative, ctx=LONG_CTX).handle, prompt))
    caller.close()
    idle = loaded_when(
        shared, lambda found: all(model.state == "idle" and not model.leases for model in found)
    )
    assert str(talkative) in [model.model for model in idle]
    with shared.caller() as other:
        clean(other.ask(ask_raw(other.open(talkative).handle, PROMPT["prompt"], 24)))


def test_a_reader_that_falls_behind_loses_its_reply_alone(home: Home, talkative: Path) -> None:
    with running_daemon(home, changes={"client_queue": 4096}) as daemon, daemon.caller() as slow:
        slow.send(ask_raw(slow.open(talkative, ctx=LONG_CTX).handle, "Once"))
        loaded_when(daemon, lambda found: found[0].state == "idle")
        with daemon.caller() as other:
            clean(other.ask(ask_raw(other.open(talkative).handle, PROMPT["prompt"], 24)))
        events = slow.rest()
        assert len(text_of(events)) > 0
        assert (type(events[-1]), events[-1].code) == (Refusal, "daemon/slow-reader")
        clean(slow.ask(ask_raw(1, PROMPT["prompt"], 24)))
