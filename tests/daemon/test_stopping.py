"""How a daemon ends: by signal, by request, and when its socket is taken away."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from caldrix_protocol.messages import Delta, Done, Ps, Refusal, Stop
from tests.daemon.conftest import LONG_CTX
from tests.daemon.test_replies import loaded_when
from tests.support.daemon import Daemon, Home, ask_raw, await_end, running_daemon, text_of
from tests.support.models import reference, tiny


def test_sigterm_leaves_the_lock_file_and_no_socket(daemon: Daemon) -> None:
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert not os.path.lexists(daemon.home.address.socket)
    assert Path(daemon.home.address.lock).exists()


def test_a_running_reply_is_finished(home: Home, talkative: Path) -> None:
    """Also where it outlasts the next look at the socket, which is gone then."""
    prompt = reference("tiny-llama")["prompts"][0]
    changes = {"drain_seconds": 600.0, "socket_check_seconds": 0.001}
    with running_daemon(home, changes=changes) as daemon, daemon.caller() as caller:
        opened = caller.open(talkative)
        caller.send(ask_raw(opened.handle, prompt["prompt"], 1500))
        first = caller.until(Delta)
        daemon.signal(signal.SIGTERM)
        rest = caller.rest()
        assert type(rest[-1]) is Done, rest[-1]
        assert rest[-1].finish_reason == "length"
        assert list(rest[-1].ids[:24]) == prompt["generated_ids"]
        assert len(rest[-1].ids) == 1500
        assert first.text + text_of(rest)
        goodbye = caller.receive()
        assert type(goodbye) is Refusal
        assert goodbye.code == "daemon/stopping"
        assert caller.receive() is None
        assert daemon.wait() == 0


def test_a_reply_that_outlasts_the_drain_time_is_refused(home: Home, talkative: Path) -> None:
    with running_daemon(home, changes={"drain_seconds": 0.0}) as daemon, daemon.caller() as caller:
        opened = caller.open(talkative, ctx=LONG_CTX)
        caller.send(ask_raw(opened.handle, "Once"))
        caller.until(Delta)
        daemon.signal(signal.SIGTERM)
        final = caller.rest()[-1]
        assert (type(final), final.code) == (Refusal, "daemon/stopping")
        assert daemon.wait() == 0


def test_a_second_sigterm_ends_the_drain_and_a_worker_that_hangs(home: Home, talkative: Path) -> None:
    with running_daemon(home, changes={"drain_seconds": 600.0}) as daemon, daemon.caller() as caller:
        opened = caller.open(talkative, ctx=LONG_CTX)
        bystander = daemon.caller()
        caller.send(ask_raw(opened.handle, "Once"))
        caller.until(Delta)
        worker = daemon.loaded()[0].pid
        os.kill(worker, signal.SIGSTOP)
        daemon.signal(signal.SIGTERM)
        refused = bystander.ask(Ps())[-1]
        while type(refused) is Done:  # the signal may come after the request
            refused = bystander.ask(Ps())[-1]
        assert refused.code == "daemon/stopping"
        with suppress(FileNotFoundError, ConnectionRefusedError):  # until nobody listens
            while True:
                daemon.caller(greet=False).close()
        daemon.signal(signal.SIGTERM)
        assert caller.rest()[-1].code == "daemon/stopping"
        assert daemon.wait() == 0
        await_end(worker)


def test_after_stop_daemon_another_can_start_at_once(home: Home) -> None:
    with running_daemon(home) as first, first.caller() as caller:
        caller.open(tiny("tiny-llama"))
        worker = first.loaded()[0].pid
        assert caller.ask(Stop(daemon=True)) == [Done()]
        with open(home.address.lock, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with running_daemon(home) as second:
            assert second.loaded() == []
            assert not Path(f"/proc/{worker}").exists()
        assert first.wait() == 0


def test_a_daemon_in_use_does_not_end_for_a_client_of_another_build(home: Home) -> None:
    with running_daemon(home) as daemon, daemon.caller() as caller:
        with daemon.caller() as other:
            other.open(tiny("tiny-llama"))
            refused = caller.ask(Stop(daemon=True, if_idle=True))[-1]
            assert (refused.code, refused.fields) == ("daemon/in-use", {"pid": daemon.pid})
            assert other.ask(Stop(str(tiny("tiny-llama")))) == [Done()]
        loaded_when(daemon, lambda found: not found)
        assert caller.ask(Stop(daemon=True, if_idle=True)) == [Done()]
        assert daemon.wait() == 0


@pytest.mark.parametrize("replaced", [False, True])
def test_a_daemon_without_its_socket_ends(home: Home, replaced: bool) -> None:
    with running_daemon(home, changes={"socket_check_seconds": 0.02}) as daemon:
        path = daemon.home.address.socket
        os.unlink(path)
        if replaced:
            with socket.socket(socket.AF_UNIX) as other:
                other.bind(path)
        assert daemon.wait() == 1
        assert os.path.lexists(path) == replaced
        assert f"{path} was removed or replaced" in home.log
