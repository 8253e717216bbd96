"""The chat in a real pseudo-terminal, against a scripted daemon."""

from __future__ import annotations

import os
import signal
import socket
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from caldrix_protocol.messages import Delta, Done, Generate, Message, Open, Progress, Refusal
from tests.support.cli import SECONDS, Home, Screen
from tests.support.peer import Model, Peer, Talk, say, texts

HINT = "caldrix: /help lists the commands; /quit or Ctrl-D ends the chat\r\n"


def conversations(peer: Peer) -> list[list[tuple[str, str]]]:
    return [texts(request) for request in peer.requests if type(request) is Generate]


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe's (reading, writing) descriptor; the caller's command is to be the only writer."""
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(("prompt", "flags"), [("\x1b[?2004h", ()), ("> ", ("--plain",))])
def test_a_conversation_until_ctrl_d(home: Home, prompt: str, flags: tuple[str, ...]) -> None:
    with (
        Peer(home.address, Model(["Hel", "lo"], "Bye\n")) as peer,
        Screen(home, "run", "demo", *flags) as screen,
    ):
        screen.expect(prompt)
        screen.press("hi\n")
        screen.expect("Hello\r\n")
        screen.expect(prompt)
        screen.press("bye\n")
        screen.expect("Bye\r\n")
        screen.expect(prompt)
        screen.press("\x04")
        assert screen.end() == 0
    assert conversations(peer) == [
        [("user", "hi")],
        [("user", "hi"), ("assistant", "Hello"), ("user", "bye")],
    ]


def test_plain_shows_no_escape_sequence(home: Home) -> None:
    with Peer(home.address, Model("a")), Screen(home, "run", "demo", "--plain") as screen:
        screen.expect("> ")
        screen.press("x\n")
        screen.expect("a\r\n> ")
        screen.press("\x04")
        assert screen.end() == 0
    assert screen.shown == f"{HINT}> x\r\na\r\n> \r\n"


def test_a_chat_that_is_quiet_begins_with_its_prompt(home: Home) -> None:
    with Peer(home.address, Model()), Screen(home, "run", "demo", "--plain", "--quiet") as screen:
        screen.expect("> ")
        screen.press("\x04")
        assert screen.end() == 0
    assert screen.shown == "> \r\n"


def test_ctrl_c_at_the_prompt_ends_the_chat_with_0(home: Home) -> None:
    with Peer(home.address, Model()) as peer, Screen(home, "run", "demo") as screen:
        screen.ready()
        screen.press("half a li")
        screen.expect("half a li")
        screen.press("\x03")
        assert screen.end() == 0
        assert peer.gone.wait(SECONDS)
    assert conversations(peer) == []


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(home: Home) -> None:
    def endless(talk: Talk, request: Message) -> None:
        talk.send(Delta("one two "))
        assert type(talk.receive()).__name__ == "Cancel"
        talk.send(Delta("three"), Done("cancelled"))

    with Peer(home.address, Model(endless, "ok")) as peer, Screen(home, "run", "demo") as screen:
        screen.ready()
        screen.press("count\n")
        screen.expect("one two ")
        screen.press("\x03")
        screen.ready()
        screen.press("again\n")
        screen.expect("ok\r\n")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0
    assert conversations(peer)[1] == [("user", "count"), ("assistant", "one two three"), ("user", "again")]


def test_ctrl_c_before_the_first_word_forgets_the_message(home: Home) -> None:
    def silent(talk: Talk, request: Message) -> None:
        talk.send(Progress("prompt", 1, 100, "tokens"))
        assert type(talk.receive()).__name__ == "Cancel"
        talk.send(Done("cancelled"))

    with Peer(home.address, Model(silent, "ok")) as peer, Screen(home, "run", "demo") as screen:
        screen.ready()
        screen.press("lost\n")
        screen.expect("prompt: 1 %")
        screen.press("\x03")
        screen.ready()
        screen.press("next\n")
        screen.expect("ok\r\n")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0
    assert conversations(peer)[1] == [("user", "next")]


def test_a_second_ctrl_c_ends_the_chat_at_once(home: Home) -> None:
    def deaf(talk: Talk, request: Message) -> None:
        talk.send(Delta("word\n"))
        talk.receive()
        talk.send(Delta("cancelling\n"))
        talk.receive()

    with Peer(home.address, Model(deaf)) as peer, Screen(home, "run", "demo") as screen:
        screen.ready()
        screen.press("x\n")
        screen.expect("word")
        screen.press("\x03")
        screen.expect("cancelling")
        screen.press("\x03")
        assert screen.end() == 130
        assert peer.gone.wait(SECONDS)


def test_the_terminal_is_as_it_was_after_every_way_out(home: Home) -> None:
    for key in ("\x03", "\x04"):
        with Peer(home.address, Model()), Screen(home, "run", "demo") as screen:
            before = termios.tcgetattr(screen.terminal)
            screen.ready()
            screen.press(key)
            assert screen.process.wait(SECONDS) == 0
            assert termios.tcgetattr(screen.terminal) == before


def test_what_a_model_says_cannot_act_on_the_terminal(home: Home) -> None:
    with (
        Peer(home.address, Model("\x1b]52;c;QQ==\x07", "\x9b2J\r")),
        Screen(home, "run", "demo", "--plain") as screen,
    ):
        screen.expect("> ")
        screen.press("x\n")
        screen.expect("\\x1b]52;c;QQ==\\x07\r\n> ")
        screen.press("y\n")
        screen.expect("\\x9b2J\\x0d\r\n> ")
        screen.press("\x04")
        screen.end()


def test_the_progress_line_is_redrawn_and_erased(home: Home) -> None:
    def load(talk: Talk, request: Message) -> None:
        if type(request) is Open:
            talk.send(Progress("weights", 10, 100), Progress("weights", 100, 100), Progress("x" * 500, 7, 0))
        Model("answer")(talk, request)

    with Peer(home.address, load), Screen(home, "run", "demo", "-p", "x") as screen:
        assert screen.end() == 0
    erase = "\r\x1b[K"
    long = "caldrix: " + "x" * 70
    assert screen.shown == (
        f"{erase}caldrix: weights: 10 %{erase}caldrix: weights: 100 %{erase}{long}{erase}answer\r\n"
    )


def test_a_redirected_answer_holds_the_answers_only(home: Home) -> None:
    with pipe() as (reading, writing), Peer(home.address, Model("a\x1b", "b")):
        with Screen(home, "run", "demo", out=writing) as screen:
            screen.ready()
            screen.press("x\n")
            screen.ready()
            screen.press("y\n")
            screen.ready()
            screen.press("\x04")
            assert screen.end() == 0
        assert os.read(reading, 1 << 16) == b"a\x1b\nb\n"


def test_redirected_messages_leave_the_answers_on_the_screen(home: Home) -> None:
    with pipe() as (reading, writing), Peer(home.address, Model("a", "b")):
        with Screen(home, "run", "demo", err=writing) as screen:
            screen.ready()
            screen.press("x\n")
            screen.expect("a\r\n")
            screen.ready()
            screen.press("/reset\n")
            screen.ready()
            screen.press("\x04")
            assert screen.end() == 0
        assert os.read(reading, 1 << 16) == b"caldrix: the conversation is cleared\n"


def test_a_stopped_and_continued_chat_goes_on(home: Home) -> None:
    def pause(talk: Talk, request: Message) -> None:
        talk.send(Delta("before "))
        if type(talk.receive()).__name__ == "Cancel":
            say(talk, "after")

    with Peer(home.address, Model(pause)), Screen(home, "run", "demo") as screen:
        screen.ready()
        screen.press("x\n")
        screen.expect("before ")
        os.kill(screen.process.pid, signal.SIGSTOP)
        os.waitpid(screen.process.pid, os.WUNTRACED)
        os.kill(screen.process.pid, signal.SIGCONT)
        screen.press("\x03")
        screen.expect("after\r\n")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0


def test_a_chat_goes_on_with_another_connection(home: Home) -> None:
    """After a daemon that vanished in an answer, spoke nonsense, or was ended between two answers."""

    def vanish(talk: Talk, request: Message) -> None:
        talk.send(Delta("half"))
        talk.stream.shutdown(socket.SHUT_RDWR)

    def babble(talk: Talk, request: Message) -> None:
        talk.stream.sendall(b"\xff" * 8)

    def say_and_end(talk: Talk, request: Message) -> None:
        say(talk, "A")
        talk.stream.shutdown(socket.SHUT_RDWR)

    model = Model(say_and_end, vanish, babble, "D")
    with Peer(home.address, model) as peer, Screen(home, "run", "demo") as screen:
        for line, words in (
            ("a", "A\r\n"),
            ("b", "half\r\ncaldrix: caldrixd closed the connection before the request ended\r\n"),
            ("c", "caldrix: the peer sent a frame that cannot be read: "),
            ("d", "D\r\n"),
        ):
            screen.ready()
            screen.press(f"{line}\n")
            screen.expect(words)
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0
    assert sum(type(request) is Open for request in peer.requests) == 4
    assert conversations(peer)[-1] == [("user", "a"), ("assistant", "A"), ("user", "d")]


def test_a_ctrl_c_that_crosses_a_refusal_stops_the_answer(home: Home) -> None:
    def refuse(talk: Talk, request: Message) -> None:
        talk.send(Delta("half "))
        assert type(talk.receive()).__name__ == "Cancel"
        talk.send(Refusal("worker/died", "run", "the worker ended", {}))

    with Peer(home.address, Model(refuse, "B")) as peer, Screen(home, "run", "demo") as screen:
        screen.ready()
        screen.press("a\n")
        screen.expect("half ")
        screen.press("\x03")
        for line, words in (("/context", "0 used"), ("b", "B\r\n")):
            screen.ready()
            screen.press(f"{line}\n")
            screen.expect(words)
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0
    assert conversations(peer)[-1] == [("user", "a"), ("assistant", "half "), ("user", "b")]


def test_ctrl_c_while_a_model_is_opened_again_keeps_the_chat(home: Home) -> None:
    def say_and_end(talk: Talk, request: Message) -> None:
        say(talk, "A")
        talk.stream.shutdown(socket.SHUT_RDWR)

    model = Model(say_and_end, "C")
    opened: list[Message] = []

    def slow_the_second_time(talk: Talk, request: Message) -> None:
        if type(request) is Open:
            opened.append(request)
        if type(request) is Open and len(opened) == 2:
            talk.send(Progress("weights", 1, 2))
            assert type(talk.receive()).__name__ == "Cancel"
            talk.send(Done("cancelled"))
        else:
            model(talk, request)

    with Peer(home.address, slow_the_second_time) as peer, Screen(home, "run", "demo") as screen:
        for line, words in (("a", "A\r\n"), ("b", "weights: 50 %"), ("c", "C\r\n")):
            screen.ready()
            screen.press(f"{line}\n")
            screen.expect(words)
            if line == "b":
                screen.press("\x03")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0
    assert conversations(peer)[-1] == [("user", "a"), ("assistant", "A"), ("user", "c")]


def test_a_chat_goes_on_after_any_refusal_of_an_answer(home: Home) -> None:
    def refuse(talk: Talk, request: Message) -> None:
        talk.send(Refusal("worker/died", "run", "the worker ended", {}))

    with Peer(home.address, Model(refuse, "b")) as peer, Screen(home, "run", "demo") as screen:
        screen.ready()
        screen.press("a\n")
        screen.expect("caldrix: the worker ended\r\n")
        screen.ready()
        screen.press("b\n")
        screen.expect("b\r\n")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0
    assert sum(type(request) is Open for request in peer.requests) == 1
    assert conversations(peer)[-1] == [("user", "b")]


def test_without_a_person_what_ends_an_answer_ends_the_chat(home: Home) -> None:
    def vanish(talk: Talk, request: Message) -> None:
        talk.send(Delta("half"))
        talk.stream.shutdown(socket.SHUT_RDWR)

    with Peer(home.address, Model(vanish, "b")) as peer:
        result = home.caldrix("run", "demo", typed=b"a\nb\n")
    words = "caldrix: caldrixd closed the connection before the request ended\n"
    assert result == (1, "half\n", words)
    assert len(conversations(peer)) == 1
