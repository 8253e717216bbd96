"""The hub's hosts: HTTP/1.1 with ranges, and the faults that a test asked for."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import sys
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn

from tests.support.hub_repo import File
from tests.support.hub_routes import Reply, ask, error_reply
from tests.support.hub_state import ADDRESSES, WHOLE, Fault, Request, Server

_CHUNK = 1 << 16
_DRIP_SECONDS = 0.1
_LOGIN = b"<!doctype html><title>Sign in</title><p>Accept the terms of this network to go on.</p>"


class Host(ThreadingHTTPServer):
    """One of the hub's hosts, at a loopback address of its own."""

    request_queue_size = 128

    def __init__(self, name: str, server: Server) -> None:
        super().__init__((ADDRESSES[name], 0), _Handler)
        self.name = name
        self.shared = server
        self.origin = f"http://{ADDRESSES[name]}:{self.server_address[1]}"
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        self.shared.connected()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # a client that left is no error
            self.shared.errors.append(repr(error))

    def end(self) -> None:
        """Close the port and all connections, and wait for their threads."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):  # closed by its own thread meanwhile
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Host

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        host = self.server
        request = self._request()
        host.shared.asked(request)
        fault = host.shared.take(request, WHOLE)
        if fault and fault.action == "silent":
            self._hold(request)
            fault = None
        if fault and fault.action == "endless":
            self._send_without_end(request)
        reply = self._faulty(request, fault) if fault else host.shared.reply(request)
        host.shared.made(request)
        self._send(request, reply)

    do_HEAD = do_GET  # noqa: N815

    def do_CONNECT(self) -> None:
        """A proxy is asked for a way to a host, which it does not have."""
        self.server.shared.asked(self._request())
        self.send_error(502)

    def _request(self) -> Request:
        """What is asked for; of a proxy, by a whole address, it is asked for what the host of that has."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        host, target, via = self.server.name, self.path, ""
        if found := re.match("(http://[^/]*)(/.*)", target):
            names = {origin: name for name, origin in self.server.shared.origins.items()}
            host, target, via = names.get(found[1], "hub"), found[2], host
        return Request(host, self.command, target, ask(host, target).what, headers, via)

    def _faulty(self, request: Request, fault: Fault) -> Reply:
        if fault.action == "status":
            return Reply(fault.at, {"Content-Type": "text/plain"}, b"the hub is not well\n")
        if fault.action == "absent":
            return error_reply(404, "EntryNotFound", "Entry not found")
        if fault.action == "login":
            return Reply(200, {"Content-Type": "text/html", "ETag": '"login"'}, _LOGIN)
        if fault.action == "loop":
            return Reply(302, {"Location": self.server.origin + request.target})
        if fault.action == "bomb":
            packed = _spaces(fault.at)
            return Reply(200, {"Content-Type": "application/json", "Content-Encoding": "gzip"}, packed)
        if fault.action == "answer":
            return Reply(200, {"Content-Type": "application/json"}, fault.body)
        reply = self.server.shared.reply(request)
        if fault.action == "headers":
            return Reply(reply.status, {**reply.headers, "X-Long": "x" * fault.at}, reply.body)
        if fault.action == "elsewhere":
            location = reply.headers.get("Location", self.server.origin + request.target)
            stranger = self.server.shared.origins["stranger"]
            return Reply(302, {**reply.headers, "Location": re.sub("^https?://[^/]*", stranger, location)})
        kept = {name: value for name, value in reply.headers.items() if name != "X-Repo-Commit"}
        return Reply(reply.status, kept, reply.body)

    def _send(self, request: Request, reply: Reply) -> None:
        file = reply.body if isinstance(reply.body, File) else File("", reply.body)
        faults = self.server.shared
        asked = request.range if reply.status == 200 and isinstance(reply.body, File) else None
        getting = request.method == "GET" and reply.status == 200
        if asked and getting and faults.take(request, ("no-range",)):
            asked = None
        span = _span(asked, file.size)
        if asked and getting and (span is None or faults.take(request, ("416",))):
            self._head(request, 416, {"Content-Range": f"bytes */{file.size}", "Content-Length": "0"})
            return
        status, headers = reply.status, dict(reply.headers)
        span = span or range(file.size)
        if asked and getting:
            status = 206
            headers["Content-Range"] = f"bytes {span.start}-{span.stop - 1}/{file.size}"
        wrong = faults.take(request, ("short", "long")) if getting else None
        if wrong:
            off = wrong.at if wrong.action == "long" else -wrong.at
            span = range(span.start, max(span.start, span.stop + off))
        self._head(request, status, headers | {"Content-Length": str(len(span))})
        if request.method == "GET":
            self._body(request, file, span)

    def _hold(self, request: Request) -> None:
        """Until the test releases it. What a client that has left would get is not counted."""
        request.released.wait()
        readable, _, _ = select.select([self.connection], [], [], 0)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise BrokenPipeError

    def _send_without_end(self, request: Request) -> NoReturn:
        """Until the client leaves, which is an OSError here."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while True:
            request.released.wait(_DRIP_SECONDS)
            self.wfile.write(b"x")

    def _head(self, request: Request, status: int, headers: dict[str, str]) -> None:
        request.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _body(self, request: Request, file: File, span: range) -> None:
        """Write the bytes of a file in `span`, up to what stops them there."""
        faults = self.server.shared
        altered = faults.take(request, ("altered",), span)
        stall = faults.take(request, ("stall",), span)
        cut = faults.take(request, ("cut",), span)
        drip = faults.take(request, ("drip",))
        stops = sorted({fault.at for fault in (stall, cut, drip) if fault})
        for offset, data in _pieces(file, span, stops):
            if cut and offset == cut.at:
                self.close_connection = True
                return
            if stall and offset == stall.at:
                self._hold(request)
            if altered and offset <= altered.at < offset + len(data):
                at = altered.at - offset
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            dripping = drip is not None and offset >= drip.at
            for piece in _bytes(data) if dripping else (data,):
                if dripping:
                    request.released.wait(_DRIP_SECONDS)
                faults.progress(request, len(piece))
                self.wfile.write(piece)


def _span(asked: str | None, size: int) -> range | None:
    """The bytes a Range header asks for; None if the file has none of them."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "bytes=0-")
    if found is None:
        return range(size)
    start = int(found[1])
    stop = min(int(found[2]) + 1, size) if found[2] else size
    return range(start, stop) if start < stop or not asked else None


def _pieces(file: File, span: range, stops: list[int]) -> Iterator[tuple[int, bytes]]:
    """The file's bytes in `span` with their offsets, spaces after its end; a piece begins at every stop."""
    offset = span.start
    with file.open() as stream:
        stream.seek(offset)
        while offset < span.stop:
            end = min([offset + _CHUNK, span.stop, *(stop for stop in stops if stop > offset)])
            data = stream.read(end - offset).ljust(end - offset)
            yield offset, data
            offset = end


def _bytes(data: bytes) -> Iterator[bytes]:
    return (data[at : at + 1] for at in range(len(data)))


def _spaces(size: int) -> bytes:
    """A gzip stream of that many spaces."""
    packer = zlib.compressobj(9, wbits=31)
    block = b" " * (1 << 20)
    parts = [packer.compress(block[: min(len(block), size - at)]) for at in range(0, size, len(block))]
    return b"".join([*parts, packer.flush()])
