"""The thinking of a reply: found however the reply is cut, dim on a terminal, not sent back."""

from __future__ import annotations

import json

import pytest

from caldrix_client.thinking import Thinking, said
from caldrix_protocol.messages import Message
from tests.support.cli import Home
from tests.support.peer import Model, Peer, Talk, say

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
