"""RDMA: the server reads and writes the client's registered memory. Its device, the
pool as the device knows it, and the requests of a client that moves blocks so.

The server posts every read and write. For a put it reads the client's registered memory
into the pool, for a get it writes out of the pool into that memory, and the reply
follows on the control stream. A transfer that fails has destroyed its queue pair when
its error is raised here: so room and pins may be given back at once, as everywhere
else. The pool is registered for this side only: no key exists that a peer could use.
"""

import logging
import mmap
from collections.abc import Sequence
from itertools import repeat
from operator import add
from typing import ClassVar

import attrs
import trio

from infinistore.config import ServerConfig
from infinistore.core.arena import Arena
from infinistore.core.clients import Lease
from infinistore.core.index import length_of
from infinistore.core.pool import Pool
from infinistore.errors import ConfigError, DeadlineExceeded, OutOfMemory, ProtocolError, TransferFailed
from infinistore.keys import check_distinct
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import (
    MISSING,
    Abort,
    Commit,
    CountReply,
    HelloReply,
    Message,
    PutReply,
    RdmaConnect,
    RdmaConnectReply,
    RdmaFetch,
    RdmaFill,
    RdmaGet,
    RdmaGetReply,
    RdmaPut,
    Release,
    Reserve,
)
from infinistore.protocol.server_connection import Received
from infinistore.protocol.versions import Capability
from infinistore.server.connection import Conversation, Holdings
from infinistore.server.movers.base import ConnectionMover, Mover
from infinistore.sizes import in_units
from infinistore.transports.rdma import ibverbs
from infinistore.transports.rdma.choice import near_address
from infinistore.transports.rdma.devices import Place
from infinistore.transports.rdma.memory import address_of
from infinistore.transports.rdma.plan import Placement, plan_transfer
from infinistore.transports.rdma.requester import Requester
from infinistore.transports.rdma.verbs import Device, Endpoint, NoRdma, Operation, Region

_log = logging.getLogger("infinistore.server")


def _remote_placement(addresses: Sequence[int], keys: Sequence[int]) -> Placement:
    """Return the places that a request names; one remote key stands for all addresses.

    Raises:
        ProtocolError: the columns do not fit, or a key has more than 32 bits.
    """
    if len(keys) == 1:
        keys = [keys[0]] * len(addresses)
    if len(keys) != len(addresses) or max(keys, default=0) >= 1 << 32:
        raise ProtocolError(f"{len(addresses)} addresses with {len(keys)} remote keys")
    return Placement(addresses, keys)


def _present_lengths(lease: Lease) -> list[int]:
    """Return the lengths of the blocks that are there."""
    return list(map(length_of, lease.pinned))


def packed(remote: Placement, lease: Lease) -> Placement:
    """Return the places of the present blocks, back to back in the request's span."""
    return end_to_end(remote.addresses[0], remote.keys[0], _present_lengths(lease))


def _of_present(remote: Placement, lease: Lease) -> Placement:
    """Return the places, of those of all blocks, of the blocks that are there."""
    if len(lease.pinned) == len(remote.addresses):
        return remote
    present = [i for i, entry in enumerate(lease.entries) if entry is not None]
    return Placement([remote.addresses[i] for i in present], [remote.keys[i] for i in present])


def end_to_end(address: int, key: int, lengths: Sequence[int]) -> Placement:
    """Return places of these lengths, back to back from `address` on."""
    addresses = []
    for length in lengths:
        addresses.append(address)
        address += length
    return Placement(addresses, [key] * len(addresses))


def cut(extents: Sequence[tuple[int, int, int]], first_byte: int, count: int) -> list[tuple[int, int, int]]:
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
        raise ProtocolError(f"{in_units(count)} from byte {first_byte} on, of a batch of {position}")
    return part


class RdmaPool:
    """A device, and the arenas of a pool, each registered once for local use."""

    def __init__(self, device: Device, *, dead_after_s: float) -> None:
        self.device = device
        self.dead_after_s = dead_after_s
        self._bases: list[int] = []
        self.regions: list[Region] = []
        """The registered memory of each arena, by its number."""
        # Where bytes are read that nobody looks at.
        self._scratch = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
        self._scratch_region = device.register(address_of(self._scratch), 1, remote=False)

    def add_arena(self, arena: Arena) -> None:
        """Register the next arena. Blocking, 0.1 s and more per GiB.

        Raises:
            NoRdma: the system does not allow it.
        """
        assert arena.index == len(self.regions)
        self.regions.append(self.device.register(arena.address, arena.length, remote=False))
        self._bases.append(arena.address)

    def placement(self, extents: Sequence[tuple[int, ...]]) -> Placement:
        """Return the placement of these extents, or entries, of the pool."""
        arenas = [extent[0] for extent in extents]
        offsets = [extent[1] for extent in extents]
        if arenas and arenas.count(arenas[0]) == len(arenas):
            base, key = self._bases[arenas[0]], self.regions[arenas[0]].local_key
            return Placement(list(map(add, offsets, repeat(base))), [key] * len(arenas))
        bases, regions = self._bases, self.regions
        addresses = [bases[arena] + offset for arena, offset in zip(arenas, offsets, strict=True)]
        return Placement(addresses, [regions[arena].local_key for arena in arenas])

    def scratch(self, count: int) -> Placement:
        """Return `count` placements of one byte, as targets of a read-back."""
        return Placement([address_of(self._scratch)] * count, [self._scratch_region.local_key] * count)

    def close(self) -> None:
        """Close the device; idempotent."""
        self.device.close()


def open_rdma(config: ServerConfig, pool: Pool) -> RdmaPool | None:
    """Open the device that the settings name, or the first that works, and register the
    pool. Blocking.

    None where that is not possible, with the reason in the log.

    Raises:
        ConfigError: it is not possible, and the settings require it.
    """
    device: Device | None = None
    try:
        device = ibverbs.open_device(
            config.dev_name,
            config.ib_port,
            config.link_type,
            config.hint_gid_index,
            near_address(config.host),
            place=None if config.numa_node is None else Place(numa_node=config.numa_node),
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


_ADDRESS_SPACE = 1 << 64
_MTUS = (256, 512, 1024, 2048, 4096)


class RdmaMover(Mover):
    """Available where the server has an RDMA device; `pool` is None without one."""

    name: ClassVar = "rdma"
    requests: ClassVar[tuple[type[Message], ...]] = (RdmaConnect, RdmaPut, RdmaGet, RdmaFill, RdmaFetch)

    def __init__(self, pool: RdmaPool | None) -> None:
        self.pool = pool
        self.descriptors_per_client = 0 if pool is None else 1

    def unavailable(self, conversation: Conversation) -> str:
        """RDMA needs a device, and a client whose blocks need no encryption."""
        if conversation.identity.require_tls:
            tenant = conversation.identity.tenant
            return (
                f"tenant {tenant} must come over TLS (require_tls in the tenants file), and RDMA encrypts no blocks; "
                "leave out device, transport=rdma and unencrypted_rdma"
            )
        return "this server has no RDMA; its log says why" if self.pool is None else ""

    def open(self, conversation: Conversation, holdings: Holdings) -> ConnectionMover:
        """Answer the requests of a client that connects a queue pair, or may."""
        assert self.pool is not None
        return _RdmaConnection(self.pool, conversation, holdings)

    def announce(self, hello: HelloReply) -> HelloReply:
        """Say which link the port has."""
        return hello if self.pool is None else attrs.evolve(hello, rdma=self.pool.device.link)

    def add_arena(self, arena: Arena) -> None:
        """Register a further arena. Blocking, 0.1 s and more per GiB.

        Raises:
            OutOfMemory: the system does not allow it.
        """
        if self.pool is not None:
            try:
                self.pool.add_arena(arena)
            except NoRdma as error:
                raise OutOfMemory(str(error)) from error

    def close(self) -> None:
        """Close the device."""
        if self.pool is not None:
            self.pool.close()


class _RdmaConnection(ConnectionMover):
    def __init__(self, pool: RdmaPool, conversation: Conversation, holdings: Holdings) -> None:
        self._pool = pool
        self._conversation = conversation
        self._core = conversation.core
        self._holdings = holdings
        self._requester: Requester | None = None
        self.handlers = {
            RdmaConnect: self._connect,
            RdmaPut: self._put,
            RdmaGet: self._get,
            RdmaFill: self._fill,
            RdmaFetch: self._fetch,
            Reserve: self._reserve,
        }
        self.quick = {
            Reserve: self._reserve_now,
            Commit: self._commit,
            Abort: self._abort,
            Release: self._release,
        }

    def close(self) -> None:
        """Destroy the queue pair."""
        if self._requester is not None:
            self._requester.close()

    def _check_connected(self, message: Message) -> Requester:
        if self._requester is None:
            raise ProtocolError(f"{type(message).__name__} before RdmaConnect")
        return self._requester

    async def _connect(self, connect: RdmaConnect, received: Received) -> None:
        peer = _checked_endpoint(connect)
        self.close()  # one at a time
        device = self._pool.device
        try:
            queue = device.create_queue(serves=True)
        except NoRdma as error:
            raise TransferFailed(str(error)) from error
        try:
            queue.connect(peer, dead_after_s=self._pool.dead_after_s)
        except BaseException:
            queue.close()
            raise
        self._requester = Requester(queue, device.limits.depth, device.place)
        own = queue.endpoint
        await self._conversation.reply(RdmaConnectReply(own.queue, own.packet, own.gid, own.lid, own.mtu, own.reads))
        self._conversation.transport = RdmaMover.name

    async def _put(self, put: RdmaPut, received: Received) -> None:
        self._check_connected(put)
        conversation = self._conversation
        check_distinct(put.keys)
        conversation.check_lengths(put.keys)
        count = len(put.keys)
        if not len(put.sizes) == len(put.addresses) == count or len(put.checksums) not in (0, count):
            raise ProtocolError(f"an RdmaPut of {count} keys with columns of other lengths")
        remote = _remote_placement(put.addresses, put.remote_keys)
        reservation = await conversation.reserve(put.sizes, received.deadline_us)
        try:
            local = self._pool.placement(reservation.extents)
            await self._move(Operation.READ, local, remote, put.sizes, received)
            checksums = put.checksums.tolist() if put.checksums else None
            skipped = self._core.commit(
                reservation, put.keys, checksums, replace=put.replace, free=False, ttl_s=put.ttl_us / 1e6
            )
            conversation.traffic.received_bytes += sum(put.sizes)
            await conversation.reply(PutReply(pack_u64(skipped)))
        finally:
            self._core.abort(reservation)  # does nothing after a commit
            self._core.free_replaced()

    async def _get(self, get: RdmaGet, received: Received) -> None:
        self._check_connected(get)
        conversation = self._conversation
        packs = get.region_bytes > 0
        if not packs and not len(get.capacities) == len(get.addresses) == len(get.keys):
            raise ProtocolError(f"an RdmaGet of {len(get.keys)} keys with columns of other lengths")
        if packs and len(get.addresses) != 1:
            raise ProtocolError(f"an RdmaGet into one span, with {len(get.addresses)} addresses")
        remote = _remote_placement(get.addresses, get.remote_keys)
        # Clients of the last release take no lease for a part of a batch.
        whole = packs and Capability.DISK not in conversation.connection.peer.capabilities
        lease = await conversation.lease(get, received, whole=whole)
        keeps = False
        try:
            lengths = lease.lengths
            total = sum(lengths)
            sizes = pack_u64(length or MISSING for length in lengths)
            checksums = pack_u64(lease.checksums)
            if total <= get.inline_bytes:
                reply = RdmaGetReply(sizes, checksums, inline=True)
                return await conversation.send_blocks(reply, lease.merged_views, received)
            if packs and total > get.region_bytes:
                number = self._holdings.keep(lease)
                keeps = True
                return await conversation.reply(RdmaGetReply(sizes, checksums, number))
            target = packed(remote, lease) if packs else _of_present(remote, lease)
            lengths = _present_lengths(lease)
            await self._move(Operation.WRITE, self._pool.placement(lease.pinned), target, lengths, received)
            if get.read_back:
                await self._read_back(target, lengths, received)
            conversation.traffic.sent_bytes += total
        finally:
            if not keeps:
                self._core.release(lease)
        return await conversation.reply(RdmaGetReply(sizes, checksums))

    async def _read_back(self, written: Placement, lengths: Sequence[int], received: Received) -> None:
        """Read the last byte that was written to each memory: a card does not let a
        read overtake writes.

        The client's card acknowledges a write when it has the data. Until the data has
        passed the bus to a GPU, the GPU may read old bytes, and the reply, which takes
        another path, may arrive earlier.
        """
        ends = dict(zip(written.keys, map(add, written.addresses, lengths), strict=True))
        last = Placement([end - 1 for end in ends.values()], list(ends))
        await self._move(Operation.READ, self._pool.scratch(len(last.keys)), last, [1] * len(last.keys), received)

    # Reservations that the server fills, and leases that it fetches from

    def _reserve_now(self, reserve: Reserve, received: Received, at_once: bool) -> Sequence[memoryview] | None:
        self._check_connected(reserve)
        reply = self._holdings.reserve_now(reserve.sizes, spare=reserve.spare)
        return None if reply is None else self._conversation.connection.begin_reply(reply)

    async def _reserve(self, reserve: Reserve, received: Received) -> None:
        await self._conversation.reply(await self._holdings.reserve(reserve.sizes, received))

    def _commit(self, commit: Commit, received: Received, at_once: bool) -> Sequence[memoryview]:
        self._check_connected(commit)
        self._holdings.check_filled(commit.reservation)
        return self._holdings.commit(commit, received, at_once)

    def _abort(self, abort: Abort, received: Received, at_once: bool) -> Sequence[memoryview]:
        self._check_connected(abort)
        return self._holdings.abort(abort, received, at_once)

    def _release(self, release: Release, received: Received, at_once: bool) -> Sequence[memoryview]:
        self._check_connected(release)
        return self._holdings.release(release, received, at_once)

    async def _fill(self, fill: RdmaFill, received: Received) -> None:
        self._check_connected(fill)
        reservation = self._holdings.reservation(fill.reservation)
        if fill.first_byte != self._holdings.filled_bytes(fill.reservation):
            raise ProtocolError("a reservation is filled from its first byte to its last, without gaps")
        await self._move_piece(Operation.READ, reservation.extents, fill, received)
        self._holdings.fill(fill.reservation, fill.length)

    async def _fetch(self, fetch: RdmaFetch, received: Received) -> None:
        self._check_connected(fetch)
        lease = self._holdings.lease(fetch.lease)
        await self._move_piece(Operation.WRITE, lease.extents, fetch, received)
        self._conversation.traffic.sent_bytes += fetch.length

    async def _move_piece(
        self,
        operation: Operation,
        extents: Sequence[tuple[int, int, int]],
        piece: RdmaFill | RdmaFetch,
        received: Received,
    ) -> None:
        part = cut(extents, piece.first_byte, piece.length)
        lengths = [length for _, _, length in part]
        remote = end_to_end(piece.address, piece.remote_key, lengths)
        await self._move(operation, self._pool.placement(part), remote, lengths, received)
        await self._conversation.reply(CountReply(piece.length))

    async def _move(
        self,
        operation: Operation,
        local: Placement,
        remote: Placement,
        lengths: Sequence[int],
        received: Received,
    ) -> None:
        requester = self._requester
        assert requester is not None
        longest = self._pool.device.limits.longest_bytes
        if lengths and max(remote.addresses) + max(lengths) > _ADDRESS_SPACE:
            raise ProtocolError("an address beyond the end of all memory")
        pieces = plan_transfer(local, remote, lengths, longest_bytes=longest)
        count = sum(lengths)
        with trio.move_on_after(self._conversation.limits.transfer_s(count, received.deadline_us)) as scope:
            await requester.move(operation, pieces)
        if scope.cancelled_caught:
            raise DeadlineExceeded(f"the {in_units(count)} had not been moved in time")


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
