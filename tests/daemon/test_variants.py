"""`--cpu-isa`, `--cpu-kernels`, `--ctx` through a real daemon: which worker answers, and what is refused."""

from __future__ import annotations

import os

import pytest

from caldrix_protocol.messages import Cancel, Done, Message, Open, Opened, Refusal, Status
from caldrixd.lanes.drivers.cpu import cpu_flags, isa_level
from tests.daemon.test_replies import PROMPT
from tests.support.daemon import Caller, Daemon, Home, ask_raw, await_end, running_daemon
from tests.support.models import tiny

LLAMA = tiny("tiny-llama")
NO_COMPILER = "no C compiler: the CPU lane links its kernels with cc at load, and cc is not on PATH"
above_v3 = pytest.mark.skipif(
    isa_level(cpu_flags()) <= "x86-64-v3", reason="this processor has no level above x86-64-v3"
)
# Runs in the daemon alone: a processor without AVX-512, and a Python without numba.
ONLY_V3 = """
from caldrixd.lanes.drivers import cpu
every = cpu.cpu_flags()
cpu.cpu_flags = lambda: frozenset(flag for flag in every if not flag.startswith("avx512"))
"""
NO_NUMBA = "sys.modules['numba'] = None"


def answer(caller: Caller, handle: int) -> Done:
    done: Message = caller.ask(ask_raw(handle, PROMPT["prompt"], 24))[-1]
    assert type(done) is Done
    return done


@above_v3
def test_each_level_is_a_worker_and_all_say_the_same(daemon: Daemon) -> None:
    with daemon.caller() as caller:
        levels = ("native", "x86-64-v4", "x86-64-v3", "x86-64-v2")
        opened = [caller.open(LLAMA, cpu_isa=isa) for isa in levels]
        assert [loaded.variant for loaded in daemon.loaded()] == ["", "x86-64-v3", "x86-64-v2"]
        answers = [answer(caller, each.handle).ids for each in opened]
        assert answers == [tuple(PROMPT["generated_ids"])[:24]] * 4
    for each, kernels in zip(opened, ("numba", "numba", "numba x86-64-v3", "numba x86-64-v2"), strict=True):
        assert f"kernels {kernels}," in each.settings


def test_kernels_in_c_are_another_worker_and_say_the_same(daemon: Daemon) -> None:
    with daemon.caller() as caller:
        opened = [caller.open(LLAMA, cpu_kernels=kernels) for kernels in ("auto", "c")]
        assert [loaded.variant for loaded in daemon.loaded()] == ["", "c"]
        assert len({answer(caller, each.handle).ids for each in opened}) == 1
    assert "kernels C," in opened[1].settings


def test_a_level_the_host_lacks_is_refused_before_anything_is_loaded(home: Home) -> None:
    with running_daemon(home, prelude=ONLY_V3) as daemon, daemon.caller() as caller:
        (refused,) = caller.ask(Open(str(LLAMA), {}, cpu_isa="x86-64-v4"))
        assert type(refused) is Refusal
        assert (refused.kind, refused.text) == ("run", "--cpu-isa x86-64-v4: this host has x86-64-v3 only")
        assert daemon.loaded() == []


def test_without_numba_the_kernels_are_in_c(home: Home) -> None:
    with running_daemon(home, prelude=NO_NUMBA) as daemon, daemon.caller() as caller:
        opened = [caller.open(LLAMA, cpu_kernels=kernels) for kernels in ("auto", "c")]
        assert ["kernels C," in each.settings for each in opened] == [True, True]
        assert len(daemon.loaded()) == 1
        assert answer(caller, opened[0].handle).ids == tuple(PROMPT["generated_ids"])[:24]
        refused = caller.ask(Open(str(LLAMA), {}, cpu_kernels="numba"))[-1]
        assert refused.text == "the CPU lane cannot use numba: No module named 'numba'"


def test_with_neither_numba_nor_cc_the_lane_is_refused(home: Home) -> None:
    home.changes = {"PATH": ""}
    with running_daemon(home, prelude=NO_NUMBA) as daemon, daemon.caller() as caller:
        named, chosen = (caller.ask(Open(str(LLAMA), {}, backend=each))[-1] for each in ("cpu", "auto"))
        assert (named.kind, named.text) == ("run", f"the cpu lane cannot run here: {NO_COMPILER}")
        assert chosen.text.endswith(f"cpu: {NO_COMPILER})")


def test_kernels_in_c_need_a_compiler(home: Home) -> None:
    home.changes = {"PATH": ""}
    with running_daemon(home) as daemon, daemon.caller() as caller:
        (refused,) = caller.ask(Open(str(LLAMA), {}, cpu_kernels="c"))
        assert (refused.kind, refused.text) == ("run", NO_COMPILER)


def test_a_cancel_ends_a_compilation(home: Home) -> None:
    """The compilers here never end, and say their process ids when they are asked to compile."""
    cc, fifo = home.root / "bin" / "cc", home.root / "pid"
    cc.parent.mkdir()
    cc.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho $$ > {fifo}\nexec sleep 10000\n', "ascii")
    cc.chmod(0o755)
    os.mkfifo(fifo)
    alone = Home(home.root, home.root / "cache", {"PATH": f"{cc.parent}{os.pathsep}{os.environ['PATH']}"})
    with running_daemon(alone) as daemon, daemon.caller() as caller:
        caller.send(Open(str(LLAMA), {}, cpu_kernels="c"))
        compilers = [int(pid) for pid in fifo.read_text().split()]
        caller.send(Cancel())
        assert caller.rest()[-1] == Done("cancelled")
        assert compilers
        for pid in compilers:
            await_end(pid)


def test_the_default_context_is_the_models_own_and_one_that_is_named_is_not(shared: Daemon) -> None:
    short = tiny("tiny-llama-yarn")
    with shared.caller() as caller:
        assert caller.open(short).ctx == 512
        refused = caller.ask(Open(str(short), {}, ctx=2048))[-1]
        assert refused.text == "--ctx 2048 is over the 512 tokens this model was made for"


def test_the_status_line_names_the_kernels(shared: Daemon) -> None:
    with shared.caller() as caller:
        events = caller.ask(Open(str(LLAMA), {}))
    (said,) = (event for event in events if type(event) is Status and event.code == "status/lane")
    (opened,) = (event for event in events if type(event) is Opened)
    assert said.text == f"cpu: {opened.settings}"
    assert ", weights bf16, kernels numba, arithmetic f32" in opened.settings
