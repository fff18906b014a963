"""A connection that has said hello, as every driver keeps it."""

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar, cast

from infinistore.client.mapped_pool import MappedPool
from infinistore.client.options import Options
from infinistore.client.pins import HasSocket, Pins
from infinistore.client.rdma import DEAD_AFTER_S, ClientRdma
from infinistore.client.rdma_operations import RdmaOperations
from infinistore.client.remote_operations import Channel, RemoteOperations
from infinistore.client.shared_memory import SharedMemoryOperations
from infinistore.errors import ProtocolError, TransferFailed
from infinistore.protocol.connection import ClientConnection, State
from infinistore.protocol.effects import Exchange
from infinistore.protocol.messages import Hello, HelloReply, RdmaConnect, RdmaConnectReply
from infinistore.transports.rdma_choice import near_address
from infinistore.transports.rdma_devices import Address
from infinistore.transports.rdma_verbs import Endpoint, NoRdma

__all__ = ["Link"]

_Stream = TypeVar("_Stream")


class Link(Generic[_Stream]):
    """A stream, the conversation on it, and what can be asked over it. One call uses it at a time.

    `deadline` is when the caller of the moment stops waiting, on `clock`.
    """

    def __init__(self, stream: _Stream, options: Options, clock: Callable[[], float]) -> None:
        self.stream = stream
        self.deadline = 0.0
        self.instead_of_rdma = False
        """Whether it goes another way because RDMA did not work."""
        self._options = options
        self._clock = clock
        self._connection = ClientConnection()
        self.pins = Pins(cast(HasSocket, stream), self._connection)
        self.operations: RemoteOperations
        """What can be asked, after the hello."""
        self._is_open = False

    def greet(self) -> Exchange[HelloReply]:
        """Say hello, once, before anything else.

        Raises:
            AuthenticationFailed: the token is missing or wrong.
            VersionMismatch: the server is of another version.
            LimitExceeded: the server has all the connections it takes.
            ProtocolError: what answers is no server of ours.
        """
        hello = Hello(name=self._options.name, token=self._options.token)
        reply = yield from self._connection.request(hello, deadline_us=self._remaining_us())
        assert isinstance(reply, HelloReply)
        for name in ("max_body_bytes", "max_batch_keys", "max_batch_bytes", "max_value_bytes"):
            if not getattr(reply, name):
                raise ProtocolError(f"the server says that it takes nothing: its {name} is 0")
        return reply

    def connect_queue(self, rdma: ClientRdma, hello: HelloReply, *, why: str = "") -> Exchange[None]:
        """Connect a queue pair, and get ready for calls by RDMA. `why` says why not by a better path.

        Raises:
            NoRdma: RDMA cannot be used; the connection can.
        """
        device = rdma.device_for(hello, self._own_address())
        queue = None
        try:
            queue = device.create_queue(serves=False)
            end = queue.endpoint
            request = RdmaConnect(end.queue, end.packet, end.gid, end.lid, end.mtu, end.reads)
            reply = yield from self._connection.request(request, deadline_us=self._remaining_us())
            assert isinstance(reply, RdmaConnectReply)
            queue.connect(
                Endpoint(reply.queue, reply.packet, reply.gid, reply.lid, reply.mtu, reply.reads),
                dead_after_s=DEAD_AFTER_S,
            )
        except BaseException as error:
            if queue is not None:
                queue.close()
            rdma.release(None)
            if not isinstance(error, NoRdma | TransferFailed):
                raise
            rdma.failed(str(error))
            raise NoRdma(str(error)) from error
        channel = self._channel(hello, ("rdma", f"by {device.place}{why}"))
        self.operations = RdmaOperations(channel, rdma=rdma, queue=queue, inline_bytes=self._options.inline_bytes)
        self._is_open = True

    def _own_address(self) -> Address | None:
        """The address of this machine that the server knows, because this connection comes from there."""
        with suppress(OSError):  # it may have been closed meanwhile; then the next request tells
            name = cast(HasSocket, self.stream).socket.getsockname()
            return near_address(name[0]) if isinstance(name, tuple) else None
        return None

    def close(self) -> None:
        """Let go of what it has besides its stream, which is closed by who made it. No byte moves after this."""
        if self._is_open:
            self.operations.close()

    def open(self, hello: HelloReply, path: tuple[str, str], pool: MappedPool | None) -> None:
        """Get ready for calls: by shared memory if there is a mapped pool. `path` names the transport, and why."""
        channel = self._channel(hello, path)
        if pool is None:
            self.operations = RemoteOperations(channel)
        else:
            self.operations = SharedMemoryOperations(
                channel, pool=pool, inline_bytes=self._options.inline_bytes, pins=self.pins
            )
        self._is_open = True

    def _channel(self, hello: HelloReply, path: tuple[str, str]) -> Channel:
        return Channel(self._connection, hello, self._options.verify == "always", path, self._remaining_us)

    @property
    def usable(self) -> bool:
        """Whether another request may follow. Not while one is half-way, nor after it was given up there."""
        return (
            self._connection.state is State.READY
            and self._is_open
            and not self.operations.holding
            and not self.pins.reserved
        )

    @property
    def at_rest(self) -> bool:
        """Whether no request is half-way."""
        return self._connection.state is State.READY

    def _remaining_us(self) -> int:
        # At least 1: 0 would mean that the caller waits for ever.
        return max(1, int((self.deadline - self._clock()) * 1e6))
