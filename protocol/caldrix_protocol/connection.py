"""One end of a connection, without I/O: bytes in, messages out, and who may say what when.

The caller reads a socket and writes to it; a `Connection` does the rest:

    connection.receive_data(data)                     # what recv returned; b"" when it returned that
    while (event := connection.next_event()) is not NEED_DATA:
        if event is CLOSED: ...                       # the peer is gone; no further events come
        ...                                           # a message
    sock.sendall(connection.send(message))

After a `ProtocolError` that is `fatal` the daemon may still send one `refused`; then both ends close.
"""

from __future__ import annotations

from typing import Any, Literal

from caldrix_protocol import messages
from caldrix_protocol.codec import BadFrame, TooNew, decode, encode, name_of
from caldrix_protocol.framing import MAX_BULK, MAX_CONTROL, FrameReader, frame
from caldrix_protocol.messages import Hello, Message, Notice, Refusal, Status, Welcome
from caldrix_protocol.refusals import Refused, sendable, sentence
from caldrix_protocol.version import FEATURES, PROTOCOL_MAJOR, PROTOCOL_MINOR, VERSION

Role = Literal["client", "daemon", "parent", "worker"]

MAX_BLOB_SUM = 64 << 20  # bytes of all blobs of one request

NEW = "new"
GREETED = "greeted"
READY = "ready"
ACTIVE = "active"
LOADING = "loading"
SERVING = "serving"
FAILED = "failed"
ENDED = "ended"

_REQUESTS = ("open", "generate", "ps", "stop", "doctor", "pull", "plan", "models", "remove", "pin")
_PARTIAL = (
    "status",
    "notice",
    "progress",
    "opened",
    "delta",
    "loaded",
    "lane",
    "verdict",
    "known",
    "removal",
)

# State -> sender -> message -> next state. Both ends walk the same table, each as it sends and receives.
SOCKET_TABLE: dict[str, dict[str, dict[str, str]]] = {
    NEW: {"client": {"hello": GREETED}, "daemon": {"refused": ENDED}},
    GREETED: {"daemon": {"welcome": READY, "refused": ENDED}},
    READY: {
        "client": {"blob": READY} | dict.fromkeys(_REQUESTS, ACTIVE),
        "daemon": {"refused": ENDED},
    },
    ACTIVE: {
        "client": {"cancel": ACTIVE},
        "daemon": dict.fromkeys(_PARTIAL, ACTIVE) | {"done": READY, "refused": READY},
    },
    FAILED: {"daemon": {"refused": ENDED}},
    ENDED: {},
}
WORKER_TABLE: dict[str, dict[str, dict[str, str]]] = {
    NEW: {"parent": {"load": LOADING}, "worker": {"refused": ENDED}},
    LOADING: {
        "worker": {
            "status": LOADING,
            "notice": LOADING,
            "progress": LOADING,
            "ready": SERVING,
            "refused": ENDED,
        }
    },
    SERVING: {
        "parent": {"attach": SERVING, "begin": SERVING, "abort": SERVING},
        "worker": {"relay": SERVING, "refused": ENDED},
    },
    FAILED: {"worker": {"refused": ENDED}},
    ENDED: {},
}

# A `cancel` that crosses the `done` of its request arrives here: received and dropped.
CROSSING = {(READY, "cancel")}

# Messages that may have more than MAX_CONTROL bytes on the client socket, and the states they come in.
BULK = {("daemon", READY): ("blob",), ("client", ACTIVE): ("done",)}

_PEER: dict[str, Role] = {"client": "daemon", "daemon": "client", "parent": "worker", "worker": "parent"}
_INCOMING = {
    "client": messages.EVENTS,
    "daemon": messages.REQUESTS,
    "parent": messages.FROM_WORKER,
    "worker": messages.TO_WORKER,
}


class Signal:
    """What `next_event` returns when there is no message. Compare with `is`."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


NEED_DATA = Signal("NEED_DATA")
CLOSED = Signal("CLOSED")


class ProtocolError(Exception):
    """The peer (in `next_event`) or the caller (in `send`) broke the protocol; `reason` says how.

    Not `fatal`: the frame was whole and came where a request may come, so it counts as one; the daemon
    answers it with `refused` and the connection goes on. `fatal`: the connection cannot go on.
    """

    def __init__(self, reason: str, *, fatal: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fatal = fatal


class Connection:
    """One end of a client socket ("client", "daemon") or of a worker's socket pair ("parent", "worker").

    `state` is a key of the role's table. A client may send requests in READY and `cancel` in ACTIVE;
    parent and worker run many streams at once in SERVING.
    """

    __slots__ = ("_blob_sum", "_eof", "_incoming", "_minor", "_peer", "_reader", "_table", "role", "state")

    def __init__(self, role: Role) -> None:
        self.role: Role = role
        self.state = NEW
        self._peer = _PEER[role]
        self._incoming = _INCOMING[role]
        self._table = SOCKET_TABLE if role in ("client", "daemon") else WORKER_TABLE
        self._reader = FrameReader()
        self._blob_sum = 0
        self._minor = PROTOCOL_MINOR
        self._eof = False

    def receive_data(self, data: bytes) -> None:
        """Add what was read from the socket, b"" for end of file; then call `next_event` until NEED_DATA."""
        if data:
            self._reader.feed(data)
        else:
            self._eof = True

    def next_event(self) -> Message | Signal:
        """The next message of the peer; NEED_DATA: read the socket; CLOSED: close it.

        Raises ProtocolError. If it is `fatal`: send a Refusal if this is the daemon, then close the socket.
        Else: answer with a Refusal and go on.
        """
        while self.state not in (FAILED, ENDED):
            bulk = self._table is WORKER_TABLE or (self.role, self.state) in BULK
            self._reader.limit = MAX_BULK if bulk else MAX_CONTROL
            try:
                payload = self._reader.next()
            except BadFrame as error:
                raise self._fail(error.reason) from None
            if payload is None:
                return CLOSED if self._eof else NEED_DATA
            try:
                message = decode(payload, self._incoming)
            except BadFrame as error:
                raise self._refused(error.reason) from None
            name = name_of(message)
            if (self.state, name) in CROSSING:
                continue
            self._admit(name, message, len(payload))
            return message
        return CLOSED

    def send(self, message: Message) -> bytes:
        """The bytes to write to the socket for this message, at once and in order.

        ProtocolError if it may not be sent now or is too long, Refused "daemon/version" if it asks what the
        peer's version cannot do; the state is as before then.
        """
        name = name_of(message)
        following = self._table[self.state].get(self.role, {}).get(name)
        if following is None:
            raise ProtocolError(f"{self.role} cannot send {name} while {self.state}")
        try:
            payload = encode(message, self._minor)
        except TooNew:
            raise versions_differ((PROTOCOL_MAJOR, self._minor), (PROTOCOL_MAJOR, PROTOCOL_MINOR)) from None
        size = len(payload)
        if size > MAX_CONTROL and size > (limit := self._limit(self._peer, name)):
            raise ProtocolError(f"{name} has {size} bytes; at most {limit} are possible")
        data = frame(payload)
        self.state = following
        return data

    def _refused(self, reason: str) -> ProtocolError:
        """What became of a frame that is no message: a request that is answered, or the end."""
        if self.role == "daemon" and self.state == READY:
            self._start_request()
            return ProtocolError(reason, fatal=False)
        return self._fail(reason)

    def _admit(self, name: str, message: Message, size: int) -> None:
        """Move to the state after a received message."""
        following = self._table[self.state].get(self._peer, {}).get(name)
        if following is None:
            raise self._fail(f"is {name}, which cannot come while {self.state}")
        if size > MAX_CONTROL and size > self._limit(self.role, name):
            raise self._fail(f"is {name} with {size} bytes; at most {MAX_CONTROL} are possible")
        if type(message) in (Hello, Welcome):
            self._minor = message.protocol[1]
        if name == "blob":
            self._blob_sum += len(message.data)
            if self._blob_sum > MAX_BLOB_SUM:
                raise self._fail(f"brings the blobs of this request over {MAX_BLOB_SUM} bytes")
        elif following == ACTIVE:
            self._blob_sum = 0
        self.state = following

    def _start_request(self) -> None:
        self._blob_sum = 0
        self.state = ACTIVE

    def _limit(self, receiver: Role, name: str) -> int:
        if self._table is WORKER_TABLE or name in BULK.get((receiver, self.state), ()):
            return MAX_BULK
        return MAX_CONTROL

    def _fail(self, reason: str) -> ProtocolError:
        self.state = FAILED
        return ProtocolError(reason)


def hello(pid: int) -> Hello:
    """The first message of a client of this version."""
    return Hello((PROTOCOL_MAJOR, PROTOCOL_MINOR), VERSION, pid, FEATURES)


def answer_hello(greeting: Hello, pid: int, build: str = VERSION) -> Welcome | Refusal:
    """What a daemon of that build sends back: `welcome`, or `refused` (then close) if the majors differ."""
    if greeting.protocol[0] != PROTOCOL_MAJOR:
        return as_refusal(versions_differ((PROTOCOL_MAJOR, PROTOCOL_MINOR), greeting.protocol))
    return Welcome((PROTOCOL_MAJOR, PROTOCOL_MINOR), build, pid, FEATURES)


def versions_differ(daemon: tuple[int, ...], client: tuple[int, ...]) -> Refused:
    """Why a client of one version cannot ask a daemon of another."""
    theirs, ours = (".".join(map(str, version)) for version in (daemon, client))
    return Refused("daemon/version", theirs=theirs, ours=ours)


def as_status(code: str, **fields: Any) -> Status:
    """The `status` message of a row."""
    sent = sendable(fields)
    return Status(code, sentence(code, **sent), sent)


def as_notice(code: str, **fields: Any) -> Notice:
    """The `notice` message of a row."""
    sent = sendable(fields)
    return Notice(code, sentence(code, **sent), sent)


def as_refusal(refused: Refused) -> Refusal:
    """The `refused` message for an expected failure."""
    fields: dict[str, Any] = refused.fields
    return Refusal(refused.code, refused.kind, refused.text, fields)
