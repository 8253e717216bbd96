"""The worker's end of its socket: blocking, one thread reads, any thread sends."""

from __future__ import annotations

import os
import socket
import threading

from caldrix_protocol.connection import CLOSED, NEED_DATA, Connection
from caldrix_protocol.messages import Message

READ_SIZE = 1 << 16


class Pipe:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._connection = Connection("worker")
        self._sending = threading.Lock()

    def receive(self) -> Message | None:
        """The next message of the daemon; None when it is gone. ProtocolError for anything else."""
        while True:
            event = self._connection.next_event()
            if event is CLOSED:
                return None
            if event is not NEED_DATA:
                return event
            try:
                data = self._socket.recv(READ_SIZE)
            except ConnectionError:
                data = b""
            self._connection.receive_data(data)

    def send(self, message: Message) -> None:
        """Send one message. When the daemon is gone the process ends: nobody is left to work for."""
        with self._sending:
            try:
                self._socket.sendall(self._connection.send(message))
            except OSError:
                os._exit(0)
