"""The two things a service manager and the daemon tell each other: sd_listen_fds(3) and sd_notify(3)."""

from __future__ import annotations

import socket

FIRST_INHERITED = 3


def inherited_listener(count: int) -> socket.socket | None:
    """The socket passed as descriptor 3, if it is the only one, and a listening Unix stream socket."""
    if count != 1:
        return None
    try:
        listener = socket.socket(fileno=FIRST_INHERITED)
    except OSError:
        return None
    listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if listener.family != socket.AF_UNIX or listener.type != socket.SOCK_STREAM or not listening:
        listener.detach()
        return None
    listener.set_inheritable(False)
    return listener


def notify(address: str, state: str) -> None:
    """Tell the service manager; nothing happens without one (`address` empty), or when it does not listen."""
    if not address:
        return
    path = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        try:
            sock.sendto(state.encode(), path)
        except OSError:
            return
