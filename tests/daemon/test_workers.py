"""Worker processes: shared, lost, loaded again, unloaded, and never left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from caldrix_protocol.connection import Connection
from caldrix_protocol.messages import Cancel, Delta, Done, Generate, Load, Open, Opened, Refusal, Status, Stop
from caldrixd.worker.process import Key, Worker
from tests.daemon.conftest import LONG_CTX
from tests.daemon.test_replies import PROMPT, clean, loaded_when, user
from tests.support.daemon import ROOT, SECONDS, Daemon, Home, ask_raw, await_end, running_daemon
from tests.support.models import tiny

# Of the daemon `endless`.
ENDLESS = Open(str(tiny("tiny-llama")), {}, cpu_kernels="c")


def worker_of(daemon: Daemon) -> int:
    (loaded,) = daemon.loaded()
    return loaded.pid


def loading_worker(daemon: Daemon) -> int:
    return loaded_when(daemon, lambda found: bool(found) and found[0].pid > 0)[0].pid


def test_a_worker_that_dies_ends_its_replies_alone(daemon: Daemon, talkative: Path) -> None:
    with daemon.caller() as caller, daemon.caller() as second, daemon.caller() as other:
        caller.open(talkative, ctx=LONG_CTX)
        second.open(talkative, ctx=LONG_CTX)
        worker = worker_of(daemon)
        other.open(tiny("tiny-llama"))
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT):
            for one in (caller, second):
                one.send(ask_raw(1, "Once"))
                one.until(Delta)
            os.kill(worker, number)
            for one in (caller, second):
                refused = one.rest()[-1]
                assert (type(refused), refused.code) == (Refusal, "worker/died")
                assert refused.fields["reason"] == f"killed by signal {int(number)}"
            clean(other.ask(ask_raw(1, PROMPT["prompt"], 24)))
            clean(caller.ask(ask_raw(1, PROMPT["prompt"], 24)))
            (again,) = [loaded.pid for loaded in daemon.loaded() if loaded.model == str(talkative)]
            assert again != worker
            worker = again
    assert daemon.home.log.count("Traceback") == 0


def test_clients_that_open_a_model_at_once_share_its_load(daemon: Daemon) -> None:
    callers = [daemon.caller() for _ in range(5)]
    for caller in callers:
        caller.send(Open(str(tiny("tiny-llama")), {}))
    events = [caller.rest() for caller in callers]
    assert all(type(told[-1]) is Done for told in events)
    codes = [[event.code for event in told if type(event) is Status] for told in events]
    assert sorted("status/queued" in told for told in codes) == [False, True, True, True, True]
    assert all("status/loading" in told for told in codes)
    (loaded,) = daemon.loaded()
    assert loaded.leases == 5
    for caller in callers:
        caller.close()


def test_a_worker_that_dies_while_loading_is_told_to_all(endless: Daemon) -> None:
    with endless.caller() as first, endless.caller() as second:
        first.send(ENDLESS)
        second.send(ENDLESS)
        loaded_when(endless, lambda found: [loaded.leases for loaded in found] == [2])
        os.kill(loading_worker(endless), signal.SIGKILL)
        assert [one.rest()[-1].code for one in (first, second)] == ["worker/died"] * 2
        assert type(first.ask(Open(str(tiny("tiny-llama")), {}))[-2]) is Opened


def test_a_load_that_nobody_waits_for_is_ended(endless: Daemon) -> None:
    with endless.caller() as first, endless.caller() as second:
        first.send(ENDLESS)
        second.send(ENDLESS)
        worker = loading_worker(endless)
        loaded_when(endless, lambda found: [loaded.leases for loaded in found] == [2])
        first.send(Cancel())
        assert first.rest()[-1] == Done("cancelled")
        assert worker_of(endless) == worker
        second.close()
        await_end(worker)
        assert endless.loaded() == []
        assert type(first.ask(Open(str(tiny("tiny-llama")), {}))[-2]) is Opened


def test_changed_files_get_a_worker_of_their_own(daemon: Daemon, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny("tiny-llama"), model)
    with daemon.caller() as caller:
        caller.open(model)
        caller.open(model / ".." / "model")
        assert len(daemon.loaded()) == 1
        (model / "generation_config.json").write_text('{"eos_token_id": 3}', "utf-8")
        caller.open(model)
        assert len({loaded.pid for loaded in daemon.loaded()}) == 2


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("config.json", '{"architectures": ["LlamaForCausalLM"], "hidden_size": "64"}', "config/"),
        ("tokenizer.json", "{}", "tokenizer/invalid"),
        ("model.safetensors", "\xff\xff\xff\xff\xff\xff\xff\x0f{}", "weights/header"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    daemon: Daemon, tmp_path: Path, file: str, text: str, code: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny("tiny-llama"), model)
    (model / file).write_text(text, "latin-1")
    with daemon.caller() as caller:
        for _ in range(2):
            refused = caller.ask(Open(str(model), {}))[-1]
            assert type(refused) is Refusal
            assert refused.code.startswith(code)
    assert loaded_when(daemon, lambda found: not found) == []
    assert daemon.home.log.count("incident") == 0


def test_links_that_lead_nowhere_or_to_no_text_are_refused(shared: Daemon, tmp_path: Path) -> None:
    """A cache of the hub that lost its blobs is full of such links."""
    dangling, odd, link = tmp_path / "dangling", tmp_path / os.fsdecode(b"odd\xff"), tmp_path / "link"
    for model in (dangling, odd):
        shutil.copytree(tiny("tiny-llama"), model)
    (dangling / "model.safetensors").unlink()
    (dangling / "model.safetensors").symlink_to("nowhere")
    link.symlink_to(odd)
    with shared.caller() as caller:
        found = [caller.ask(Open(str(model), {}))[-1] for model in (dangling, link)]
    assert [refused.text for refused in found] == [
        f"caldrixd cannot read {dangling}/model.safetensors: No such file or directory",
        f"caldrixd cannot read {tmp_path}/odd\\udcff: its path is not valid UTF-8",
    ]


def test_a_file_name_that_is_no_text_is_refused_all_the_same(daemon: Daemon, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny("tiny-llama"), model)
    (model / "model.safetensors").rename(model / "weights.safetensors")
    (model / os.fsdecode(b"odd\xff.safetensors")).write_bytes(b"x" * 100)
    with daemon.caller() as caller:
        refused = caller.ask(Open(str(model), {}))[-1]
        assert (type(refused), refused.kind) == (Refusal, "run")
        assert type(caller.ask(Open(str(tiny("tiny-llama")), {}))[-2]) is Opened


@pytest.mark.parametrize(
    ("model", "settings", "code"),
    [
        ("/nowhere/at/all", {}, "model/no-such-directory"),
        ("no model", {}, "model/not-a-model"),
        (str(ROOT / "docs"), {}, "model/missing-files"),
        (str(tiny("tiny-llama")), {"ctx": 4096}, "run/ctx-too-long"),
        (str(tiny("tiny-llama")), {"backend": "metal"}, "lane/unusable"),
    ],
)
def test_what_open_refuses(shared: Daemon, model: str, settings: dict[str, Any], code: str) -> None:
    with shared.caller() as caller:
        assert caller.ask(Open(model, {}, **settings))[-1].code == code
    assert shared.loaded() == []


# Free memory as this daemon sees it: none while there is a worker, `FREE` otherwise.
_SCARCE_MEMORY = """
import pathlib
from caldrixd.models import fit
children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children")
fit.available_memory = lambda: 0 if children.read_text("ascii").strip() else FREE
"""


def test_an_idle_model_makes_room_but_a_leased_one_does_not(home: Home, talkative: Path) -> None:
    # What is in the process beside the weights does not count as free, so a model of 1 GiB is claimed.
    prelude = _SCARCE_MEMORY.replace("FREE", str(1 << 40)) + (
        "from caldrixd.worker.process import Worker; Worker.size = property(lambda worker: 1 << 30)"
    )
    with running_daemon(home, prelude=prelude) as daemon, daemon.caller() as caller:
        caller.open(tiny("tiny-llama"))
        with daemon.caller() as other:
            refused = other.ask(Open(str(talkative), {}))[-1]
            assert (refused.code, refused.fields["free"]) == ("run/memory-weights", 0)
            caller.close()
            loaded_when(daemon, lambda found: not found[0].leases)
            other.open(talkative)
            assert [loaded.model for loaded in daemon.loaded()] == [str(talkative)]


def test_what_cannot_fit_unloads_nothing(home: Home, talkative: Path) -> None:
    prelude = _SCARCE_MEMORY.replace("FREE", str(1 << 40))
    with running_daemon(home, prelude=prelude) as daemon:
        with daemon.caller() as caller:
            caller.open(tiny("tiny-llama"))
        loaded_when(daemon, lambda found: not found[0].leases)
        with daemon.caller() as caller:
            assert caller.ask(Open(str(talkative), {}))[-1].code == "run/memory-weights"
        assert [loaded.model for loaded in daemon.loaded()] == [str(tiny("tiny-llama"))]


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{{ 'x'.center(10**9) }}",
        pytest.param(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            marks=pytest.mark.slow,  # it takes its deadline
        ),
    ],
)
def test_a_template_that_eats_all_ends_its_reply_alone(daemon: Daemon, tmp_path: Path, source: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny("tiny-llama"), model)
    (model / "chat_template.jinja").write_text(source, "utf-8")
    with daemon.caller() as caller, daemon.caller() as other:
        handle = caller.open(model).handle
        other_handle = other.open(model).handle
        worker = worker_of(daemon)
        caller.send(Generate(handle, turns=(user("hi"),)))
        clean(other.ask(ask_raw(other_handle, PROMPT["prompt"], 24)))
        refused = caller.rest()[-1]
        assert (type(refused), refused.kind) == (Refusal, "message")
        assert refused.code in (
            "template/too-long",
            "template/too-slow",
            "template/memory",
            "template/failed",
        )
        clean(caller.ask(ask_raw(handle, PROMPT["prompt"], 24)))
        assert worker_of(daemon) == worker


def test_an_idle_model_is_unloaded(home: Home) -> None:
    with running_daemon(home, "--idle-unload", "0") as daemon:
        with daemon.caller() as caller:
            handle = caller.open(tiny("tiny-llama")).handle
            worker = worker_of(daemon)
            clean(caller.ask(ask_raw(handle, PROMPT["prompt"], 24)))
            clean(caller.ask(ask_raw(handle, PROMPT["prompt"], 24)))
            assert worker_of(daemon) == worker
        await_end(worker)
        assert loaded_when(daemon, lambda found: not found) == []


def test_stop_unloads_by_name_and_running_replies_say_so(daemon: Daemon, talkative: Path) -> None:
    with daemon.caller() as caller, daemon.caller() as other:
        handle = caller.open(talkative, ctx=LONG_CTX).handle
        worker = worker_of(daemon)
        other.open(tiny("tiny-llama"))
        caller.send(ask_raw(handle, "Once"))
        caller.until(Delta)
        assert other.ask(Stop(str(talkative))) == [Done()]
        assert not Path(f"/proc/{worker}").exists()
        refused = caller.rest()[-1]
        assert (refused.code, refused.fields["model"]) == ("worker/unloaded", str(talkative))
        assert [loaded.model for loaded in daemon.loaded()] == [str(tiny("tiny-llama"))]
        clean(caller.ask(ask_raw(handle, PROMPT["prompt"], 24)))
        assert other.ask(Stop()) == [Done()]
        assert daemon.loaded() == []
        assert other.ask(Stop(str(talkative)))[-1].code == "model/not-loaded"


def test_a_model_is_loaded_again_only_when_its_old_worker_is_gone(daemon: Daemon) -> None:
    """Its memory is free only then."""
    with daemon.caller() as caller, daemon.caller() as other:
        handle = caller.open(tiny("tiny-llama")).handle
        worker = worker_of(daemon)
        os.kill(worker, signal.SIGSTOP)
        other.send(Stop())
        loaded_when(daemon, lambda found: not found)
        clean(caller.ask(ask_raw(handle, PROMPT["prompt"], 24)))
        assert not Path(f"/proc/{worker}").exists()
        assert other.rest() == [Done()]


LINGERING = """
import signal, socket, sys
from caldrix_protocol.connection import Connection, as_refusal
from caldrix_protocol.messages import Ready
from caldrix_protocol.refusals import Refused
sock, connection = socket.socket(fileno=int(sys.argv[2])), Connection("worker")
connection.receive_data(sock.recv(1 << 16))
connection.next_event()
ready = connection.send(Ready("", 1, False, 1))
sock.sendall(ready + connection.send(as_refusal(Refused("run/not-finite"))))
signal.pause()
"""


def test_a_worker_that_gave_up_takes_no_further_reply(home: Home) -> None:
    (home.root / "caldrixd").mkdir()
    (home.root / "caldrixd" / "__init__.py").touch()
    (home.root / "caldrixd" / "worker.py").write_text(LINGERING, "utf-8")
    environment = home.environment | {"PYTHONPATH": f"{home.root}{os.pathsep}{ROOT / 'protocol'}"}

    async def run() -> None:
        worker = Worker(Key(str(home.root), (), "cpu"), "model", environment)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            await worker.settled.wait()
            while worker.alive:
                await anyio.lowlevel.checkpoint()
            assert not worker.ended.is_set()
            os.kill(worker.pid, signal.SIGKILL)
        assert worker.refused is not None
        assert worker.refused.code == "run/not-finite"

    anyio.run(run)


# --- the process itself -----------------------------------------------------------------------


def test_no_worker_outlives_a_killed_daemon(daemon: Daemon, talkative: Path) -> None:
    with daemon.caller() as caller:
        handle = caller.open(talkative, ctx=LONG_CTX).handle
        caller.send(ask_raw(handle, "Once"))
        caller.until(Delta)
        worker = worker_of(daemon)
        os.kill(worker, signal.SIGSTOP)  # so that it cannot see the end of its socket
        daemon.signal(signal.SIGKILL)
        await_end(worker)


def test_a_worker_ends_with_its_socket(home: Home) -> None:
    ours, theirs = socket.socketpair()
    command = [
        sys.executable,
        "-m",
        "caldrixd.worker",
        "--fd",
        str(theirs.fileno()),
        "--parent",
        str(os.getpid()),
    ]
    with ours, theirs:
        worker = subprocess.Popen(command, env=home.environment, pass_fds=[theirs.fileno()], cwd="/")
        theirs.close()
        ours.sendall(Connection("parent").send(Load("tiny", str(tiny("tiny-llama")), "cpu")))
        ours.shutdown(socket.SHUT_WR)
        assert worker.wait(SECONDS) == 0


def test_a_worker_of_another_parent_does_not_start(home: Home) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "caldrixd.worker", "--fd", str(theirs.fileno()), "--parent", "1"]
    with ours, theirs:
        worker = subprocess.run(
            command,
            env=home.environment,
            pass_fds=[theirs.fileno()],
            cwd="/",
            stderr=subprocess.PIPE,
            timeout=SECONDS,
        )
    assert worker.returncode == 1
    assert worker.stderr.endswith(b"the daemon is gone\n")
    assert worker.stderr.count(b"\n") == 1


def test_what_a_worker_inherits(home: Home) -> None:
    home.changes = {"HF_TOKEN": "hf_secret", "PYTHONSTARTUP": "x"}
    with running_daemon(home) as daemon, daemon.caller() as caller:
        caller.open(tiny("tiny-llama"))
        process = Path(f"/proc/{worker_of(daemon)}")
        variables = dict(
            entry.split("=", 1) for entry in (process / "environ").read_text("utf-8").split("\0") if entry
        )
        assert variables["NUMBA_CACHE_DIR"].startswith(str(home.cache / "caldrix" / "kernels"))
        assert not {"HF_TOKEN", "PYTHONSTARTUP", "NOTIFY_SOCKET"} & variables.keys()
        assert os.readlink(process / "cwd") == "/"
        assert os.readlink(process / "fd/0") == "/dev/null"
        score = int((process / "oom_score_adj").read_text("ascii"))
        assert score > int(Path(f"/proc/{daemon.pid}/oom_score_adj").read_text("ascii"))
        sockets = [os.readlink(file) for file in (process / "fd").iterdir() if file.exists()]
        listening = [line.split()[-1] for line in Path("/proc/net/unix").read_text("utf-8").splitlines()]
        assert home.address.socket in listening
        assert len([name for name in sockets if name.startswith("socket:")]) == 1


def test_an_interrupt_for_all_does_not_end_a_worker(daemon: Daemon) -> None:
    with daemon.caller() as caller:
        handle = caller.open(tiny("tiny-llama")).handle
        worker = worker_of(daemon)
        os.kill(worker, signal.SIGINT)
        clean(caller.ask(ask_raw(handle, PROMPT["prompt"], 24)))
        assert worker_of(daemon) == worker
