"""Blocks by RDMA: the server reads and writes this process's registered memory.

Blocks in memory that the caller has registered move from where they are. Others go
through a staging buffer: in one request if they fit, else piece by piece. Both are
atomic, because the server keeps the room or the pin until the end. Small batches go
inline over the stream: one round trip, and nothing to set up.

When a call ends, however it ends, no byte of it moves any more: either its reply has
come, or its queue pair is destroyed. If a transfer fails, the stream still works, so
the call goes on inline, unless the URL asks for RDMA alone.

Blocks in memory of GPUs have no other way than RDMA, however small they are. They have
no checksums either: this process does not see them.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

from infinistore.client.memory.copying import copy_blocks, hash_blocks
from infinistore.client.movers.base import GetPart, Mover, PutPart
from infinistore.client.movers.channel import Channel, expect
from infinistore.client.movers.inline import read_payload, skipped_keys
from infinistore.client.movers.rdma.device import StoreRdma
from infinistore.client.movers.rdma.pause import RdmaPause
from infinistore.errors import DeadlineExceeded, DeviceMemoryUnreachable, ProtocolError, TransferFailed
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.effects import Pause, Span
from infinistore.protocol.messages import (
    MISSING,
    NO_CHECKSUM,
    Abort,
    Commit,
    CountReply,
    Keys,
    Numbers,
    PutReply,
    RdmaFetch,
    RdmaFill,
    RdmaGet,
    RdmaGetReply,
    RdmaPut,
    Release,
    Reserve,
    ReserveReply,
)
from infinistore.transports.cuda import DeviceMemory
from infinistore.transports.rdma.memory import Staging
from infinistore.transports.rdma.plan import Placement
from infinistore.transports.rdma.verbs import NoRdma, Queue

__all__ = ["RdmaMover"]


class RdmaMover(Mover):
    """Moves the blocks of one connection by the queue pair beside it."""

    name = "rdma"
    writes_before_it_tells = True

    def __init__(self, channel: Channel, rdma: StoreRdma, pause: RdmaPause, queue: Queue, inline_bytes: int) -> None:
        self._channel = channel
        self._connection = channel.connection
        self._rdma = rdma
        self._pause = pause
        self._queue: Queue | None = queue
        self._inline_bytes = inline_bytes
        self._staged: Staging | None = None
        self._owed: Release | Abort | None = None
        """What gives back what the server keeps for the batch under way, if it keeps
        anything.
        """
        self.handlers = {PutPart: self.put, GetPart: self.get}

    def why_not(self, request: PutPart | GetPart) -> str:
        """Say why it cannot carry a part; empty if it can."""
        if request.on_device:
            return ""
        if self._queue is None:
            return "a transfer has failed on this connection"
        if isinstance(request, PutPart) and request.total_bytes <= self._inline_bytes:
            return "a small batch is quicker inline"
        return ""

    def close(self) -> None:
        """Destroy the queue pair: after this, it accesses no memory of this process."""
        queue, self._queue = self._queue, None
        staged, self._staged = self._staged, None
        if queue is not None:
            queue.close()
            self._rdma.release(staged)

    # Put

    async def put(self, part: PutPart) -> list[str] | None:
        """Put a part; None if RDMA has failed, and the part shall go another way."""
        if part.on_device:
            return await self._put_from_device(part)
        try:
            return await self._put_from_host(part)
        except (TransferFailed, DeadlineExceeded, NoRdma) as error:
            if not await self._goes_on_without(error):
                raise
        return None

    async def _put_from_host(self, part: PutPart) -> list[str]:
        placement = self._rdma.memory.locate(part.views, writable=False)
        verify = self._channel.verify
        if placement is not None:
            checksums = (await hash_blocks(part.views)) if verify else []
            return await self._put_at(part, placement, checksums)
        staging = self._staging()
        if part.total_bytes > len(staging):
            return await self._put_in_pieces(part, staging)
        checksums = await copy_blocks(part.views, staging.views(part.sizes), hash_targets=verify)
        addresses = list(accumulate(part.sizes[:-1], initial=staging.span.address))
        return await self._put_at(part, Placement(addresses, [staging.span.key]), checksums)

    async def _put_at(self, part: PutPart, placement: Placement, checksums: list[int]) -> list[str]:
        put = RdmaPut(
            Keys(part.keys),
            pack_u64(part.sizes),
            pack_u64(placement.addresses),
            _one_if_same(placement.keys),
            pack_u64(checksums),
            part.replace,
            part.ttl_us,
        )
        reply = expect(PutReply, await self._channel.ask(put))
        self._works()
        return skipped_keys(part.keys, reply)

    async def _put_in_pieces(self, part: PutPart, staging: Staging) -> list[str]:
        reserved = expect(ReserveReply, (await self._channel.ask(Reserve(pack_u64(part.sizes)))))
        self._channel.holding = True
        self._owed = Abort(reserved.reservation)
        checksums = (await hash_blocks(part.views)) if self._channel.verify else []
        source = Span(part.views)
        first = 0
        while source.remaining:
            count = 0
            for view in _next_views(source, len(staging)):
                staging.span.view[count : count + len(view)] = view
                count += len(view)
                await Pause()
            fill = RdmaFill(reserved.reservation, first, count, staging.span.address, staging.span.key)
            expect(CountReply, (await self._channel.ask(fill)))
            first += count
        commit = Commit(reserved.reservation, Keys(part.keys), pack_u64(checksums), part.replace, part.ttl_us)
        reply = expect(PutReply, (await self._channel.ask(commit)))
        self._channel.holding = False
        self._owed = None
        self._works()
        return skipped_keys(part.keys, reply)

    # Get

    async def get(self, part: GetPart) -> int | None:
        """Read a part; return how many of its keys were answered for, None if it shall
        go another way.
        """
        if part.on_device:
            return await self._get_to_device(part)
        try:
            return await self._get_to_host(part)
        except (TransferFailed, DeadlineExceeded, NoRdma) as error:
            if not await self._goes_on_without(error):
                raise
        return None

    async def _get_to_host(self, part: GetPart) -> int:
        keys, capacities, views, destination, first, verify, _ = part
        target = None if views is None else self._rdma.memory.locate(views, writable=True)
        staging: Staging | None = None
        if target is not None:
            get = RdmaGet(
                keys, capacities, pack_u64(target.addresses), _one_if_same(target.keys), 0, self._inline_bytes
            )
        else:
            staging = self._staging()
            place = pack_u64([staging.span.address]), pack_u64([staging.span.key])
            get = RdmaGet(keys, capacities, *place, len(staging), self._inline_bytes)
        reply = expect(RdmaGetReply, await self._channel.ask(get))
        self._channel.holding = bool(reply.lease)
        self._owed = Release(reply.lease) if reply.lease else None
        self._channel.check_reply(get, reply)
        targets = destination(reply.sizes, first)
        if reply.inline:
            await read_payload(self._channel, part.keys, reply, targets, verify=part.verify)
            return len(reply.sizes)
        if staging is None:
            hashes = (await hash_blocks(targets)) if verify else []
        elif reply.lease:
            await self._fetch(reply, staging, targets)
            hashes = (await hash_blocks(targets)) if verify else []
        else:
            sources = staging.views(map(len, targets))
            hashes = await copy_blocks(sources, targets, hash_targets=verify)
        self._works()
        if verify:
            await self._check_hashes(keys, reply, hashes)
        return len(reply.sizes)

    async def _fetch(self, reply: RdmaGetReply, staging: Staging, targets: list[memoryview]) -> None:
        span = Span(targets)
        first = 0
        while span.remaining:
            count = min(len(staging), span.remaining)
            fetch = RdmaFetch(reply.lease, first, count, staging.span.address, staging.span.key)
            expect(CountReply, (await self._channel.ask(fetch)))
            span.copy_in(staging.span.view[:count])
            first += count
            await Pause()
        await self._connection.notify(Release(reply.lease))
        self._channel.holding = False
        self._owed = None

    async def _check_hashes(self, keys: Keys, reply: RdmaGetReply, hashes: list[int]) -> None:
        present = [i for i, size in enumerate(reply.sizes) if size != MISSING]
        pairs = zip(present, hashes, strict=True)
        bad = [keys[i] for i, found in pairs if reply.checksums[i] not in (NO_CHECKSUM, found)]
        if bad:
            await self._channel.report(bad, len(present))

    # Memory of GPUs

    async def _put_from_device(self, part: PutPart) -> list[str]:
        placement = self._locate(part.views)
        try:
            return await self._put_at(part, placement, [])
        except (TransferFailed, DeadlineExceeded) as error:
            if not await self._goes_on_without(error):
                raise
            raise DeviceMemoryUnreachable(f"{error}; nothing was stored") from error

    async def _get_to_device(self, part: GetPart) -> int:
        assert part.views is not None
        target = self._locate(part.views)
        place = pack_u64(target.addresses), _one_if_same(target.keys)
        get = RdmaGet(part.keys, part.capacities, *place, read_back=True)
        try:
            reply = expect(RdmaGetReply, await self._channel.ask(get))
        except (TransferFailed, DeadlineExceeded) as error:
            if not await self._goes_on_without(error):
                raise
            raise DeviceMemoryUnreachable(str(error)) from error
        self._channel.check_reply(get, reply)
        if reply.lease or (reply.inline and set(reply.sizes) != {MISSING}):
            raise ProtocolError("the server did not write to the memory that it was given")
        part.destination(reply.sizes, part.first)
        self._works()
        return len(reply.sizes)

    def _locate(self, views: Sequence[memoryview]) -> Placement:
        placement: Placement | None = self._rdma.device_memory.locate(cast("Sequence[DeviceMemory]", views))
        # it was registered when the call began
        if placement is None:
            raise DeviceMemoryUnreachable("the memory was unregistered")
        return placement

    # The queue pair

    def _works(self) -> None:
        """Note that bytes were moved."""
        self._pause.end()
        self._rdma.pause.end()

    def _staging(self) -> Staging:
        if self._staged is None:
            self._staged = self._rdma.take_staging()
        return self._staged

    async def _goes_on_without(self, error: TransferFailed | DeadlineExceeded | NoRdma) -> bool:
        """Give up RDMA after a failure; False if the call cannot continue without it.

        Then the caller gets the failure. The server's queue pair is destroyed already,
        but what it has sent may still be on the way, and the caller's memory is about
        to be used again: so this side is destroyed first.
        """
        self.close()
        self._channel.holding = True  # so that the next call makes another connection
        if not isinstance(error, NoRdma):  # else it is the device that failed, which has noted that
            self._pause.begin(str(error))
        if isinstance(error, DeadlineExceeded) or (self._rdma.forced and isinstance(error, TransferFailed)):
            return False
        if self._rdma.forced:
            raise TransferFailed(str(error)) from error
        if self._owed is not None:  # for the call that goes on: it may need that room
            await self._connection.notify(self._owed)
            self._owed = None
        return True


def _one_if_same(keys: Sequence[int]) -> Numbers:
    """Return the keys of the blocks' memory to send: a single one if all are equal."""
    return pack_u64(keys[:1] if keys and list(keys).count(keys[0]) == len(keys) else keys)


def _next_views(span: Span, most_bytes: int) -> list[memoryview]:
    """Take views of what comes next, up to so many bytes."""
    views: list[memoryview] = []
    room = min(most_bytes, span.remaining)
    while room:
        some = span.next_views(room)
        count = sum(map(len, some))
        span.advance(count)
        views += some
        room -= count
    return views
