"""The operations over a connection to a server, with payload inline; what moves it otherwise builds on this."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from operator import gt, not_
from typing import Any, NamedTuple, TypeAlias, TypeVar

from xxhash import xxh3_64_intdigest

from infinistore.client.in_place import Leased, PrivateBlocks, ReservedRoom, private_room
from infinistore.client.operations import Batch
from infinistore.errors import ChecksumMismatch, LimitExceeded, ProtocolError, ValueTooLarge
from infinistore.protocol.codec import numbers
from infinistore.protocol.connection import ClientConnection
from infinistore.protocol.effects import Exchange
from infinistore.protocol.messages import (
    MISSING,
    NO_CHECKSUM,
    CountReply,
    Delete,
    Evict,
    Exists,
    ExistsReply,
    Get,
    GetReply,
    HelloReply,
    Keys,
    KeysReply,
    Lease,
    LeaseReply,
    ListKeys,
    MatchPrefix,
    MatchPrefixReply,
    Numbers,
    Purge,
    Put,
    PutReply,
    RdmaGet,
    RdmaGetReply,
    ReleaseHold,
    Reply,
    Request,
    Statistics,
    StatisticsReply,
    Verify,
)
from infinistore.protocol.span import Span
from infinistore.statistics import Stats, statistics_from_tree

__all__ = ["BlocksReply", "Channel", "RemoteOperations", "Room", "expect", "present_in", "skipped_keys"]

_R = TypeVar("_R", bound=Reply)
BlocksReply: TypeAlias = GetReply | LeaseReply | RdmaGetReply
Room: TypeAlias = Callable[[Sequence[int], int], list[memoryview]]
"""Given the sizes of a part and which key it begins with, the memory for those blocks of it that are there."""
_HASH_BYTES = 2 * 1024 * 1024
"""How much is hashed before it is sent. Less would be in a nearer cache still when the kernel copies it, but many short
sends put both ends in lockstep: by 512 KiB, a put of 64 x 64 KiB took a fifth longer. More, and the other end waits:
by 4 MiB it took a tenth longer."""


class Channel(NamedTuple):
    """A conversation with a server, and what holds for all that is asked over it, however its blocks move."""

    connection: ClientConnection
    hello: HelloReply
    verify: bool
    """Whether blocks are hashed, and what is read is checked."""
    path: tuple[str, str]
    """The transport, and why it is the one in use."""
    remaining_us: Callable[[], int]
    """Tells how long the caller still waits, in microseconds; 0 means for ever."""


class RemoteOperations:
    """The operations over one connection to a server.

    A batch over the server's limits goes in parts; each part is atomic.
    """

    def __init__(self, channel: Channel) -> None:
        self._connection, self._hello, self._verify, self._path, self._remaining_us = channel
        # Whether the server keeps room or pins for a call that is under way: then the connection must not be kept.
        self.holding = False
        # Whether something is still to come from the server for a call that is over.
        self.unsettled = False

    def put_many(self, batch: Batch, replace: bool) -> Exchange[list[str]]:
        """Put the batch; return the keys that were skipped because they were there."""
        sizes = list(map(len, batch.views))
        self._check_sizes(batch.keys, sizes)
        if replace:
            return (yield from self._put_parts(batch, sizes, replace))
        present = yield from self._exists(batch.keys, touch=True)
        missing = batch.where(map(not_, present))
        skipped = list(compress(batch.keys, present))
        if missing.keys:
            skipped += yield from self._put_parts(missing, list(map(len, missing.views)), replace)
            if len(missing.keys) < len(batch.keys):  # what was there already must not end colder than what follows it
                yield from self._exists(batch.keys, touch=True)
        return skipped

    def _put_parts(self, batch: Batch, sizes: Sequence[int], replace: bool) -> Exchange[list[str]]:
        skipped: list[str] = []
        for part in _parts(batch, sizes, self._hello.max_batch_keys, self._hello.max_batch_bytes):
            skipped += yield from self._put_part(part, replace)
        return skipped

    def _check_sizes(self, keys: Sequence[str], sizes: Sequence[int]) -> None:
        limit = self._hello.max_value_bytes
        if max(sizes, default=0) > limit:
            key, size = next((key, size) for key, size in zip(keys, sizes, strict=True) if size > limit)
            raise ValueTooLarge(f"the value of {key[:100]!r} has {size} bytes; this store takes at most {limit}")

    def _put_part(self, batch: Batch, replace: bool) -> Exchange[list[str]]:
        keys, views = batch
        sizes = numbers(map(len, views))
        payload_bytes = sum(sizes)
        payload: Iterable[list[memoryview]] = [views]
        if self._verify:
            payload, payload_bytes = _hashed_groups(views), payload_bytes + 8 * len(keys)
        put = Put(Keys(keys), sizes, checksums=self._verify, replace=replace)
        request = self._connection.request(put, payload, payload_bytes=payload_bytes, deadline_us=self._remaining_us())
        reply = expect(PutReply, (yield from request))
        return skipped_keys(keys, reply)

    def get_many(self, keys: Sequence[str]) -> Exchange[list[bytearray | None]]:
        """Read the batch into memory of its own; None for what is missing."""
        values: list[bytearray | None] = []

        def make_room(sizes: Sequence[int], first: int) -> list[memoryview]:
            made = [None if size == MISSING else bytearray(size) for size in sizes]
            values[first:] = made
            return [memoryview(value) for value in made if value is not None]

        yield from self._get(keys, None, make_room)
        return values

    def get_many_into(self, batch: Batch, all_or_nothing: bool) -> Exchange[list[int | None]]:
        """Read the batch into the caller's memory; return the stored lengths, None for what is missing."""
        lengths: list[int | None] = []
        capacities = numbers(map(len, batch.views))

        def room(sizes: Sequence[int], first: int) -> list[memoryview]:
            if first == 0 and sizes == capacities:  # nearly always: all there, and of the expected length
                lengths[:] = sizes
                return batch.views
            lengths[first:] = [None if size == MISSING else size for size in sizes]
            if all_or_nothing and MISSING in sizes:  # what comes all the same is not for the caller
                return [memoryview(bytearray(size)) for size in sizes if size != MISSING]
            return [
                view if len(view) == size else view[:size]
                for view, size in zip(batch.views[first:], sizes, strict=False)
                if size != MISSING
            ]

        yield from self._get(batch.keys, batch.views, room, capacities)
        return lengths

    def _get(
        self,
        keys: Sequence[str],
        views: Sequence[memoryview] | None,
        room: Room,
        capacities: Numbers | None = None,
    ) -> Exchange[None]:
        """Read a batch in as many parts as the server makes of it; `room(sizes, first)` tells where a part goes.

        `views` is the memory that the caller wants them in, one for each key, if it has any; `capacities` how long each
        is.
        """
        first = 0
        while first < len(keys):
            part = self._key_part(keys, first)
            wanted: Any = numbers() if capacities is None else capacities[first : first + len(part)]
            get = Get(part, wanted, checksums=self._verify)
            reply = expect(GetReply, (yield from self._connection.request(get, deadline_us=self._remaining_us())))
            self._check_reply(get, reply)
            yield from self._read_blocks(part, reply, room(reply.sizes, first))
            first += len(reply.sizes)

    def _check_reply(self, request: Get | Lease | RdmaGet, reply: BlocksReply) -> None:
        """Raise `ProtocolError` if a reply does not fit what was asked for, the room there is, or the server's
        limits."""
        checksums = len(reply.checksums) if not isinstance(request, Get) or request.checksums else len(reply.sizes)
        if not 0 < len(reply.sizes) <= len(request.keys) or checksums != len(reply.sizes):
            raise ProtocolError(f"a reply with {len(reply.sizes)} sizes to a request for {len(request.keys)} keys")
        if reply.sizes == request.capacities:  # nearly always
            return
        if request.capacities and any(map(gt, reply.sizes, request.capacities)):
            for size, capacity in zip(reply.sizes, request.capacities, strict=False):
                if capacity < size != MISSING:
                    raise ProtocolError(f"the server sends {size} bytes where there is room for {capacity}")
        # Believe no more bytes, before there is memory for them, than the server said that it sends at a time.
        most = max(self._hello.max_batch_bytes, self._hello.max_value_bytes) + 8 * self._hello.max_batch_keys
        sizes = reply.sizes.tolist()  # everything that looks at a list takes half the time that an array takes
        total = sum(sizes) - MISSING * sizes.count(MISSING)
        if total > most:
            raise ProtocolError(f"the server sends {total} bytes, more than its limit of {most}")

    def _read_blocks(self, keys: Keys, reply: BlocksReply, views: list[memoryview]) -> Exchange[None]:
        if not views:
            return
        payload = self._connection.payload_at_hand()
        if payload is not None:  # few bytes
            start = 0
            for view in views:
                view[:] = payload[start : start + len(view)]
                start += len(view)
        if not self._verify:
            if payload is None:
                yield from self._connection.read_payload(views)
            return
        there = present_in(reply)
        checker = _Checker(views, [reply.checksums[i] for i in there])
        if payload is None:
            yield from self._connection.read_payload(views, checker.progress)
        else:
            checker.check(len(views))
        if checker.bad:
            yield from self._report([keys[there[i]] for i in checker.bad], len(views))

    def _report(self, bad: list[str], count: int) -> Exchange[None]:
        """If blocks arrived that are not what was written, have the server look at its own bytes, and raise.

        It forgets those that are bad: the next reader gets a miss.
        """
        if bad:
            yield from self._ask(Verify(Keys(bad)))
            raise ChecksumMismatch(f"{len(bad)} of {count} blocks are not what was written, first {bad[0][:100]!r}")

    def lease(self, keys: Sequence[str], verify: bool) -> Exchange[Leased]:
        """Read the batch into memory of its own, and return views of that: here nobody can look at the pool."""
        blocks = PrivateBlocks()
        verified, self._verify = self._verify, self._verify or verify
        try:
            yield from self._get(keys, None, blocks.room)
        finally:
            self._verify = verified
        return Leased(blocks.views, blocks.watch)

    def reserve(self, keys: list[str], sizes: Sequence[int]) -> Exchange[ReservedRoom]:
        """Take memory of its own for a batch: here nobody can write to the pool."""
        yield from ()
        self._check_room(keys, sizes)
        return private_room(keys, sizes)

    def _check_room(self, keys: Sequence[str], sizes: Sequence[int]) -> None:
        """A reservation is committed in one step, so it cannot be split like a put."""
        self._check_sizes(keys, sizes)
        most_keys, most_bytes = self._hello.max_batch_keys, self._hello.max_batch_bytes
        if len(sizes) > most_keys or (len(sizes) > 1 and sum(sizes) > most_bytes):
            raise LimitExceeded(
                f"a reservation of {len(sizes)} blocks and {sum(sizes)} bytes is above what the server stores at once:"
                f" {most_keys} blocks and {most_bytes} bytes; make several"
            )

    def commit(self, room: ReservedRoom) -> Exchange[None]:
        """Put what was written to memory of its own."""
        yield from self.put_many(Batch(room.keys, room.memory), True)

    def exists_many(self, keys: Sequence[str]) -> Exchange[list[bool]]:
        """Ask which keys are there."""
        return (yield from self._exists(keys, touch=False))

    def _exists(self, keys: Sequence[str], *, touch: bool) -> Exchange[list[bool]]:
        present = b""
        for part in reversed(self._key_parts(keys)):  # the head of a prefix is touched last
            reply = expect(ExistsReply, (yield from self._ask(Exists(part, touch))))
            if len(reply.present) != len(part):
                raise ProtocolError(f"the server answered for {len(reply.present)} of {len(part)} keys")
            present = reply.present + present if present else reply.present
        if present.translate(None, b"\0\1"):
            raise ProtocolError("the server says of a key that it is neither there nor missing")
        if not present:  # which cannot be cast
            return []
        # list(map(bool, present)) takes five times as long.
        flags: Any = memoryview(present).cast("?").tolist()
        return flags  # type: ignore[no-any-return]

    def match_prefix(self, keys: Sequence[str], hold_s: float) -> Exchange[tuple[int, str]]:
        """Count the leading keys that are there; return the count, and the token of the hold or an empty text."""
        matched = 0
        holds: list[int] = []
        try:
            for part in self._key_parts(keys):
                request = MatchPrefix(part, hold_us=math.ceil(hold_s * 1e6))
                reply = expect(MatchPrefixReply, (yield from self._ask(request)))
                if reply.matched > len(part):
                    raise ProtocolError(f"the server matched {reply.matched} of {len(part)} keys")
                matched += reply.matched
                if reply.hold:
                    holds.append(reply.hold)
                if reply.matched < len(part):
                    break
        except LimitExceeded:  # the caller learns of no hold, so there must be none
            for hold in holds:
                yield from self._count(ReleaseHold(hold))
            raise
        return matched, f"{self._hello.instance}:{','.join(f'{hold:x}' for hold in holds)}" if holds else ""

    def release_hold(self, hold: str) -> Exchange[bool]:
        """End a hold; False if it has ended, or if it was another server's."""
        instance, _, ids = hold.partition(":")
        if instance != self._hello.instance:
            return False
        released = 0
        for hold_id in ids.split(","):
            released += yield from self._count(ReleaseHold(int(hold_id, 16)))
        return released > 0

    def delete(self, keys: Sequence[str]) -> Exchange[int]:
        """Delete keys; return how many were there."""
        deleted = 0
        for part in self._key_parts(keys):
            deleted += yield from self._count(Delete(part))
        return deleted

    def keys(self, prefix: str, limit: int, after: str) -> Exchange[list[str]]:
        """One page of keys, in code point order."""
        found: list[str] = []
        while len(found) < limit:
            request = ListKeys(prefix, found[-1] if found else after, limit - len(found))
            reply = expect(KeysReply, (yield from self._ask(request)))
            if len(reply.keys) > request.limit:
                raise ProtocolError(f"the server sent {len(reply.keys)} keys where {request.limit} were asked for")
            found += reply.keys
            if not reply.keys or len(reply.keys) < reply.limit:
                break
        return found

    def evict(self, low: float, high: float) -> Exchange[int]:
        """Evict cold blocks; return how many."""
        return (yield from self._count(Evict(low, high)))

    def purge(self) -> Exchange[int]:
        """Delete everything; return how many keys there were."""
        return (yield from self._count(Purge()))

    def stats(self, details: bool) -> Exchange[Stats]:
        """Ask the server for its statistics."""
        reply = expect(StatisticsReply, (yield from self._ask(Statistics(details))))
        tree = statistics_from_tree(reply.statistics)
        return Stats(*self._path, store=tree.store, server=tree.server, details=tree.details)

    def close(self) -> None:
        """Let go of what a connection has besides its stream, when it is closed."""

    def settle(self) -> Exchange[None]:
        """Hear what the server has still to say to the last call, if this is `unsettled`. Before the next call, and
        before a look at whether the connection is stale."""
        yield from ()

    def _ask(self, request: Request) -> Exchange[Reply]:
        return self._connection.request(request, deadline_us=self._remaining_us())

    def _count(self, request: Request) -> Exchange[int]:
        return expect(CountReply, (yield from self._ask(request))).count

    def _key_parts(self, keys: Sequence[str]) -> list[Keys]:
        most = self._hello.max_batch_keys
        if isinstance(keys, list) and 0 < len(keys) <= most:
            return [Keys(keys)]
        return [self._key_part(keys, first) for first in range(0, len(keys), most)]

    def _key_part(self, keys: Sequence[str], first: int) -> Keys:
        most = self._hello.max_batch_keys
        if isinstance(keys, list) and not first and len(keys) <= most:
            return Keys(keys)
        return Keys(list(keys[first : first + most]))


def skipped_keys(keys: Sequence[str], reply: PutReply) -> list[str]:
    """Return which keys of a batch were skipped because they were there."""
    if reply.skipped and max(reply.skipped) >= len(keys):
        raise ProtocolError(f"the server skipped block {max(reply.skipped)} of {len(keys)}")
    return [keys[index] for index in reply.skipped]


def present_in(reply: BlocksReply) -> Sequence[int]:
    """Return which of the blocks that a reply tells of are there."""
    if MISSING not in reply.sizes:  # nearly always
        return range(len(reply.sizes))
    return [i for i, size in enumerate(reply.sizes) if size != MISSING]


class _Checker:
    """Hashes blocks as they arrive, while they are in the cache, and remembers which were wrong."""

    def __init__(self, views: list[memoryview], checksums: list[int]) -> None:
        self._views = views
        self._checksums = checksums
        self._checked = 0
        self.bad: list[int] = []

    def progress(self, span: Span) -> None:
        self.check(span.complete)

    def check(self, complete: int) -> None:
        """Look at the blocks that have become complete."""
        for index in range(self._checked, complete):
            expected = self._checksums[index]
            if expected != NO_CHECKSUM and xxh3_64_intdigest(self._views[index]) != expected:
                self.bad.append(index)
        self._checked = complete


def expect(kind: type[_R], reply: Reply) -> _R:
    """The connection has checked which reply answers which request; this tells the type checker."""
    assert isinstance(reply, kind)
    return reply


def _parts(batch: Batch, sizes: Sequence[int], most_keys: int, most_bytes: int) -> list[Batch]:
    """Split a batch so that each part keeps to the limits; a single block may be longer than `most_bytes`."""
    if len(sizes) <= most_keys and sum(sizes) <= most_bytes:
        return [batch] if sizes else []
    parts: list[Batch] = []
    first = 0
    part_bytes = 0
    for index, size in enumerate(sizes):
        if index > first and (index - first == most_keys or part_bytes + size > most_bytes):
            parts.append(Batch(batch.keys[first:index], batch.views[first:index]))
            first, part_bytes = index, 0
        part_bytes += size
    parts.append(Batch(batch.keys[first:], batch.views[first:]))
    return parts


def _hashed_groups(views: list[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the blocks in groups, each hashed just before, and with the last group the checksums."""
    checksums = numbers()
    group: list[memoryview] = []
    group_bytes = 0
    for view in views:
        if group_bytes >= _HASH_BYTES:
            yield group
            group, group_bytes = [], 0
        checksums.append(xxh3_64_intdigest(view))
        group.append(view)
        group_bytes += len(view)
    yield [*group, memoryview(checksums).cast("B")]
