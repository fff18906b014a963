# Generated from store_calls.py by scripts/generate.py: change that one instead.
"""The calls of a store as an engine wants them: a failure costs hits, and is counted.

`read_exactly` reads into buffers of exact size, and tells hits, misses and bad blocks
apart. A block that is longer than its buffer, or whose checksum is wrong, fails a whole
batch; an engine wants the other blocks all the same.

`read_ahead` has a store read ahead what a look-up has found on disk only. The engine
goes on at once: it asks for the blocks some time later, and finds them in memory then,
or waits for less. Where everything is in memory, nothing is sent.

`pin_loaded` pins what an engine has just used, for a time: it is likely to be used
again.
"""

from collections.abc import Iterable, Sequence

from infinistore.blocking import BlockingStore, PrefixMatch
from infinistore.integrations.internal.record import BAD_BLOCK, BAD_SIZE, Outcome, Record, outcomes


def read_exactly(store: BlockingStore, items: Sequence[tuple[str, memoryview]], record: Record) -> list[Outcome]:
    """Read blocks, each of which has to fill its buffer.

    After anything but a hit, the contents of a buffer are undefined. Raises what
    `get_many_into` raises, except `BufferTooSmall` and `ChecksumMismatch`.
    """
    try:
        return outcomes(items, store.get_many_into(items), record)
    except BAD_BLOCK as error:
        record.bad_block(error)
    sizes: list[int | None] = []
    for item in items:
        try:
            sizes += store.get_many_into([item])
        except BAD_BLOCK:
            sizes.append(BAD_SIZE)
    return outcomes(items, sizes, record)


def read_ahead(store: BlockingStore, match: PrefixMatch, keys: Iterable[str], record: Record) -> None:
    """Begin to read `keys`, those that a load of the match will ask for, unless the
    whole match is in memory. Does not wait for a disk, and never fails.
    """
    if match.in_memory == match:
        return
    with record.trying("prefetch"):
        store.prefetch(keys)


def pin_loaded(store: BlockingStore, keys: Iterable[str], pin_s: float | None, record: Record) -> None:
    """Keep blocks that were loaded from being evicted, for `pin_s` seconds from now on
    if that is set. Never fails: what the store refuses to pin can be evicted.
    """
    if pin_s is None or not (names := list(keys)):
        return
    with record.trying("pin"):
        store.pin(names, ttl_s=pin_s)
