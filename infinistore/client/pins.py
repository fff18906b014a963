"""What a connection keeps pinned at the server for memory that somebody looks at, and how that is given back.

A server takes the end of a client's stream as proof that nobody looks at its pins any more. So a connection with
pins is not closed before the last of them is gone, whatever became of the store, of the call or of the server.
"""

import socket as sockets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import attrs

from infinistore.client.in_place import Returns, Watch
from infinistore.protocol.codec import encode_head
from infinistore.protocol.connection import ClientConnection, State
from infinistore.protocol.messages import Abort, Release
from infinistore.protocol.shared_tables import HazardTable

__all__ = ["HasSocket", "Owed", "Pins"]

_MOST_AT_ONCE = 128
_SEND_BUFFER_BYTES = 1024 * 1024  # the kernel gives less; room for hundreds of messages that the server has not read


class HasSocket(Protocol):
    """A stream, as far as it concerns its pins."""

    socket: sockets.socket


@attrs.define
class Owed:
    """What is to be done when memory is not looked at any more."""

    messages: list[Release | Abort] = attrs.field(factory=list)
    """To be sent."""
    hazards: list[int] = attrs.field(factory=list)
    """To be removed from the hazard table."""
    leased_bytes: int = 0
    """What is no longer leased then."""


class Pins(Returns[Owed]):
    """The pins of one connection by Unix socket. `with pins` around an exchange: finalizers do nothing meanwhile."""

    def __init__(self, stream: HasSocket, connection: ClientConnection) -> None:
        super().__init__()
        self._stream = stream
        self._connection = connection
        self._watched = 0
        self._has_room = False
        self.reserved = False
        """Whether a reservation is open that somebody means to commit."""
        self._close: Callable[[], None] | None = None
        self.hazards: HazardTable | None = None
        """Where this process pins blocks by itself, inside `with`, if the server lets it."""
        self.leased_bytes = 0
        """What is leased over this connection, however it was."""

    def watch(self, owed: Owed) -> Watch:
        """Watch memory; when nothing of it is alive any more, do what is in `owed` then. Inside `with` only."""
        if not self._has_room:
            self._has_room = True
            with suppress(OSError):
                self._stream.socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._watched += 1
        return Watch(self.leave, owed)

    @property
    def in_use(self) -> bool:
        """Whether memory that belongs to this connection is still alive."""
        return self._watched > 0

    def close_after(self, close: Callable[[], None]) -> None:
        """Close the connection, with `close`, as soon as it has no pins: now, or from a finalizer."""
        with self:
            self._close = close
            self._close_if_done()

    def give_back(self, things: Sequence[Owed]) -> int:
        """Do what is owed. What the server has no room for now is sent with the next call of the store."""
        for owed in things:
            self.leased_bytes -= owed.leased_bytes
            owed.leased_bytes = 0
            while owed.hazards:
                assert self.hazards is not None
                self.hazards.remove(owed.hazards.pop())
        taken = 0
        while taken < len(things):
            some = things[taken : taken + _MOST_AT_ONCE]
            # On a connection that is given up nobody waits for this: its end says it all.
            if not self._send([message for owed in some for message in owed.messages]) and self._close is None:
                break
            self._watched -= len(some)
            taken += len(some)
        self._close_if_done()
        return taken

    def _send(self, messages: Sequence[Release | Abort]) -> bool:
        """Send messages without waiting; False if there is no room for them now."""
        if not messages or self._connection.state not in (State.READY, State.REPLYING):
            return True  # in the middle of a frame nothing else can be sent, ever: the connection is given up
        data = b"".join(encode_head(message, request_id=0) for message in messages)
        try:
            sent = self._stream.socket.send(data, sockets.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:  # the server has gone, and its pins with it
            return True
        if sent < len(data):  # a Unix socket takes so few bytes as a whole or not at all, but if it ever did not
            self._connection.state = State.CLOSED
        return True

    def _close_if_done(self) -> None:
        if self._close is not None and not self._watched:
            close, self._close = self._close, None
            with suppress(OSError):
                close()
            self.hazards = None
