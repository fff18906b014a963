"""TCP and Unix sockets for asyncio and uvloop, by the loop's own reader and writer callbacks.

A stream belongs to no loop: each wait asks the loop that is running. So a store may be opened in one loop and used in
another, in another thread. No wait leaves a callback or a thread behind when it is cancelled.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Sequence

from infinistore.protocol.span import Span
from infinistore.transports.sockets import broken, cannot_connect, looks_stale, prepare
from infinistore.transports.spin import Spinner

__all__ = ["AsyncioSocketStream", "connect_tcp", "connect_unix"]

_YIELD_AFTER_BYTES = 4 * 1024 * 1024


class AsyncioSocketStream:
    """A connected, non-blocking socket. One task at a time uses it."""

    def __init__(self, sock: socket.socket, spinner: Spinner) -> None:
        self.socket = sock
        self._spinner = spinner
        sock.setblocking(False)
        prepare(sock)

    async def send_all(self, views: Sequence[memoryview]) -> None:
        """Send all of these views, in order.

        Raises:
            StoreUnavailable: the stream is broken.
        """
        span = Span(views)
        while span.remaining:
            try:
                span.advance(self.socket.sendmsg(span.next_views(_YIELD_AFTER_BYTES)))
            except BlockingIOError:
                await _writable(self.socket)
            except OSError as error:
                raise broken(error) from error

    async def receive_into(self, views: Sequence[memoryview]) -> int:
        """Wait for at least one byte; 0 is the end of the stream.

        Raises:
            StoreUnavailable: the stream is broken.
        """
        sock = self.socket

        def receive() -> int:
            return sock.recv_into(views[0]) if len(views) == 1 else sock.recvmsg_into(views)[0]

        try:
            count = self._spinner.spin(self, receive)
            while count is None:
                try:
                    count = receive()
                except BlockingIOError:
                    await _readable(sock)
        except OSError as error:
            raise broken(error) from error
        self._spinner.served(self)
        return count

    def is_stale(self) -> bool:
        """Whether the peer has closed an idle connection, or said something that nobody asked for."""
        return looks_stale(self.socket)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


async def connect_tcp(host: str, port: int, spinner: Spinner) -> AsyncioSocketStream:
    """Connect to the first address of the host that answers.

    Raises:
        StoreUnavailable: none does.
    """
    place = f"{host}:{port}"
    try:
        addresses = await _resolve(host, port)
    except OSError as error:
        raise cannot_connect(place, error) from error
    refused: OSError = OSError(errno.EADDRNOTAVAIL, "the name has no address")
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        try:
            await _connect(sock, address)
            return AsyncioSocketStream(sock, spinner)
        except OSError as error:
            sock.close()
            refused = error
        except BaseException:
            sock.close()
            raise
    raise cannot_connect(place, refused) from refused


async def connect_unix(path: str, spinner: Spinner) -> AsyncioSocketStream:
    """Connect to a Unix socket.

    Raises:
        StoreUnavailable: no server listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        await _connect(sock, path)
    except OSError as error:
        sock.close()
        raise cannot_connect(path, error) from error
    except BaseException:
        sock.close()
        raise
    return AsyncioSocketStream(sock, spinner)


_Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]]


async def _resolve(host: str, port: int) -> list[_Address]:
    """Look a name up; an address needs no look-up, and so no thread of the loop's executor."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return found  # type: ignore[return-value]  # AF_UNIX cannot be among them


async def _connect(sock: socket.socket, address: object) -> None:
    sock.setblocking(False)
    try:
        sock.connect(address)  # type: ignore[arg-type]
    except BlockingIOError:
        await _writable(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error)) from None


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(sock, _wake, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(sock, _wake, ready)
    try:
        await ready
    finally:
        loop.remove_writer(sock)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
