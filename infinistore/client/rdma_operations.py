"""The operations over RDMA: the server reads blocks out of this process's registered memory, and writes them into it.

Blocks in memory that the caller has registered are moved where they are. Others go through a staging buffer: in one
request if they fit, else piece by piece, which is atomic all the same, because the server keeps the room or the pin
meanwhile. What is small goes inline over the stream: one round trip, and nothing to set up.

When a call ends, however it ends, no byte of it moves any more: either its reply has come, or its queue pair is
destroyed. If a transfer fails, the stream still works, so the call goes on inline, unless the URL asks for RDMA alone.

Blocks in the memory of GPUs have no other way than RDMA, however small they are. They have no checksums either: this
process does not see them.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

from infinistore.client.copying import copy_blocks, hash_blocks
from infinistore.client.device_memory import DeviceBatch
from infinistore.client.operations import Batch
from infinistore.client.rdma import ClientRdma
from infinistore.client.remote_operations import Channel, RemoteOperations, Room, expect, skipped_keys
from infinistore.errors import DeadlineExceeded, DeviceMemoryUnreachable, ProtocolError, TransferFailed
from infinistore.protocol.codec import numbers
from infinistore.protocol.effects import Exchange, Pause
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
from infinistore.protocol.span import Span
from infinistore.transports.device_memory import DeviceMemory
from infinistore.transports.rdma_memory import Staging
from infinistore.transports.rdma_plan import Placement
from infinistore.transports.rdma_verbs import NoRdma, Queue

__all__ = ["RdmaOperations"]


class RdmaOperations(RemoteOperations):
    """The operations over one connection with a queue pair beside it."""

    def __init__(self, channel: Channel, *, rdma: ClientRdma, queue: Queue, inline_bytes: int) -> None:
        super().__init__(channel)
        self._rdma = rdma
        self._queue: Queue | None = queue
        self._inline_bytes = inline_bytes
        self._staged: Staging | None = None
        self._owed: Release | Abort | None = None
        """What gives back what the server keeps for the batch under way, if it keeps anything."""

    def close(self) -> None:
        """Destroy the queue pair: when this returns, nothing is read or written in this process for it."""
        queue, self._queue = self._queue, None
        staged, self._staged = self._staged, None
        if queue is not None:
            queue.close()
            self._rdma.release(staged)

    # Put

    def _put_part(self, batch: Batch, replace: bool) -> Exchange[list[str]]:
        if _is_on_device(batch.views):
            return (yield from self._put_from_device(batch, replace))
        if self._queue is not None and sum(map(len, batch.views)) > self._inline_bytes:
            try:
                return (yield from self._put_by_rdma(batch, replace))
            except (TransferFailed, DeadlineExceeded, NoRdma) as error:
                yield from self._give_up(error)
        return (yield from super()._put_part(batch, replace))

    def _put_by_rdma(self, batch: Batch, replace: bool) -> Exchange[list[str]]:
        sizes = list(map(len, batch.views))
        placement = self._rdma.memory.locate(batch.views, writable=False)
        if placement is not None:
            checksums = (yield from hash_blocks(batch.views)) if self._verify else []
            return (yield from self._put_at(batch.keys, sizes, placement, checksums, replace))
        staging = self._staging()
        if sum(sizes) > len(staging):
            return (yield from self._put_in_pieces(batch, sizes, staging, replace))
        checksums = yield from copy_blocks(batch.views, staging.views(sizes), hash_targets=self._verify)
        addresses = list(accumulate(sizes[:-1], initial=staging.span.address))
        placement = Placement(addresses, [staging.span.key])
        return (yield from self._put_at(batch.keys, sizes, placement, checksums, replace))

    def _put_at(
        self, keys: list[str], sizes: list[int], placement: Placement, checksums: list[int], replace: bool
    ) -> Exchange[list[str]]:
        put = RdmaPut(
            Keys(keys),
            numbers(sizes),
            numbers(placement.addresses),
            _one_if_same(placement.keys),
            numbers(checksums),
            replace,
        )
        reply = expect(PutReply, (yield from self._ask(put)))
        self._rdma.works()
        return skipped_keys(keys, reply)

    def _put_in_pieces(self, batch: Batch, sizes: list[int], staging: Staging, replace: bool) -> Exchange[list[str]]:
        reserved = expect(ReserveReply, (yield from self._ask(Reserve(numbers(sizes)))))
        self.holding = True
        self._owed = Abort(reserved.reservation)
        checksums = (yield from hash_blocks(batch.views)) if self._verify else []
        source = Span(batch.views)
        first = 0
        while source.remaining:
            count = 0
            for view in _next_views(source, len(staging)):
                staging.span.view[count : count + len(view)] = view
                count += len(view)
                yield Pause()
            fill = RdmaFill(reserved.reservation, first, count, staging.span.address, staging.span.key)
            expect(CountReply, (yield from self._ask(fill)))
            first += count
        commit = Commit(reserved.reservation, Keys(batch.keys), numbers(checksums), replace)
        reply = expect(PutReply, (yield from self._ask(commit)))
        self.holding = False
        self._owed = None
        self._rdma.works()
        return skipped_keys(batch.keys, reply)

    # Get

    def get_many_into(self, batch: Batch, all_or_nothing: bool) -> Exchange[list[int | None]]:
        """Read the batch into the caller's memory; return the stored lengths, None for what is missing.

        The server writes what is there before it tells what is not, so a batch that must be whole is looked up first.
        """
        if all_or_nothing and len(batch.keys) > 1:
            present = yield from self.exists_many(batch.keys)
            if not all(present):
                return [0 if there else None for there in present]
        return (yield from super().get_many_into(batch, all_or_nothing=False))

    def _get(
        self,
        keys: Sequence[str],
        views: Sequence[memoryview] | None,
        room: Room,
        capacities: Numbers | None = None,
    ) -> Exchange[None]:
        if views and _is_on_device(views):
            yield from self._get_to_device(keys, views, room)
            return
        first = 0
        while first < len(keys) and self._queue is not None:
            try:
                first += yield from self._get_by_rdma(keys, views, room, first)
            except (TransferFailed, DeadlineExceeded, NoRdma) as error:
                yield from self._give_up(error)
        if first < len(keys):
            rest = None if views is None else views[first:]
            left: Any = None if capacities is None else capacities[first:]
            yield from super()._get(keys[first:], rest, lambda sizes, index: room(sizes, index + first), left)

    def _get_by_rdma(
        self, keys: Sequence[str], views: Sequence[memoryview] | None, room: Room, first: int
    ) -> Exchange[int]:
        """Read a part of a batch that begins with key number `first`; return how many keys it had."""
        part = Keys(list(keys[first : first + self._hello.max_batch_keys]))
        wanted = None if views is None else views[first : first + len(part)]
        target = None if wanted is None else self._rdma.memory.locate(wanted, writable=True)
        capacities = numbers(() if wanted is None else map(len, wanted))
        staging: Staging | None = None
        if target is not None:
            get = RdmaGet(part, capacities, numbers(target.addresses), _one_if_same(target.keys), 0, self._inline_bytes)
        else:
            staging = self._staging()
            place = numbers([staging.span.address]), numbers([staging.span.key])
            get = RdmaGet(part, capacities, *place, len(staging), self._inline_bytes)
        reply = expect(RdmaGetReply, (yield from self._ask(get)))
        self.holding = bool(reply.lease)
        self._owed = Release(reply.lease) if reply.lease else None
        self._check_reply(get, reply)
        if len(reply.sizes) != len(part) and reply.lease:
            raise ProtocolError("a lease for a part of what was asked for")
        targets = room(reply.sizes, first)
        if reply.inline:
            yield from self._read_blocks(part, reply, targets)
            return len(reply.sizes)
        if staging is None:
            hashes = (yield from hash_blocks(targets)) if self._verify else []
        elif reply.lease:
            hashes = yield from self._fetch(reply, staging, targets)
        else:
            sources = staging.views(map(len, targets))
            hashes = yield from copy_blocks(sources, targets, hash_targets=self._verify)
        self._rdma.works()
        yield from self._check_hashes(part, reply, hashes)
        return len(reply.sizes)

    def _fetch(self, reply: RdmaGetReply, staging: Staging, targets: list[memoryview]) -> Exchange[list[int]]:
        span = Span(targets)
        first = 0
        while span.remaining:
            count = min(len(staging), span.remaining)
            fetch = RdmaFetch(reply.lease, first, count, staging.span.address, staging.span.key)
            expect(CountReply, (yield from self._ask(fetch)))
            span.copy_in(staging.span.view[:count])
            first += count
            yield Pause()
        yield from self._connection.notify(Release(reply.lease))
        self.holding = False
        self._owed = None
        return (yield from hash_blocks(targets)) if self._verify else []

    def _check_hashes(self, keys: Keys, reply: RdmaGetReply, hashes: list[int]) -> Exchange[None]:
        if not self._verify:
            return
        present = [i for i, size in enumerate(reply.sizes) if size != MISSING]
        pairs = zip(present, hashes, strict=True)
        bad = [keys[i] for i, found in pairs if reply.checksums[i] not in (NO_CHECKSUM, found)]
        yield from self._report(bad, len(present))

    # Memory of GPUs

    def put_device(self, batch: DeviceBatch, replace: bool) -> Exchange[list[str]]:
        """Put a batch that lies in registered memory of GPUs; return the keys that were skipped."""
        return (yield from self.put_many(_as_batch(batch), replace))

    def get_device_into(self, batch: DeviceBatch, all_or_nothing: bool) -> Exchange[list[int | None]]:
        """Read the batch into registered memory of GPUs; return the stored lengths, None for what is missing."""
        return (yield from self.get_many_into(_as_batch(batch), all_or_nothing))

    def _put_from_device(self, batch: Batch, replace: bool) -> Exchange[list[str]]:
        placement = self._locate(batch.views)
        try:
            return (yield from self._put_at(batch.keys, list(map(len, batch.views)), placement, [], replace))
        except (TransferFailed, DeadlineExceeded) as error:
            yield from self._give_up(error)
            raise DeviceMemoryUnreachable(f"{error}; nothing was stored") from error

    def _get_to_device(self, keys: Sequence[str], views: Sequence[memoryview], room: Room) -> Exchange[None]:
        first = 0
        while first < len(keys):
            part = Keys(list(keys[first : first + self._hello.max_batch_keys]))
            wanted = views[first : first + len(part)]
            target = self._locate(wanted)
            place = numbers(target.addresses), _one_if_same(target.keys)
            get = RdmaGet(part, numbers(map(len, wanted)), *place, read_back=True)
            try:
                reply = expect(RdmaGetReply, (yield from self._ask(get)))
            except (TransferFailed, DeadlineExceeded) as error:
                yield from self._give_up(error)
                raise DeviceMemoryUnreachable(str(error)) from error
            self._check_reply(get, reply)
            if reply.lease or (reply.inline and set(reply.sizes) != {MISSING}):
                raise ProtocolError("the server did not write to the memory that it was given")
            room(reply.sizes, first)
            first += len(reply.sizes)
            self._rdma.works()

    def _locate(self, views: Sequence[memoryview]) -> Placement:
        placement = self._rdma.device_memory.locate(cast("Sequence[DeviceMemory]", views))
        if placement is None:  # it was, when the call began
            raise DeviceMemoryUnreachable("the memory was unregistered")
        return placement

    # The queue pair

    def _staging(self) -> Staging:
        if self._staged is None:
            self._staged = self._rdma.take_staging()
        return self._staged

    def _give_up(self, error: TransferFailed | DeadlineExceeded | NoRdma) -> Exchange[None]:
        """Go on without RDMA after a failure, or raise it.

        The server's queue pair is destroyed already, but what it has sent may still be on the way, and the caller's
        memory is about to be used again: this side is destroyed before that.
        """
        self.close()
        self.holding = True  # so that the next call makes another connection
        self._rdma.failed(str(error))
        if isinstance(error, DeadlineExceeded) or (self._rdma.forced and isinstance(error, TransferFailed)):
            raise error
        if self._rdma.forced:
            raise TransferFailed(str(error)) from error
        if self._owed is not None:  # for the call that goes on: it may need that room
            yield from self._connection.notify(self._owed)
            self._owed = None


def _as_batch(batch: DeviceBatch) -> Batch:
    """The parts of an operation that only measure and cut the blocks are the same for both kinds of memory."""
    return Batch(batch.keys, cast("list[memoryview]", batch.blocks))


def _is_on_device(views: Sequence[memoryview]) -> bool:
    first: object = views[0]
    return type(first) is DeviceMemory


def _one_if_same(keys: Sequence[int]) -> Numbers:
    """Return the keys of the blocks' memory as they travel: a single one if all are the same."""
    return numbers(keys[:1] if keys and list(keys).count(keys[0]) == len(keys) else keys)


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
