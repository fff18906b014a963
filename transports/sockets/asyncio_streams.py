"""TCP and Unix sockets for asyncio and uvloop, on the loop's reader and writer
callbacks.

A stream belongs to no loop: each wait uses the running loop. So a store may be opened
in one loop and used in another, in another thread. A cancelled wait leaves neither a
callback nor a thread behind.
"""

import asyncio
import math
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from infinistore.protocol.effects import Span
from infinistore.transports.sockets.names import Dialer
from infinistore.transports.sockets.raw_sockets import (
    broken,
    cannot_connect,
    looks_stale,
    prepare,
    receive_with_descriptors,
    send_at_once,
)
from infinistore.transports.sockets.spin import Spinner

_YIELD_AFTER_BYTES = 4 * 1024 * 1024
_CALL_COST_BYTES = 32 * 1024  # what a system call counts for, however few bytes it moves


class AsyncioSocketStream:
    """A connected, non-blocking socket. One task at a time uses it."""

    def __init__(self, sock: socket.socket, spinner: Spinner) -> None:
        self.socket = sock
        self._spinner = spinner
        self._credit = _YIELD_AFTER_BYTES
        self.waited = False
        """Whether other tasks ran since this was set to False."""
        self.silence_s = math.inf
        self.ask: Callable[[], Awaitable[None]] | None = None
        """Awaited after each `silence_s` of a wait; raises if the peer is gone."""
        sock.setblocking(False)
        prepare(sock)

    async def send_all(self, views: Sequence[memoryview]) -> None:
        """Send all of these views, in order.

        Raises:
            StoreUnavailable: the stream is broken.
        """
        views = send_at_once(self.socket, views)
        self._credit -= _CALL_COST_BYTES
        if self._credit < 0:
            await self._let_others_run()
        span = Span(views)
        while span.remaining:
            try:
                sent = self.socket.sendmsg(span.next_views(_YIELD_AFTER_BYTES))
            except BlockingIOError:
                await self._wait(_writable)
                self._others_ran()
            except OSError as error:
                raise broken(error) from error
            else:
                span.advance(sent)
                self._credit -= sent + _CALL_COST_BYTES
                if self._credit < 0:
                    await self._let_others_run()
        self._spinner.moved(self)

    async def receive_into(self, views: Sequence[memoryview]) -> int:
        """Wait for at least one byte; 0 is the end of the stream.

        Raises:
            StoreUnavailable: the stream is broken.
        """
        sock = self.socket
        if self._credit < 0:  # before anything is received, so that a cancelled call loses no bytes
            await self._let_others_run()
        try:
            count = self._spinner.spin(self, sock, views)
            while count is None:
                try:
                    count = sock.recv_into(views[0]) if len(views) == 1 else sock.recvmsg_into(views)[0]
                except BlockingIOError:
                    await self._wait(_readable)
                    self._others_ran()
        except OSError as error:
            raise broken(error) from error
        self._spinner.moved(self)
        self._credit -= count + _CALL_COST_BYTES
        return count

    async def _wait(self, until_ready: Callable[[socket.socket], Awaitable[None]]) -> None:
        while self.ask is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.silence_s):
                    await until_ready(self.socket)
                    return
            await self.ask()
        await until_ready(self.socket)

    async def _let_others_run(self) -> None:
        """Yield, for the loop's other tasks and for this one's deadline."""
        self._others_ran()  # said before: a receive that is cancelled here again and again must get on some time
        await asyncio.sleep(0)

    def _others_ran(self) -> None:
        self._credit = _YIELD_AFTER_BYTES
        self.waited = True

    async def receive_descriptors(self, views: Sequence[memoryview], descriptors: list[int]) -> int:
        """Do as `receive_into`, and append the descriptors that come with the bytes.
        The caller closes them.

        Raises:
            StoreUnavailable: the stream is broken.
        """
        while True:
            try:
                return receive_with_descriptors(self.socket, views, descriptors)
            except BlockingIOError:
                await self._wait(_readable)
            except OSError as error:
                raise broken(error) from error

    def is_stale(self) -> bool:
        """Whether the peer of an idle connection has closed it, or sent something."""
        return looks_stale(self.socket)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


async def connect_tcp(host: str, port: int, spinner: Spinner, dialer: Dialer | None = None) -> AsyncioSocketStream:
    """Connect to the first address of the host that answers. With a `dialer`, what was
    begun goes on if this is cancelled.

    Raises:
        StoreUnavailable: no address answers.
    """
    dialer = dialer or Dialer(keeps=False)
    try:
        found = await asyncio.wrap_future(dialer.look_up(host, port, time.monotonic()))
        with dialer.dial(found, time.monotonic()) as dial:
            while (sock := dial.connected(now := time.monotonic())) is None:
                await _any_writable(dial.sockets, dial.next_at - now)
    except (OSError, UnicodeError) as error:  # UnicodeError: what no host can be called
        raise cannot_connect(f"{host}:{port}", error) from error
    return AsyncioSocketStream(sock, spinner)


async def _any_writable(sockets: Sequence[socket.socket], within_s: float) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    for sock in sockets:
        loop.add_writer(sock, _wake, ready)
    try:
        await asyncio.wait([ready], timeout=None if math.isinf(within_s) else within_s)
    finally:
        for sock in sockets:
            loop.remove_writer(sock)


async def connect_unix(path: str, spinner: Spinner) -> AsyncioSocketStream:
    """Connect to a Unix socket.

    Raises:
        StoreUnavailable: no server listens there.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise cannot_connect(path, error) from error
    sock.setblocking(False)
    try:
        sock.connect(path)  # a Unix socket connects at once, or refuses
        return AsyncioSocketStream(sock, spinner)
    except OSError as error:
        sock.close()
        raise cannot_connect(path, error) from error


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
