"""Many clients, some of them rude, while workers are killed: no reply is wrong, and nothing is left over."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from caldrix_protocol.messages import Cancel, Done, Message, Open, Opened, Refusal, Stop
from tests.support.daemon import Caller, Daemon, Home, ask_raw, running_daemon
from tests.support.models import reference, tiny

MODELS = ("tiny-llama", "tiny-qwen2")
LOST = {"worker/died", "worker/unloaded"}


class Crowd:
    """Clients that act at random; every `period` replies a worker is killed or unloaded."""

    def __init__(self, daemon: Daemon, *, period: int) -> None:
        self.daemon = daemon
        self.period = period
        self.outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1
            due = self.outcomes.total() % self.period == 0
            number = self.outcomes.total() // self.period
        if due:
            self._harm(number)

    def _harm(self, number: int) -> None:
        loaded = self.daemon.loaded()
        if loaded and number % 3:
            pid = loaded[number % len(loaded)].pid
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if number % 2 else signal.SIGSEGV)
        elif loaded:
            with self.daemon.caller() as caller:
                caller.ask(Stop(loaded[0].model))

    def visit(self, random: Random) -> None:
        """One connection: open a model, ask a few times, perhaps leave without a word."""
        name = random.choice(MODELS)
        with self.daemon.caller() as caller:
            events = caller.ask(Open(str(tiny(name)), {}))
            if type(events[-1]) is Refusal:
                assert events[-1].code in LOST, events[-1]
                self.note("not loaded")
                return
            (opened,) = [event for event in events if type(event) is Opened]
            for _ in range(random.randint(1, 4)):
                if not self._ask(caller, opened.handle, name, random):
                    return

    def _ask(self, caller: Caller, handle: int, name: str, random: Random) -> bool:
        """Whether the connection can go on."""
        prompt = random.choice(reference(name)["prompts"])
        request = ask_raw(handle, prompt["prompt"], len(prompt["generated_ids"]))
        action = random.choices(["answer", "cancel", "leave", "garbage"], [12, 3, 2, 1])[0]
        if action == "garbage":
            caller.socket.sendall(random.randbytes(50))
            return False
        caller.send(request)
        if action == "leave":
            return False
        if action == "cancel":
            caller.send(Cancel())
        self.note(outcome_of(caller.rest()[-1], prompt["generated_ids"], prompt["eos_step"]))
        return True


def outcome_of(final: Message, expected: list[int], eos_step: int | None) -> str:
    """The kind of a reply's end, after checking that it is a right one."""
    if type(final) is Refusal:
        assert final.code in LOST, final
        return final.code
    assert type(final) is Done
    assert final.ids == tuple(expected)[: len(final.ids)]
    if final.finish_reason != "cancelled":
        assert len(final.ids) == (len(expected) if eos_step is None else eos_step + 1)
    return final.finish_reason


@pytest.mark.slow
def test_a_crowd_with_faults(home: Home) -> None:
    failures: list[BaseException] = []
    with running_daemon(home) as daemon:
        crowd = Crowd(daemon, period=25)

        def client(seed: int) -> None:
            random = Random(seed)
            try:
                for _ in range(30):
                    crowd.visit(random)
            except BaseException as error:
                failures.append(error)

        descriptors = len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))
        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert {"length", "stop", "cancelled", "worker/died"} <= crowd.outcomes.keys(), crowd.outcomes
        with daemon.caller() as caller:
            assert caller.ask(Stop()) == [Done()]
        assert daemon.loaded() == []
        assert len(list(Path(f"/proc/{daemon.pid}/fd").iterdir())) <= descriptors + 1
    assert "incident" not in home.log
    assert "Traceback" not in home.log
