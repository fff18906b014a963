"""Pins what an engine has just used, for a time: it is likely to be used again."""

from collections.abc import Iterable

from infinistore.aio import AsyncStore
from infinistore.errors import InfiniStoreException
from infinistore.integrations.internal.record import Record

__all__ = ["pin_loaded"]


async def pin_loaded(store: AsyncStore, keys: Iterable[str], pin_s: float | None, record: Record) -> None:
    """Keep blocks that were loaded from being evicted, for `pin_s` seconds from now on
    if that is set. Never fails: what the store refuses to pin can be evicted.
    """
    if pin_s is None or not (names := list(keys)):
        return
    try:
        await store.pin(names, ttl_s=pin_s)
    except InfiniStoreException as error:
        record.failed("pin", error)
    else:
        record.succeeded("pin")
