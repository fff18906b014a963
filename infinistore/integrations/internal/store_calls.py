"""The calls of a store as an engine wants them: a failure costs hits, and is counted.

`match_and_hold` looks blocks up, and holds them for the load that follows.

`read_exactly` reads into buffers of exact size. A block that is longer than its buffer,
or whose checksum is wrong, fails a whole batch; an engine wants the other blocks all
the same.

`read_ahead` asks the store to read blocks into memory that a look-up has found on disk
only. The engine goes on at once. When it loads the blocks some time later, they are in
memory, or will be soon. If all blocks are in memory, no request is sent.

`pin_loaded` pins the blocks that an engine has just used, for a time, because it is
likely to use them again.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from infinistore.aio import AsyncStore, PrefixMatch
from infinistore.errors import BufferTooSmall, ChecksumMismatch, DiskFailed, LimitExceeded
from infinistore.integrations.internal.record import Record

_BAD_SIZE = -1
"""In place of the size of a block that is known to be bad."""


async def match_and_hold(store: AsyncStore, keys: Sequence[str], hold_s: float, record: Record) -> PrefixMatch:
    """Count the leading keys that exist, and hold them. If the store refuses that,
    most of them will be there all the same.
    """
    try:
        match = await store.match_prefix(keys, hold_s=hold_s)
    except LimitExceeded as error:
        record.failed("hold", error)
        return await store.match_prefix(keys)
    if hold_s:
        record.succeeded("hold")
    return match


async def read_exactly(store: AsyncStore, items: Sequence[tuple[str, memoryview]], record: Record) -> list[bool | None]:
    """Read blocks, each of which has to fill its buffer.

    Returns True for each block that did, False for one that was bad, and None for one
    that is missing; the contents of the buffers of these are undefined. A bad block,
    with a wrong size or checksum, is deleted, so that it is stored anew. A missing one
    may be there all the same, on a disk or a node that is late. Raises what
    `get_many_into` raises, except `BufferTooSmall` and `ChecksumMismatch`.
    """
    try:
        sizes: Sequence[int | None] = await store.get_many_into(items)
    except (BufferTooSmall, ChecksumMismatch) as error:
        record.bad_block(error)
        sizes = [await _size_read(store, item) for item in items]
    bad: list[str] = []
    for (key, buffer), size in zip(items, sizes, strict=True):
        if size is not None and size != len(buffer):
            bad.append(key)
            if size != _BAD_SIZE:
                record.bad_block(ValueError(f"{key!r} has {size} bytes where {len(buffer)} were expected"))
    if bad:
        with suppress(DiskFailed):  # which may bring them back when a disk is opened again
            await store.delete(bad)
    return [None if size is None else size == len(buffer) for (_, buffer), size in zip(items, sizes, strict=True)]


async def _size_read(store: AsyncStore, item: tuple[str, memoryview]) -> int | None:
    try:
        (size,) = await store.get_many_into([item])
    except (BufferTooSmall, ChecksumMismatch):
        return _BAD_SIZE
    return size


async def read_ahead(store: AsyncStore, match: PrefixMatch, keys: Iterable[str], record: Record) -> None:
    """Begin to read `keys`, those that a load of the match will ask for, unless the
    whole match is in memory. Does not wait for a disk, and never fails.
    """
    if match.in_memory == match:
        return
    with record.trying("prefetch"):
        await store.prefetch(keys)


async def pin_loaded(store: AsyncStore, keys: Iterable[str], pin_s: float | None, record: Record) -> None:
    """Keep blocks that were loaded from being evicted, for `pin_s` seconds from now on
    if that is set. Never fails: blocks that the store refuses to pin can be evicted.
    """
    if pin_s is None or not (names := list(keys)):
        return
    with record.trying("pin"):
        await store.pin(names, ttl_s=pin_s)
