"""What a connection proves of who is at its other end, and where that is."""

import socket
import struct
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast

from infinistore.access.identity import Credentials, UnixAccess
from infinistore.addresses import with_port
from infinistore.errors import AuthenticationFailed
from infinistore.transports.base import Stream

if TYPE_CHECKING:
    from infinistore.transports.tls.trio_stream import TlsStream

__all__ = ["ORIGIN", "PRIVATE", "check_unix_peer", "is_private", "origin_of", "present"]

ORIGIN: Final = "infinistore.origin"
"""Where a request to the management API comes from, in its ASGI scope."""
PRIVATE: Final = "infinistore.private"
"""Whether nobody on the way reads that request; there, too."""
_PEER: Final = struct.Struct("iII")
_SO_PEERGROUPS: Final = 59  # since Linux 4.13; the module socket has no name for it
_MOST_GROUPS_BYTES: Final = 1024  # all that getsockopt takes
_NOBODY: Final = 65534
"""Whom the kernel shows for a user that this process's namespace does not have."""


def present(stream: Stream, token: str) -> Credentials:
    """Return what a connection presents whose handshake is done."""
    if hasattr(stream, "session"):
        found = cast("TlsStream", stream).session.peer_certificate() or {}
        names = tuple(_written(kind, name) for kind, name in found.get("subjectAltName", ()))
        return Credentials(token, names, private=True)
    user = _user_of(stream)
    return Credentials(token, uid=None if user is None else user[0], private=is_private(stream))


def is_private(stream: Stream) -> bool:
    """Whether nobody on the way reads a connection: it has TLS, or is a Unix socket."""
    return hasattr(stream, "session") or stream.passes_descriptors


def origin_of(stream: Stream) -> str:
    """Return where a connection comes from: an address, or a user and a process of this
    machine.
    """
    user = _user_of(stream)
    if user is not None:
        return f"uid {user[0]}, pid {user[1]}"
    try:
        host, port = _socket_of(stream).getpeername()[:2]
    except (OSError, ValueError, AttributeError, TypeError):  # it has gone, or there is no socket
        return "unknown"
    return with_port(host, port)


def check_unix_peer(stream: Stream, access: UnixAccess) -> None:
    """Refuse who has connected to a Unix socket and may not: its mode may have been
    changed since the server began to listen. Other streams are let through.

    What counts is who connected, not who holds the connection by now.

    Raises:
        AuthenticationFailed: this one may not.
    """
    if not stream.passes_descriptors:
        return
    peer = _peer_of(stream)
    if peer is None:
        raise AuthenticationFailed("the kernel does not say who has connected to this Unix socket; connect by TCP")
    _, uid, gid = peer
    groups = array("I")
    with suppress(OSError):  # an old kernel, or more groups than these: the first one counts
        groups.frombytes(_socket_of(stream).getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_GROUPS_BYTES))
    access.check(uid, {gid, *groups})


def _user_of(stream: Stream) -> tuple[int, int] | None:
    """Return the user and the process at the other end of a Unix socket."""
    peer = _peer_of(stream) if stream.passes_descriptors else None
    return None if peer is None or peer[1] == _NOBODY else (peer[1], peer[0])


def _peer_of(stream: Stream) -> tuple[int, int, int] | None:
    """Return the process, the user and the group that have connected."""
    try:
        data = _socket_of(stream).getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    except (OSError, AttributeError):
        return None
    pid, uid, gid = _PEER.unpack(data)
    return pid, uid, gid


def _socket_of(stream: Stream) -> socket.socket:
    found: socket.socket = stream.socket  # type: ignore[attr-defined]  # simulated streams have none
    return found


def _written(kind: str, name: str) -> str:
    return f"DNS:{name.lower()}" if kind == "DNS" else f"{kind}:{name}"
