"""RDMA of a store: connects the queue pairs of its connections."""

from contextlib import suppress
from typing import Any

from infinistore.client.movers.base import CannotMove, MoverSource
from infinistore.client.movers.channel import Channel, expect
from infinistore.client.movers.rdma.device import DEAD_AFTER_S, StoreRdma
from infinistore.client.movers.rdma.mover import RdmaMover
from infinistore.client.movers.rdma.pause import RdmaPause
from infinistore.errors import TransferFailed
from infinistore.protocol.messages import RdmaConnect, RdmaConnectReply
from infinistore.protocol.versions import Capability
from infinistore.transports.rdma.choice import near_address
from infinistore.transports.rdma.devices import Address
from infinistore.transports.rdma.verbs import Endpoint, NoRdma

__all__ = ["RdmaSource"]


class RdmaSource(MoverSource):
    """Makes movers for connections to a server with an RDMA device of the same kind.

    The device is the store's, which closes it: memory is registered with it even where
    no connection moves blocks by it. `pause` is that of the server: where a transfer
    failed, other servers may still be reached by the same device.

    `asked_for` says that the caller named RDMA or a device. Else it is left alone where
    one side has no device.
    """

    name = "rdma"
    needs = Capability.RDMA

    def __init__(self, rdma: StoreRdma, pause: RdmaPause, inline_bytes: int, *, asked_for: bool) -> None:
        self.rdma = rdma
        self.pause = pause
        self._inline_bytes = inline_bytes
        self._asked_for = asked_for

    async def open(self, channel: Channel, stream: Any) -> RdmaMover:
        """Connect a queue pair, and make the mover that uses it."""
        rdma = self.rdma
        if not self._asked_for and not rdma.is_likely(channel.hello):
            raise CannotMove("")
        if not channel.hello.rdma:
            raise CannotMove("no RDMA: the server has no RDMA; its log says why", lasting=True)
        try:
            return await self._connect(channel, stream)
        except NoRdma as error:
            raise CannotMove(f"no RDMA: {error}") from error

    async def _connect(self, channel: Channel, stream: Any) -> RdmaMover:
        rdma = self.rdma
        if not rdma.forced:
            self.pause.check()
        device = rdma.take_device(*_addresses(stream))
        queue = None
        rests = self.pause
        try:
            if device.link != channel.hello.rdma:
                raise NoRdma(f"{device.place} is {device.link}, the server's port is {channel.hello.rdma}")
            rests = rdma.pause
            queue = device.create_queue(serves=False)
            rests = self.pause
            end = queue.endpoint
            request = RdmaConnect(end.queue, end.packet, end.gid, end.lid, end.mtu, end.reads)
            reply = expect(RdmaConnectReply, await channel.ask(request))
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
            rests.begin(str(error))
            raise NoRdma(str(error)) from error
        mover = RdmaMover(channel, rdma, self.pause, queue, self._inline_bytes)
        mover.place = f"by {device.place}"
        return mover

    @property
    def retry_is_due(self) -> bool:
        """Whether the pause is over, or bytes were moved by another connection."""
        return self.due

    @property
    def due(self) -> bool:
        """Whether a new connection should try it, if it can be had at all."""
        return not self.rdma.pause.resting and not self.pause.resting


def _addresses(stream: Any) -> tuple[Address | None, Address | None]:
    """The address of this machine that the server knows, because this connection comes
    from there, and that of the server.
    """
    with suppress(OSError, AttributeError):  # closed meanwhile: the next request tells; or simulated
        names = stream.socket.getsockname(), stream.socket.getpeername()
        own, peer = (near_address(name[0]) if isinstance(name, tuple) else None for name in names)
        return own, peer
    return None, None
