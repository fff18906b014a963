"""TCP and Unix sockets as Trio streams.

The system call is tried first, and waited for only when it says that it would block; `trio.SocketStream` costs a
quarter of the throughput here. One call moves a whole list of views. After a bounded number of bytes the stream
yields to the scheduler, so that one busy connection cannot starve the others.
"""

import contextlib
import errno
import math
import os
import socket
import stat
import struct
from array import array
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import trio

from infinistore.errors import ConfigError, StoreUnavailable
from infinistore.protocol.span import Span
from infinistore.transports.spin import Spinner

__all__ = [
    "MAX_DESCRIPTORS",
    "SocketStream",
    "accept",
    "broken",
    "cannot_connect",
    "connect_tcp",
    "connect_unix",
    "listen_tcp",
    "listen_unix",
    "looks_stale",
    "peer_user",
    "prepare",
    "receive_with_descriptors",
    "send_at_once",
]

_CREDENTIALS = struct.Struct("@iII")  # ucred: process, user, group
_YIELD_AFTER_BYTES = 4 * 1024 * 1024
_CALL_COST_BYTES = 32 * 1024  # what a system call counts for, however few bytes it moves
_SHORT_BYTES = 64 * 1024
_SPIN_COST_BYTES = 512 * 1024
_BACKLOG = 1024
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)  # made once: to join two flags takes several calls
MAX_DESCRIPTORS = 253
"""The most descriptors in one message (SCM_MAX_FD of Linux)."""


class SocketStream:
    """A connected, non-blocking socket. See `infinistore.transports.base.Stream` for what its methods promise."""

    def __init__(self, sock: socket.socket, spinner: Spinner | None = None) -> None:
        self.socket = sock
        self._spinner = spinner
        self._credit = _YIELD_AFTER_BYTES
        self._awake_until = 0.0
        self._drowsy = False
        self.passes_descriptors = sock.family == socket.AF_UNIX
        sock.setblocking(False)
        prepare(sock)

    async def send_all(self, views: Sequence[memoryview], within_s: float = math.inf) -> None:
        """Send all of these views, in order."""
        views = send_at_once(self.socket, views)
        self._credit -= _CALL_COST_BYTES
        if views:
            await self._send_rest(Span(views), trio.current_time() + within_s)
        elif self._credit < 0:
            await self._yield()
        if self._spinner is not None:
            self._spinner.moved(self)

    async def _send_rest(self, span: Span, deadline: float) -> None:
        while span.remaining:
            try:
                sent = self.socket.sendmsg(span.next_views(_YIELD_AFTER_BYTES))
            except BlockingIOError:
                await self._wait(trio.lowlevel.wait_writable, deadline)
                continue
            except OSError as error:
                raise broken(error) from error
            span.advance(sent)
            self._credit -= sent + _CALL_COST_BYTES
            if self._credit < 0:
                await self._yield()

    async def receive_into(self, views: Sequence[memoryview], deadline: float = math.inf) -> int:
        """Wait for at least one byte; 0 is the end of the stream."""
        if self._credit < 0:  # before anything has moved, so that a cancelled receive loses no bytes
            await self._yield()
        while True:
            count: int | None
            try:
                count = self.socket.recv_into(views[0]) if len(views) == 1 else self.socket.recvmsg_into(views)[0]
            except BlockingIOError:
                count = None if self._spinner is None or self._drowsy else self._spin(self._spinner, views)
                if count is None:
                    if self._is_awake():
                        await self._yield()
                    else:
                        await self._wait(trio.lowlevel.wait_readable, deadline)
                    continue
            except OSError as error:
                raise broken(error) from error
            if self._spinner is not None:
                self._spinner.moved(self)
            self._credit -= count + _CALL_COST_BYTES
            self._awake_until = 0.0
            self._drowsy = False
            return count

    def stay_awake(self, seconds: float) -> None:
        """Wait awake for up to this time from now on, in short pieces, if the stream may do that at all; 0: do not."""
        if self._spinner is not None:
            self._awake_until = self._spinner.clock() + seconds
            self._drowsy = not seconds

    def _is_awake(self) -> bool:
        return (
            self._spinner is not None
            and self._awake_until > self._spinner.clock()
            and self._spinner.may_spin(self, self._awake_until)
        )

    def _spin(self, spinner: Spinner, views: Sequence[memoryview]) -> int | None:
        # Others have to get their turn soon, or nobody would notice that they are there.
        self._credit -= _SPIN_COST_BYTES
        try:
            return spinner.spin(self, self.socket, views, until=self._awake_until)
        except OSError as error:
            raise broken(error) from error

    async def send_descriptors(self, views: Sequence[memoryview], descriptors: Sequence[int]) -> None:
        """Send all of these views, with descriptors beside the first byte."""
        sent = 0
        while not sent:
            try:
                sent = socket.send_fds(self.socket, [views[0]], list(descriptors))
            except BlockingIOError:
                await self._wait(trio.lowlevel.wait_writable)
            except OSError as error:
                raise broken(error) from error
        await self.send_all([views[0][sent:], *views[1:]])

    async def receive_descriptors(self, views: Sequence[memoryview], descriptors: list[int]) -> int:
        """Wait for at least one byte, and take what descriptors come with it; 0 is the end of the stream."""
        while True:
            try:
                return receive_with_descriptors(self.socket, views, descriptors)
            except BlockingIOError:
                await self._wait(trio.lowlevel.wait_readable)
            except OSError as error:
                raise broken(error) from error

    async def send_eof(self) -> None:
        """Shut the sending side down."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise broken(error) from error
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Close the socket."""
        if self.socket.fileno() != -1:
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()

    def is_stale(self) -> bool:
        """Whether the peer has closed an idle connection, or said something that nobody asked for."""
        return looks_stale(self.socket)

    async def _wait(self, until_ready: Callable[[socket.socket], Awaitable[None]], deadline: float = math.inf) -> None:
        try:
            if deadline == math.inf:
                await until_ready(self.socket)
            else:
                with trio.CancelScope(deadline=deadline) as scope:
                    await until_ready(self.socket)
                if scope.cancelled_caught:
                    raise TimeoutError
        except trio.ClosedResourceError:
            raise StoreUnavailable("the connection was closed on this side") from None
        self._credit = _YIELD_AFTER_BYTES

    async def _yield(self) -> None:
        """Let others run: enough was done without waiting."""
        self._credit = _YIELD_AFTER_BYTES
        await trio.lowlevel.checkpoint()


def send_at_once(sock: socket.socket, views: Sequence[memoryview]) -> Sequence[memoryview]:
    """Send a message without payload, one short view, as far as it goes now; return what is left, else all of it.

    Raises:
        StoreUnavailable: the stream is broken.
    """
    if len(views) != 1 or len(views[0]) > _SHORT_BYTES:
        return views
    view = views[0]
    try:
        sent = sock.send(view, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return views
    except OSError as error:
        raise broken(error) from error
    return () if sent == len(view) else (view[sent:],)


async def connect_tcp(host: str, port: int) -> SocketStream:
    """Connect to the first address of the host that answers.

    Raises:
        StoreUnavailable: none does.
    """
    try:
        stream = await trio.open_tcp_stream(host, port)
    except (OSError, UnicodeError) as error:  # UnicodeError: what no host can be called
        raise cannot_connect(f"{host}:{port}", _last_reason(error)) from error
    return SocketStream(_stdlib_socket(stream.socket))


def _last_reason(error: OSError | UnicodeError) -> OSError | UnicodeError:
    """Trio says that all attempts failed; why the last of them did is in the cause."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[-1]
    return cause if isinstance(cause, OSError) else error


async def connect_unix(path: str) -> SocketStream:
    """Connect to a Unix socket.

    Raises:
        StoreUnavailable: no server listens there.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise cannot_connect(path, error) from error
    try:
        sock.setblocking(False)
        sock.connect(path)  # a Unix socket connects at once, or refuses
        await trio.lowlevel.checkpoint()
    except OSError as error:
        sock.close()
        raise cannot_connect(path, error) from error
    except BaseException:
        sock.close()
        raise
    return SocketStream(sock)


def listen_tcp(
    host: str, port: int, *, host_flag: str = "--host", port_flag: str = "--service-port"
) -> list[socket.socket]:
    """Listen on every address that the host name stands for; port 0 takes a free one, the same for all of them.

    The flags are those that errors name.

    Raises:
        ConfigError: the name is unknown, the address is not this machine's, or the port is taken.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{host_flag} {host}: {reason(error)}; give an address or a name of this machine") from None
    listeners: list[socket.socket] = []
    with contextlib.ExitStack() as undo:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sock = undo.enter_context(socket.socket(family, kind, protocol))
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind((address[0], port, *address[2:]))
                sock.listen(_BACKLOG)
            except OSError as error:
                raise ConfigError(_cannot_listen(host, port, error, host_flag, port_flag)) from None
            port = sock.getsockname()[1]
            listeners.append(sock)
        undo.pop_all()
    return listeners


def listen_unix(path: Path) -> socket.socket:
    """Listen on a Unix socket that only this user may open; what a dead server left behind there is replaced.

    The folder is made, private, if it is not there.

    Raises:
        ConfigError: the path is too long, not ours, not a socket, or a live server listens there.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid not in (os.getuid(), 0):
            raise ConfigError(f"--unix-socket: the folder {path.parent} belongs to another user; choose another path")
        _remove_stale(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--unix-socket {path}: {reason(error)}; choose another path, or `off`") from None
    try:
        sock.setblocking(False)
        # Made private before it can be connected to: between bind and listen nobody gets in.
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"--unix-socket {path}: {reason(error)}; choose another path, or `off`") from None
    return sock


async def accept(listener: socket.socket, spinner: Spinner | None = None) -> SocketStream:
    """Wait for the next connection.

    Raises:
        OSError: the process is out of descriptors or memory; the listener is still good.
        trio.ClosedResourceError: the listener was closed.
    """
    while True:
        await trio.lowlevel.checkpoint()  # while nothing is accepted yet that would be lost
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            await trio.lowlevel.wait_readable(listener)
        except OSError as error:
            if listener.fileno() == -1:
                raise trio.ClosedResourceError from error
            if error.errno not in _LOST_BEFORE_ACCEPT:
                raise
        else:
            return SocketStream(sock, spinner)


_LOST_BEFORE_ACCEPT = {
    errno.ECONNABORTED,
    errno.EPERM,
    errno.EPROTO,
    errno.ENETDOWN,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
}


def _stdlib_socket(wrapped: trio.socket.SocketType) -> socket.socket:
    """Take the socket out of Trio's wrapper, which closes nothing when it is forgotten."""
    return socket.socket(fileno=wrapped.detach())


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--unix-socket: {path} is there and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:  # its backlog is full: somebody listens
            pass
    raise ConfigError(f"--unix-socket: a server listens on {path} already; choose another path, or `off`")


def _cannot_listen(host: str, port: int, error: OSError, host_flag: str, port_flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what listens there, or give another {port_flag} (0: any)"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host_flag} {host}: not an address of this machine"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; give a {port_flag} above 1023"
    return f"cannot listen on {host}:{port}: {reason(error)}"


def prepare(sock: socket.socket) -> None:
    """Set the options that every connected socket of a store has."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        # A header and its payload leave in one call: Nagle would only hold back the end of it, for 40 ms.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def receive_with_descriptors(sock: socket.socket, views: Sequence[memoryview], descriptors: list[int]) -> int:
    """Receive bytes once, and append to `descriptors` those that come with them.

    Raises:
        OSError: the socket's error; EMFILE if this process may not have so many descriptors.
    """
    room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)
    count, messages, flags, _ = sock.recvmsg_into(views, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received = array("i")
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
            descriptors.extend(received)
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, "not all descriptors could be received; raise the limit (ulimit -n)")
    return count


def peer_user(sock: socket.socket) -> int:
    """Return the user id of the process that listens at the other end of a Unix socket (SO_PEERCRED of unix(7))."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def looks_stale(sock: socket.socket) -> bool:
    """Whether the peer of an idle connection has closed it, or said something that nobody asked for."""
    try:
        sock.recv(1, _LOOK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def cannot_connect(place: str, error: OSError | UnicodeError) -> StoreUnavailable:
    """Return the error for a server that is not there."""
    remedy = "is the server running there?"
    if isinstance(error, PermissionError) and place.startswith("/"):  # the mode of the socket, or of its folder
        remedy = "connect as the user who runs the server, or by TCP"
    return StoreUnavailable(f"cannot connect to {place}: {reason(error)}; {remedy}")


def broken(error: OSError) -> StoreUnavailable:
    """Return the error that stands for a broken socket."""
    return StoreUnavailable(f"the connection broke: {reason(error)}")


def reason(error: OSError | UnicodeError) -> str:
    """Return what the system says, without the number."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
