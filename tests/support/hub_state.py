"""What the hub's hosts and the test share: the repositories, the record of requests, and the faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.support.hub_repo import Repo
from tests.support.hub_routes import Reply, cdn_reply, hub_reply

SECONDS = 300  # a test that waits longer for anything has failed

# The hosts differ in their names, as real ones do: the library takes ports of one name for one host.
ADDRESSES = {"hub": "127.0.0.1", "cdn": "127.0.0.2", "stranger": "127.0.0.3"}

# Faults of the reply as a whole, and of its body.
WHOLE = (
    "status",
    "absent",
    "login",
    "loop",
    "elsewhere",
    "silent",
    "no-commit",
    "bomb",
    "answer",
    "headers",
    "endless",
)
BODY = ("cut", "stall", "drip", "no-range", "416", "short", "long", "altered")


@dataclass
class Request:
    """One request, to a host or to a proxy on the way there.

    `status` and `sent`, the bytes of the body given out so far, change while it is answered: they are what
    they will be before the client can have the answer. `released` ends what holds the reply.
    """

    host: str
    method: str
    target: str
    what: str  # "info", "tree", the file's name, or ""
    headers: Mapping[str, str]  # by lower-case name
    via: str = ""  # the host that was used as a proxy
    status: int = 0
    sent: int = 0
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def range(self) -> str | None:
        return self.headers.get("range")

    @property
    def token(self) -> str | None:
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token if scheme == "Bearer" else None


@dataclass
class Fault:
    """What goes wrong, with which requests, and how often still (None: always)."""

    action: str
    what: str
    host: str
    method: str
    at: int
    left: int | None
    body: bytes = b""

    def hits(self, request: Request, span: range | None) -> bool:
        return (
            self.left != 0
            and (span is None or self.at in span)
            and self.what in ("", request.what)
            and self.host in ("", request.host)
            and self.method in ("", request.method)
        )


@dataclass
class Server:
    """The running hub. What the handlers' threads share with the test is guarded by `changed`."""

    repos: dict[str, dict[str, Repo]]
    resolve_cache: bool
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    errors: list[str] = field(default_factory=list)  # of the hub itself
    changed: threading.Condition = field(default_factory=threading.Condition)
    _faults: list[Fault] = field(default_factory=list)
    _calls: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    _released: threading.Event = field(default_factory=threading.Event)
    origins: dict[str, str] = field(default_factory=dict)  # by the names of ADDRESSES

    @property
    def endpoint(self) -> str:
        return self.origins["hub"]

    @property
    def environment(self) -> dict[str, str]:
        """What leads a client to this hub, and past any proxy."""
        here = ",".join(ADDRESSES.values())
        return {"HF_ENDPOINT": self.endpoint, "NO_PROXY": here, "no_proxy": here}

    def files(self, host: str = "hub") -> list[str]:
        """The names of the files asked for, in order, each once."""
        names = [request.what for request in self.requests if request.host == host]
        return list(dict.fromkeys(name for name in names if name not in ("", "info", "tree")))

    def sent(self, what: str) -> int:
        """The bytes of a file's contents given out, over all requests. They may be on their way still."""
        return sum(request.sent for request in self.requests if request.what == what and request.status < 300)

    def fail(
        self,
        action: str,
        what: str = "",
        *,
        host: str = "",
        method: str = "",
        at: int = 0,
        times: int | None = None,
        body: bytes = b"",
    ) -> None:
        """From now on let requests fail: those for `what` ("info", "tree" or a file), to `host`, of `method`.

        Of a body, which a redirect has not: "cut" closes the connection before the byte `at` of the file,
        "stall" stops there until `release`, "altered" has another byte there, "no-range" sends the whole
        whatever range was asked for, "416" says the range cannot be had, "short" and "long" leave out or add
        `at` bytes and announce that length, "drip" sends ten bytes a second from `at` on. The first three
        leave alone a body that does not reach over `at`.

        Of the reply: "status" has the status `at`, "absent" says that there is no such file, "login" is a
        page in HTML, "loop" redirects to itself, "elsewhere" to the host "stranger", "silent" never comes
        until `release`, "no-commit" lacks the header that says the commit, "bomb" inflates to `at` bytes of
        spaces, "answer" is `body` as JSON, "headers" has one of `at` bytes, "endless" one that
        never ends, ten bytes a second.
        """
        assert action in WHOLE + BODY
        with self.changed:
            self._faults.append(Fault(action, what, host, method, at, times, body))

    def heal(self) -> None:
        """No faults from now on, and whatever was held goes on."""
        with self.changed:
            self._faults.clear()
        self.release()

    def release(self) -> None:
        """Let the replies to all requests that have come go on, also where none is held yet."""
        with self.changed:
            self._released.set()
            self._released = threading.Event()

    def move(self, name: str, to: Repo) -> None:
        """Point the branch main at another commit; the one before can still be had by its hash."""
        with self.changed:
            self.repos[name] |= {"main": to, to.commit: to}

    def upon(self, what: str, call: Callable[[], None]) -> None:
        """Call once, when the next request for `what` has come: its answer is made, and not sent yet."""
        with self.changed:
            self._calls.append((what, call))

    def wait(self, reached: Callable[[], bool]) -> None:
        """Until something is so, looked at whenever a request comes or some bytes have gone."""
        with self.changed:
            assert self.changed.wait_for(reached, SECONDS), f"not reached: {self.requests}"

    # --- for the hosts ------------------------------------------------------------------------------

    def connected(self) -> None:
        with self.changed:
            self.connections += 1
            self.changed.notify_all()

    def asked(self, request: Request) -> None:
        with self.changed:
            request.released = self._released
            self.requests.append(request)
            self.changed.notify_all()

    def progress(self, request: Request, sent: int) -> None:
        with self.changed:
            request.sent += sent
            self.changed.notify_all()

    def made(self, request: Request) -> None:
        with self.changed:
            due = [entry for entry in self._calls if entry[0] == request.what][:1]
            for entry in due:
                self._calls.remove(entry)
        for _, call in due:
            call()

    def take(self, request: Request, actions: tuple[str, ...], span: range | None = None) -> Fault | None:
        """The first fault of these kinds that hits a request, with `at` in the span; one less is left."""
        with self.changed:
            for fault in self._faults:
                if fault.action in actions and fault.hits(request, span):
                    if fault.left is not None:
                        fault.left -= 1
                    return fault
        return None

    def reply(self, request: Request) -> Reply:
        """What a host answers when nothing goes wrong."""
        with self.changed:
            repos = {name: dict(revisions) for name, revisions in self.repos.items()}
        if request.host == "hub":
            cdn = self.origins["cdn"]
            return hub_reply(request.target, request.token, repos, cdn, self.resolve_cache)
        return cdn_reply(request.target, repos)
