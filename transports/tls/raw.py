"""What every kind of TLS stream does with the socket below, without waiting."""

import socket
from contextlib import suppress
from typing import Protocol

from infinistore.transports.tls.session import TlsSession

__all__ = ["Endpoint", "is_stale", "say_goodbye"]


class Endpoint(Protocol):
    """Where a client connects: the `path` of a Unix socket, or a `host`."""

    @property
    def path(self) -> str:
        """The socket; empty if there is a host."""

    @property
    def host(self) -> str:
        """The name that the certificate must have."""


class _Inner(Protocol):
    @property
    def socket(self) -> socket.socket: ...
    def is_stale(self) -> bool: ...


def is_stale(inner: _Inner, session: TlsSession) -> bool:
    """Whether the peer of an idle connection has closed it, or said something that
    nobody asked for. What TLS says for itself, such as a ticket, is taken in.
    """
    while session.is_quiet():
        if not inner.is_stale():
            return False
        try:
            count = inner.socket.recv_into(session.room(0), 0, socket.MSG_DONTWAIT)
        except OSError:
            return True
        if not count:
            return True
        session.received(count)
    return True


def say_goodbye(inner: object, session: TlsSession) -> None:
    """Tell the peer that the connection ends, if there is room for it."""
    sock = getattr(inner, "socket", None)
    if isinstance(sock, socket.socket) and sock.fileno() != -1 and (goodbye := session.end()):
        with suppress(OSError):
            sock.send(goodbye, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
