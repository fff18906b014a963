"""The connection pool of a store: its connections, and which calls use them.

A connection is the stream, the conversation on it, its movers and its pins. One call
uses it at a time.

Calls in threads are limited by `Turns`, which also find out which ones were
interrupted. Ctrl-C, like any signal whose handler raises, may arrive between any two
bytecodes, even in a `finally`: what Python code takes and gives back can be lost. There
is one exception: a lock implemented in C and taken by `with` is released however its
block is left. So each call holds such a lock, its *turn*, which no thread waits for. A
call whose turn is not locked is over, whether it has reported so or not, and any thread
may give back what it had: the next call does.
"""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from socket import SHUT_RDWR
from typing import Generic, Protocol, TypeVar, cast

from infinistore.client.connection.effects import ClientStream
from infinistore.client.memory.pins import HasSocket, Pins
from infinistore.client.memory.views import ReservationLink
from infinistore.client.movers.base import Closable, Mover, MoverSource
from infinistore.client.movers.channel import Channel, expect
from infinistore.client.movers.inline import InlineMover
from infinistore.client.operations.remote import RemoteOperations
from infinistore.client.options import Options
from infinistore.client.requests import store_closed_error
from infinistore.errors import ProtocolError
from infinistore.host import FORKED
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.messages import Hello, HelloReply
from infinistore.protocol.states import State

new_turn = threading.Lock
_LOOK_AGAIN_S = 1.0
"""An interrupted call may not have notified the waiting ones."""


class Turn(Protocol):
    """Something that is under way as long as it is locked."""

    def locked(self) -> bool:
        """Whether it is."""


class Limit(Protocol):
    """Until when a call may take."""

    deadline: float
    """On `time.monotonic`. Another thread may move it up, and wake the call."""


class Turns:
    """Limits the calls that run at a time; the others wait. Any thread may use it."""

    def __init__(self, most: int, look_again_s: float = _LOOK_AGAIN_S) -> None:
        self._most = most
        self._look_again_s = look_again_s
        self._lock = threading.Lock()
        self.under_way: dict[Turn, None] = {}
        self.waiting: dict[Turn, threading.Lock] = {}
        """Each with its bell: a lock that is taken until it rings.

        `queue.SimpleQueue` would not do: before Python 3.13, its `get` waits for ever
        if a signal handler runs in the middle of it until its time is up.
        """

    def begin(self, turn: Turn, limit: Limit) -> bool:
        """Wait until another call may begin. `turn` is its own, which it has locked.

        Returns whether an earlier call was found to have been interrupted.

        Raises:
            TimeoutError: the deadline has passed.
        """
        interrupted = False
        with self._lock:
            if self.under_way:  # usually by other threads
                interrupted = self._forget_interrupted()
            if len(self.under_way) < self._most:
                self.under_way[turn] = None
                return interrupted
        return self._wait(turn, limit) or interrupted

    def end(self, turn: Turn) -> None:
        """Say that a call is over, and was not interrupted."""
        self.under_way.pop(turn, None)
        if self.waiting:
            self.tell()

    @property
    def free(self) -> int:
        """How many calls could begin now."""
        with self._lock:
            self._forget_interrupted()
            return self._most - len(self.under_way)

    def wake(self) -> None:
        """Have all that wait look at their limits."""
        self._ring(every=True)

    def _wait(self, turn: Turn, limit: Limit) -> bool:
        bell = threading.Lock()
        bell.acquire()
        self.waiting[turn] = bell
        interrupted = False
        try:
            while True:
                with self._lock:
                    interrupted = self._forget_interrupted() or interrupted
                    if len(self.under_way) < self._most:
                        self.under_way[turn] = None
                        return interrupted
                left_s = limit.deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                bell.acquire(timeout=min(left_s, self._look_again_s))
        finally:
            with self._lock:  # so that nobody rings for a call that is gone
                self.waiting.pop(turn, None)
            if not bell.locked() and self.waiting:  # it rang, and may have meant another one
                self.tell()

    def _forget_interrupted(self) -> bool:
        """Forget the calls that ended without reporting it, under the lock."""
        # a copy, because others begin and end meanwhile
        found = [turn for turn in list(self.under_way) if not turn.locked()]
        for turn in found:
            self.under_way.pop(turn, None)
        return bool(found)

    def tell(self) -> None:
        """Wake one of the waiting calls."""
        self._ring(every=False)

    def _ring(self, *, every: bool) -> None:
        with self._lock:
            for turn, bell in list(self.waiting.items()):
                if not turn.locked():
                    self.waiting.pop(turn, None)  # it was interrupted
                elif bell.locked():
                    bell.release()
                    if not every:
                        break


_AnyStream = TypeVar("_AnyStream")


class Connection(Generic[_AnyStream]):
    """A stream and the conversation on it, for one call at a time."""

    def __init__(self, stream: _AnyStream, options: Options, clock: Callable[[], float]) -> None:
        self.stream = stream
        self.turn: Turn | None = None
        """The turn of its current or last call, see `Turns`. None: that call cannot be
        interrupted at arbitrary points."""
        self.passed_over: Sequence[MoverSource] = ()
        """Better transports that failed when it was made. It is replaced when one is
        due for another try."""
        self._options = options
        self.protocol = ClientConnection()
        self.pins = Pins(cast(HasSocket, stream), self.protocol)
        self.channel = Channel(self.protocol, self.pins, clock, verify=options.verify == "always")
        self.movers: Sequence[Mover] = ()
        """Those before inline."""
        self.mapped: Closable | None = None
        """Memory of the server that its movers have mapped, closed when the server has
        ended.
        """
        self.operations: RemoteOperations | None = None
        """What carries out requests, when it is open."""

    async def greet(self) -> HelloReply:
        """Say hello, once, before anything else.

        Raises:
            AuthenticationFailed: the token is missing or wrong.
            VersionMismatch: the server is of another version.
            LimitExceeded: the server has all the connections it takes.
            ProtocolError: what answers is no server of ours.
        """
        hello = Hello(name=self._options.name, token=self._options.token)
        request = self.protocol.request(hello, deadline_us=self.channel.remaining_us())
        reply = expect(HelloReply, await request)
        for name in ("max_body_bytes", "max_batch_keys", "max_batch_bytes", "max_value_bytes"):
            if not getattr(reply, name):
                raise ProtocolError(f"the server says that it takes nothing: its {name} is 0")
        self.channel.hello = reply
        return reply

    def open(self, movers: Sequence[Mover], path: tuple[str, str]) -> None:
        """Get ready for requests by these movers. `path`: the transport, and why."""
        self.channel.path = path
        self.movers = movers
        self.mapped = next((mover.mapped for mover in movers if mover.mapped is not None), None)
        self.operations = RemoteOperations(self.channel, [*movers, InlineMover(self.channel)])

    def close(self) -> None:
        """Free what its movers have. No byte moves after this.

        The stream is closed by its creator.
        """
        for mover in self.movers:
            mover.close()

    @property
    def usable(self) -> bool:
        """Return whether another request may follow.

        False while one is incomplete, or after it was given up then.
        """
        return (
            self.protocol.state is State.READY
            and self.operations is not None
            and not self.channel.holding
            and not self.pins.reserved
        )

    @property
    def at_rest(self) -> bool:
        """Whether no request is half-way."""
        return self.protocol.state is State.READY


_Stream = TypeVar("_Stream", bound=ClientStream)


class ConnectionPool(Generic[_Stream]):
    """The connections of one store. Any thread may use it."""

    def __init__(self) -> None:
        self.closed = ""
        """Why nothing can be done with the store any more; empty while it is open."""
        self.kept: set[Connection[_Stream]] = set()
        """Kept by reservations that are being written."""
        self.idle: list[Connection[_Stream]] = []
        self.pinned: list[Connection[_Stream]] = []  # not in use, but what was leased over them is still looked at
        self.connections: set[Connection[_Stream]] = set()
        self._lock = threading.Lock()  # of who takes one

    def check_open(self) -> None:
        """Raise `StoreUnavailable` if the store was closed, or opened before a fork."""
        if self.closed:
            raise store_closed_error(self.closed)

    def add(self, connection: Connection[_Stream]) -> None:
        """Take note of a connection that was made."""
        self.connections.add(connection)

    def take(self, pinning: bool, turn: Turn | None = None) -> Connection[_Stream] | None:
        """Return a connection that nobody uses, for the call with this turn; None if
        there is none.

        One with pins is for more of them, so that few connections have any: whatever
        else goes wrong on a connection closes it, and that has to wait for the pins.
        """
        try:  # other threads take from the lists, too
            if self.pinned:
                for connection in [connection for connection in self.pinned if not connection.pins.in_use]:
                    with self._lock:
                        self.pinned.remove(connection)  # from here on it is ours, and only now does it get no more pins
                        (self.pinned if connection.pins.in_use else self.idle).append(connection)
                if pinning and self.pinned:
                    with self._lock:  # so that it always belongs to somebody, or is in one of the lists
                        connection = self.pinned.pop()
                        connection.turn = turn
                    return connection
        except (ValueError, IndexError):
            pass
        try:
            with self._lock:
                connection = self.idle.pop()
                connection.turn = turn
        except IndexError:
            return None
        return connection

    def take_kept(self, kept: ReservationLink, turn: Turn | None) -> Connection[_Stream]:
        """Return a reservation's connection, for the call with this turn."""
        connection: Connection[_Stream] = kept.link
        connection.turn = turn
        kept.link = None
        self.kept.discard(connection)
        return connection

    def give_back(self, connection: Connection[_Stream]) -> None:
        """Have a connection back after a call."""
        if self.closed == FORKED:  # its socket is closed, and a thread that is not here may have its lock
            return
        pins = connection.pins
        for other in self.pinned:
            other.pins.flush()
        if pins.left:  # while it was in use
            pins.flush()
        if not connection.usable:
            self.close_connection(connection)
        elif pins.watching:
            self.pinned.append(connection)
        else:
            self.idle.append(connection)
        if self.closed:  # looked at last: another thread may be closing the store
            self.close_idle()
        elif connection.mapped is not None and connection.mapped.closed:
            self.close_lost()

    def leave(self, connection: Connection[_Stream], kept: ReservationLink | None, *, interrupted: bool) -> None:
        """Have a connection back after a call that was interrupted, or that began or
        ended a reservation.

        A reservation keeps its connection until it lets go of that, or is no more.
        """
        if interrupted:  # in the middle of anything
            self.close_connection(connection)
        elif kept is not None and connection.at_rest and connection.pins.reserved:
            self.kept.add(connection)
            kept.keep(connection, self._take_back)
            connection.turn = _Alive(kept)
        else:
            self.give_back(connection)

    def _take_back(self, connection: Connection[_Stream]) -> None:
        """Have a connection back whose reservation gives its room back by itself."""
        self.kept.discard(connection)
        connection.pins.reserved = False
        self.give_back(connection)

    def close(self) -> None:
        """Close idle connections now, the others when their calls are done."""
        self.closed = self.closed or "this store is closed; open another one"
        self.close_idle()

    def close_idle(self) -> None:
        """Close the connections that nobody uses."""
        while (connection := self.take(pinning=True)) is not None:
            self.close_connection(connection)

    def close_interrupted(self) -> None:
        """Close connections of interrupted calls, and of lost reservations."""
        if self.closed == FORKED:
            return
        with self._lock:  # nobody takes one meanwhile
            over = [one for one in list(self.connections) if not (one.turn and one.turn.locked())]
            at_hand = {*self.idle, *self.pinned}  # looked at last: a call gives its connection back before it is over
        for connection in over:
            if connection not in at_hand:
                self.kept.discard(connection)
                self.close_connection(connection)

    def shut_down(self, turn: Turn | None) -> None:
        """Break the connection that the call with this turn uses, so that it waits no
        longer. Any thread may. One that nobody uses any more is found to be broken.
        """
        with self._lock:  # nobody takes one meanwhile
            for connection in list(self.connections):
                if connection.turn is turn:
                    with suppress(OSError):  # it is closed already
                        connection.stream.socket.shutdown(SHUT_RDWR)

    def close_lost(self) -> None:
        """Close the unused connections to a server that has ended, and their mappings.

        Any thread may call it.
        """
        for connections in (self.idle, self.pinned):
            for connection in [one for one in connections if one.mapped is not None and one.mapped.closed]:
                try:
                    connections.remove(connection)
                except ValueError:  # a call has taken it just now, and will find that it leads nowhere
                    continue
                connection.close()
                self._close_unused(connection)

    def close_connection(self, connection: Connection[_Stream]) -> None:
        """Close a connection now, or when its last pin is gone."""
        connection.close()
        if not connection.pins.in_use:
            connection.stream.close()
            self.connections.discard(connection)
        else:
            self._close_unused(connection)

    def _close_unused(self, connection: Connection[_Stream]) -> None:
        """Close a connection once it has no pins. Any thread may; no call waits."""

        def close() -> None:
            connection.stream.socket.close()
            self.connections.discard(connection)

        connection.pins.close_after(close)
        connection.turn = _Closing()

    def let_go(self) -> None:
        """In a forked child: close the copies of the descriptors."""
        self.closed = FORKED
        for connection in self.connections:
            connection.stream.socket.close()


class _Alive:
    """Locked, like a turn, as long as something is alive."""

    def __init__(self, owner: object) -> None:
        self._owner: Callable[[], object] = weakref.ref(owner)

    def locked(self) -> bool:
        return self._owner() is not None


class _Closing:
    """Locked for ever: a connection that its last pin closes is nobody's to close."""

    def locked(self) -> bool:
        return True
