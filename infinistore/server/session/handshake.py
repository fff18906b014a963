"""The handshake of a connection: from its first byte until its hello is accepted or
refused.

Anyone who reaches a port can open connections and send nothing, or half a hello. Such a
stranger does not count as a client. It gets a small buffer and little time, and there
are only so many of them: the next one closes the oldest, without an error, so that a
client that was only slow tries again. A session decides what a client may do.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import trio

from infinistore.access.identity import Credentials, Identity, UnixAccess
from infinistore.access.policy import Policy
from infinistore.access.tenants import SUCCESSOR
from infinistore.errors import (
    DeadlineExceeded,
    InfiniStoreException,
    InvalidRequest,
    StoreUnavailable,
    TlsFailed,
)
from infinistore.protocol.messages import Hello
from infinistore.protocol.server_connection import ServerConnection
from infinistore.server.budgets import LogBudget
from infinistore.server.connection import INTERNAL_ERROR, SessionLimits, linger, send_fatal_error
from infinistore.server.security import check_unix_peer, is_private, origin_of, present
from infinistore.transports.base import Stream, drive

if TYPE_CHECKING:
    from infinistore.transports.tls.trio_stream import TlsStream

_log = logging.getLogger("infinistore.server")
MOST_STRANGERS = 128
"""How many connections may be open that have not completed their hello."""
_Admitted = TypeVar("_Admitted")


class Handshakes:
    """The handshakes under way. `policy` says who is let in, and `unix_access` who may
    come by the Unix socket; None for whomever the kernel lets in.
    """

    def __init__(
        self,
        limits: SessionLimits,
        policy: Policy,
        log_budget: LogBudget,
        *,
        places: int,
        unix_access: UnixAccess | None = None,
    ) -> None:
        self._limits = limits
        self.policy = policy
        self._log_budget = log_budget
        self._places = places
        self._unix_access = unix_access
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

    def reopen(self) -> None:
        """Admit connections again."""
        self._closed = False

    def drop_oldest(self) -> None:
        """Close the oldest handshake, if there is one."""
        for oldest in self._strangers:
            oldest.cancel()
            del self._strangers[oldest]
            self.dropped += 1
            break

    async def perform(
        self,
        stream: Stream,
        name: str,
        transport: str,
        admit: Callable[[ServerConnection, Hello, Identity], _Admitted],
    ) -> _Admitted | None:
        """Receive a hello, and return what `admit` makes of the connection and of who
        is at its other end. The caller has to answer the hello.

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
        self,
        stream: Stream,
        name: str,
        transport: str,
        admit: Callable[[ServerConnection, Hello, Identity], _Admitted],
    ) -> _Admitted | None:
        limits = self._limits
        connection = ServerConnection(
            max_body_bytes=limits.max_body_bytes,
            max_payload_bytes=limits.max_payload_bytes,
            max_batch_keys=limits.max_batch_keys,
            read_ahead_bytes=limits.read_ahead_bytes,
        )
        audit = self.policy.audit
        where = {"origin": origin_of(stream), "transport": transport} if audit.listens else {}
        hello = None
        try:
            hello = await self._receive_hello(connection, stream)
            identity = self._identify(stream, hello)
            admitted = admit(connection, hello, identity)
            audit.note("login", tenant=identity.tenant, proof=identity.proof.value, says=hello.name, **where)
            return admitted
        except TlsFailed as error:
            self._log_budget.log(logging.INFO, "no TLS", client=name, error=str(error))
            audit.note("refused", reason=f"TlsFailed: {error}", **where)
            self.errors += 1
            await _part(connection, cast("TlsStream", stream), error)
        except StoreUnavailable as error:
            _log.debug("connection lost", extra={"client": name, "error": str(error)})
        except InfiniStoreException as error:
            why = type(error).__name__ if isinstance(error, InvalidRequest) else f"{type(error).__name__}: {error}"
            self._log_budget.log(logging.INFO, "connection closed", client=name, transport=transport, error=why)
            audit.note("refused", reason=why, says="" if hello is None else hello.name, **where)
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
        return hello

    def _identify(self, stream: Stream, hello: Hello) -> Identity:
        if self._unix_access is not None:
            check_unix_peer(stream, self._unix_access)
        if self.policy.looks_beyond_token or hello.token == SUCCESSOR:
            return self.policy.identify(present(stream, hello.token))
        return self.policy.identify(Credentials(hello.token, private=is_private(stream)))


async def _part(connection: ServerConnection, stream: "TlsStream", error: TlsFailed) -> None:
    """Give a client time to read why there is no TLS, in the clear if it has none."""
    if stream.session.peer_is_plain:
        await send_fatal_error(connection, stream.inner, error)
    else:  # OpenSSL has told it
        await linger(stream.inner)
