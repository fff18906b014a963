"""The connection pool of a store: its connections, and which calls use them."""

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from socket import SHUT_RDWR
from typing import Generic, TypeVar

from infinistore.client.connection.connection import Connection
from infinistore.client.connection.effects import ClientStream
from infinistore.client.connection.turns import Turn
from infinistore.client.memory.views import Kept
from infinistore.client.requests import closed
from infinistore.host import FORKED

__all__ = ["ConnectionPool"]

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
            raise closed(self.closed)

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

    def take_kept(self, kept: Kept, turn: Turn | None) -> Connection[_Stream]:
        """Return the connection of a reservation, to be used by the call with this
        turn.
        """
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

    def leave(self, connection: Connection[_Stream], kept: Kept | None, *, interrupted: bool) -> None:
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
        """Have a connection back that was kept for a reservation, whose room its
        finalizer gives back.
        """
        self.kept.discard(connection)
        connection.pins.reserved = False
        self.give_back(connection)

    def close(self) -> None:
        """Close the connections that nobody uses; the others are closed when their
        calls are done.
        """
        self.closed = self.closed or "this store is closed; open another one"
        self.close_idle()

    def close_idle(self) -> None:
        """Close the connections that nobody uses."""
        while (connection := self.take(pinning=True)) is not None:
            self.close_connection(connection)

    def close_interrupted(self) -> None:
        """Close the connections of calls that were interrupted, and of reservations
        that nobody can commit.
        """
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
        """Close a connection once it has no pins. Any thread may: no call waits
        on it.
        """

        def close() -> None:
            connection.stream.socket.close()
            self.connections.discard(connection)

        connection.pins.close_after(close)
        connection.turn = _Closing()

    def let_go(self) -> None:
        """In a forked child: close the copies of the descriptors, whoever used them in
        the parent.
        """
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
