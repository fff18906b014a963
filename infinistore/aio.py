"""The store for asyncio and uvloop: `async with infinistore.aio.open_store(...) as store`."""

from infinistore.client.async_store import AsyncStore
from infinistore.client.asyncio_store import open_store
from infinistore.client.prefix_match import PrefixMatch

__all__ = ["AsyncStore", "PrefixMatch", "open_store"]
