"""The log: one line an event, no text of users or models, nothing that acts on a terminal."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import sys
from pathlib import Path

from caldrixd import log
from tests.support.daemon import Home, ask_raw, running_daemon, text_of
from tests.support.models import tiny


def test_a_log_holds_no_text_and_no_control_characters(home: Home, tmp_path: Path) -> None:
    model = tmp_path / "a\x1b]52;c;QQ==\x07\nb"
    shutil.copytree(tiny("tiny-llama"), model)
    with running_daemon(home) as daemon, daemon.caller() as caller:
        handle = caller.open(model).handle
        told = text_of(caller.ask(ask_raw(handle, "swordfish", 24)))
        caller.ask(ask_raw(handle, "swordfish " * 2000))
    assert r"a\x1b]52;c;QQ==\x07\nb" in home.log
    assert "swordfish" not in home.log
    assert told.strip()
    assert told not in home.log
    assert all(character.isprintable() for line in home.log.splitlines() for character in line)


def test_an_incident_is_logged_without_its_message() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        try:
            "swordfish".encode("ascii").decode("nonsense")
        except LookupError as error:
            name = log.incident(error)
    finally:
        logging.getLogger().removeHandler(handler)
    assert f"incident {name}: LookupError at " in stream.getvalue()
    assert Path(__file__).name in stream.getvalue()
    assert "nonsense" not in stream.getvalue()


def test_of_a_group_the_first_error_is_described() -> None:
    refused = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    group = ExceptionGroup("tasks", [ExceptionGroup("inner", [refused]), ValueError("x")])
    assert log.describe(group) == "OSError (Too many open files) at an unknown place"


def test_escape_keeps_text_and_shows_what_is_not() -> None:
    assert log.escape("naïve 漢 😀") == "naïve 漢 😀"
    assert log.escape("\x1b[2J\r\n\x9b\u202e\ud800") == r"\x1b[2J\r\n\x9b\u202e\ud800"
    assert log.escape(chr(sys.maxunicode)) == r"\U0010ffff"
