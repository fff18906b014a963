# Generated from read_ahead.py by scripts/generate.py: change that one instead.
"""Has a store read ahead what a look-up has found on disk only.

The engine goes on at once: it asks for the blocks some time later, and finds them in
memory then, or waits for less. Where everything is in memory, nothing is sent.
"""

from collections.abc import Iterable

from infinistore.blocking import BlockingStore, PrefixMatch
from infinistore.errors import InfiniStoreException
from infinistore.integrations.internal.record import Record

__all__ = ["read_ahead"]


def read_ahead(store: BlockingStore, match: PrefixMatch, keys: Iterable[str], record: Record) -> None:
    """Begin to read `keys`, those that a load of the match will ask for, unless the
    whole match is in memory. Does not wait for a disk, and never fails.
    """
    if match.in_memory == match:
        return
    try:
        store.prefetch(keys)
    except InfiniStoreException as error:
        record.failed("prefetch", error)
    else:
        record.succeeded("prefetch")
