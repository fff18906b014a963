"""The store for threads: `with infinistore.blocking.open_store(...) as store`."""

from infinistore.client.blocking_store import BlockingStore
from infinistore.client.prefix_match import PrefixMatch
from infinistore.client.thread_store import open_store

__all__ = ["BlockingStore", "PrefixMatch", "open_store"]
