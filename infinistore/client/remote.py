"""A call to a server, from taking a connection to the last retry: written once for every driver.

A call is a generator, like the exchanges inside it. Besides bytes to move it asks its driver to connect, to use a
connection that is there, and to wait. When the driver drops it (a cancelled task, a deadline), what it held is closed.
How far it came stays in its `Attempt`, so that the error of a deadline can tell.
"""

import enum
import random
import socket
from collections.abc import Callable, Generator
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import attrs

from infinistore.client.address import Address
from infinistore.client.fork import FORKED, let_go_in_child
from infinistore.client.health import Health
from infinistore.client.link import Link
from infinistore.client.operations import Operation
from infinistore.client.options import Options
from infinistore.errors import DeadlineExceeded, InfiniStoreException, StoreUnavailable
from infinistore.protocol.connection import Pause, Receive, Send

__all__ = ["Attempt", "Call", "ClientStream", "Connect", "RemoteCalls", "Sleep", "Use"]

_T = TypeVar("_T")
LOOKUP_CONNECTIONS = 2
"""How many connections a store has for look-ups, besides those for blocks."""
_OUTCOME_UNKNOWN = (
    "it is not known whether the request was carried out: ask the store, or do it again if that does no harm"
)


class _Stage(enum.Enum):
    WAITING = enum.auto()  # for other calls to finish
    CONNECTING = enum.auto()
    ASKING = enum.auto()  # from here on, the server may have heard of it


@attrs.define
class Attempt:
    """One call of a method: until when, whether it may be tried again, and how far it has come."""

    deadline: float
    idempotent: bool = True
    stage: _Stage = _Stage.WAITING
    probe: int = 0


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

    def attempt(self, *, idempotent: bool = True) -> Attempt:
        """Begin a call: its time runs from now on."""
        return Attempt(self._clock() + self.options.deadline_s, idempotent)

    def first(self, attempt: Attempt) -> Call[None]:
        """Make the first connection, without retries: a wrong address or token is known at once."""
        attempt.stage = _Stage.CONNECTING
        link = yield from self._connect(attempt.deadline)
        self._give_back(link)

    def call(self, operation: Operation[_T], attempt: Attempt) -> Call[_T]:
        """Carry out an operation; what is idempotent is tried again, until the deadline.

        What is not is tried again only if nothing of it was sent.
        """
        while True:
            self.check_open()
            attempt.probe = self._health.check()
            attempt.stage = _Stage.CONNECTING
            link: Link[_Stream] | None = None
            try:
                link = yield from self._take(attempt.deadline)
                attempt.stage = _Stage.ASKING
                result = yield from operation(link.operations)
            except StoreUnavailable as error:
                delay_s = self._failed(error, attempt)
                if link is not None and not attempt.idempotent:
                    raise StoreUnavailable(f"{error}; {_OUTCOME_UNKNOWN}") from error
                if delay_s is None or self._clock() + delay_s >= attempt.deadline:
                    raise
            except InfiniStoreException:
                self._health.succeeded()  # an answer is an answer
                raise
            except BaseException:  # cancelled, late, or asked for something that cannot be asked for
                self._health.dropped(attempt.probe)
                raise
            else:
                self._health.succeeded()
                return result
            finally:
                if link is not None:
                    self._give_back(link)
            yield Sleep(delay_s)

    def deadline_exceeded(self, attempt: Attempt) -> DeadlineExceeded:
        """Note that a call did not finish in time, and return the error to raise."""
        within = f"within {self.options.deadline_s:g} s"
        if attempt.stage is _Stage.WAITING:  # which says nothing about the server
            return DeadlineExceeded(
                f"no connection of this store came free {within}; make fewer calls at a time, or raise max_connections"
            )
        if attempt.stage is _Stage.CONNECTING:
            error = DeadlineExceeded(f"no connection to {self.address} {within}")
        else:
            unknown = "" if attempt.idempotent else f"; {_OUTCOME_UNKNOWN}"
            error = DeadlineExceeded(f"no answer from {self.address} {within}{unknown}")
        self._failed(error, attempt)
        return error

    def _failed(self, error: Exception, attempt: Attempt) -> float | None:
        # The other connections are to the same server: each that is as dead would cost another call its deadline.
        self._close_idle()
        return self._health.failed(error, attempt.probe)

    def close(self) -> None:
        """Close the connections that nobody uses; the others are closed when their calls are done."""
        self._closed = self._closed or "this store is closed; open another one"
        self._close_idle()

    def let_go(self) -> None:
        """In a forked child: close the copies of the descriptors, whoever used them in the parent."""
        self._closed = FORKED
        for stream in self._streams:
            stream.socket.close()

    def _take(self, deadline: float) -> Call[Link[_Stream]]:
        while (link := self._next_idle()) is not None:
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
        if link.usable:
            self._idle.append(link)
        else:
            self._close(link)
        if self._closed:  # looked at last: another thread may be closing the store
            self._close_idle()

    def _next_idle(self) -> Link[_Stream] | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _close_idle(self) -> None:
        while (link := self._next_idle()) is not None:
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
