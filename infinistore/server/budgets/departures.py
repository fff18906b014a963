"""Tells when a peer leaves whose connection nobody reads just now.

Who does not read a socket does not learn that its peer has ended its side: that comes
behind all that the peer has sent. The kernel knows it at once.
"""

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import trio
import trio.lowlevel

__all__ = ["Departures"]


class Departures:
    """Watches any number of sockets with one descriptor, while `run` runs."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._on_departure: dict[int, Callable[[], object]] = {}

    async def run(self) -> None:
        """Tell of departures until cancelled."""
        try:
            while True:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                for descriptor, _ in self._epoll.poll(0):
                    self._on_departure[descriptor]()
        finally:
            self._epoll.close()

    @contextmanager
    def watched(self, sock: socket.socket | None, on_departure: Callable[[], object]) -> Iterator[None]:
        """Call `on_departure`, once, if the peer ends its side or is lost. What has no
        socket is not watched.
        """
        descriptor = -1 if sock is None else sock.fileno()
        if descriptor < 0 or self._epoll.closed:
            yield
            return
        self._on_departure[descriptor] = on_departure
        try:
            self._epoll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)
            yield
        finally:
            del self._on_departure[descriptor]
            with suppress(OSError, ValueError):  # one of them was closed meanwhile
                self._epoll.unregister(descriptor)
