from __future__ import annotations

import pytest

from caldrix_client.conversation import INLINE_BYTES, MAX_EXCHANGES, Conversation, Exchange, pack_raw
from caldrix_protocol.connection import Connection, hello
from caldrix_protocol.messages import MAX_BLOB, Generate, Welcome
from caldrix_protocol.refusals import Refused


def spoken(conversation: Conversation, message: str) -> list[tuple[str, str]]:
    turns = conversation.pack(message).turns
    assert turns is not None
    return [(turn["role"], turn["content"][0]["text"]) for turn in turns]


def filled(*pairs: str) -> Conversation:
    conversation = Conversation("S")
    for name in pairs:
        conversation.keep(Exchange(f"u{name}", f"a{name}", 10 * int(name)))
    return conversation


def test_every_request_carries_the_whole_conversation() -> None:
    assert spoken(filled("1", "2"), "now") == [
        ("system", "S"),
        ("user", "u1"),
        ("assistant", "a1"),
        ("user", "u2"),
        ("assistant", "a2"),
        ("user", "now"),
    ]


def test_an_empty_reply_takes_its_message_along() -> None:
    conversation = filled("1")
    conversation.keep(Exchange("lost", "", 20))
    conversation.keep(Exchange("kept", "part of a rep", 30))
    assert spoken(conversation, "now")[3:5] == [("user", "kept"), ("assistant", "part of a rep")]


@pytest.mark.parametrize(("dropped", "left"), [(0, 3), (1, 2), (2, 2), (3, 1), (4, 1), (6, 0), (100, 0)])
def test_dropped_turns_go_in_pairs(dropped: int, left: int) -> None:
    conversation = filled("1", "2", "3")
    conversation.drop(dropped)
    said = spoken(conversation, "now")
    assert [role for role, _ in said] == ["system", *["user", "assistant"] * left, "user"]
    assert said[-2] == (("assistant", "a3") if left else ("system", "S"))


def test_the_last_exchange_can_be_taken_back() -> None:
    conversation = filled("1", "2")
    assert (len(conversation), conversation.tokens) == (2, 20)
    assert conversation.take_back() == Exchange("u2", "a2", 20)
    assert (len(conversation), conversation.tokens) == (1, 10)
    assert spoken(conversation, "now")[1:3] == [("user", "u1"), ("assistant", "a1")]
    conversation.take_back()
    assert conversation.tokens == 0
    with pytest.raises(Refused) as refused:
        conversation.take_back()
    assert refused.value.code == "message/nothing-said"


def test_what_no_request_can_hold_is_dropped_and_counted() -> None:
    conversation = Conversation()
    dropped = [conversation.keep(Exchange(f"u{n}", "a", 0)) for n in range(MAX_EXCHANGES + 2)]
    assert dropped == [0] * MAX_EXCHANGES + [2, 2]
    assert spoken(conversation, "now")[0] == ("user", "u2")


def test_clear_keeps_the_system_message() -> None:
    conversation = filled("1")
    conversation.clear()
    assert spoken(conversation, "now") == [("system", "S"), ("user", "now")]


def test_long_texts_travel_in_blobs_and_new_ones_stay_inline() -> None:
    conversation = Conversation()
    long = "é" * (MAX_BLOB // 2) + "end"
    conversation.keep(Exchange(long, "short reply", 0))
    packed = conversation.pack("x" * INLINE_BYTES)
    assert packed.turns is not None
    assert [turn["content"][0] for turn in packed.turns] == [
        {"type": "text", "blob": 0},
        {"type": "text", "blob": 1},
        {"type": "text", "text": "x" * INLINE_BYTES},
    ]
    joined = {
        number: b"".join(blob.data for blob in packed.blobs if blob.id == number).decode()
        for number in (0, 1)
    }
    assert joined == {0: long, 1: "short reply"}


def test_a_long_conversation_fits_a_control_frame() -> None:
    conversation = Conversation()
    for _ in range(3000):
        conversation.keep(Exchange("m" * 200, "r" * 200, 0))
    packed = conversation.pack("now")
    connection = Connection("client")
    connection.send(hello(1))
    daemon = Connection("daemon")
    daemon.receive_data(Connection("client").send(hello(1)))
    daemon.next_event()
    connection.receive_data(daemon.send(Welcome((1, 0), "", 1)))
    connection.next_event()
    data = b"".join(map(connection.send, (*packed.blobs, Generate(1, packed.turns, None))))
    daemon.receive_data(data)
    for blob in packed.blobs:
        assert daemon.next_event() == blob
    request = daemon.next_event()
    assert type(request) is Generate
    assert request.turns == packed.turns


def test_what_no_request_can_carry_is_refused() -> None:
    with pytest.raises(Refused) as refused:
        pack_raw("x" * (65 << 20))
    assert refused.value.code == "message/too-big"
