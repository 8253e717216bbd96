"""Work that is one call behind: in order, never two at a time, and its failures come back."""

from __future__ import annotations

import threading

import pytest

from caldrixd.worker.behind import Behind
from tests.support.daemon import SECONDS


class Panic(BaseException):
    """What a library in another language may raise."""


def test_the_second_call_begins_when_the_first_has_ended() -> None:
    order: list[tuple[str, int]] = []
    begun, go = threading.Event(), threading.Event()

    def work(number: int) -> None:
        order.append(("begun", number))
        begun.set()
        assert go.wait(SECONDS)
        order.append(("ended", number))

    behind = Behind(work)
    behind.call(1)
    assert begun.wait(SECONDS)
    assert order == [("begun", 1)]
    go.set()
    behind.call(2)
    assert order[:2] == [("begun", 1), ("ended", 1)]
    behind.wait()
    behind.wait()
    assert order == [(what, number) for number in (1, 2) for what in ("begun", "ended")]


def test_all_calls_run_on_one_thread_and_not_the_callers() -> None:
    threads: list[int] = []
    behind = Behind(lambda: threads.append(threading.get_ident()))
    for _ in range(3):
        behind.call()
    behind.wait()
    assert len(threads) == 3
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


@pytest.mark.parametrize("then", ["call", "wait"])
def test_what_a_call_raises_comes_back_once_and_the_next_one_runs(then: str) -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if number == 1:
            raise Panic
        done.append(number)

    behind = Behind(work)
    behind.call(1)
    with pytest.raises(Panic):
        behind.call(2) if then == "call" else behind.wait()
    assert done == []
    behind.call(3)
    behind.wait()
    assert done == [3]
