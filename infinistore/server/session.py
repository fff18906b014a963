"""One connection, from hello to goodbye.

A session owns what its client has pinned in the core, and gives it back when the connection is over. Requests are
answered one after the other, so a slow reader slows nobody but itself; a pipelined request waits in the socket.
"""

import hmac
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import attrs
import trio

from infinistore.core.store import StoreCore
from infinistore.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    InfiniStoreException,
    InvalidRequest,
    ProtocolError,
    StoreUnavailable,
    TransferFailed,
)
from infinistore.keys import check_distinct
from infinistore.protocol.codec import numbers
from infinistore.protocol.connection import Received, State
from infinistore.protocol.messages import (
    MISSING,
    ErrorReply,
    Get,
    GetReply,
    Hello,
    HelloReply,
    MatchPrefix,
    MatchPrefixReply,
    Put,
    PutReply,
    Statistics,
    StatisticsReply,
    Touch,
    Tree,
)
from infinistore.server.conversation import Conversation, SessionLimits
from infinistore.server.growth import PoolGrowth
from infinistore.server.rdma import RdmaPool, RdmaRequest, RdmaRequests
from infinistore.server.read_tables import ReadTables
from infinistore.server.recorder import CANCELLED, OK, Recorder, outcome_of
from infinistore.server.requests import ANSWERS
from infinistore.server.shared_memory import SharedMemory, SharedMemoryRequest
from infinistore.transports.base import Stream, drive

__all__ = ["Service", "Session"]

_log = logging.getLogger("infinistore.server")
_DRAIN_BYTES = 16 * 1024 * 1024
_LINGER_S = 1.0


@attrs.frozen
class Service:
    """What all sessions of one server share. `token` is empty where everybody is welcome."""

    core: StoreCore
    hello: HelloReply
    limits: SessionLimits
    statistics: Callable[[bool], Awaitable[Tree]]
    """What answers a Statistics request, without or with details."""
    token: str = attrs.field(default="", repr=False)
    growth: PoolGrowth | None = None
    recorder: Recorder = attrs.field(factory=Recorder)
    shared_writes: bool = True
    """Whether clients that map the pool may write to it."""
    rdma: RdmaPool | None = None
    tables: ReadTables | None = None
    """What lets clients that map the pool read blocks that they know without asking."""


class Session:
    """Serves one stream until it ends. `run` returns when it is over, whatever the client did.

    `name` is for messages, until the client gives itself another; `transport` is what payload travels over.
    """

    def __init__(self, stream: Stream, service: Service, name: str, transport: str) -> None:
        self.name = name
        self.transport = transport
        self.connected_at = trio.current_time()
        self._stream = stream
        self._service = service
        self._core = service.core
        self._client = service.core.open_client(name)
        self._limits = service.limits
        self._conversation = Conversation(stream, service.core, self._client, service.limits, service.growth)
        self._connection = self._conversation.connection
        self.traffic = self._conversation.traffic
        self._scope = trio.CancelScope()
        self._finishing = False
        self._shared_memory = SharedMemory(self._conversation, writable=service.shared_writes, tables=service.tables)
        self._rdma = (
            None if service.rdma is None else RdmaRequests(self._conversation, self._shared_memory, service.rdma)
        )

    @property
    def pinned_bytes(self) -> int:
        """What the client has leased and reserved, by footprint."""
        return self._client.pinned_bytes

    def finish(self) -> None:
        """End the session after the request under way, at once if there is none."""
        self._finishing = True
        if self._connection.state in (State.HELLO, State.READY):
            self._scope.cancel()

    async def run(self) -> None:
        """Serve the stream until the client leaves, breaks the protocol, or `finish` is called."""
        try:
            await self._until_over()
            await self._until_quiet()
        finally:
            # What goes over the socket goes through this task, which is done. What the client does in mapped memory
            # ended with its end of the stream; or the server is going, and the memory with it. RDMA ends here.
            if self._rdma is not None:
                self._rdma.close()
            self._core.close_client(self._client)
            self._shared_memory.close()
            self._stream.close()

    async def _until_over(self) -> None:
        try:
            with self._scope:
                await self._converse()
        except StoreUnavailable as error:
            _log.debug("connection lost", extra={"client": self.name, "error": str(error)})
        except InfiniStoreException as error:
            # What an invalid request names may be a key, and keys are nobody's business above debug.
            why = type(error).__name__ if isinstance(error, InvalidRequest) else f"{type(error).__name__}: {error}"
            _log.info("connection closed", extra={"client": self.name, "transport": self.transport, "error": why})
            self.traffic.errors += 1
            await self._say_goodbye(error)
        except Exception:  # noqa: BLE001  # a fault of ours in one session must not end all the others
            _log.exception("internal error", extra={"client": self.name, "transport": self.transport})
            self.traffic.errors += 1
            await self._say_goodbye(InfiniStoreException("internal error of the server; its log has more"))

    async def _until_quiet(self) -> None:
        """Wait until a client that still holds room or pins in mapped memory cannot touch it any more.

        The end of its side of the stream proves that. Until then, however long it takes, nobody gets its room.
        """
        self._shared_memory.end_own_reads()
        if not self._stream.passes_descriptors or not self._client.pinned_bytes:
            return
        self._core.quarantine(self._client)
        with suppress(StoreUnavailable):
            await self._stream.send_eof()
            buffer = [memoryview(bytearray(64 * 1024))]
            while await self._stream.receive_into(buffer):
                pass

    async def _converse(self) -> None:
        await self._greet()
        traffic = self.traffic
        recorder = self._service.recorder
        logs_requests = _log.isEnabledFor(logging.DEBUG)
        while not self._finishing:
            received = await drive(self._connection.receive(), self._stream, stall_s=self._limits.grace_s)
            if received is None:
                return
            start = recorder.clock()
            traffic.requests += 1
            self._shared_memory.listen()
            bytes_before = traffic.received_bytes + traffic.sent_bytes
            traffic.received_bytes += received.payload_bytes
            outcome = CANCELLED
            try:
                outcome = await self._serve(received)
            except Exception as error:
                outcome = outcome_of(error)
                raise
            finally:
                moved_bytes = traffic.received_bytes + traffic.sent_bytes - bytes_before
                elapsed_s = recorder.clock() - start
                recorder.record(type(received.message), self.transport, outcome, moved_bytes, elapsed_s)
                if logs_requests:
                    self._log_request(received, outcome, moved_bytes, elapsed_s)

    def _log_request(self, received: Received, outcome: str, moved_bytes: int, elapsed_s: float) -> None:
        fields = {
            "client": self.name,
            "request": type(received.message).__name__,
            "outcome": outcome,
            "payload_bytes": moved_bytes,
            "elapsed_us": round(elapsed_s * 1e6),
        }
        _log.debug("request", extra=fields)

    async def _greet(self) -> None:
        """Exchange hellos. A stranger has little time to say who it is."""
        try:
            received = await self._conversation.drive(self._connection.receive(), self._limits.grace_s)
        except TimeoutError:
            raise DeadlineExceeded(f"no Hello came within {self._limits.grace_s:g} s") from None
        if received is None:
            raise StoreUnavailable("the client left before it said anything")
        assert isinstance(received.message, Hello)
        token = self._service.token
        if token and not hmac.compare_digest(token.encode(), received.message.token.encode()):
            raise AuthenticationFailed("this server wants a token; give the one that is in its --token-file")
        self.name = received.message.name or self.name
        await self._conversation.reply(self._service.hello)

    async def _serve(self, received: Received) -> str:
        """Answer a request; return its outcome."""
        message = received.message
        try:
            if (simple := ANSWERS.get(type(message))) is not None:
                await self._conversation.reply(await simple(message, self._core, self._client))
            elif isinstance(message, Put):
                await self._put(message, received)
            elif isinstance(message, Get):
                await self._get(message, received)
            elif isinstance(message, MatchPrefix):
                await self._match_prefix(message)
            elif isinstance(message, Touch):
                self._shared_memory.hear(message)
            elif isinstance(message, SharedMemoryRequest):
                await self._share(message, received)
            elif isinstance(message, RdmaRequest):
                await self._move_by_rdma(message, received)
            else:
                assert isinstance(message, Statistics)
                await self._conversation.reply(StatisticsReply(await self._service.statistics(message.details)))
        except (InvalidRequest, TransferFailed) as error:
            return await self._refuse(error, received)
        except (ProtocolError, StoreUnavailable):
            raise
        except ValueError as error:  # how the core refuses arguments
            return await self._refuse(InvalidRequest(str(error)), received)
        except InfiniStoreException as error:
            return await self._refuse(error, received)
        return OK

    async def _refuse(self, error: InfiniStoreException, received: Received) -> str:
        """Answer with an error, and keep the connection if the rest of the payload is short enough to wait for."""
        if self._connection.state is State.PAYLOAD:
            if self._connection.payload_left > _DRAIN_BYTES:
                raise error
            within_s = self._limits.transfer_s(received.payload_bytes, received.deadline_us)
            try:
                await self._conversation.drive(self._connection.discard_payload(), within_s)
            except TimeoutError:
                raise error from None
        if self._connection.state is not State.REPLYING:
            raise error
        self.traffic.errors += 1
        _log.debug("request refused", extra={"client": self.name, "error": f"{type(error).__name__}: {error}"})
        await self._conversation.reply(ErrorReply(error.code, str(error)[:1000]))
        return outcome_of(error)

    async def _put(self, put: Put, received: Received) -> None:
        check_distinct(put.keys)
        self._conversation.check_lengths(put.keys)
        reservation = await self._conversation.reserve(put.sizes, received.deadline_us)
        try:
            trailer = memoryview(numbers(bytes(8 * len(put.keys)) if put.checksums else b"")).cast("B")
            within_s = self._limits.transfer_s(received.payload_bytes, received.deadline_us)
            exchange = self._connection.read_payload([*reservation.merged_views, trailer])
            try:
                await self._conversation.drive(exchange, within_s)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{self._connection.payload_left} of {received.payload_bytes} bytes had not come in time"
                ) from None
            checksums = trailer.cast("Q").tolist() if put.checksums else None
            skipped = self._core.commit(reservation, put.keys, checksums, replace=put.replace, free=False)
            await self._conversation.reply(PutReply(numbers(skipped)))
        finally:
            self._core.abort(reservation)  # does nothing after a commit
            self._core.free_replaced(reservation)

    async def _get(self, get: Get, received: Received) -> None:
        lease = self._conversation.lease(get)
        try:
            sizes = [size or MISSING for size in lease.lengths]  # no value is empty: a length of 0 says there is none
            checksums = lease.checksums if get.checksums else ()
            await self._conversation.send_blocks(
                GetReply(numbers(sizes), numbers(checksums)), lease.merged_views, received
            )
        finally:
            self._core.release(lease)

    async def _share(self, message: SharedMemoryRequest, received: Received) -> None:
        if not self._stream.passes_descriptors:
            if self._rdma is None or not self._rdma.connected:
                raise ProtocolError("shared memory needs the server's Unix socket")
            self._rdma.check_order(message)
        await self._shared_memory.answer(message, received)

    async def _move_by_rdma(self, message: RdmaRequest, received: Received) -> None:
        if self._rdma is None:
            raise TransferFailed("this server has no RDMA; its log says why")
        await self._rdma.answer(message, received)
        self.transport = "rdma"

    async def _match_prefix(self, match: MatchPrefix) -> None:
        if match.hold_us:
            matched, hold = self._core.hold_prefix(self._client, match.keys, match.hold_us / 1e6)
            await self._conversation.reply(MatchPrefixReply(matched, hold))
            return
        matched = self._core.match_prefix(match.keys, touch=False)
        try:
            await self._conversation.reply(MatchPrefixReply(matched))
        finally:
            self._core.touch(match.keys[:matched])  # while the client reads the answer

    async def _say_goodbye(self, error: InfiniStoreException) -> None:
        """Tell the client why, and give it the time to read that: closing on unread bytes would reset the
        connection."""
        with trio.move_on_after(_LINGER_S):
            try:
                await self._conversation.drive(self._connection.reply_fatal(error))
                await self._stream.send_eof()
                buffer = [memoryview(bytearray(64 * 1024))]
                while await self._stream.receive_into(buffer):
                    pass
            except StoreUnavailable:
                pass  # it has gone
