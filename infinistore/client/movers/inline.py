"""Blocks inline: as the payload of requests and replies, over the stream of the
connection.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from infinistore.client.movers.base import GetPart, Mover, PutPart
from infinistore.client.movers.channel import BlocksReply, Channel, present_in
from infinistore.errors import ProtocolError
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.effects import Span
from infinistore.protocol.messages import MISSING, NO_CHECKSUM, Get, Keys, Numbers, Put, PutReply

_HASH_BYTES = 2 * 1024 * 1024
"""How much is hashed before it is sent. With less, the kernel would copy from a nearer
cache, but many short sends put both ends in lockstep: with 512 KiB, a put of 64 x 64
KiB took a fifth longer. With more, the other end waits: with 4 MiB it took a tenth
longer."""


class InlineMover(Mover):
    """Sends and receives blocks over the stream: all but memory of GPUs."""

    name = "inline"

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.handlers = {PutPart: self.put, GetPart: self.get}

    def why_not(self, request: PutPart | GetPart) -> str:
        """Say why it cannot carry a part; empty if it can."""
        return "only RDMA reaches memory of GPUs" if request.on_device else ""

    async def put(self, part: PutPart, since: int = 0) -> list[str]:
        """Send a part, which is a copy if there is a mark; return the keys that were
        skipped."""
        keys, views, sizes, payload_bytes, replace, _, ttl_us = part
        channel = self._channel
        payload: Iterable[list[memoryview]] = [views]
        verify = channel.verify
        if verify:
            payload_bytes += 8 * len(keys)
            if payload_bytes > _HASH_BYTES:
                payload = _hashed_groups(views)
            else:
                payload = [[*views, memoryview(array("Q", map(xxh3_64_intdigest, views))).cast("B")]]
        put = Put(Keys(keys), Numbers(array("Q", sizes)), verify, replace, ttl_us, since)
        reply: Any = await channel.ask(put, payload, payload_bytes)
        return skipped_keys(keys, reply) if reply.skipped else []

    async def get(self, part: GetPart) -> int:
        """Receive a part; return how many of its keys the server has answered for."""
        channel = self._channel
        get = Get(part.keys, part.capacities, part.verify)
        reply: Any = await channel.ask(get)
        channel.check_reply(get, reply)
        views = part.destination(reply.sizes, part.first)
        await read_payload(channel, part.keys, reply, views, verify=part.verify)
        return len(reply.sizes)

    async def put_one(self, keys: list[str], view: memoryview) -> list[str]:
        """Send one block, in place of what its key had; return no key."""
        channel = self._channel
        verify, size = channel.verify, len(view)
        views = [view, memoryview(array("Q", (xxh3_64_intdigest(view),))).cast("B")] if verify else [view]
        put = Put(Keys(keys), Numbers(array("Q", (size,))), verify)
        reply: Any = await channel.ask(put, [views], size + 8 if verify else size)
        return skipped_keys(keys, reply) if reply.skipped else []

    async def get_one(self, keys: list[str], view: memoryview) -> int | None:
        """Receive one block into a view, or the front of it; return its length, None if
        it is missing."""
        channel = self._channel
        get = Get(Keys(keys), Numbers(array("Q", (len(view),))), channel.verify)
        reply: Any = await channel.ask(get)
        channel.check_reply(get, reply)
        size: int = reply.sizes[0]
        if size == MISSING:
            return None
        view = view if size == len(view) else view[:size]
        await read_payload(channel, get.keys, reply, [view], verify=channel.verify)
        return size


async def read_payload(
    channel: Channel, keys: Sequence[str], reply: BlocksReply, views: list[memoryview], *, verify: bool
) -> None:
    """Read a reply's payload, about these keys, into views; `verify` checks it."""
    if not views:
        return
    connection = channel.connection
    payload = connection.payload_at_hand()
    if payload is not None:  # few bytes
        start = 0
        for view in views:
            view[:] = payload[start : start + len(view)]
            start += len(view)
    if not verify:
        if payload is None:
            await connection.read_payload(views)
        return
    there = present_in(reply)
    checksums = reply.checksums if len(there) == len(reply.sizes) else [reply.checksums[i] for i in there]
    if payload is None:
        checker = _Checker(views, checksums)
        await connection.read_payload(views, checker.progress)
        bad = checker.bad
    else:
        bad = _mismatches(views, checksums)
    if bad:
        await channel.report([keys[there[i]] for i in bad], len(views))


def skipped_keys(keys: list[str], reply: PutReply) -> list[str]:
    """Return the keys of a batch that were skipped because they were there."""
    if reply.skipped and max(reply.skipped) >= len(keys):
        raise ProtocolError(f"the server skipped block {max(reply.skipped)} of {len(keys)}")
    return [keys[index] for index in reply.skipped]


def _mismatches(views: list[memoryview], checksums: Any) -> list[int]:
    """Return the numbers of the blocks that are not what their checksums say."""
    return [
        index
        for index, (view, expected) in enumerate(zip(views, checksums, strict=True))
        if expected != NO_CHECKSUM and xxh3_64_intdigest(view) != expected
    ]


class _Checker:
    """Hashes blocks as they arrive, while they are in the cache; notes wrong ones."""

    def __init__(self, views: list[memoryview], checksums: Any) -> None:
        self._views = views
        self._checksums = checksums
        self._checked = 0
        self.bad: list[int] = []

    def progress(self, span: Span) -> None:
        """Look at the blocks that have become complete."""
        complete = span.complete
        for index in range(self._checked, complete):
            expected = self._checksums[index]
            if expected != NO_CHECKSUM and xxh3_64_intdigest(self._views[index]) != expected:
                self.bad.append(index)
        self._checked = complete


def _hashed_groups(views: list[memoryview]) -> Iterator[list[memoryview]]:
    """Yield blocks in groups, each hashed just before; with the last, the checksums."""
    checksums = pack_u64()
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
