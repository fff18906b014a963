"""Clients: one protocol, driven by Trio, by threads or by asyncio.

`open_store` here is the one for Trio; `infinistore.blocking` has the one for threads.
"""

from infinistore.client.async_store import AsyncStore
from infinistore.client.prefix_match import PrefixMatch
from infinistore.client.trio_store import open_store

__all__ = ["AsyncStore", "PrefixMatch", "open_store"]
