"""Memory for one more conversation with a model that is loaded."""

from __future__ import annotations

from pathlib import Path

from caldrix_kernels.step import layout as at
from caldrix_protocol.messages import Open
from caldrixd.handlers import room
from tests.daemon.conftest import LONG_CTX
from tests.daemon.test_replies import loaded_when
from tests.support.daemon import Caller, Home, running_daemon
from tests.support.models import tiny

# Free memory as this daemon sees it: what a file says.
_TOLD = """
import pathlib
from caldrixd.models import fit
fit.available_memory = lambda: int(pathlib.Path(TOLD).read_text("ascii"))
"""
MIB = 1 << 20


def largest(caller: Caller, model: Path) -> int:
    refused = caller.ask(Open(str(model), {}, ctx=LONG_CTX))[-1]
    assert (refused.code, refused.fields["model"], refused.fields["free"]) == (
        "run/memory-further",
        str(model),
        4,
    )
    return int(refused.fields["ctx"])


def test_a_longer_context_of_a_loaded_model_must_fit(home: Home, talkative: Path, tmp_path: Path) -> None:
    told = tmp_path / "free"
    told.write_text(str(1 << 40))
    prelude = _TOLD.replace("TOLD", repr(str(told)))
    with running_daemon(home, prelude=prelude) as daemon, daemon.caller() as caller, daemon.caller() as other:
        caller.open(talkative, ctx=256)
        told.write_text(str(4 * MIB))
        ctx = largest(other, talkative)
        assert 256 < ctx < LONG_CTX
        other.open(talkative, ctx=ctx)
        assert [loaded.model for loaded in daemon.loaded()] == [str(talkative)]


# Little while there are two workers; of which each is said to have 1 GiB of weights.
_CROWDED = """
import pathlib
from caldrixd.models import fit
from caldrixd.worker.process import Worker
children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children")
fit.available_memory = lambda: 4 << 20 if len(children.read_text("ascii").split()) > 1 else 1 << 40
Worker.size = property(lambda worker: 1 << 30)
"""


def test_an_idle_model_makes_room_for_a_conversation(home: Home, talkative: Path) -> None:
    with running_daemon(home, prelude=_CROWDED) as daemon:
        with daemon.caller() as first:
            first.open(tiny("tiny-llama"))
            with daemon.caller() as caller:
                caller.open(talkative, ctx=256)
        loaded_when(daemon, lambda found: not any(loaded.leases for loaded in found))
        with daemon.caller() as caller:
            caller.open(talkative, ctx=LONG_CTX)
            assert [loaded.model for loaded in daemon.loaded()] == [str(talkative)]


def test_state_is_reckoned_in_the_blocks_of_the_lane() -> None:
    assert room.BLOCK == at.BLOCK
