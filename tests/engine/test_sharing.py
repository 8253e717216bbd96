"""How sequences share steps: how many, in which order, and how long a reply waits for a prompt."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from caldrixd.engine.engine import Engine, Request
from caldrixd.lanes.lane import Rows
from tests.support.mock_program import VOCAB, MockProgram, mock_plan, reply
from tests.support.replies import Reply, collect, drain


def request(id: int, prompt: tuple[int, ...], ctx: int = 256, max_tokens: int | None = 5) -> Request:
    return Request(id, prompt, ctx, max_tokens)


def sharing(program: MockProgram) -> list[int]:
    """How many sequences each step held."""
    return [len(set(rows.slots)) for rows in program.steps]


def test_eight_replies_share_every_step_and_the_ninth_waits() -> None:
    program = MockProgram()
    engine = Engine(program)
    for id in range(9):
        engine.submit(request(id, prompt=(id, 1), max_tokens=10))
    replies = drain(engine)
    assert all(replies[id].tokens == reply((id, 1), 10) for id in range(9))
    assert sharing(program) == [8] * 10 + [1] * 10
    assert [len(rows.tokens) for rows in program.steps] == [16, *[8] * 9, 2, *[1] * 9]


def test_a_place_that_is_free_is_taken_in_the_next_step() -> None:
    program = MockProgram()
    engine = Engine(program)
    for id in range(10):
        engine.submit(request(id, prompt=(id,), max_tokens=1 + id))
    drain(engine)
    assert sharing(program) == [8, 8, 8, 7, 6, 5, 4, 3, 2, 2, 1, 1]


def test_a_request_of_one_runs_alone_and_in_its_turn() -> None:
    program = MockProgram()
    engine = Engine(program)
    for id, places in enumerate((8, 8, 1, 1, 8, 8)):
        engine.submit(Request(id, (id, 2, 3), 256, 3, max_batch=places))
    ended = []
    while engine.busy:
        ended += [event.id for event in engine.step() if event.finish]
    assert ended == [0, 1, 2, 3, 4, 5]
    assert sharing(program) == [2] * 3 + [1] * 6 + [2] * 3


def test_requests_that_keep_coming_do_not_pass_one_that_wants_to_be_alone() -> None:
    program = MockProgram()
    engine = Engine(program)
    engine.submit(request(0, prompt=(3, 1)))
    engine.submit(Request(1, (4, 1), 256, 1, max_batch=1))
    for id in range(2, 20):
        engine.submit(request(id, prompt=(id,)))
        if any(event.finish and event.id == 1 for event in engine.step()):
            break
    assert id < 10
    assert sharing(program) == [1] * len(program.steps)


def timed(
    seconds: Callable[[Rows], float], *, max_rows: int = 512, attention: int = 0
) -> tuple[Engine, MockProgram, list[float]]:
    """An engine whose steps take `seconds`, and the time in a list."""
    now = [0.0]
    program = MockProgram(max_rows=max_rows, plan=mock_plan(fixed=1000, attention=attention))

    def during(rows: Rows) -> None:
        now[0] += seconds(rows)

    program.during = during
    return Engine(program, clock=lambda: now[0]), program, now


MACHINES = {
    "fast": lambda rows: 0.001 + 1e-5 * len(rows.tokens),
    "typical": lambda rows: 0.012 + 1.2e-3 * len(rows.tokens),
    "slow": lambda rows: 0.06 + 5e-3 * len(rows.tokens),
    "long": lambda rows: 0.012 + sum(1e-3 * (1 + position / 300) for position in rows.positions),
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("first", [4, 40])
def test_a_prompt_of_2000_tokens_never_stalls_a_reply_for_a_quarter_second(
    machine: str, dtype: str, first: int
) -> None:
    engine, _, now = timed(MACHINES[machine], attention=3 if machine == "long" else 0)
    engine.submit(request(1, prompt=(5,) * first, ctx=4096, max_tokens=None))
    replies: dict[int, Reply] = {}
    while 1 not in replies:
        collect(replies, engine.step())
    prompt = tuple(i % VOCAB for i in range(2000))
    engine.submit(Request(2, prompt, 4096, 3, dtype=dtype))
    waits = []
    while 2 not in replies:
        before, count = now[0], len(replies[1].tokens)
        collect(replies, engine.step())
        assert len(replies[1].tokens) == count + 1
        waits.append(now[0] - before)
    assert replies[2].tokens == reply(prompt, 1)
    assert max(waits) < 0.25
    if dtype == "f32" and machine != "fast":
        assert min(waits[3:-1]) > 0.125, "a step has time for more of the prompt"


def test_a_prompt_alone_is_run_in_long_steps_that_a_newcomer_can_wait_for() -> None:
    engine, program, now = timed(MACHINES["typical"])
    engine.submit(request(1, prompt=(5,) * 2000, ctx=4096, max_tokens=1))
    waits = []
    while engine.busy:
        before = now[0]
        engine.step()
        waits.append(now[0] - before)
    assert max(waits) < 0.55
    sizes = [len(rows.tokens) for rows in program.steps]
    assert sizes[0] == 16
    assert sum(sizes) == 2000
    assert len(sizes) == 7


def test_a_prompt_alone_on_a_fast_lane_fills_every_step() -> None:
    engine, program, _ = timed(MACHINES["fast"])
    engine.submit(request(1, prompt=(5,) * 2000, ctx=4096, max_tokens=1))
    drain(engine)
    assert [len(rows.tokens) for rows in program.steps] == [16, 512, 512, 512, 448]
