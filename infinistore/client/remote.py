"""A call to a server, from taking a connection to the last retry: written once for every driver.

A call is a generator, like the exchanges inside it. Besides bytes to move it asks its driver to connect, to use a
connection that is there, and to wait. When the driver drops it (a cancelled task, a deadline), what it held is closed.
"""

import random
import socket
from collections.abc import Callable, Generator
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from infinistore.client.address import Address
from infinistore.client.fork import FORKED, let_go_in_child
from infinistore.client.health import Health
from infinistore.client.link import Link
from infinistore.client.operations import Operation
from infinistore.client.options import Options
from infinistore.errors import DeadlineExceeded, InfiniStoreException, StoreUnavailable
from infinistore.protocol.connection import Pause, Receive, Send

__all__ = ["Call", "ClientStream", "Connect", "RemoteCalls", "Sleep", "Use"]

_T = TypeVar("_T")
LOOKUP_CONNECTIONS = 2
"""How many connections a store has for look-ups, besides those for blocks."""
_OUTCOME_UNKNOWN = (
    "it is not known whether the request was carried out: ask the store, or do it again if that does no harm"
)


class ClientStream(Protocol):
    """What a call itself needs of a stream; how bytes go through it is between the driver and the stream."""

    socket: socket.socket

    def close(self) -> None:
        """Close it, at once."""

    def is_stale(self) -> bool:
        """Whether the peer has closed it, or said something that nobody asked for."""


_Stream = TypeVar("_Stream", bound=ClientStream)


class Connect(NamedTuple):
    """Connect to the server; resume with the stream, and use that from now on."""


class Use(NamedTuple):
    """Use this stream from now on."""

    stream: Any


class Sleep(NamedTuple):
    """Wait for so many seconds."""

    seconds: float


Call: TypeAlias = Generator[Send | Receive | Pause | Connect | Use | Sleep, Any, _T]


class RemoteCalls(Generic[_Stream]):
    """Makes calls to one server over a few connections, each of which serves one call at a time."""

    def __init__(self, address: Address, options: Options, clock: Callable[[], float]) -> None:
        self.address = address
        self.options = options
        self._clock = clock
        self._health = Health(clock, random.Random())
        self._idle: list[Link[_Stream]] = []
        self._streams: set[_Stream] = set()
        self._closed = ""
        let_go_in_child(self)

    def first(self, deadline: float) -> Call[None]:
        """Make the first connection, without retries: a wrong address or token is known at once."""
        link = yield from self._connect(deadline)
        self._give_back(link)

    def call(self, operation: Operation[_T], *, idempotent: bool, deadline: float) -> Call[_T]:
        """Carry out an operation; what is idempotent is tried again, until `deadline` on the clock.

        What is not is tried again only if nothing of it was sent.
        """
        while True:
            self.check_open()
            self._health.check()
            link: Link[_Stream] | None = None
            try:
                link = yield from self._take(deadline)
                result = yield from operation(link.operations)
            except StoreUnavailable as error:
                delay_s = self._health.failed(error)
                if link is not None and not idempotent:
                    raise StoreUnavailable(f"{error}; {_OUTCOME_UNKNOWN}") from error
                if delay_s is None or self._clock() + delay_s >= deadline:
                    raise
            except InfiniStoreException:
                self._health.succeeded()  # an answer is an answer
                raise
            else:
                self._health.succeeded()
                return result
            finally:
                if link is not None:
                    self._give_back(link)
            yield Sleep(delay_s)

    def deadline_exceeded(self) -> DeadlineExceeded:
        """Note that a call got no answer in time, and return the error to raise."""
        error = DeadlineExceeded(f"no answer from {self.address} within {self.options.deadline_s:g} s")
        self._health.failed(error)
        return error

    def close(self) -> None:
        """Close the connections that nobody uses; the others are closed when their calls are done."""
        self._closed = self._closed or "this store is closed; open another one"
        while self._idle:
            self._close(self._idle.pop())

    def let_go(self) -> None:
        """In a forked child: close the copies of the descriptors, whoever used them in the parent."""
        self._closed = FORKED
        for stream in self._streams:
            stream.socket.close()

    def _take(self, deadline: float) -> Call[Link[_Stream]]:
        while self._idle:
            try:
                link = self._idle.pop()
            except IndexError:  # another thread was quicker
                break
            if not link.stream.is_stale():
                link.deadline = deadline
                yield Use(link.stream)
                return link
            self._close(link)
        return (yield from self._connect(deadline))

    def _connect(self, deadline: float) -> Call[Link[_Stream]]:
        stream: _Stream = yield Connect()
        link = Link(stream, self.options, self._path(), self._clock)
        link.deadline = deadline
        self._streams.add(stream)
        try:
            yield from link.greet()
        except BaseException:
            self._close(link)
            raise
        return link

    def _give_back(self, link: Link[_Stream]) -> None:
        if link.usable and not self._closed:
            self._idle.append(link)
        else:
            self._close(link)

    def _path(self) -> tuple[str, str]:
        if self.address.scheme == "unix":
            return "unix", f"the URL names a Unix socket, {self.address.path}"
        if self.address.scheme == "tcp":
            return "tcp", f"the URL asks for TCP to {self.address.host}:{self.address.port}"
        return "tcp", f"the only way to {self.address.host}:{self.address.port} that this release knows"

    def check_open(self) -> None:
        """Raise `StoreUnavailable` if the store was closed, or opened before a fork."""
        if self._closed:
            raise StoreUnavailable(self._closed)

    def _close(self, link: Link[_Stream]) -> None:
        self._streams.discard(link.stream)
        link.stream.close()
