"""RDMA at the server: the device and its registered pool, and the requests of one connection that uses it.

The server drives. For a put it reads the client's registered memory into the pool, for a get it writes out of the pool
into it, and the reply follows on the control stream. The pool is registered for this side alone: no key to it exists
that a peer could use.

A transfer that fails has destroyed its queue pair when its error comes up here. So room and pins may be given back at
once, like everywhere else.
"""

import logging
import mmap
from collections.abc import Sequence
from itertools import repeat
from operator import add
from typing import TypeAlias

import trio

from infinistore.config import ServerConfig
from infinistore.core.arena import Arena
from infinistore.core.clients import Lease as CoreLease
from infinistore.core.pool import Pool
from infinistore.errors import ConfigError, DeadlineExceeded, ProtocolError, TransferFailed
from infinistore.keys import check_distinct
from infinistore.protocol.codec import numbers
from infinistore.protocol.connection import Received
from infinistore.protocol.messages import (
    MISSING,
    Abort,
    Commit,
    CountReply,
    Lease,
    MapArenas,
    MapTables,
    Prepare,
    PutReply,
    RdmaConnect,
    RdmaConnectReply,
    RdmaFetch,
    RdmaFill,
    RdmaGet,
    RdmaGetReply,
    RdmaPut,
)
from infinistore.server.conversation import Conversation
from infinistore.server.shared_memory import SharedMemory, SharedMemoryRequest
from infinistore.transports import rdma_verbs
from infinistore.transports.rdma_choice import near_address
from infinistore.transports.rdma_memory import address_of
from infinistore.transports.rdma_mover import RdmaMover
from infinistore.transports.rdma_plan import Placement, plan_transfer
from infinistore.transports.rdma_verbs import Device, Endpoint, NoRdma, Operation, Region

__all__ = ["RdmaPool", "RdmaRequest", "RdmaRequests", "open_rdma"]

_log = logging.getLogger("infinistore.server")
RdmaRequest: TypeAlias = RdmaConnect | RdmaPut | RdmaGet | RdmaFill | RdmaFetch
_ADDRESS_SPACE = 1 << 64
_MTUS = (256, 512, 1024, 2048, 4096)


class RdmaPool:
    """A device, and the arenas of a pool as it knows them: each registered once, when it is made, for local use."""

    def __init__(self, device: Device, *, dead_after_s: float) -> None:
        self.device = device
        self.dead_after_s = dead_after_s
        self._bases: list[int] = []
        self._regions: list[Region] = []
        # Where bytes are read that nobody looks at.
        self._scratch = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
        self._scratch_region = device.register(address_of(self._scratch), 1, remote=False)

    def add_arena(self, arena: Arena) -> None:
        """Register the next arena. Blocking, 0.1 s and more per GiB.

        Raises:
            NoRdma: the system does not allow it.
        """
        assert arena.index == len(self._regions)
        self._regions.append(self.device.register(arena.address, arena.length, remote=False))
        self._bases.append(arena.address)

    def placement(self, extents: Sequence[tuple[int, ...]]) -> Placement:
        """Where these extents, or entries, of the pool are."""
        arenas = [extent[0] for extent in extents]
        offsets = [extent[1] for extent in extents]
        if arenas and arenas.count(arenas[0]) == len(arenas):
            base, key = self._bases[arenas[0]], self._regions[arenas[0]].local_key
            return Placement(list(map(add, offsets, repeat(base))), [key] * len(arenas))
        bases, regions = self._bases, self._regions
        addresses = [bases[arena] + offset for arena, offset in zip(arenas, offsets, strict=True)]
        return Placement(addresses, [regions[arena].local_key for arena in arenas])

    def scratch(self, count: int) -> Placement:
        """One byte, as often as it is wanted, to read into what nobody will look at."""
        return Placement([address_of(self._scratch)] * count, [self._scratch_region.local_key] * count)

    def close(self) -> None:
        """Close the device; idempotent."""
        self.device.close()


def open_rdma(config: ServerConfig, pool: Pool) -> RdmaPool | None:
    """Open the device that the settings name, or the first that works, and register the pool. Blocking.

    None where that is not possible, with the reason in the log.

    Raises:
        ConfigError: it is not possible, and the settings require it.
    """
    device: Device | None = None
    try:
        device = rdma_verbs.open_device(
            config.dev_name, config.ib_port, config.link_type, config.hint_gid_index, near_address(config.host)
        )
        rdma = RdmaPool(device, dead_after_s=config.rdma_timeout_s)
        for arena in pool.arenas:
            rdma.add_arena(arena)
    except NoRdma as error:
        if device is not None:
            device.close()
        if config.require_rdma:
            raise ConfigError(f"--require-rdma: {error}") from None
        wanted = config.dev_name is not None
        _log.log(logging.WARNING if wanted else logging.INFO, "serving without RDMA", extra={"reason": str(error)})
        return None
    _log.info("serving RDMA", extra={"device": device.place, "reason": device.reason})
    return rdma


class RdmaRequests:
    """Answers one connection's requests for RDMA. `close` before anything that the client holds is given back."""

    def __init__(self, conversation: Conversation, shared: SharedMemory, rdma: RdmaPool) -> None:
        self._conversation = conversation
        self._core = conversation.core
        self._shared = shared
        self._rdma = rdma
        self._mover: RdmaMover | None = None
        self._filled: dict[int, int] = {}  # bytes, by the number of a reservation

    @property
    def connected(self) -> bool:
        """Whether the client has connected a queue pair."""
        return self._mover is not None

    async def answer(self, message: RdmaRequest, received: Received) -> None:
        """Do what a request asks for, and reply."""
        if isinstance(message, RdmaConnect):
            await self._connect(message)
        elif self._mover is None:
            raise ProtocolError(f"{type(message).__name__} before RdmaConnect")
        elif isinstance(message, RdmaPut):
            await self._put(message, received)
        elif isinstance(message, RdmaGet):
            await self._get(message, received)
        elif isinstance(message, RdmaFill):
            await self._fill(message, received)
        else:
            await self._fetch(message, received)

    def close(self) -> None:
        """Destroy the queue pair; idempotent."""
        if self._mover is not None:
            self._mover.close()

    async def _connect(self, connect: RdmaConnect) -> None:
        peer = _checked_endpoint(connect)
        self.close()  # one at a time
        device = self._rdma.device
        try:
            queue = device.create_queue(serves=True)
        except NoRdma as error:
            raise TransferFailed(str(error)) from error
        try:
            queue.connect(peer, dead_after_s=self._rdma.dead_after_s)
        except BaseException:
            queue.close()
            raise
        self._mover = RdmaMover(queue, device.limits.depth, device.place)
        own = queue.endpoint
        await self._conversation.reply(RdmaConnectReply(own.queue, own.packet, own.gid, own.lid, own.mtu, own.reads))

    async def _put(self, put: RdmaPut, received: Received) -> None:
        conversation = self._conversation
        check_distinct(put.keys)
        conversation.check_lengths(put.keys)
        count = len(put.keys)
        if not len(put.sizes) == len(put.addresses) == count or len(put.checksums) not in (0, count):
            raise ProtocolError(f"an RdmaPut of {count} keys with columns of other lengths")
        remote = _remote(put.addresses, put.remote_keys)
        reservation = await conversation.reserve(put.sizes, received.deadline_us)
        try:
            local = self._rdma.placement(reservation.extents)
            await self._move(Operation.READ, local, remote, put.sizes, received)
            checksums = put.checksums.tolist() if put.checksums else None
            skipped = self._core.commit(reservation, put.keys, checksums, replace=put.replace, free=False)
            conversation.traffic.received_bytes += sum(put.sizes)
            await conversation.reply(PutReply(numbers(skipped)))
        finally:
            self._core.abort(reservation)  # does nothing after a commit
            self._core.free_replaced(reservation)

    async def _get(self, get: RdmaGet, received: Received) -> None:
        conversation = self._conversation
        packs = get.region_bytes > 0
        if not packs and not len(get.capacities) == len(get.addresses) == len(get.keys):
            raise ProtocolError(f"an RdmaGet of {len(get.keys)} keys with columns of other lengths")
        if packs and len(get.addresses) != 1:
            raise ProtocolError(f"an RdmaGet into one span, with {len(get.addresses)} addresses")
        remote = _remote(get.addresses, get.remote_keys)
        lease = conversation.lease(get)
        keeps = False
        try:
            lengths = lease.lengths
            total = sum(lengths)
            sizes = numbers(length or MISSING for length in lengths)
            checksums = numbers(lease.checksums)
            if total <= get.inline_bytes:
                reply = RdmaGetReply(sizes, checksums, inline=True)
                return await conversation.send_blocks(reply, lease.merged_views, received)
            if packs and total > get.region_bytes:
                number = self._shared.keep(lease)
                keeps = True
                return await conversation.reply(RdmaGetReply(sizes, checksums, number))
            target = _packed(remote, lease) if packs else _scattered(remote, lease)
            lengths = _lengths(lease)
            await self._move(Operation.WRITE, self._rdma.placement(lease.pinned), target, lengths, received)
            if get.read_back:
                await self._read_back(target, lengths, received)
            conversation.traffic.sent_bytes += total
        finally:
            if not keeps:
                self._core.release(lease)
        return await conversation.reply(RdmaGetReply(sizes, checksums))

    async def _read_back(self, written: Placement, lengths: Sequence[int], received: Received) -> None:
        """Read the last byte that was written to each memory: a card does not let a read overtake writes.

        A write is acknowledged when the client's card has it. Until it has passed the bus to a GPU, the GPU may read
        what was there before, and the reply, which goes another way, may be quicker.
        """
        ends = dict(zip(written.keys, map(add, written.addresses, lengths), strict=True))
        last = Placement([end - 1 for end in ends.values()], list(ends))
        await self._move(Operation.READ, self._rdma.scratch(len(last.keys)), last, [1] * len(last.keys), received)

    def check_order(self, message: SharedMemoryRequest) -> None:
        """Refuse what only a client that maps the pool may ask for, and to commit what was not filled.

        Room that is new to a client holds what others had there before.
        """
        if isinstance(message, MapArenas | MapTables | Prepare | Lease):
            raise ProtocolError(f"{type(message).__name__} needs the server's Unix socket")
        if isinstance(message, Commit):
            extents = self._shared.open_reservation(message.reservation).extents
            missing = sum(length for _, _, length in extents) - self._filled.get(message.reservation, 0)
            if missing:
                raise ProtocolError(f"{missing} bytes of this reservation have not been filled")
        if isinstance(message, Commit | Abort):
            self._filled.pop(message.reservation, None)

    async def _fill(self, fill: RdmaFill, received: Received) -> None:
        reservation = self._shared.open_reservation(fill.reservation)
        if fill.first_byte != self._filled.get(fill.reservation, 0):
            raise ProtocolError("a reservation is filled from its first byte to its last, without gaps")
        await self._move_piece(Operation.READ, reservation.extents, fill, received)
        self._filled[fill.reservation] = fill.first_byte + fill.length

    async def _fetch(self, fetch: RdmaFetch, received: Received) -> None:
        lease = self._shared.open_lease(fetch.lease)
        await self._move_piece(Operation.WRITE, lease.extents, fetch, received)
        self._conversation.traffic.sent_bytes += fetch.length

    async def _move_piece(
        self,
        operation: Operation,
        extents: Sequence[tuple[int, int, int]],
        piece: RdmaFill | RdmaFetch,
        received: Received,
    ) -> None:
        part = _cut(extents, piece.first_byte, piece.length)
        lengths = [length for _, _, length in part]
        remote = _end_to_end(piece.address, piece.remote_key, lengths)
        await self._move(operation, self._rdma.placement(part), remote, lengths, received)
        await self._conversation.reply(CountReply(piece.length))

    async def _move(
        self,
        operation: Operation,
        local: Placement,
        remote: Placement,
        lengths: Sequence[int],
        received: Received,
    ) -> None:
        mover = self._mover
        assert mover is not None
        longest = self._rdma.device.limits.longest_bytes
        if lengths and max(remote.addresses) + max(lengths) > _ADDRESS_SPACE:
            raise ProtocolError("an address beyond the end of all memory")
        pieces = plan_transfer(local, remote, lengths, longest_bytes=longest)
        count = sum(lengths)
        with trio.move_on_after(self._conversation.limits.transfer_s(count, received.deadline_us)) as scope:
            await mover.move(operation, pieces)
        if scope.cancelled_caught:
            raise DeadlineExceeded(f"the {count} bytes had not been moved in time")


def _checked_endpoint(connect: RdmaConnect) -> Endpoint:
    digits = connect.gid
    sound = (
        len(digits) == 32
        and digits.isascii()
        and all(digit in "0123456789abcdef" for digit in digits)
        and connect.queue < 1 << 24
        and connect.packet < 1 << 24
        and connect.lid < 1 << 16
        and connect.mtu in _MTUS
        and 0 < connect.reads < 256
    )
    if not sound:
        raise ProtocolError("an RdmaConnect with numbers that no queue pair has")
    return Endpoint(connect.queue, connect.packet, digits, connect.lid, connect.mtu, connect.reads)


def _remote(addresses: Sequence[int], keys: Sequence[int]) -> Placement:
    if len(keys) == 1:
        keys = [keys[0]] * len(addresses)
    if len(keys) != len(addresses) or max(keys, default=0) >= 1 << 32:
        raise ProtocolError(f"{len(addresses)} addresses with {len(keys)} remote keys")
    return Placement(addresses, keys)


def _lengths(lease: CoreLease) -> list[int]:
    return [entry[2] for entry in lease.pinned]


def _packed(remote: Placement, lease: CoreLease) -> Placement:
    return _end_to_end(remote.addresses[0], remote.keys[0], _lengths(lease))


def _scattered(remote: Placement, lease: CoreLease) -> Placement:
    """The places of the blocks that are there."""
    if len(lease.pinned) == len(remote.addresses):
        return remote
    present = [i for i, entry in enumerate(lease.entries) if entry is not None]
    return Placement([remote.addresses[i] for i in present], [remote.keys[i] for i in present])


def _end_to_end(address: int, key: int, lengths: Sequence[int]) -> Placement:
    addresses = []
    for length in lengths:
        addresses.append(address)
        address += length
    return Placement(addresses, [key] * len(addresses))


def _cut(extents: Sequence[tuple[int, int, int]], first_byte: int, count: int) -> list[tuple[int, int, int]]:
    """Return what `count` bytes of these extents are, end to end, from `first_byte` on.

    Raises:
        ProtocolError: there are not so many.
    """
    part: list[tuple[int, int, int]] = []
    position = 0
    for arena, offset, length in extents:
        start, end = max(first_byte, position), min(first_byte + count, position + length)
        if start < end:
            part.append((arena, offset + start - position, end - start))
        position += length
    if not count or first_byte + count > position:
        raise ProtocolError(f"{count} bytes from byte {first_byte} on, of a batch of {position}")
    return part
