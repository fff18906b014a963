"""A call to a server, from taking a connection to the last retry: written once for every driver.

A call is a generator, like the exchanges inside it. Besides bytes to move it asks its driver to connect, to use a
connection that is there, and to wait. When the driver drops it (a cancelled task, a deadline), what it held is closed.
How far it came stays in its `Attempt`, so that the error of a deadline can tell.
"""

import enum
import os
import random
import socket
import threading
from collections.abc import Callable, Generator
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import attrs

from infinistore.client.address import Address
from infinistore.client.fork import FORKED, let_go_in_child
from infinistore.client.health import Health
from infinistore.client.in_place import Kept
from infinistore.client.link import Link
from infinistore.client.mapped_pool import MappedPool
from infinistore.client.operations import Operation
from infinistore.client.options import Options
from infinistore.client.rdma import ClientRdma
from infinistore.client.registration import Registration
from infinistore.errors import (
    DeadlineExceeded,
    DeviceMemoryUnreachable,
    InfiniStoreException,
    LimitExceeded,
    StoreUnavailable,
    TransferFailed,
)
from infinistore.protocol.effects import Pause, Receive, ReceiveDescriptors, Send, SendDescriptors
from infinistore.protocol.messages import HelloReply
from infinistore.transports.device_memory import DeviceMemory
from infinistore.transports.rdma_verbs import NoRdma
from infinistore.transports.sockets import peer_user

__all__ = ["Attempt", "Call", "ClientStream", "Connect", "RemoteCalls", "Sleep", "Use"]

_T = TypeVar("_T")
_new = tuple.__new__  # makes a named tuple without the call of a Python function
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
    """Connect to this address; resume with the stream, and use that from now on."""

    address: Address


class Use(NamedTuple):
    """Use this stream from now on."""

    stream: Any


class Sleep(NamedTuple):
    """Wait for so many seconds."""

    seconds: float


Call: TypeAlias = Generator[
    Send | Receive | SendDescriptors | ReceiveDescriptors | Pause | Connect | Use | Sleep, Any, _T
]


class RemoteCalls(Generic[_Stream]):
    """Makes calls to one server over a few connections, each of which serves one call at a time."""

    def __init__(self, address: Address, options: Options, clock: Callable[[], float]) -> None:
        self.address = address
        self.options = options
        self._clock = clock
        self._health = Health(clock, random.Random())
        self._idle: list[Link[_Stream]] = []
        self._pinned: list[Link[_Stream]] = []  # not in use, but what was leased over them is still looked at
        self._streams: set[_Stream] = set()
        self._closed = ""
        self._local: Address | None = None  # where the server was found on this host
        self._unreachable = ("", "")  # the instance of a server whose Unix socket leads nowhere from here, and why
        self._pool: MappedPool | None = None
        self._pool_lock = threading.Lock()
        self.rdma = ClientRdma(options, clock, forced=address.scheme == "rdma")
        let_go_in_child(self)

    def attempt(self, *, idempotent: bool = True) -> Attempt:
        """Begin a call: its time runs from now on."""
        return Attempt(self._clock() + self.options.deadline_s, idempotent)

    def first(self, attempt: Attempt) -> Call[None]:
        """Make the first connection, without retries: a wrong address or token is known at once."""
        attempt.stage = _Stage.CONNECTING
        link = yield from self._connect(attempt.deadline)
        self._give_back(link)

    def call(
        self, operation: Operation[_T], attempt: Attempt, *, pinning: bool = False, kept: Kept | None = None
    ) -> Call[_T]:
        """Carry out an operation; what is idempotent is tried again, until the deadline.

        What is not is tried again only if nothing of it was sent. `pinning`: what it pins may outlive the call. `kept`
        has the connection that the operation must use, and keeps it if the server still has room for it afterwards.
        """
        while True:
            self.check_open()
            attempt.probe = self._health.check()
            attempt.stage = _Stage.CONNECTING
            link: Link[_Stream] | None = None
            try:
                link = yield from self._take(attempt.deadline, pinning, kept)
                attempt.stage = _Stage.ASKING
                result = yield from operation(link.operations)
            except StoreUnavailable as error:
                delay_s = self._failed(error, attempt)
                if link is not None and not attempt.idempotent:
                    if isinstance(error, TransferFailed):  # nothing was stored, and the error says so
                        raise
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
                    if kept is not None and link.at_rest and link.pins.reserved:
                        kept.keep(link, self._take_back)
                    else:
                        self._give_back(link)
            yield Sleep(delay_s)

    def register(self, memory: memoryview | DeviceMemory) -> Registration:
        """Register memory of the caller's; see the method of the stores."""
        self.check_open()
        try:
            return self.rdma.register(memory)
        except NoRdma as error:
            kind = DeviceMemoryUnreachable if isinstance(memory, DeviceMemory) else LimitExceeded
            raise kind(str(error)) from error

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

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Return the server's pool as far as it is mapped here; see `MappedPool.arenas`."""
        with self._pool_lock:
            return [] if self._pool is None or self._closed else self._pool.arenas()

    def close(self) -> None:
        """Close the connections that nobody uses; the others are closed when their calls are done."""
        self._closed = self._closed or "this store is closed; open another one"
        self._close_idle()
        with self._pool_lock:
            if self._pool is not None:
                self._pool.close()
        self.rdma.close()

    def let_go(self) -> None:
        """In a forked child: close the copies of the descriptors, whoever used them in the parent."""
        self._closed = FORKED
        for stream in self._streams:
            stream.socket.close()
        self._pool_lock = threading.Lock()  # another thread of the parent may have held it
        if self._pool is not None:
            self._pool.let_go()
        self.rdma.let_go()

    def _take(self, deadline: float, pinning: bool, kept: Kept | None) -> Call[Link[_Stream]]:
        if kept is not None and kept.link is not None:
            found: Link[_Stream] = kept.link
            kept.link = None
            found.deadline = deadline
            yield Use(found.stream)
            return found
        while (link := self._next(pinning)) is not None:
            link.deadline = deadline
            yield _new(Use, (link.stream,))
            retries = link.instead_of_rdma and self.rdma.retry_is_due
            if (
                link.usable
                and (not link.operations.unsettled or (yield from self._settle(link)))
                and not link.stream.is_stale()
                and not retries
            ):
                return link
            self._close(link)
        return (yield from self._connect(deadline))

    def _connect(self, deadline: float) -> Call[Link[_Stream]]:
        """Connect by the best path there is: by shared memory if the server is on this host, and the URL leaves it
        open."""
        address = self.address
        if self._local is not None and self._pool is not None and not self.rdma.due:
            try:
                return (yield from self._connect_locally(self._local, deadline, self._pool.instance))
            except StoreUnavailable:  # perhaps it has moved: ask again
                self._local = None
        if address.path:
            if address.scheme == "shm":
                return (yield from self._connect_locally(address, deadline))
            return (yield from self._open(address, deadline, ("unix", "the URL asks for a Unix socket")))[0]
        if address.scheme == "tcp":
            return (yield from self._open(address, deadline, ("tcp", "the URL asks for TCP")))[0]
        return (yield from self._ask_the_way(deadline))

    def _ask_the_way(self, deadline: float) -> Call[Link[_Stream]]:
        """Connect by TCP, and change to the server's Unix socket if that leads to the same server."""
        link, hello = yield from self._open(self.address, deadline, ("tcp", ""))
        no_rdma = ""
        if self.rdma.asked_for:
            no_rdma = yield from self._connect_queue(link, hello, "")
            if not no_rdma:
                return link
        why_not = "the server has no Unix socket"
        if hello.instance == self._unreachable[0]:
            why_not = self._unreachable[1]
        elif hello.unix_socket:
            local = Address("shm", "", 0, hello.unix_socket, {})
            try:
                found = yield from self._connect_locally(local, deadline, hello.instance, no_rdma)
            except InfiniStoreException as error:
                why_not = f"no shared memory: {error}"
                if isinstance(error, StoreUnavailable):  # a server that has no room for one more may have some later
                    self._unreachable = (hello.instance, why_not)
            except BaseException:
                self._close(link)
                raise
            else:
                self._close(link)
                self._local = local
                return found
        if self.address.scheme == "shm":
            self._close(link)
            raise StoreUnavailable(f"{self.address}: {why_not}")
        yield Use(link.stream)  # and not the one that was tried last
        if self.address.scheme == "infinistore" and not self.rdma.asked_for and self.rdma.is_likely(hello):
            no_rdma = yield from self._connect_queue(link, hello, f"; {why_not}")
            if not no_rdma:
                return link
        link.open(hello, ("tcp", f"{no_rdma}; {why_not}" if no_rdma else why_not), None)
        link.instead_of_rdma = bool(no_rdma)
        return link

    def _connect_queue(self, link: Link[_Stream], hello: HelloReply, why: str) -> Call[str]:
        """Make a connection one that moves blocks by RDMA; return why not, or an empty text."""
        try:
            yield from link.connect_queue(self.rdma, hello, why=why)
        except NoRdma as error:
            if self.rdma.forced:
                self._close(link)
                raise StoreUnavailable(f"{self.address}: no RDMA: {error}") from error
            return f"no RDMA: {error}"
        except BaseException:
            self._close(link)
            raise
        return ""

    def _connect_locally(
        self, address: Address, deadline: float, instance: str | None = None, no_rdma: str = ""
    ) -> Call[Link[_Stream]]:
        """Connect by a Unix socket, to use shared memory; `instance` is the server that it must lead to."""
        link, hello = yield from self._open(address, deadline, ("unix", ""))
        if instance not in (None, hello.instance):
            self._close(link)
            raise StoreUnavailable(f"another server than the one at {self.address} listens on {address.path}")
        try:
            pool = self._pool_of(hello.instance)
        except StoreUnavailable:
            self._close(link)
            raise
        why = f"the server is on this host, at {address.path}"
        link.open(hello, ("shm", f"{no_rdma}; {why}" if no_rdma else why), pool)
        link.instead_of_rdma = bool(no_rdma)
        return link

    def _pool_of(self, instance: str) -> MappedPool:
        """Return what is mapped of this run of a server; what was mapped of another one is given up."""
        with self._pool_lock:
            self.check_open()
            if self._pool is None or self._pool.instance != instance:
                if self._pool is not None:
                    self._pool.close()
                self._pool = MappedPool(instance, self.options.copy_threads, self.options.known_blocks)
            return self._pool

    def _open(self, address: Address, deadline: float, path: tuple[str, str]) -> Call[tuple[Link[_Stream], HelloReply]]:
        stream: _Stream = yield Connect(address)
        link = Link(stream, self.options, self._clock)
        link.deadline = deadline
        self._streams.add(stream)
        try:
            if address.path and address is not self.address:
                _check_peer(stream, address)
            hello = yield from link.greet()
        except BaseException:
            self._close(link)
            raise
        link.open(hello, path, None)
        return link, hello

    def _give_back(self, link: Link[_Stream]) -> None:
        if self._closed == FORKED:  # its socket is closed, and a thread that is not here may have its lock
            return
        for other in self._pinned:
            other.pins.flush()
        if not link.usable:
            self._close(link)
        elif link.pins.in_use:
            self._pinned.append(link)
        else:
            self._idle.append(link)
        if self._closed:  # looked at last: another thread may be closing the store
            self._close_idle()

    def _take_back(self, link: Link[_Stream]) -> None:
        """Have a connection back that was kept for a reservation: it goes back, if it has not, by its finalizer."""
        link.pins.reserved = False
        self._give_back(link)

    def _settle(self, link: Link[_Stream]) -> Call[bool]:
        """Hear what is still to come from the last call; False if the connection is lost."""
        try:
            yield from link.operations.settle()
        except StoreUnavailable:
            return False
        except BaseException:
            self._close(link)
            raise
        return True

    def _next(self, pinning: bool) -> Link[_Stream] | None:
        """Return a connection that nobody uses. One with pins is for more of them, so that few connections have any:
        whatever else goes wrong on a connection closes it, and that has to wait for the pins."""
        try:  # other threads take from the lists, too
            if self._pinned:
                for link in [link for link in self._pinned if not link.pins.in_use]:
                    self._pinned.remove(link)
                    self._idle.append(link)
                if pinning and self._pinned:
                    return self._pinned.pop()
        except (ValueError, IndexError):
            pass
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _close_idle(self) -> None:
        while (link := self._next(pinning=True)) is not None:
            self._close(link)

    def check_open(self) -> None:
        """Raise `StoreUnavailable` if the store was closed, or opened before a fork."""
        if self._closed:
            raise StoreUnavailable(self._closed)

    def _close(self, link: Link[_Stream]) -> None:
        link.close()
        if not link.pins.in_use:
            self._streams.discard(link.stream)
            link.stream.close()
            return

        def close() -> None:  # from any thread; nobody waits for the stream by now
            self._streams.discard(link.stream)
            link.stream.socket.close()

        link.pins.close_after(close)


def _check_peer(stream: ClientStream, address: Address) -> None:
    """Refuse a socket that the server named, not the caller, if a stranger listens there: the hello has the token."""
    user = peer_user(stream.socket)
    if user not in (0, os.geteuid()):
        raise StoreUnavailable(
            f"the server at {address.path} runs as another user ({user}); name its socket to trust it"
        )
