"""Where compiled kernels are kept, as `doctor` and a run say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from caldrix_protocol.messages import Doctor, Lane, Notice, Open, Opened
from tests.support.daemon import Daemon, Home, kernel_cache, private_home, running_daemon
from tests.support.models import tiny


def details(daemon: Daemon) -> dict[str, tuple[str, ...]]:
    with daemon.caller() as caller:
        return {event.name: event.details for event in caller.ask(Doctor()) if type(event) is Lane}


def test_doctor_says_where_they_are_and_how_large(daemon: Daemon) -> None:
    found = details(daemon)
    kept = daemon.home.cache / "caldrix" / "kernels"
    assert found["cpu"][-1].startswith(f"compiled kernels are kept in {kept}, ")
    assert int(found["cpu"][-1].split()[-2]) > 0
    assert not [text for lane in ("hip", "metal") for text in found[lane] if "compiled kernels" in text]


def test_a_cache_that_cannot_be_written_is_a_notice_once(request: pytest.FixtureRequest) -> None:
    """The daemon keeps them beside its socket then, where those of all test runs are linked to here."""
    with private_home() as home:
        blocked, used = home.cache / "caldrix" / "kernels", Path(home.address.directory) / "kernels"
        blocked.parent.mkdir(parents=True)
        blocked.touch()
        used.parent.mkdir(mode=0o700)
        used.symlink_to(kernel_cache(request.config) / "caldrix" / "kernels")
        said = f"{blocked} cannot be written: File exists; compiled kernels are kept in {used} for now"
        with running_daemon(home) as daemon, daemon.caller() as caller:
            first, second = (caller.ask(Open(str(tiny("tiny-llama")), {})) for _ in range(2))
            assert [event.text for event in first if type(event) is Notice] == [said]
            assert [event.text for event in second if type(event) is Notice] == []
            assert {type(events[-2]) for events in (first, second)} == {Opened}
            assert details(daemon)["cpu"][-1] == said


def test_a_usual_cache_is_no_notice(home: Home) -> None:
    with running_daemon(home) as daemon, daemon.caller() as caller:
        events = caller.ask(Open(str(tiny("tiny-llama")), {}))
    assert [event.text for event in events if type(event) is Notice] == []
