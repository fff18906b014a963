"""What every kind of stream does with a bare socket: options, short sends, descriptors,
and errors.

Nothing here waits, and nothing here knows an event loop.
"""

import errno
import os
import socket
import struct
import sys
from array import array
from collections.abc import Sequence

from infinistore.errors import StoreUnavailable
from infinistore.protocol.effects import Span

_CREDENTIALS = struct.Struct("@iII")  # ucred: process, user, group
_SHORT_BYTES = 128 * 1024
UNIX_SEND_BYTES = 2 * 1024 * 1024
"""The send buffer of a Unix socket, without the kernel's share, which doubles it: both
together are what TCP grows to. With the kernel's own 208 KiB, a batch of 4 MiB wakes
each end twenty times. `net.core.wmem_max` is the most that the kernel grants.
"""
_FEW_VIEWS = 16
BACKLOG = 1024
"""How many connections may wait to be accepted."""
_PROBE_AFTER_S = 30
_PROBE_EVERY_S = 10
_PROBES = 3
VANISHED_AFTER_MS = (_PROBE_AFTER_S + _PROBE_EVERY_S * _PROBES) * 1000
"""When a peer that acknowledges nothing is given up."""
LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)  # made once: to join two flags takes several calls
_DESCRIPTORS_NOW = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0) | socket.MSG_DONTWAIT)
if sys.platform == "darwin":
    _KEEP_IDLE = socket.TCP_KEEPALIVE
else:
    _KEEP_IDLE = socket.TCP_KEEPIDLE
MAX_DESCRIPTORS = 253
"""The most descriptors in one message (SCM_MAX_FD of Linux)."""


def send_at_once(sock: socket.socket, views: Sequence[memoryview]) -> Sequence[memoryview]:
    """Send a short message as far as possible without waiting; return what is left.

    All of a long message is left.

    Raises:
        StoreUnavailable: the stream is broken.
    """
    total = len(views[0]) if len(views) == 1 else sum(map(len, views))
    if total > _SHORT_BYTES or len(views) > _FEW_VIEWS:
        return views
    try:
        if len(views) == 1:
            sent = sock.send(views[0], socket.MSG_DONTWAIT)
        else:
            sent = sock.sendmsg(views, (), socket.MSG_DONTWAIT)
    except BlockingIOError:
        return views
    except OSError as error:
        raise broken(error) from error
    if sent == total:
        return ()
    rest = Span(views)
    rest.advance(sent)
    return rest.next_views(total)


def prepare(sock: socket.socket) -> None:
    """Set the socket options of every connection of a store."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_SEND_BYTES)
    elif sock.family in (socket.AF_INET, socket.AF_INET6):
        # A header and its payload leave in one call: Nagle would only hold back the end
        # of it, for 40 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A peer that vanished without a word is given up after a minute; by default,
        # after two hours.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, _KEEP_IDLE, _PROBE_AFTER_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def receive_with_descriptors(sock: socket.socket, views: Sequence[memoryview], descriptors: list[int]) -> int:
    """Receive bytes once, and append the descriptors that come with them to
    `descriptors`.

    Raises:
        OSError: the socket's error; EMFILE if this process has no descriptors left.
    """
    room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)
    count, messages, flags, _ = sock.recvmsg_into(views, room, _DESCRIPTORS_NOW)
    for level, kind, data in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received = array("i")
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
            descriptors.extend(received)
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, "not all descriptors could be received; raise the limit (ulimit -n)")
    return count


def peer_user(sock: socket.socket) -> int:
    """Return the user at the other end of a Unix socket (SO_PEERCRED, unix(7))."""
    if sys.platform != "linux":
        raise StoreUnavailable("only Linux tells who is at the other end of a Unix socket; use TCP")
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def looks_stale(sock: socket.socket) -> bool:
    """Whether the peer of an idle connection has closed it, or sent something."""
    try:
        sock.recv(1, LOOK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def cannot_connect(place: str, error: OSError | UnicodeError) -> StoreUnavailable:
    """Return the error for a server that does not listen."""
    remedy = "is the server running there?"
    if isinstance(error, PermissionError) and place.startswith("/"):  # the mode of the socket, or of its folder
        remedy = "connect as the user who runs the server, or by TCP"
    elif isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "close what this process has open, or raise the limit (ulimit -n)"
    return StoreUnavailable(f"cannot connect to {place}: {reason(error)}; {remedy}")


def broken(error: OSError) -> StoreUnavailable:
    """Return the error for a broken socket."""
    return StoreUnavailable(f"the connection broke: {reason(error)}")


def reason(error: OSError | UnicodeError) -> str:
    """Return the system's message, without its number and what Trio puts before it."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    message = os.strerror(error.errno or 0)
    return message if error.strerror.endswith(f": {message}") else error.strerror
