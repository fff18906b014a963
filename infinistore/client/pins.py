"""What a connection keeps pinned at the server for memory that somebody looks at, and how that is given back.

A server takes the end of a client's stream as proof that nobody looks at its pins any more. So a connection with
pins is not closed before the last of them is gone, whatever became of the store, of the call or of the server.
"""

import socket as sockets
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from infinistore.client.in_place import Returns, Watch
from infinistore.protocol.codec import encode_head
from infinistore.protocol.connection import ClientConnection, State
from infinistore.protocol.messages import Abort, Release

__all__ = ["HasSocket", "Pins"]


class HasSocket(Protocol):
    """A stream, as far as it concerns its pins."""

    socket: sockets.socket


class Pins:
    """The pins of one connection by Unix socket. `with pins` around an exchange: finalizers send nothing meanwhile."""

    def __init__(self, stream: HasSocket, connection: ClientConnection) -> None:
        self._stream = stream
        self._connection = connection
        self._returns: Returns[list[Release | Abort]] = Returns(self._give_back)
        self._watched = 0
        self.reserved = False
        """Whether a reservation is open that somebody means to commit."""
        self._close: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._returns.acquire()

    def __exit__(self, *_: object) -> None:
        self._returns.release()

    def watch(self, owed: list[Release | Abort]) -> Watch:
        """Watch memory; when nothing of it is alive any more, send what is in `owed` then. Inside `with` only."""
        self._watched += 1
        return Watch(self._returns.leave, owed)

    @property
    def any(self) -> bool:
        """Whether memory that belongs to this connection is still alive."""
        return self._watched > 0

    def flush(self) -> None:
        """Send what could not be sent before, because the server had not read enough."""
        self._returns.flush()

    def close_after(self, close: Callable[[], None]) -> None:
        """Close the connection, with `close`, as soon as it has no pins: now, or from a finalizer."""
        with self._returns:
            self._close = close
            self._close_if_done()

    def _give_back(self, owed: list[Release | Abort]) -> bool:
        # In the middle of a frame nothing else can be sent. Such a connection is given up, and its end says it all.
        if owed and self._connection.state in (State.READY, State.REPLYING):
            try:
                # To a Unix socket so few bytes go as a whole, or not at all.
                self._stream.socket.send(
                    b"".join(encode_head(message, request_id=0) for message in owed), sockets.MSG_DONTWAIT
                )
            except BlockingIOError:
                if self._close is None:
                    return False
            except OSError:
                pass  # the server has gone, and its pins with it
        self._watched -= 1
        self._close_if_done()
        return True

    def _close_if_done(self) -> None:
        if self._close is not None and not self._watched:
            close, self._close = self._close, None
            with suppress(OSError):
                close()
