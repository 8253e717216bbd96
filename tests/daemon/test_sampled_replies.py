"""Seeds and stop texts through a real daemon and its worker."""

from __future__ import annotations

import pytest

from caldrix_protocol.messages import Delta, Done, Generate
from tests.support.daemon import Caller, Daemon, raw, text_of
from tests.support.models import reference, tiny

PROMPT = reference("tiny-llama")["prompts"][0]
LLAMA = tiny("tiny-llama")


def ask(caller: Caller, handle: int, **knobs: object) -> tuple[str, Done]:
    settings = {"raw": raw(PROMPT["prompt"]), "max_tokens": 24, **knobs}
    events = caller.ask(Generate(handle, **settings))  # type: ignore[arg-type]
    done = events[-1]
    assert type(done) is Done, done
    return text_of(events), done


def test_the_seed_of_a_reply_gives_it_again(shared: Daemon) -> None:
    with shared.caller() as caller:
        handle = caller.open(LLAMA).handle
        first = ask(caller, handle, temperature=1.5)
        second = ask(caller, handle, temperature=1.5)
        assert first[1].seed is not None
        assert 0 <= first[1].seed < 2**53
        assert first[1].seed != second[1].seed
        assert first[1].ids != second[1].ids
        again = ask(caller, handle, temperature=1.5, seed=first[1].seed)
        assert (again[0], again[1].ids, again[1].seed) == (first[0], first[1].ids, first[1].seed)


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_without_a_draw_there_is_no_seed(shared: Daemon, seed: int) -> None:
    with shared.caller() as caller:
        handle = caller.open(LLAMA).handle
        greedy = ask(caller, handle, seed=seed, top_k=3, top_p=0.5, min_p=0.5)[1]
        assert greedy.ids == tuple(PROMPT["generated_ids"])
        assert greedy.seed is None
        assert ask(caller, handle, seed=seed, temperature=1.0)[1].seed == seed
        penalised = ask(caller, handle, repetition_penalty=3.0)[1]
        assert penalised.seed is None
        assert penalised.ids != greedy.ids


def test_a_stop_text_ends_the_reply_and_is_not_shown(shared: Daemon) -> None:
    with shared.caller() as caller:
        handle = caller.open(LLAMA).handle
        whole, done = ask(caller, handle)
        for size in (1, 3, 7):
            for start in range(0, len(whole) - size, 5):
                stop = whole[start : start + size]
                text, ended = ask(caller, handle, stop=("never in it", stop))
                assert text == whole[: whole.find(stop)]
                assert ended.finish_reason == "stop"
                assert ended.ids == done.ids[: len(ended.ids)]
        early = ask(caller, handle, stop=(whole[4:8],))[1]
        assert len(early.ids) < len(done.ids)


def test_what_only_begins_like_a_stop_text_is_shown_at_the_end(shared: Daemon) -> None:
    with shared.caller() as caller:
        handle = caller.open(LLAMA).handle
        whole, done = ask(caller, handle)
        text, ended = ask(caller, handle, stop=(whole[-5:] + "and more",))
        assert (text, ended.ids, ended.finish_reason) == (whole, done.ids, done.finish_reason)


def test_a_reply_that_a_stop_text_ended_leaves_its_place(shared: Daemon) -> None:
    with shared.caller() as caller:
        handle = caller.open(LLAMA).handle
        whole, done = ask(caller, handle)
        for _ in range(12):
            ask(caller, handle, stop=(whole[1:3],), max_tokens=None)
        assert ask(caller, handle)[1].ids == done.ids
        events = caller.ask(Generate(handle, raw=raw(PROMPT["prompt"]), stop=(whole[0],), max_tokens=24))
        assert [event for event in events if type(event) is Delta] == []
