"""Requests over one connection: cut to the server's limits, handed to its movers."""

import re
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from operator import not_
from typing import Any, ClassVar, TypeAlias

from infinistore.client import requests
from infinistore.client.memory.views import Leased, PrivateBlocks, ReservedRoom, private_room
from infinistore.client.movers.base import Destination, GetPart, Handler, Mover, PutPart
from infinistore.client.movers.channel import Channel, expect
from infinistore.client.movers.inline import InlineMover
from infinistore.client.movers.new_blocks import NewBlocks
from infinistore.client.requests import Batch, Followed, FollowRemovalsOfNodes, followed
from infinistore.errors import (
    DeviceMemoryUnreachable,
    DiskFailed,
    LimitExceeded,
    ProtocolError,
    ServerReplaced,
    StoreUnavailable,
    ValueTooLarge,
    VersionMismatch,
)
from infinistore.kept_errors import KeptError
from infinistore.protocol.codec import pack_u64, statistics_from_tree
from infinistore.protocol.messages import (
    MISSING,
    REPLIES,
    BatchRequest,
    CountingRequest,
    Exists,
    Found,
    KeyedRequest,
    Keys,
    KeysReply,
    ListKeys,
    Matched,
    MatchPrefix,
    MatchPrefixReply,
    Numbers,
    Pin,
    Prefetch,
    Prefetched,
    PrefetchReply,
    ReleaseHold,
    Statistics,
    StatisticsReply,
    StoreRequest,
)
from infinistore.protocol.versions import Capability
from infinistore.sizes import in_units
from infinistore.statistics import Stats


@contextmanager
def not_all_over(done: int) -> Iterator[None]:
    """Around one part: let nobody begin the call again if parts of it are `done`."""
    try:
        yield
    except ServerReplaced as error:
        if not done:
            raise
        raise StoreUnavailable(f"{error}; earlier parts of the batch are") from error


def cuts(sizes: Sequence[int], most_keys: int, most_bytes: int) -> list[tuple[int, int]]:
    """Cut a batch into parts within the limits, of one block at least."""
    cuts: list[tuple[int, int]] = []
    first = 0
    part_bytes = 0
    for index, size in enumerate(sizes):
        if index > first and (index - first == most_keys or part_bytes + size > most_bytes):
            cuts.append((first, index))
            first, part_bytes = index, 0
        part_bytes += size
    if sizes:
        cuts.append((first, len(sizes)))
    return cuts


def check_ttl(channel: Channel, ttl_us: int) -> None:
    """Raise VersionMismatch if blocks shall end and the server cannot end them."""
    if ttl_us and Capability.RETENTION not in channel.connection.peer.capabilities:
        raise VersionMismatch(
            "the server's release knows no time to live; put without ttl_s, or install this release there, too"
        )


_Routes: TypeAlias = Sequence[tuple[Callable[[Any], str], Handler]]
_NO_CAPACITIES = pack_u64()
_HOLD_ID = re.compile("[0-9a-f]{1,16}")
_new = tuple.__new__  # makes a named tuple without the call of a Python function


_Carry: TypeAlias = Callable[[Any, Any], Coroutine[Any, Any, Any]]


def _of_messages(ask: _Carry, ask_in_parts: _Carry) -> dict[type[Any], _Carry]:
    """Return what carries out each request that is a message and needs no more than
    that."""
    messages = [kind for kind in REPLIES if issubclass(kind, StoreRequest)]
    return {kind: ask_in_parts if issubclass(kind, CountingRequest | KeyedRequest) else ask for kind in messages}


class RemoteOperations:
    """Carries out requests over one connection, by its movers in order of preference.

    A batch over the server's limits goes in parts; each part is atomic.
    """

    def __init__(self, channel: Channel, movers: Sequence[Mover]) -> None:
        self._channel = channel
        self._new_blocks = NewBlocks()
        self.movers = movers
        kinds = {kind for mover in movers for kind in mover.handlers}
        self._routes: dict[type[Any], _Routes] = {kind: _routes(movers, kind) for kind in kinds}
        self._put_routes = self._routes[PutPart]
        self._get_routes = self._routes[GetPart]
        self._lookups_first = any(mover.writes_before_it_tells for mover in movers)
        # A single block goes without being a part, where nothing else would carry it.
        self._puts_inline = movers[-1] if isinstance(movers[-1], InlineMover) else None
        self._gets_inline = self._puts_inline if len(movers) == 1 else None
        self._puts_inline_bytes = min((mover.inline_bytes for mover in movers[:-1]), default=sys.maxsize)

    async def _carry(self, routes: _Routes, request: Any) -> Any:
        """Hand a request to the first mover that can carry it; None if none does."""
        for why_not, handler in routes:
            if not why_not(request):
                result = await handler(request)
                if result is not None:
                    return result
        if isinstance(request, PutPart | GetPart):  # inline carries all but memory of GPUs
            raise self._unreachable(request)
        return None

    def why_not(self, request: Any) -> dict[str, str]:
        """Say why each mover cannot carry a request or a part; empty if it can."""
        return {
            mover.name: mover.why_not(request) if type(request) in mover.handlers else "it has no part in this"
            for mover in self.movers
        }

    # Put

    async def put(self, request: requests.Put, *, on_device: bool = False) -> list[str]:
        """Store a batch; return the keys that were skipped because they were there."""
        batch, replace, ttl_us = request.batch, request.replace, request.ttl_us
        keys, views = batch
        hello = self._channel.hello
        most = min(hello.max_value_bytes, hello.max_batch_bytes, self._puts_inline_bytes)
        if self._puts_inline and len(keys) == 1 and replace and not (ttl_us or on_device) and len(views[0]) <= most:
            return await self._puts_inline.put_one(keys, views[0])
        total = sum(sizes := list(map(len, views)))
        if max(sizes, default=0) > hello.max_value_bytes:
            self._refuse_sizes(keys, sizes)
        if ttl_us:
            check_ttl(self._channel, ttl_us)
        if not replace:
            return await self._put_missing(batch, on_device=on_device, ttl_us=ttl_us, since=request.since)
        if len(keys) > hello.max_batch_keys or total > hello.max_batch_bytes or not keys:
            return await self._put_in_parts(batch, sizes, replace=True, on_device=on_device, ttl_us=ttl_us)
        part = _new(PutPart, (keys, views, sizes, total, True, on_device, ttl_us))
        return await self._carry(self._put_routes, part)  # type: ignore[no-any-return]

    async def put_from_device(self, request: requests.PutFromDevice) -> list[str]:
        """Store a batch that lies in memory of GPUs."""
        views: Any = request.batch.blocks
        put = requests.Put(Batch(request.batch.keys, views), request.replace, request.ttl_us)
        return await self.put(put, on_device=True)

    async def _put_missing(self, batch: Batch, *, on_device: bool, ttl_us: int, since: int) -> list[str]:
        """Store what is not there yet, without moving the bytes of what is."""
        if since and Capability.COPIES not in self._channel.connection.peer.capabilities:
            raise VersionMismatch("the server's release takes no copies; install this release there, too")
        present = await self.ask_in_parts(Exists(Keys(batch.keys), touch=True), backwards=True)
        missing = batch.where(map(not_, present))
        skipped = list(compress(batch.keys, present))
        if missing.keys:
            sizes = list(map(len, missing.views))
            skipped += await self._put_in_parts(
                missing, sizes, replace=False, on_device=on_device, ttl_us=ttl_us, since=since
            )
            if len(missing.keys) < len(batch.keys):  # what was there already must not end colder than what follows it
                await self.ask_in_parts(Exists(Keys(batch.keys), touch=True), backwards=True)
        return skipped

    async def _put_in_parts(
        self, batch: Batch, sizes: list[int], *, replace: bool, on_device: bool, ttl_us: int, since: int = 0
    ) -> list[str]:
        skipped: list[str] = []
        hello = self._channel.hello
        for first, end in cuts(sizes, hello.max_batch_keys, hello.max_batch_bytes):
            some = sizes[first:end]
            part = PutPart(batch.keys[first:end], batch.views[first:end], some, sum(some), replace, on_device, ttl_us)
            with not_all_over(first):
                if since:
                    skipped += await InlineMover(self._channel).put(part, since)
                else:
                    skipped += await self._carry(self._put_routes, part)
        return skipped

    def _refuse_sizes(self, keys: Sequence[str], sizes: Sequence[int]) -> None:
        limit = self._channel.hello.max_value_bytes
        key, size = next((key, size) for key, size in zip(keys, sizes, strict=True) if size > limit)
        raise ValueTooLarge(
            f"the value of {key[:100]!r} has {in_units(size)}; this store takes at most {in_units(limit)}"
        )

    # Get

    async def get(self, request: requests.Get) -> list[bytearray | None]:
        """Read a batch into new memory; None for what is missing."""
        values: list[bytearray | None] = []

        def destination(sizes: Sequence[int], first: int) -> list[memoryview]:
            values[first:] = self._new_blocks.of(sizes)
            return [memoryview(value) for value in values[first:] if value is not None]

        await self._get(request.keys, destination)
        return values

    async def get_into(self, request: requests.GetInto) -> list[int | None]:
        """Read a batch into memory; return the stored lengths, None if missing."""
        batch = request.batch
        if self._gets_inline and len(batch.keys) == 1:
            return [await self._gets_inline.get_one(batch.keys, batch.views[0])]
        return await self._get_into(batch, request.all_or_nothing)

    async def get_to_device(self, request: requests.GetToDevice) -> list[int | None]:
        """Read a batch into memory of GPUs; return stored lengths, None if missing."""
        views: Any = request.batch.blocks
        return await self._get_into(Batch(request.batch.keys, views), request.all_or_nothing, on_device=True)

    async def _get_into(self, batch: Batch, all_or_nothing: bool, *, on_device: bool = False) -> list[int | None]:
        keys, views = batch
        if all_or_nothing and self._lookups_first and len(keys) > 1:
            all_or_nothing = False
            present = await self.exists(Exists(Keys(keys)))
            if not all(present):
                return [0 if there else None for there in present]
        lengths: list[int | None] = []
        capacities = pack_u64(map(len, views))

        def destination(sizes: Sequence[int], first: int) -> list[memoryview]:
            if first == 0 and sizes == capacities:  # all are there, and of the expected length
                lengths[:] = sizes
                return views
            lengths[first:] = [None if size == MISSING else size for size in sizes]
            if all_or_nothing and MISSING in sizes:  # what comes all the same is not for the caller
                return [memoryview(bytearray(size)) for size in sizes if size != MISSING]
            return [
                view if len(view) == size else view[:size]
                for view, size in zip(views[first:], sizes, strict=False)
                if size != MISSING
            ]

        await self._get(keys, destination, views, capacities, on_device=on_device)
        return lengths

    async def _get(
        self,
        keys: Sequence[str],
        destination: Destination,
        views: Sequence[memoryview] | None = None,
        capacities: Numbers = _NO_CAPACITIES,
        *,
        verify: bool = False,
        on_device: bool = False,
    ) -> None:
        """Read a batch in as many parts as the server makes of it."""
        channel = self._channel
        verify = verify or channel.verify
        first = 0
        while first < len(keys):
            part_keys = channel.key_part(keys, first)
            end = first + len(part_keys)
            some: Any = capacities if end - first == len(capacities) else capacities[first:end]
            part_views = views if views is None or end - first == len(views) else views[first:end]
            part = _new(GetPart, (part_keys, some, part_views, destination, first, verify, on_device))
            first += await self._carry(self._get_routes, part)

    def _unreachable(self, part: PutPart | GetPart) -> DeviceMemoryUnreachable:
        """Return the error for a part that no mover carries: one in memory of a GPU."""
        block: Any = part.views and part.views[0]
        way, why = self._channel.path
        return DeviceMemoryUnreachable(
            f"the tensor is on {block.place}, which RDMA alone can reach, and the store is reached"
            f" by {way} ({why}); infinistore.tensors copies it by way of the host, and tensor.cpu() by hand"
        )

    # In place

    async def lease(self, request: requests.Lease) -> Leased:
        """Pin a batch; return views of the pool if a mover can, else of a copy."""
        leased: Leased | None = await self._carry(self._routes.get(requests.Lease, ()), request)
        if leased is None:
            blocks = PrivateBlocks()
            await self._get(request.keys, blocks.room, verify=request.verify)
            leased = Leased(blocks.views, blocks.watch)
        return leased

    async def reserve(self, request: requests.Reserve) -> ReservedRoom:
        """Take room for a batch: in the pool if a mover can, else in private memory."""
        keys, sizes = request.keys, request.sizes
        hello = self._channel.hello
        if max(sizes, default=0) > hello.max_value_bytes:
            self._refuse_sizes(keys, sizes)
        # It is committed in one step, so it cannot be split like a put.
        if len(sizes) > hello.max_batch_keys or (len(sizes) > 1 and sum(sizes) > hello.max_batch_bytes):
            raise LimitExceeded(
                f"a reservation of {len(sizes)} blocks and {in_units(sum(sizes))} is above what the server stores at"
                f" once: {hello.max_batch_keys} blocks and {in_units(hello.max_batch_bytes)}; make several"
            )
        room: ReservedRoom | None = await self._carry(self._routes.get(requests.Reserve, ()), request)
        return private_room(keys, sizes) if room is None else room

    async def commit(self, request: requests.Commit) -> None:
        """Store what was written to reserved room."""
        check_ttl(self._channel, request.ttl_us)
        if await self._carry(self._routes.get(requests.Commit, ()), request) is None:
            await self.put(requests.Put(Batch(request.room.keys, request.room.memory), ttl_us=request.ttl_us))

    # Without blocks

    async def exists(self, request: Exists) -> Found:
        """Tell for each key whether it is there."""
        routes = self._routes.get(Exists)
        known: Found | None = await self._carry(routes, request) if routes else None
        return await self.ask_in_parts(request) if known is None else known

    async def match_prefix(self, request: MatchPrefix) -> Matched:
        """Count the leading keys that are there."""
        routes = self._routes.get(MatchPrefix)
        known: Matched | None = await self._carry(routes, request) if routes else None
        if known is not None:
            return known
        matched = on_disk = 0
        holds: list[int] = []
        try:
            for part, _ in self._parts(request):
                reply = expect(MatchPrefixReply, await self._channel.ask(part))
                if reply.matched > len(part.keys):
                    raise ProtocolError(f"the server matched {reply.matched} of {len(part.keys)} keys")
                matched += reply.matched
                on_disk += reply.on_disk
                if reply.hold:
                    holds.append(reply.hold)
                if reply.matched < len(part.keys):
                    break
        except LimitExceeded:  # the caller learns of no hold, so there must be none
            await self._release(holds)
            raise
        return Matched(matched, self._token(holds), on_disk)

    def _token(self, holds: Sequence[int]) -> str:
        """Return what the caller releases holds by; empty if there are none."""
        return f"{self._channel.hello.instance}:{','.join(f'{hold:x}' for hold in holds)}" if holds else ""

    async def _release(self, holds: Sequence[int]) -> None:
        for hold in holds:
            await self.ask(ReleaseHold(hold))

    async def prefetch(self, request: Prefetch) -> Prefetched:
        """Have blocks read ahead."""
        if Capability.DISK not in self._channel.connection.peer.capabilities:
            if not request.hold_us:
                return Prefetched(0)
            held = await self.match_prefix(MatchPrefix(request.keys, request.hold_us))
            return Prefetched(0, hold=held.hold)
        reading = skipped = 0
        holds: list[int] = []
        try:
            for part, _ in self._parts(request):
                reply = expect(PrefetchReply, await self._channel.ask(part))
                reading += reply.reading
                skipped += reply.skipped
                if reply.hold:
                    holds.append(reply.hold)
        except LimitExceeded:  # as above
            await self._release(holds)
            raise
        return Prefetched(reading, skipped, self._token(holds))

    async def release_holds(self, request: requests.ReleaseHolds) -> bool:
        """End a hold; False if it has ended, or if it is another server's."""
        ids = request.hold.rpartition(":")[2].split(",")
        if not all(map(_HOLD_ID.fullmatch, ids)):
            return False
        # Another run of the server may have them since: one that took its place.
        released = 0
        for hold_id in ids:
            released += await self.ask(ReleaseHold(int(hold_id, 16)))
        return released > 0

    async def list_keys(self, request: ListKeys) -> list[str]:
        """Return one page of keys, in code point order."""
        found: list[str] = []
        while len(found) < request.limit:
            page = ListKeys(request.prefix, found[-1] if found else request.after, request.limit - len(found))
            reply = expect(KeysReply, await self._channel.ask(page))
            if len(reply.keys) > page.limit:
                raise ProtocolError(f"the server sent {len(reply.keys)} keys where {page.limit} were asked for")
            found += reply.keys
            if not reply.keys or len(reply.keys) < reply.limit:
                break
        return found

    async def statistics(self, request: Statistics) -> Stats:
        """Ask the server for its statistics."""
        await self._carry(self._routes.get(Statistics, ()), request)
        reply = expect(StatisticsReply, await self._channel.ask(request))
        tree = statistics_from_tree(reply.statistics)
        return Stats(*self._channel.path, **tree._asdict())

    # Whatever needs one reply

    async def ask(self, request: Any) -> Any:
        """Ask the server, and return the result that its reply has."""
        if request.CAPABILITY and not request.CAPABILITY & self._channel.connection.peer.capabilities:
            return request.of_older_server()
        reply: Any = await self._channel.ask(request)
        return reply.result

    def _parts(self, request: BatchRequest[Any]) -> list[tuple[Any, Sequence[int]]]:
        """Cut a request to as many keys as the server takes; return the parts, each
        with the positions of its keys."""
        count, most = len(request.keys), self._channel.hello.max_batch_keys
        if 0 < count <= most:
            return [(request, range(count))]
        cuts = [range(first, min(first + most, count)) for first in range(0, count, most)]
        return [(request.at(positions), positions) for positions in cuts]

    async def ask_in_parts(self, request: CountingRequest | KeyedRequest[Any], *, backwards: bool = False) -> Any:
        """Ask for as many keys at a time as the server takes, and merge the results.

        Raises:
            DiskFailed: a disk may bring back some keys. What was to be done to the
                others is.
        """
        parts = self._parts(request)
        if len(parts) == 1:
            return await self._ask_part(request)
        if backwards:  # the head of a prefix is touched last
            parts.reverse()
        results: list[tuple[Sequence[int], Any]] = []
        failed: list[KeptError] = []
        for number, (part, positions) in enumerate(parts):
            with not_all_over(0 if request.idempotent else number):
                try:
                    results.append((positions, await self._ask_part(part)))
                except DiskFailed as error:
                    if request.idempotent:
                        raise
                    failed.append(KeptError(error))
        if failed:
            raise failed[0].again()
        return request.merge(results)

    async def _ask_part(self, part: Any) -> Any:
        result = await self.ask(part)
        if isinstance(part, KeyedRequest) and len(result) != len(part.keys):
            raise ProtocolError(f"the server answered for {len(result)} of {len(part.keys)} keys")
        return result

    async def follow_removals(self, request: FollowRemovalsOfNodes) -> Followed:
        """Ask which keys were removed."""
        return followed(await self.ask(request.message))

    async def pin(self, request: Pin) -> Any:
        """Pin keys, or unpin them."""
        if request.ttl_us and Capability.TIMED_PINS not in self._channel.connection.peer.capabilities:
            raise VersionMismatch(
                "the server's release does not end pins; pin without ttl_s, or install this release there, too"
            )
        return await self.ask_in_parts(request)

    handlers: ClassVar[Mapping[type[Any], _Carry]] = {
        **_of_messages(ask, ask_in_parts),
        requests.Put: put,
        requests.PutFromDevice: put_from_device,
        requests.Get: get,
        requests.GetInto: get_into,
        requests.GetToDevice: get_to_device,
        requests.Lease: lease,
        requests.Reserve: reserve,
        requests.Commit: commit,
        Exists: exists,
        MatchPrefix: match_prefix,
        requests.ReleaseHolds: release_holds,
        Pin: pin,
        FollowRemovalsOfNodes: follow_removals,
        Prefetch: prefetch,
        ListKeys: list_keys,
        requests.ListKeysOfEveryNode: list_keys,
        Statistics: statistics,
    }
    """What carries out each kind of request."""


def _routes(movers: Sequence[Mover], kind: type[Any]) -> _Routes:
    """Return the movers that have a handler for a kind of request, in order."""
    return [(mover.why_not, mover.handlers[kind]) for mover in movers if kind in mover.handlers]
