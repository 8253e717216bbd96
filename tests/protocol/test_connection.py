"""Both ends of a connection: who may say what in which state, and what happens when somebody does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caldrix_protocol import connection as c
from caldrix_protocol import messages as m
from caldrix_protocol.codec import encode, encoded_delta, name_of
from caldrix_protocol.connection import CLOSED, NEED_DATA, Connection, ProtocolError, answer_hello, hello
from caldrix_protocol.framing import MAX_CONTROL, frame
from caldrix_protocol.refusals import Refused
from caldrix_protocol.version import PROTOCOL_MAJOR, PROTOCOL_MINOR, VERSION
from tests.protocol.samples import SAMPLES, TABLES

BY_NAME = {name_of(message): message for message in SAMPLES}
PEERS: tuple[tuple[c.Role, c.Role], ...] = (("client", "daemon"), ("parent", "worker"))
SENDS = {
    "client": m.REQUESTS,
    "daemon": m.EVENTS,
    "parent": m.TO_WORKER,
    "worker": m.FROM_WORKER,
}
PATHS = {
    c.NEW: [],
    c.GREETED: ["hello"],
    c.READY: ["hello", "welcome"],
    c.ACTIVE: ["hello", "welcome", "ps"],
    c.LOADING: ["load"],
    c.SERVING: ["load", "ready"],
    c.ENDED: ["refused"],
}
SOCKET_STATES = (c.NEW, c.GREETED, c.READY, c.ACTIVE, c.ENDED)
WORKER_STATES = (c.NEW, c.LOADING, c.SERVING, c.ENDED)
STATES = {PEERS[0]: SOCKET_STATES, PEERS[1]: WORKER_STATES}


def pair(left: c.Role, right: c.Role, state: str) -> dict[str, Connection]:
    """Both ends, brought into a state by an ordinary exchange."""
    ends: dict[str, Connection] = {left: Connection(left), right: Connection(right)}
    for name in PATHS[state]:
        sender, receiver = (left, right) if name in SENDS[left] else (right, left)
        ends[receiver].receive_data(ends[sender].send(BY_NAME[name]))
        assert name_of(ends[receiver].next_event()) == name
    assert ends[left].state == ends[right].state == state
    return ends


def events(connection: Connection) -> list[Any]:
    """All messages there are, then NEED_DATA or CLOSED, or the ProtocolError."""
    got: list[Any] = []
    try:
        while True:
            got.append(connection.next_event())
            if got[-1] in (NEED_DATA, CLOSED):
                return got
    except ProtocolError as error:
        return [*got, error]


ALLOWED = {
    ("client", c.NEW): {"hello"},
    ("client", c.GREETED): set(),
    ("client", c.READY): set(m.REQUESTS) - {"hello", "cancel"},
    ("client", c.ACTIVE): {"cancel"},
    ("client", c.ENDED): set(),
    ("daemon", c.NEW): {"refused"},
    ("daemon", c.GREETED): {"welcome", "refused"},
    ("daemon", c.READY): {"refused"},
    ("daemon", c.ACTIVE): set(m.EVENTS) - {"welcome"},
    ("daemon", c.ENDED): set(),
    ("parent", c.NEW): {"load"},
    ("parent", c.LOADING): set(),
    ("parent", c.SERVING): {"attach", "begin", "abort"},
    ("parent", c.ENDED): set(),
    ("worker", c.NEW): {"refused"},
    ("worker", c.LOADING): {"status", "notice", "progress", "ready", "refused"},
    ("worker", c.SERVING): {"relay", "refused"},
    ("worker", c.ENDED): set(),
}


@pytest.mark.parametrize(
    ("sender", "receiver", "state", "name"),
    [
        (sender, receiver, state, name)
        for peers in PEERS
        for sender, receiver in (peers, peers[::-1])
        for state in STATES[peers]
        for name in SENDS[sender]
    ],
)
def test_what_may_be_sent_in_a_state_is_what_is_accepted_in_it(
    sender: c.Role, receiver: c.Role, state: str, name: str
) -> None:
    left, right = next(peers for peers in PEERS if sender in peers)
    ends = pair(left, right, state)
    allowed = name in ALLOWED[sender, state]
    data = frame(encode(BY_NAME[name]))
    if allowed:
        assert ends[sender].send(BY_NAME[name]) == data
    else:
        with pytest.raises(ProtocolError, match=f"{sender} cannot send {name} while {state}"):
            ends[sender].send(BY_NAME[name])
        assert ends[sender].state == state

    ends[receiver].receive_data(data)
    got = events(ends[receiver])
    if state == c.ENDED:
        assert got == [CLOSED]
    elif allowed:
        assert got[0] == BY_NAME[name]
        assert ends[receiver].state == ends[sender].state
    elif (state, name) == (c.READY, "cancel"):
        assert got == [NEED_DATA]
        assert ends[receiver].state == c.READY
    else:
        assert type(got[0]) is ProtocolError
        assert got[0].fatal
        assert ends[receiver].next_event() is CLOSED


def test_every_end_of_a_request_makes_the_connection_ready_again() -> None:
    for ending in (m.Done(), BY_NAME["refused"]):
        ends = pair("client", "daemon", c.ACTIVE)
        ends["client"].receive_data(ends["daemon"].send(ending))
        assert events(ends["client"]) == [ending, NEED_DATA]
        ends["daemon"].receive_data(ends["client"].send(m.Doctor()))
        assert events(ends["daemon"]) == [m.Doctor(), NEED_DATA]


def test_a_cancel_that_crosses_done_is_dropped() -> None:
    ends = pair("client", "daemon", c.ACTIVE)
    last = ends["daemon"].send(m.Done())
    late = ends["client"].send(m.Cancel())
    ends["client"].receive_data(last)
    assert events(ends["client"]) == [m.Done(), NEED_DATA]
    ends["daemon"].receive_data(late + ends["client"].send(m.Ps()))
    assert events(ends["daemon"]) == [m.Ps(), NEED_DATA]
    assert ends["daemon"].state == c.ACTIVE


def test_several_cancels_are_allowed_while_active() -> None:
    ends = pair("client", "daemon", c.ACTIVE)
    for _ in range(2):
        ends["daemon"].receive_data(ends["client"].send(m.Cancel()))
        assert events(ends["daemon"]) == [m.Cancel(), NEED_DATA]


@pytest.mark.parametrize(
    "payload", [b"\xc1", b"\x81\xa4type\xa8teleport", b"\x82\xa4type\xa2ps\xa1x\x01", b"\x81\xa4type\xa4open"]
)
def test_a_bad_request_is_answered_and_the_connection_goes_on(payload: bytes) -> None:
    ends = pair("client", "daemon", c.READY)
    ends["daemon"].receive_data(frame(payload))
    with pytest.raises(ProtocolError) as caught:
        ends["daemon"].next_event()
    assert not caught.value.fatal
    answer = c.as_refusal(Refused("daemon/bad-request", reason=caught.value.reason))
    ends["daemon"].send(answer)
    ends["daemon"].receive_data(ends["client"].send(m.Ps()))
    assert events(ends["daemon"]) == [m.Ps(), NEED_DATA]


@pytest.mark.parametrize(
    ("role", "state"),
    [
        ("daemon", c.NEW),
        ("daemon", c.ACTIVE),
        ("client", c.GREETED),
        ("client", c.ACTIVE),
        ("worker", c.NEW),
        ("worker", c.SERVING),
        ("parent", c.LOADING),
        ("parent", c.SERVING),
    ],
)
def test_anywhere_else_a_bad_message_ends_the_connection(role: c.Role, state: str) -> None:
    left, right = next(peers for peers in PEERS if role in peers)
    connection = pair(left, right, state)[role]
    connection.receive_data(frame(b"\xc1") + frame(encode(m.Ps())))
    (error,) = events(connection)
    assert error.fatal
    assert "not one msgpack value" in error.reason
    assert connection.next_event() is CLOSED
    if role in ("daemon", "worker"):
        assert connection.send(BY_NAME["refused"])
    with pytest.raises(ProtocolError):
        connection.send(BY_NAME["refused"])
    assert connection.state in (c.ENDED, c.FAILED)


@pytest.mark.parametrize("length", [0, MAX_CONTROL + 1, 2**32 - 1])
@pytest.mark.parametrize("state", [c.NEW, c.ACTIVE])
def test_a_frame_length_out_of_range_ends_the_connection(state: str, length: int) -> None:
    daemon = pair("client", "daemon", state)["daemon"]
    daemon.receive_data(length.to_bytes(4, "big"))
    (error,) = events(daemon)
    assert error.fatal
    assert f"claims {length} bytes" in error.reason


def big_request(size: int) -> m.Generate:
    return m.Generate(1, raw=({"type": "text", "text": "x" * size},))


def test_only_blobs_may_be_larger_than_a_control_frame() -> None:
    ends = pair("client", "daemon", c.READY)
    largest = MAX_CONTROL - len(encode(big_request(1 << 17))) + (1 << 17)
    assert len(ends["client"].send(big_request(largest))) == 4 + MAX_CONTROL
    ends = pair("client", "daemon", c.READY)
    with pytest.raises(ProtocolError, match="at most 1048576 are possible"):
        ends["client"].send(big_request(largest + 1))
    ends["daemon"].receive_data(frame(encode(big_request(largest + 1))))
    (error,) = events(ends["daemon"])
    assert error.fatal
    assert "generate with 1048577 bytes" in error.reason


def test_the_ids_of_a_full_context_fit_into_done() -> None:
    ends = pair("client", "daemon", c.ACTIVE)
    last = m.Done("length", ids=(100_000,) * (1 << 19), prompt_ids=(100_000,) * (1 << 19))
    ends["client"].receive_data(ends["daemon"].send(last))
    assert events(ends["client"]) == [last, NEED_DATA]


def test_the_blobs_of_one_request_have_a_sum() -> None:
    ends = pair("client", "daemon", c.READY)
    piece = m.Blob(1, bytes(m.MAX_BLOB))
    for _ in range(2):
        for _ in range(c.MAX_BLOB_SUM // m.MAX_BLOB):
            ends["daemon"].receive_data(ends["client"].send(piece))
            assert events(ends["daemon"]) == [piece, NEED_DATA]
        ends["daemon"].receive_data(ends["client"].send(big_request(1)))
        assert len(events(ends["daemon"])) == 2
        ends["client"].receive_data(ends["daemon"].send(m.Done()))
        assert events(ends["client"]) == [m.Done(), NEED_DATA]
    for _ in range(c.MAX_BLOB_SUM // m.MAX_BLOB):
        ends["daemon"].receive_data(ends["client"].send(piece))
        assert events(ends["daemon"]) == [piece, NEED_DATA]
    ends["daemon"].receive_data(ends["client"].send(m.Blob(2, b"x")))
    (error,) = events(ends["daemon"])
    assert error.fatal
    assert "over 67108864 bytes" in error.reason


def test_a_worker_answers_many_streams_at_once() -> None:
    ends = pair("parent", "worker", c.SERVING)
    begins = [BY_NAME["begin"]._replace(stream=number) for number in range(3)]
    for begin in begins:
        ends["worker"].receive_data(ends["parent"].send(begin))
    assert events(ends["worker"]) == [*begins, NEED_DATA]
    relays = [m.Relay(number, encode(m.Done())) for number in (2, 0, 1)]
    for relay in relays:
        ends["parent"].receive_data(ends["worker"].send(relay))
    assert events(ends["parent"]) == [*relays, NEED_DATA]


def test_a_delta_that_a_worker_has_encoded_is_sent_as_one_of_ones_own() -> None:
    message = m.Delta("Paris", (12_095,))
    encoded = encoded_delta(encode(message))
    ends = pair("client", "daemon", c.ACTIVE)
    assert ends["daemon"].send(encoded) == frame(encode(message))
    ends["client"].receive_data(frame(encode(message)))
    assert events(ends["client"]) == [message, NEED_DATA]
    large = encoded_delta(encode(m.Delta("a" * MAX_CONTROL)))
    with pytest.raises(ProtocolError, match=f"at most {MAX_CONTROL} are possible"):
        ends["daemon"].send(large)
    assert ends["daemon"].state == c.ACTIVE
    with pytest.raises(ProtocolError, match="cannot send delta while ready"):
        pair("client", "daemon", c.READY)["daemon"].send(encoded)


def test_the_greeting_names_versions_and_features() -> None:
    greeting = hello(17)
    assert greeting == m.Hello((PROTOCOL_MAJOR, PROTOCOL_MINOR), VERSION, 17, ("blobs",))
    assert answer_hello(greeting, 18) == m.Welcome((PROTOCOL_MAJOR, PROTOCOL_MINOR), VERSION, 18, ("blobs",))
    newer = greeting._replace(protocol=(PROTOCOL_MAJOR, PROTOCOL_MINOR + 1), features=("telepathy",))
    assert type(answer_hello(newer, 18)) is m.Welcome


@pytest.mark.parametrize("major", [0, PROTOCOL_MAJOR + 1, 65535])
def test_another_major_version_is_refused_with_both_versions_and_the_command(major: int) -> None:
    ends = pair("client", "daemon", c.GREETED)
    answer = answer_hello(hello(1)._replace(protocol=(major, 7)), 2)
    assert type(answer) is m.Refusal
    assert answer.text == (
        f"caldrixd speaks protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR} and this client {major}.7; "
        "run `caldrix stop --daemon` and try again"
    )
    ends["client"].receive_data(ends["daemon"].send(answer))
    assert events(ends["client"]) == [answer, CLOSED]


def test_a_peer_of_an_older_minor_version_gets_what_it_knows() -> None:
    client, daemon = c.Connection("client"), c.Connection("daemon")
    daemon.receive_data(client.send(hello(1)))
    assert events(daemon) == [hello(1), NEED_DATA]
    client.receive_data(daemon.send(m.Welcome((PROTOCOL_MAJOR, 0), "0.1.0", 2)))
    client.next_event()
    with pytest.raises(Refused) as caught:
        client.send(m.Open("demo", {}, max_batch=1))
    assert caught.value.text == (
        f"caldrixd speaks protocol {PROTOCOL_MAJOR}.0 and this client {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}; "
        "run `caldrix stop --daemon` and try again"
    )
    sent = client.send(m.Open("demo", {}, threads=2))
    assert sent == frame(encode(m.Open("demo", {}, threads=2), 0))


CONVERSATION: tuple[tuple[c.Role, m.Message], ...] = (
    ("client", BY_NAME["hello"]),
    ("daemon", BY_NAME["welcome"]),
    ("client", BY_NAME["open"]),
    ("daemon", BY_NAME["status"]),
    ("daemon", BY_NAME["progress"]),
    ("daemon", BY_NAME["opened"]),
    ("daemon", m.Done()),
    ("client", BY_NAME["blob"]),
    ("client", BY_NAME["generate"]),
    ("daemon", BY_NAME["notice"]),
    ("daemon", BY_NAME["delta"]),
    ("client", m.Cancel()),
    ("daemon", BY_NAME["done"]),
    ("client", m.Ps()),
    ("daemon", BY_NAME["loaded"]),
    ("daemon", BY_NAME["refused"]),
    ("client", m.Doctor()),
    ("daemon", BY_NAME["lane"]),
    ("daemon", m.Done()),
)
WORKER_CONVERSATION: tuple[tuple[c.Role, m.Message], ...] = (
    ("parent", BY_NAME["load"]),
    ("worker", BY_NAME["progress"]),
    ("worker", BY_NAME["ready"]),
    ("parent", BY_NAME["attach"]),
    ("parent", BY_NAME["begin"]),
    ("worker", BY_NAME["relay"]),
    ("parent", BY_NAME["abort"]),
    ("worker", m.Relay(9, encode(m.Done("cancelled")))),
)


def replay(script: tuple[tuple[c.Role, m.Message], ...], role: c.Role, cut: list[int]) -> list[Any]:
    """What one end hears when each burst of its peer arrives cut at the given offsets of the whole stream."""
    connection = Connection(role)
    heard: list[Any] = []
    arrived = 0

    def deliver(burst: bytes) -> None:
        nonlocal arrived
        edges = [offset - arrived for offset in cut if arrived < offset < arrived + len(burst)]
        for start, end in zip([0, *edges], [*edges, len(burst)], strict=True):
            connection.receive_data(burst[start:end])
            heard.extend(event for event in events(connection) if event is not NEED_DATA)
        arrived += len(burst)

    burst = b""
    for sender, message in script:
        if sender == role:
            if burst:
                deliver(burst)
            burst = b""
            connection.send(message)
        else:
            burst += frame(encode(message))
    if burst:
        deliver(burst)
    connection.receive_data(b"")
    return heard + events(connection)


def expected(script: tuple[tuple[c.Role, m.Message], ...], role: c.Role) -> list[Any]:
    return [message for sender, message in script if sender != role] + [CLOSED]


SCRIPTS: dict[c.Role, tuple[tuple[c.Role, m.Message], ...]] = {
    "client": CONVERSATION,
    "daemon": CONVERSATION,
    "parent": WORKER_CONVERSATION,
    "worker": WORKER_CONVERSATION,
}


def length_of(script: tuple[tuple[c.Role, m.Message], ...], role: c.Role) -> int:
    return sum(len(frame(encode(message))) for sender, message in script if sender != role)


@pytest.mark.parametrize("role", SCRIPTS)
def test_a_conversation_cut_at_any_byte_is_heard_the_same(role: c.Role) -> None:
    script = SCRIPTS[role]
    for offset in range(length_of(script, role) + 1):
        assert replay(script, role, [offset]) == expected(script, role), offset


@pytest.mark.parametrize("role", SCRIPTS)
def test_a_conversation_cut_at_every_byte_is_heard_the_same(role: c.Role) -> None:
    script = SCRIPTS[role]
    assert replay(script, role, list(range(length_of(script, role)))) == expected(script, role)


@given(st.sampled_from(list(SCRIPTS)), st.lists(st.integers(0, 3000), max_size=12))
def test_a_conversation_cut_at_several_bytes_is_heard_the_same(role: c.Role, cut: list[int]) -> None:
    script = SCRIPTS[role]
    assert replay(script, role, sorted(set(cut))) == expected(script, role)


def test_an_end_of_file_anywhere_gives_what_came_whole_and_then_closed() -> None:
    stream = b"".join(frame(encode(BY_NAME[name])) for name in ("hello", "blob"))
    whole = len(frame(encode(BY_NAME["hello"])))
    for offset in range(len(stream)):
        daemon = Connection("daemon")
        daemon.receive_data(stream[:offset])
        daemon.receive_data(b"")
        if offset < whole:
            assert events(daemon) == [CLOSED]
        else:
            assert daemon.next_event() == BY_NAME["hello"]
            daemon.send(BY_NAME["welcome"])
            assert events(daemon) == [CLOSED]


def test_the_tables_name_every_message_of_their_direction() -> None:
    for table in (c.SOCKET_TABLE, c.WORKER_TABLE):
        for row in table.values():
            for sender, moves in row.items():
                assert set(moves) <= set(SENDS[sender])
                assert set(moves.values()) <= set(table)
    for sender, names in SENDS.items():
        said = {
            name
            for table in (c.SOCKET_TABLE, c.WORKER_TABLE)
            for row in table.values()
            for name in row.get(sender, {})
        }
        assert said == set(names)
    assert set(TABLES) == {"requests", "events", "to_worker", "from_worker", "from_fetcher"}
