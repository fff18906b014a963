"""The handshake of a connection: from its first byte until its hello is accepted or
refused.

Anyone who reaches a port can open connections and send nothing, or half a hello. Such a
stranger does not count as a client. It gets a small buffer and little time, and there
are only so many of them: the next one closes the oldest, without an error, so that a
client that was only slow tries again. A session decides what a client may do.
"""

import hmac
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import trio

from infinistore.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    InfiniStoreException,
    InvalidRequest,
    StoreUnavailable,
    TlsFailed,
)
from infinistore.protocol.messages import Hello
from infinistore.protocol.server_connection import ServerConnection
from infinistore.server.budgets.log_budget import LogBudget
from infinistore.server.connection.conversation import INTERNAL_ERROR, SessionLimits, linger, send_fatal_error
from infinistore.transports.base import Stream, drive

if TYPE_CHECKING:
    from infinistore.transports.tls.trio_stream import TlsStream

__all__ = ["MOST_STRANGERS", "Handshakes"]

_log = logging.getLogger("infinistore.server")
MOST_STRANGERS = 128
"""How many connections may be open that have not completed their hello."""
_Admitted = TypeVar("_Admitted")


class Handshakes:
    """The handshakes under way. `token` is empty if no token is required."""

    def __init__(self, limits: SessionLimits, token: str, log_budget: LogBudget, *, places: int) -> None:
        self._limits = limits
        self._token = token
        self._log_budget = log_budget
        self._places = places
        self._strangers: dict[trio.CancelScope, None] = {}  # in the order in which they came
        self._closed = False
        self.dropped = 0
        """How many were closed to make room for others."""
        self.errors = 0
        """How many were refused for their hello, or sent none in time."""

    def __len__(self) -> int:
        return len(self._strangers)

    def close(self) -> None:
        """Refuse every connection that is not admitted yet, and all later ones."""
        self._closed = True
        for scope in self._strangers:
            scope.cancel()

    def drop_oldest(self) -> None:
        """Close the oldest handshake, if there is one."""
        for oldest in self._strangers:
            oldest.cancel()
            del self._strangers[oldest]
            self.dropped += 1
            break

    async def perform(
        self, stream: Stream, name: str, transport: str, admit: Callable[[ServerConnection, Hello], _Admitted]
    ) -> _Admitted | None:
        """Receive a hello, and return what `admit` makes of the connection. The caller
        has to answer the hello.

        Return None if there is nobody to serve; the stream is closed then. The client
        is told what `admit` raises.
        """
        scope = trio.CancelScope()
        if self._closed:
            scope.cancel()
        elif len(self._strangers) >= self._places:
            self.drop_oldest()
            self._log_budget.log(logging.INFO, "too many connections said no hello; the oldest was closed")
        self._strangers[scope] = None
        admitted = None
        try:
            with scope:
                admitted = await self._hear(stream, name, transport, admit)
        finally:
            self._strangers.pop(scope, None)
            if admitted is None:
                stream.close()
        return admitted

    async def _hear(
        self, stream: Stream, name: str, transport: str, admit: Callable[[ServerConnection, Hello], _Admitted]
    ) -> _Admitted | None:
        limits = self._limits
        connection = ServerConnection(
            max_body_bytes=limits.max_body_bytes,
            max_payload_bytes=limits.max_payload_bytes,
            read_ahead_bytes=limits.read_ahead_bytes,
        )
        try:
            return admit(connection, await self._receive_hello(connection, stream))
        except TlsFailed as error:
            self._log_budget.log(logging.INFO, "no TLS", client=name, error=str(error))
            self.errors += 1
            await _part(connection, cast("TlsStream", stream), error)
        except StoreUnavailable as error:
            _log.debug("connection lost", extra={"client": name, "error": str(error)})
        except InfiniStoreException as error:
            why = type(error).__name__ if isinstance(error, InvalidRequest) else f"{type(error).__name__}: {error}"
            self._log_budget.log(logging.INFO, "connection closed", client=name, transport=transport, error=why)
            self.errors += 1
            await send_fatal_error(connection, stream, error)
        except Exception:  # noqa: BLE001  # a fault of ours in one greeting must not end everything
            _log.exception("internal error", extra={"client": name, "transport": transport})
            self.errors += 1
            await send_fatal_error(connection, stream, InfiniStoreException(INTERNAL_ERROR))
        return None

    async def _receive_hello(self, connection: ServerConnection, stream: Stream) -> Hello:
        within_s = self._limits.grace_s
        try:
            received = await drive(connection.receive(), stream, within_s=within_s)
        except TimeoutError:
            raise DeadlineExceeded(f"no Hello came within {within_s:g} s") from None
        if received is None or self._closed:
            raise StoreUnavailable("the client left before it was served")
        hello = received.message
        assert isinstance(hello, Hello)
        if self._token and not hmac.compare_digest(self._token.encode(), hello.token.encode()):
            problem = "the token given is wrong" if hello.token else "this server wants a token, and none was given"
            raise AuthenticationFailed(f"{problem}; the right one is in the file of the server's --token-file")
        return hello


async def _part(connection: ServerConnection, stream: "TlsStream", error: TlsFailed) -> None:
    """Give a client time to read why there is no TLS. One that does not speak TLS is
    told in the clear.
    """
    if stream.session.peer_is_plain:
        await send_fatal_error(connection, stream.inner, error)
    else:  # OpenSSL has told it
        await linger(stream.inner)
