"""A daemon's end of the protocol on a real socket, which says what a test tells it to say."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from caldrix_protocol.address import Address, ensure_directory
from caldrix_protocol.connection import CLOSED, NEED_DATA, Connection, answer_hello
from caldrix_protocol.messages import Blob, Delta, Done, Generate, Hello, Message, Open, Opened, Timings

Script = Callable[["Talk", Message], None]


class Talk:
    """One connection of a client. `blobs` holds what it sent ahead of the request that is being answered."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.blobs: dict[int, bytes] = {}
        self._connection = Connection("daemon")

    def send(self, *messages: Message) -> None:
        """All messages in one write."""
        self.stream.sendall(b"".join(map(self._connection.send, messages)))

    def receive(self) -> Message | None:
        """The next message of the client; None when it has gone."""
        while (event := self._connection.next_event()) is NEED_DATA:
            try:
                self._connection.receive_data(self.stream.recv(1 << 16))
            except ConnectionResetError:
                return None
        return None if event is CLOSED else event


class Peer:
    """Listens at an address while it is entered; `script` answers each request, in a thread per connection.

    `requests` holds every request in order, and `gone` is set once a client has closed its connection.
    """

    def __init__(self, address: Address, script: Script, greet: Callable[[Talk, Hello], None] | None = None):
        self.requests: list[Any] = []
        self.gone = threading.Event()
        self.failures: list[BaseException] = []
        self._script = script
        self._greet = greet or (lambda talk, hello: talk.send(answer_hello(hello, os.getpid())))
        ensure_directory(address)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address.socket)
        self._path = address.socket
        self._listener.listen()

    def __enter__(self) -> Peer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        os.unlink(self._path)
        assert not self.failures

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        talk = Talk(stream)
        try:
            with stream:
                while (message := talk.receive()) is not None:
                    self._take(talk, message)
        except (BrokenPipeError, ConnectionResetError):
            pass
        except BaseException as error:
            self.failures.append(error)
        finally:
            self.gone.set()

    def _take(self, talk: Talk, message: Message) -> None:
        if type(message) is Hello:
            self._greet(talk, message)
        elif type(message) is Blob:
            talk.blobs[message.id] = talk.blobs.get(message.id, b"") + message.data
        else:
            self.requests.append(message)
            self._script(talk, message)
            talk.blobs = {}


class Model:
    """A script: a model that is loaded at once and answers with the texts it was given, in turn.

    An answer is a text, a list of pieces, or a script for that `generate`.
    """

    def __init__(self, *answers: Any, template: bool = True) -> None:
        self._answers = list(answers)
        self._template = template

    def __call__(self, talk: Talk, request: Message) -> None:
        if type(request) is Open:
            talk.send(
                Opened(7, request.model, "cpu", "2 threads", request.ctx or 2048, self._template, 1.5),
                Done(),
            )
        elif type(request) is Generate:
            answer = self._answers.pop(0)
            if callable(answer):
                answer(talk, request)
            else:
                say(talk, *([answer] if isinstance(answer, str) else answer))
        else:
            talk.send(Done())


def say(talk: Talk, *pieces: str, **fields: Any) -> None:
    """Send an answer of several deltas and its `done`."""
    for number, piece in enumerate(pieces):
        talk.send(Delta(piece, (number,)))
    talk.send(Done(**{"finish_reason": "stop", "timings": TIMINGS} | fields))


TIMINGS = Timings(0.0, 10, 2, 0.5, 20, 2.0, 0.25)


def texts(request: Generate) -> list[tuple[str, str]]:
    """(role, text) of the turns of a request that has all its text inline."""
    assert request.turns is not None
    return [(turn["role"], "".join(part["text"] for part in turn["content"])) for turn in request.turns]
