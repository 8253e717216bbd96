"""The engine on a mock lane whose tokens depend on the whole history."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caldrix_protocol.refusals import Refused
from caldrixd.engine.engine import Engine, Request
from caldrixd.lanes.lane import Rows
from tests.support.mock_program import PIECE_BYTES, VOCAB, MockProgram, mock_plan, reply
from tests.support.replies import Reply, collect, drain

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def request(id: int, prompt: tuple[int, ...] = PROMPT, ctx: int = 256, max_tokens: int | None = 5) -> Request:
    return Request(id, prompt, ctx, max_tokens)


def answer(engine: Engine, asked: Request) -> Reply:
    engine.submit(asked)
    return drain(engine)[asked.id]


def test_a_reply_ends_at_max_tokens() -> None:
    got = answer(Engine(MockProgram()), request(1))
    assert got.tokens == reply(PROMPT, 5)
    assert got.finish == "length"
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.cached_tokens, got.usage.reply_tokens) == (8, 0, 5)


def test_a_reply_ends_with_its_stop_token() -> None:
    tokens = reply(PROMPT, 20)
    stop = next(token for i, token in enumerate(tokens) if i >= 3 and token not in tokens[:i])
    end = tokens.index(stop) + 1
    engine = Engine(MockProgram())
    engine.submit(Request(1, PROMPT, 256, None, frozenset({stop})))
    got = drain(engine)[1]
    assert (got.tokens, got.finish) == (tokens[:end], "stop")


def test_a_stop_token_at_max_tokens_is_a_stop() -> None:
    tokens = reply(PROMPT, 1)
    got = answer(Engine(MockProgram()), Request(1, PROMPT, 256, 1, frozenset(tokens)))
    assert (got.tokens, got.finish) == (tokens, "stop")


@pytest.mark.parametrize("ctx", [9, 10, 64])
def test_a_reply_without_an_end_stops_exactly_at_ctx(ctx: int) -> None:
    got = answer(Engine(MockProgram()), request(1, ctx=ctx, max_tokens=None))
    assert got.tokens == reply(PROMPT, ctx - len(PROMPT))
    assert got.finish == "length"


@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 50])
def test_no_step_holds_more_prompt_rows_than_the_chunk(chunk: int) -> None:
    program = MockProgram()
    got = answer(Engine(program, prefill_chunk=chunk), request(1))
    assert got.tokens == reply(PROMPT, 5)
    sizes = [len(rows.tokens) for rows in program.steps]
    assert sizes == [chunk] * (8 // chunk) + [8 % chunk] * (8 % chunk > 0) + [1] * 4


def test_a_long_prompt_does_not_stall_a_running_reply() -> None:
    program = MockProgram()
    engine = Engine(program, prefill_chunk=4)
    engine.submit(request(1, max_tokens=60))
    replies: dict[int, Reply] = {}
    while 1 not in replies:
        collect(replies, engine.step())
    engine.submit(request(2, prompt=tuple(range(50))))
    while 2 not in replies:
        before = len(replies[1].tokens)
        collect(replies, engine.step())
        assert len(replies[1].tokens) == before + 1
    collect(replies, [event for _ in range(60) for event in engine.step()])
    assert replies[1].tokens == reply(PROMPT, 60)
    assert replies[2].tokens == reply(tuple(range(50)), 5)


def test_sessions_beyond_the_limit_wait_in_order() -> None:
    program = MockProgram()
    engine = Engine(program, max_sessions=2)
    ended: list[int] = []
    for id in range(5):
        engine.submit(request(id, prompt=(id, 1, 2)))
    while engine.busy:
        events = engine.step()
        ended += [event.id for event in events if event.finish]
        assert len({slot for rows in program.steps[-1:] for slot in rows.slots}) <= 2
    assert ended == [0, 1, 2, 3, 4]


def test_the_threads_and_dtype_of_a_request_reach_the_step() -> None:
    program = MockProgram()
    answer(Engine(program), Request(1, PROMPT, 256, 1, dtype="bf16", threads=3))
    assert program.settings_of_steps == [("bf16", 3)]


# --- submission ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "ctx", "code"),
    [
        ((), 8, "message/empty"),
        (tuple(range(8)), 8, "message/too-long"),
        (tuple(range(9)), 8, "message/too-long"),
        ((1, VOCAB), 8, "message/unknown-token"),
        ((1, -1), 8, "message/unknown-token"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused(prompt: tuple[int, ...], ctx: int, code: str) -> None:
    engine = Engine(MockProgram())
    with pytest.raises(Refused) as caught:
        engine.submit(request(1, prompt=prompt, ctx=ctx))
    assert caught.value.code == code
    assert not engine.busy


def test_an_id_in_use_is_an_error() -> None:
    engine = Engine(MockProgram())
    engine.submit(request(1))
    with pytest.raises(ValueError, match="request 1"):
        engine.submit(request(1))


def test_more_sessions_than_rows_are_an_error() -> None:
    with pytest.raises(ValueError, match="64 sessions"):
        Engine(MockProgram(max_rows=64), max_sessions=64)


# --- cancelling ---------------------------------------------------------------------------------


def cancel_in_step(engine: Engine, program: MockProgram, id: int, step: int) -> None:
    """Arrange that request `id` is cancelled while step number `step` (from 0) runs."""
    steps = iter(range(1000))

    def during(rows: Rows) -> None:
        if next(steps) == step:
            engine.cancel(id)

    program.during = during


@pytest.mark.parametrize("k", range(12))
def test_a_reply_cancelled_in_step_k_leaves_a_clean_cache(k: int) -> None:
    program = MockProgram()
    engine = Engine(program, prefill_chunk=3)
    cancel_in_step(engine, program, 1, k)
    got = answer(engine, request(1, max_tokens=100))
    prefill_steps = 3
    assert got.finish == "cancelled"
    assert got.tokens == reply(PROMPT, max(0, k - prefill_steps + 1))
    program.during = lambda rows: None
    follow_up = (*PROMPT, *got.tokens, 7, 8)
    done = len(program.steps)
    second = answer(engine, request(2, prompt=follow_up))
    assert second.tokens == reply(follow_up, 5)
    assert second.usage is not None
    committed = min(3 * k, len(PROMPT)) + max(0, k - prefill_steps)
    assert second.usage.cached_tokens == committed
    computed = sum(len(rows.tokens) for rows in program.steps[done:])
    assert computed == len(follow_up) - committed + 4


@pytest.mark.parametrize("k", range(8))
def test_a_cancel_between_steps_ends_the_reply(k: int) -> None:
    engine = Engine(MockProgram(), prefill_chunk=3)
    engine.submit(request(1, max_tokens=100))
    replies: dict[int, Reply] = {}
    for _ in range(k):
        collect(replies, engine.step())
    engine.cancel(1)
    collect(replies, engine.step())
    assert replies[1].finish == "cancelled"
    assert replies[1].tokens == reply(PROMPT, max(0, k - 2))
    assert not engine.busy
    follow_up = (*PROMPT, *replies[1].tokens, 5)
    assert answer(engine, request(2, prompt=follow_up)).tokens == reply(follow_up, 5)


@pytest.mark.parametrize("k", range(8))
def test_the_neighbour_of_a_cancelled_reply_is_not_touched(k: int) -> None:
    program = MockProgram()
    engine = Engine(program, prefill_chunk=4)
    cancel_in_step(engine, program, 1, k)
    engine.submit(request(1, max_tokens=100))
    engine.submit(request(2, prompt=(8, 8, 8, 8, 8), max_tokens=10))
    replies = drain(engine)
    assert replies[1].finish == "cancelled"
    assert (replies[2].tokens, replies[2].finish) == (reply((8, 8, 8, 8, 8), 10), "length")


def test_a_waiting_request_can_be_cancelled() -> None:
    engine = Engine(MockProgram(), max_sessions=1)
    engine.submit(request(1))
    engine.submit(request(2))
    replies: dict[int, Reply] = {}
    collect(replies, engine.step())
    engine.cancel(2)
    while engine.busy:
        collect(replies, engine.step())
    assert (replies[2].tokens, replies[2].finish) == ([], "cancelled")
    assert replies[1].tokens == reply(PROMPT, 5)


def test_cancelling_the_unknown_or_finished_does_nothing() -> None:
    engine = Engine(MockProgram())
    engine.cancel(1)
    assert answer(engine, request(1)).finish == "length"
    engine.cancel(1)
    assert answer(engine, request(1)).finish == "length"


def test_a_cancel_that_meets_the_last_token_of_a_reply_leaves_nothing_behind() -> None:
    program = MockProgram()
    engine = Engine(program)
    original = program.commit

    def commit(slot: int, length: int) -> None:
        engine.cancel(1)  # the step is over: too late to stop it
        original(slot, length)

    program.commit = commit  # type: ignore[method-assign]
    got = answer(engine, request(1, max_tokens=1))
    assert (got.tokens, got.finish) == (reply(PROMPT, 1), "length")
    program.commit = original  # type: ignore[method-assign]
    assert answer(engine, request(1)).finish == "length"


def test_a_late_cancel_does_not_reach_a_new_request_of_the_same_id() -> None:
    program = MockProgram()
    original = program.commit
    again = [request(1, max_tokens=2)]

    def clock() -> float:
        # The reply has ended and its step has not: another thread asks again.
        if again and program.steps and not engine.busy:
            engine.submit(again.pop())
        return 0.0

    def commit(slot: int, length: int) -> None:
        program.commit = original  # type: ignore[method-assign]
        engine.cancel(1)
        original(slot, length)

    engine = Engine(program, clock=clock)
    program.commit = commit  # type: ignore[method-assign]
    engine.submit(request(1, max_tokens=1))
    events = [event for _ in range(3) for event in engine.step()]
    assert [event.finish for event in events[:3]] == ["length", None, "length"]


def test_a_cancel_from_another_thread_stops_the_running_step() -> None:
    program = MockProgram()
    engine = Engine(program)
    entered = threading.Event()

    def during(rows: Rows) -> None:
        entered.set()
        assert program.cancelled.wait(300)

    program.during = during
    engine.submit(request(1))
    replies: dict[int, Reply] = {}
    thread = threading.Thread(target=lambda: collect(replies, engine.step()))
    thread.start()
    assert entered.wait(300)
    engine.cancel(1)
    thread.join(300)
    assert (replies[1].tokens, replies[1].finish) == ([], "cancelled")
    assert program.steps == []


@pytest.mark.parametrize("k", range(2, 6))
def test_a_cancel_lets_the_step_of_others_go_on(k: int) -> None:
    program = MockProgram()
    engine = Engine(program)
    steps = iter(range(100))

    def during(rows: Rows) -> None:
        if next(steps) == k:
            engine.cancel(1)

    program.during = during
    engine.submit(request(1, max_tokens=100))
    engine.submit(request(2, prompt=(8, 8, 8, 8, 8), max_tokens=10))
    replies = drain(engine)
    assert (replies[1].tokens, replies[1].finish) == (reply(PROMPT, k + 1), "cancelled")
    assert replies[2].tokens == reply((8, 8, 8, 8, 8), 10)
    assert next(steps) == len(program.steps) == 10


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_step_is_stopped_when_all_that_are_in_it_are_cancelled(count: int) -> None:
    program = MockProgram()
    engine = Engine(program)
    ids = range(1, count + 1)

    def during(rows: Rows) -> None:
        for id in ids:
            assert not program.cancelled.is_set()
            engine.cancel(id)

    program.during = during
    for id in ids:
        engine.submit(request(id))
    replies = drain(engine)
    assert [(reply.tokens, reply.finish) for reply in replies.values()] == [([], "cancelled")] * count
    assert program.steps == []


def test_a_step_is_not_begun_when_all_that_would_be_in_it_are_cancelled() -> None:
    program = MockProgram()
    allocate = program.allocate

    def cancelled_meanwhile(ctx: int) -> int:
        slot = allocate(ctx)
        engine.cancel(1)
        return slot

    program.allocate = cancelled_meanwhile  # type: ignore[method-assign]
    engine = Engine(program)
    engine.submit(request(1))
    (event,) = engine.step()
    assert (event.token, event.finish, program.steps) == (None, "cancelled", [])


# --- failures -----------------------------------------------------------------------------------


def test_a_value_that_is_not_finite_refuses_that_session_alone() -> None:
    program = MockProgram()
    program.poison = {60}
    engine = Engine(program)
    engine.submit(request(1, prompt=(1, 2, 60)))
    engine.submit(request(2, prompt=(1, 2, 3), max_tokens=2))
    replies = drain(engine)
    assert replies[1].finish == "refused"
    assert replies[1].refused is not None
    assert replies[1].refused.code == "run/not-finite"
    assert replies[2].tokens == reply((1, 2, 3), 2)
    assert len(program.slots) == 1, "the slot of the refused one is given back"


def test_a_lane_that_refuses_a_step_ends_its_sessions_and_no_others() -> None:
    program = MockProgram()
    engine = Engine(program)

    def during(rows: Rows) -> None:
        raise Refused("lane/unusable", lane="mock", reason="gone")

    program.during = during
    got = answer(engine, request(1))
    assert got.refused is not None
    assert got.refused.code == "lane/unusable"
    program.during = lambda rows: None
    assert answer(engine, request(2)).tokens == reply(PROMPT, 5)
    assert len(program.slots) == 1


def test_without_memory_a_session_is_refused_and_the_others_go_on() -> None:
    program = MockProgram(capacity=1)
    engine = Engine(program)
    engine.submit(request(1))
    engine.submit(request(2, prompt=(9, 9)))
    replies = drain(engine)
    assert replies[1].tokens == reply(PROMPT, 5)
    assert replies[2].finish == "refused"
    assert replies[2].refused is not None
    assert replies[2].refused.code == "run/memory"


def test_idle_slots_are_given_up_before_a_session_is_refused() -> None:
    program = MockProgram(capacity=2)
    engine = Engine(program)
    for id, prompt in enumerate([(1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4)]):
        assert answer(engine, request(id, prompt=prompt)).tokens == reply(prompt, 5)
    assert len(program.slots) == 2


# --- seconds ------------------------------------------------------------------------------------


def test_seconds_are_told_by_the_clock() -> None:
    now = [100.0]
    program = MockProgram()

    def during(rows: Rows) -> None:
        now[0] += len(rows.tokens)

    program.during = during
    engine = Engine(program, prefill_chunk=4, clock=lambda: now[0])
    engine.submit(request(1, max_tokens=3))
    now[0] += 10
    got = drain(engine)[1]
    assert got.usage is not None
    assert got.usage.first_token_seconds == 10 + 8
    assert got.usage.prefill_seconds == 8
    assert got.usage.decode_seconds == 2


# --- anything at all ----------------------------------------------------------------------------

PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=12).map(tuple)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, Request, int | None]]:
    """(step of arrival, request, step of its cancel or None)."""
    result = []
    for id in range(draw(st.integers(1, 8))):
        asked = Request(
            id,
            draw(PROMPTS),
            draw(st.sampled_from([13, 16, 40])),
            draw(st.sampled_from([None, 1, 4])),
            frozenset(draw(st.sets(st.integers(0, VOCAB - 1), max_size=3))),
            draw(st.sampled_from(["f32", "f32", "bf16"])),
            max_batch=draw(st.sampled_from([8, 8, 8, 1])),
        )
        arrival = draw(st.integers(0, 20))
        cancel = draw(st.one_of(st.none(), st.integers(arrival, 60)))
        result.append((arrival, asked, cancel))
    return result


def expected(asked: Request) -> Iterator[int]:
    count = min(asked.ctx - len(asked.prompt), asked.max_tokens or asked.ctx)
    for token in reply(asked.prompt, count):
        yield token
        if token in asked.stop_ids:
            return


@settings(max_examples=150, deadline=None)
@given(
    histories(),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([4, 6, 100]),
    st.booleans(),
    st.data(),
)
def test_no_history_changes_a_reply(
    history: list[tuple[int, Request, int | None]],
    chunk: int,
    sessions: int,
    cached: int,
    capacity: int,
    recurrent: bool,
    data: st.DataObject,
) -> None:
    program = MockProgram(max_rows=12, capacity=capacity, plan=mock_plan(recurrent=recurrent))
    limit = cached * (PIECE_BYTES + 2 * program.plan.recurrent_bytes)
    engine = Engine(program, prefill_chunk=chunk, max_sessions=sessions, cache_bytes=limit)
    replies: dict[int, Reply] = {}
    for step in range(2000):
        for arrival, asked, _ in history:
            if arrival == step:
                engine.submit(asked)
        due = [asked.id for _, asked, cancel in history if cancel == step]
        inside = data.draw(st.booleans()) if due else False

        def cancel_due(rows: Rows | None = None, due: list[int] = due) -> None:
            while due:
                engine.cancel(due.pop())
                program.cancel()

        program.during = cancel_due if inside else lambda rows: None
        if not inside:
            cancel_due()
        collect(replies, engine.step())
        if step > 80 and not engine.busy:
            break
    for _, asked, cancel in history:
        got, full = replies[asked.id], list(expected(asked))
        assert got.tokens == full[: len(got.tokens)]
        assert got.finish in ("stop", "length") or (got.finish == "cancelled" and cancel is not None)
        if got.finish != "cancelled":
            assert got.tokens == full
            assert (got.finish == "stop") == (full[-1] in asked.stop_ids)
    assert len(program.slots) <= cached, "slots leak"
    assert program.state_bytes() <= limit
