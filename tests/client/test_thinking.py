"""The thinking of a reply: found however the reply is cut, dim on a terminal, not sent back."""

from __future__ import annotations

import json

import pytest

from caldrix_client.thinking import Thinking, said, thought
from caldrix_protocol.messages import Delta, Done, Message
from tests.support.cli import Home, Screen
from tests.support.peer import TIMINGS, Model, Peer, Talk, say, texts

REPLIES = [
    ("<think>\nhm\n</think>\n\nHi </think> <think>x", "<think>\nhm\n</think>", "\n\nHi </think> <think>x"),
    (" \n<think></think>Hi", " \n<think></think>", "Hi"),
    ("<think>\nno end", "<think>\nno end", ""),
    ("Hi <think>a</think>", "", "Hi <think>a</think>"),
    ("<thin", "", "<thin"),
    ("<thing>", "", "<thing>"),
    (" \n", "", " \n"),
    ("", "", ""),
]


@pytest.mark.parametrize(("reply", "thinking", "text"), REPLIES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_thinking_is_found_however_the_reply_is_cut(reply: str, thinking: str, text: str, size: int) -> None:
    cutter = Thinking()
    pieces = [cutter.add(reply[at : at + size]) for at in range(0, len(reply), size)]
    pieces.append(("", cutter.finish()))
    assert "".join(piece for piece, _ in pieces) == thinking
    assert "".join(piece for _, piece in pieces) == text


def test_only_what_may_be_a_beginning_is_held() -> None:
    cutter = Thinking()
    assert cutter.add("<th") == ("", "")
    assert cutter.add("ink>a") == ("<think>a", "")
    assert cutter.add("</th") == ("</th", "")
    assert cutter.add("ink>b") == ("ink>", "b")
    assert cutter.add("<think>") == ("", "<think>")


@pytest.mark.parametrize(
    ("reply", "kept"),
    [
        ("<think>\nhm\n</think>\n\nHi ", "Hi "),
        ("<think>\nno end", ""),
        ("Hi <think>a</think>", "Hi <think>a</think>"),
        (" plain", " plain"),
    ],
)
def test_what_a_conversation_keeps(reply: str, kept: str) -> None:
    assert said(reply) == kept


@pytest.mark.parametrize(
    ("pieces", "tokens"),
    [
        ([("<think>\n", 2), ("hm", 1), ("\n</think>", 2), ("\n\n", 1), ("Hi", 1)], 6),
        ([("<think>\n", 2), ("hm", 1), ("\n</think>\n\nHi", 5)], 3),
        ([("<think>", 1), ("no end", 3)], 4),
        ([("Hi", 1), (" </think>", 2)], 0),
        ([("", 1), ("Hi", 1)], 0),
        ([], 0),
    ],
)
def test_how_many_tokens_are_thinking(pieces: list[tuple[str, int]], tokens: int) -> None:
    assert thought(pieces) == tokens


def test_thinking_does_not_use_the_context(home: Home) -> None:
    def think(talk: Talk, request: Message) -> None:
        talk.send(Delta("<think>hm", (1, 2, 3)), Delta("</think>\n\n", (4, 5)), Delta("Hi", (6,)))
        talk.send(Done("stop", timings=TIMINGS._replace(prompt_tokens=30, reply_tokens=7)))

    with Peer(home.address, Model(think)):
        done = home.caldrix("run", "demo", "--ctx", "100", typed=b"1\n/context\n")
    assert "the context holds 100 tokens: 32 used," in done.err


THOUGHT = "<think>\nhm\n</think>\n\nHi"


def test_thinking_goes_to_a_pipe_as_it_is_and_is_not_sent_back(home: Home) -> None:
    heard: list[Message] = []

    def think(talk: Talk, request: Message) -> None:
        heard.append(request)
        say(talk, THOUGHT)

    with Peer(home.address, Model(think, think)):
        done = home.caldrix("run", "demo", "--think", "off", typed=b"1\n2\n")
    assert done == (0, f"{THOUGHT}\n{THOUGHT}\n", "")
    assert [request.thinking for request in heard] == [False, False]
    assert [turn["content"][0]["text"] for turn in heard[1].turns] == ["1", "Hi", "2"]


@pytest.mark.parametrize(("flags", "expected"), [((), None), (("--think=on",), True)])
def test_the_flag_travels_in_the_request(home: Home, flags: tuple[str, ...], expected: bool | None) -> None:
    heard: list[Message] = []

    def hear(talk: Talk, request: Message) -> None:
        heard.append(request)
        say(talk, THOUGHT)

    with Peer(home.address, Model(hear)):
        done = home.caldrix("run", "demo", "-p", "x", "--json", *flags)
    assert heard[0].thinking is expected
    assert json.loads(done.out)["text"] == THOUGHT


DIMMED = "\x1b[2m<think>\r\nhm\r\n</think>\x1b[22m\r\n\r\nHi\r\n"
PLAIN = "<think>\r\nhm\r\n</think>\r\n\r\nHi\r\n"


@pytest.mark.parametrize(
    ("flags", "term", "shown"),
    [((), "xterm", DIMMED), (("--plain",), "xterm", PLAIN), ((), "dumb", PLAIN), ((), "", PLAIN)],
)
def test_thinking_is_dim_on_a_terminal(home: Home, flags: tuple[str, ...], term: str, shown: str) -> None:
    command = ("run", "demo", "-p", "x", *flags)
    with Peer(home.address, Model(THOUGHT)), Screen(home, *command, TERM=term) as screen:
        assert screen.end() == 0
    assert screen.shown == shown


def test_nothing_that_is_thought_acts_on_the_terminal(home: Home) -> None:
    with (
        Peer(home.address, Model("<think>\x1b[22m\x9b0m")),
        Screen(home, "run", "demo", "-p", "x") as screen,
    ):
        assert screen.end() == 0
    assert screen.shown == "\x1b[2m<think>\\x1b[22m\\x9b0m\x1b[22m\r\n"


def test_an_answer_stopped_while_it_thinks_is_forgotten_with_its_message(home: Home) -> None:
    def endless(talk: Talk, request: Message) -> None:
        talk.send(Delta("<think>\nhm"))
        assert type(talk.receive()).__name__ == "Cancel"
        talk.send(Done("cancelled"))

    with Peer(home.address, Model(endless, "b")) as peer, Screen(home, "run", "demo") as screen:
        screen.ready()
        screen.press("1\n")
        screen.expect("hm")
        screen.press("\x03")
        screen.ready()
        screen.press("2\n")
        screen.expect("b\r\n")
        screen.ready()
        screen.press("\x04")
        assert screen.end() == 0
    assert texts(peer.requests[-1]) == [("user", "2")]


def test_an_answer_that_is_thinking_alone_does_not_take_the_place_of_another(home: Home) -> None:
    with Peer(home.address, Model("a", "<think>hm", "c")) as peer:
        done = home.caldrix("run", "demo", typed=b"1\n/regen\n2\n")
    assert done.out == "a\n<think>hm\nc\n"
    assert texts(peer.requests[-1]) == [("user", "1"), ("assistant", "a"), ("user", "2")]
