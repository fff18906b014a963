"""The pins that a connection keeps at the server for memory in use, and their release.

A server takes the end of a client's stream as proof that its pins are no longer used.
So a connection with pins is not closed before the last of them is gone, whatever
happened to the store, the call or the server.
"""

import socket as sockets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import attrs

from infinistore.client.memory.views import Returns, Watch
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.codec import encode_head
from infinistore.protocol.messages import Abort, Release
from infinistore.protocol.shared_tables import HazardTable
from infinistore.protocol.states import State

_MOST_AT_ONCE = 128


class HasSocket(Protocol):
    """The part of a stream that pins need."""

    socket: sockets.socket


@attrs.define
class Owed:
    """What has to be done when memory is no longer in use."""

    messages: list[Release | Abort] = attrs.field(factory=list)
    """Messages to send."""
    hazards: list[int] = attrs.field(factory=list)
    """Entries to remove from the hazard table."""
    leased_bytes: int = 0
    """How many leased bytes this ends."""


class Pins(Returns[Owed]):
    """The pins of one connection over a Unix socket.

    Hold `pins.lock` with `with` around an exchange: finalizers do nothing meanwhile.
    """

    def __init__(self, stream: HasSocket, connection: ClientConnection) -> None:
        super().__init__()
        self._stream = stream
        self._connection = connection
        self.reserved = False
        """Whether a reservation is open that a caller means to commit."""
        self._close: Callable[[], None] | None = None
        self.hazards: HazardTable | None = None
        """Where this process pins blocks without a request, under the lock, if the
        server allows it."""
        self.leased_bytes = 0
        """How many bytes are leased over this connection, with or without a request."""

    def watch(self, owed: Owed) -> Watch:
        """Watch memory; when none of it is alive any more, do what `owed` says then.

        Call it only inside `with pins.lock`.
        """
        return Watch(self, owed)

    @property
    def in_use(self) -> bool:
        """Return whether memory that belongs to this connection is still alive."""
        return bool(self.watching)

    def close_after(self, close: Callable[[], None]) -> None:
        """Close the connection with `close` once it has no pins.

        This happens now, or later in a finalizer.
        """
        self._close = close
        with self.lock:
            self._close_if_done()
        self.flush()

    def give_back(self, things: Sequence[Owed]) -> int:
        """Do what is owed.

        What the server has no room for now is sent with the next call of the store.
        """
        try:
            return self._do(things)
        # Ctrl-C: how much was done is unknown; ending the connection does all of it
        except BaseException:
            self._connection.close()
            raise

    def _do(self, things: Sequence[Owed]) -> int:
        for owed in things:
            self.leased_bytes -= owed.leased_bytes
            owed.leased_bytes = 0
            while owed.hazards:
                assert self.hazards is not None
                self.hazards.remove(owed.hazards.pop())
        taken = 0
        while taken < len(things):
            some = things[taken : taken + _MOST_AT_ONCE]
            # If the connection has been given up, this is not waited for: its end does
            # all of it.
            if not self._send([message for owed in some for message in owed.messages]) and self._close is None:
                break
            taken += len(some)
        if taken == len(self.watching):
            self._close_now()
        return taken

    def _send(self, messages: Sequence[Release | Abort]) -> bool:
        """Send messages without waiting; False if there is no room for them now."""
        if not messages or self._connection.state not in (State.READY, State.REPLYING):
            # nothing can be sent after an incomplete frame: the connection is given up
            return True
        data = b"".join(encode_head(message, request_id=0) for message in messages)
        try:
            sent = self._stream.socket.send(data, sockets.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:  # the server is gone, and its pins with it
            return True
        # a Unix socket takes so few bytes as a whole or not at all; this is for safety
        if sent < len(data):
            self._connection.close()
        return True

    def _close_if_done(self) -> None:
        if not self.watching:
            self._close_now()

    def _close_now(self) -> None:
        close = self._close
        if close is not None:
            with suppress(OSError):
                close()
            self._close = None
            self.hazards = None
