"""The line editor of a chat in a real pseudo-terminal, and the history it keeps."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import stat
import struct
import termios
import threading
from pathlib import Path
from typing import Any

import pytest

from caldrix_client.history import KEPT, History
from caldrix_protocol.messages import Delta, Generate, Message
from tests.support.cli import SECONDS, Home, Screen
from tests.support.peer import Model, Peer, Talk, say, texts

UP = "\x1b[A"
PASTE = "\x1b[200~{}\x1b[201~"


def messages(peer: Peer) -> list[str]:
    return [texts(request)[-1][1] for request in peer.requests if type(request) is Generate]


def history(home: Home) -> Path:
    return home.path / "state" / "caldrix" / "history"


def chat(home: Home, *keys: str, flags: tuple[str, ...] = (), **more: Any) -> list[str]:
    """The messages that a chat in a terminal sends when these keys are pressed, one answer for each."""
    with (
        Peer(home.address, Model(*["answer\n"] * len(keys))) as peer,
        Screen(home, "run", "demo", *flags, **more) as screen,
    ):
        for pressed in keys:
            screen.ready()
            screen.press(pressed)
            screen.expect("answer\r\n")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0
    return messages(peer)


def test_a_paste_of_five_lines_is_one_message(home: Home) -> None:
    lines = "one\ntwo\n\n/reset\nfive"
    pasted = PASTE.format(lines.replace("\n", "\r"))
    assert chat(home, pasted + "\r", UP + "!\r") == [lines, lines + "!"]
    assert [json.loads(line) for line in history(home).read_text().splitlines()] == [lines, lines + "!"]


def test_a_paste_is_shown_line_by_line(home: Home) -> None:
    with Peer(home.address, Model()), Screen(home, "run", "demo") as screen:
        screen.ready()
        screen.press(PASTE.format("one\rtwo\rthree"))
        screen.expect("> one")
        screen.expect(". two")
        screen.expect(". three")


def test_a_block_is_one_message_and_stays_open_while_enter_is_pressed(home: Home) -> None:
    assert chat(home, '"""\rone\r\r/two\r"""\r', UP + "\r") == ["one\n\n/two"] * 2
    assert [json.loads(line) for line in history(home).read_text().splitlines()] == ['"""\none\n\n/two\n"""']


def test_alt_enter_begins_a_line(home: Home) -> None:
    assert chat(home, "a\x1b\rb\r") == ["a\nb"]


def test_keys_edit_the_line(home: Home) -> None:
    assert chat(home, "wörld\x01hello \x05!\x7f?\r") == ["hello wörld?"]


def test_ctrl_r_finds_what_was_typed(home: Home) -> None:
    assert chat(home, "first\r", "other\r", "\x12fir\r\x05!\r") == ["first", "other", "first!"]


def test_what_is_typed_during_an_answer_is_the_next_message(home: Home) -> None:
    typed = threading.Event()

    def slow(talk: Talk, request: Message) -> None:
        talk.send(Delta("begun "))
        assert typed.wait(SECONDS)
        say(talk, "answer\n")

    with Peer(home.address, Model(slow, "b\n", "c\n")) as peer, Screen(home, "run", "demo") as screen:
        screen.ready()
        screen.press("first\r")
        screen.expect("begun ")
        screen.press("second\rthird\r")
        screen.expect("third")
        typed.set()
        screen.expect("c\r\n")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0
    assert messages(peer) == ["first", "second", "third"]


def test_tab_completes_a_command(home: Home) -> None:
    with Peer(home.address, Model()), Screen(home, "run", "demo") as screen:
        screen.ready()
        screen.press("/temp\t\r")
        screen.expect("caldrix: temperature 0\r\n")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0


def test_keys_that_mean_nothing_do_nothing(home: Home) -> None:
    """A colour, as of text that was copied, and a mouse."""
    assert chat(home, "a\x1b[31mb\x1b[<0;5;5Mc\x1b[0m\r") == ["abc"]


def test_a_paste_of_a_megabyte_is_one_message(home: Home) -> None:
    pasted = "a line of text\r" * 70_000
    received: list[int] = []

    def count(talk: Talk, request: Message) -> None:
        assert type(request) is Generate
        assert request.turns is not None
        (part,) = request.turns[-1]["content"]
        received.append(len(talk.blobs[part["blob"]]))
        say(talk, "answer\n")

    with Peer(home.address, Model(count)), Screen(home, "run", "demo") as screen:
        screen.ready()
        feeding = threading.Thread(target=feed, args=(screen.keys, PASTE.format(pasted) + "\r"))
        feeding.start()
        screen.expect("answer\r\n")
        feeding.join()
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0
    assert received == [len(pasted)]


def feed(keys: int, text: str) -> None:
    data = memoryview(text.encode())
    while data:
        data = data[os.write(keys, data) :]


def test_a_screen_of_another_size_is_drawn_anew(home: Home) -> None:
    with Peer(home.address, Model("answer\n")) as peer, Screen(home, "run", "demo") as screen:
        screen.ready()
        for width in (200, 10, 1, 80):
            fcntl.ioctl(screen.keys, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
            screen.press("word ")
        screen.press("\r")
        screen.expect("answer\r\n")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0
    assert messages(peer) == ["word " * 4]


def test_earlier_chats_are_remembered_by_their_user_alone(home: Home) -> None:
    assert chat(home, "first\r", "second\r") == ["first", "second"]
    assert stat.S_IMODE(history(home).stat().st_mode) == 0o600
    assert chat(home, UP + UP + "\r") == ["first"]


@pytest.mark.parametrize(("flags", "variables"), [(("--no-history",), {}), ((), {"CALDRIX_NO_HISTORY": "1"})])
def test_a_history_that_is_not_wanted_is_neither_read_nor_written(
    home: Home, flags: tuple[str, ...], variables: dict[str, str]
) -> None:
    chat(home, "kept\r")
    before = history(home).read_bytes()
    assert chat(home, UP + "secret\r", UP + "\r", flags=flags, **variables) == ["secret", "secret"]
    assert history(home).read_bytes() == before


def test_a_history_that_cannot_be_kept_is_said_once(home: Home) -> None:
    history(home).mkdir(parents=True)
    with Peer(home.address, Model("a\n", "b\n")), Screen(home, "run", "demo") as screen:
        screen.expect(f"caldrix: the history of chats cannot be kept in {history(home)}: ")
        for line, answer in (("x", "a"), ("y", "b")):
            screen.ready()
            screen.press(f"{line}\r")
            screen.expect(f"{answer}\r\n")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0
    assert screen.shown.count("the history of chats") == 1


def test_typed_bytes_that_are_no_text_are_refused(home: Home) -> None:
    with Peer(home.address, Model()), Screen(home, "run", "demo") as screen:
        screen.ready()
        os.write(screen.keys, b"caf\xe9!\r")
        screen.expect("caldrix: this line is not valid UTF-8, so it was not sent\r\n")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0


@pytest.mark.parametrize("term", ["", "dumb"])
def test_a_terminal_that_cannot_move_its_cursor_has_plain_lines(home: Home, term: str) -> None:
    with Peer(home.address, Model("a")), Screen(home, "run", "demo", TERM=term) as screen:
        screen.expect("> ")
        screen.press("x\n")
        screen.expect("a\r\n> ")
        screen.press("\x04")
        assert screen.end() == 0
    assert screen.shown.endswith(" ends the chat\r\n> x\r\na\r\n> \r\n")


def test_no_colour_is_ever_used(home: Home) -> None:
    with Peer(home.address, Model("a\n")), Screen(home, "run", "demo", NO_COLOR="1") as screen:
        screen.ready()
        screen.press("x\r")
        screen.expect("a\r\n")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0
    assert set(re.findall(r"\x1b\[([\d;]*)m", screen.shown)) == {"0"}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_terminal_is_left_as_it_was_when_the_chat_is_terminated(
    home: Home, number: signal.Signals, status: int
) -> None:
    with Peer(home.address, Model()), Screen(home, "run", "demo") as screen:
        before = termios.tcgetattr(screen.terminal)
        screen.ready()
        screen.press("half")
        screen.expect("half")
        screen.process.send_signal(number)
        assert screen.process.wait(SECONDS) == status
        assert termios.tcgetattr(screen.terminal) == before


def test_the_newest_entries_are_kept(tmp_path: Path) -> None:
    kept = History(str(tmp_path / "deep" / "history"))
    assert kept.entries() == []
    for number in range(2 * KEPT + 1):
        kept.keep(f"{number}\n")
    assert kept.entries() == [f"{number}\n" for number in range(KEPT + 1, 2 * KEPT + 1)]
    assert len(Path(kept.path).read_text().splitlines()) == KEPT
    assert os.listdir(tmp_path / "deep") == ["history"]


def test_lines_that_are_no_entries_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b'"a"\n\xff\n{}\n5\n"b"\n"cut')
    path.chmod(0o644)
    kept = History(str(path))
    assert kept.entries() == ["a", "b"]
    kept.keep("c")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_pipe_in_the_place_of_the_history_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "history")
    with pytest.raises(OSError, match="not a regular file"):
        History(str(tmp_path / "history")).entries()
