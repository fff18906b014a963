"""Reading from stores on the server's host in every way there is, for tests of reads
that ask nobody.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from infinistore.blocking import BlockingStore
from infinistore.protocol.shared_tables import tables_are_safe_here
from tests.server.running import KIB

__all__ = ["LOOKUPS", "READS", "REMOVALS", "SHORT", "arrays_of", "knows", "needs_tables", "values_of"]

SHORT = {"a": b"aaa", "b": b"a few bytes"}
needs_tables = pytest.mark.skipif(
    not tables_are_safe_here(), reason="clients read and commit by themselves on x86-64 only"
)


def knows(store: BlockingStore, blocks: dict[str, bytes]) -> None:
    """Have a store know these blocks, which are there, and have asked for all that it
    needs to read them.
    """
    for _ in range(2):
        assert values_of(store, blocks) == list(blocks.values())


def values_of(store: BlockingStore, keys: Iterable[str] = ("a", "b")) -> list[bytes | None]:
    """What is read, as bytes."""
    return [None if value is None else bytes(value) for value in store.get_many(list(keys))]


def arrays_of(store: BlockingStore, *keys: str) -> list[Any]:
    """Arrays that outlive the block of their lease."""
    with store.lease(list(keys)) as views:
        return [np.frombuffer(view, np.uint8) for view in views if view is not None]


def get_into(store: BlockingStore) -> list[bytes]:
    buffers = [bytearray(200_000), bytearray(200_000)]
    return [bytes(buffer[: store.get_into(key, buffer)]) for key, buffer in zip("ab", buffers, strict=True)]


def get_many_into(store: BlockingStore, **options: bool) -> list[bytes]:
    buffers = [bytearray(200_000), bytearray(200_000)]
    lengths = store.get_many_into(list(zip("ab", buffers, strict=True)), **options)
    return [bytes(buffer[:length]) for buffer, length in zip(buffers, lengths, strict=True)]


def lease(store: BlockingStore, **options: bool) -> list[bytes]:
    with store.lease(["a", "b"], **options) as views:
        return [bytes(view) for view in views if view is not None]


READS: dict[str, Callable[[BlockingStore], list[bytes]]] = {
    "get": lambda store: [bytes(store.get("a")), bytes(store.get("b"))],
    "get_many": lambda store: [bytes(value or b"") for value in store.get_many(["a", "b"])],
    "get_into": get_into,
    "get_many_into": get_many_into,
    "all_or_nothing": lambda store: get_many_into(store, all_or_nothing=True),
    "lease": lease,
    "lease and verify": lambda store: lease(store, verify=True),
}
LOOKUPS: list[Callable[[BlockingStore], object]] = [
    lambda store: store.exists("a"),
    lambda store: store.match_prefix(["a", "b"]),
]
REMOVALS: dict[str, Callable[[BlockingStore], object]] = {
    "replace": lambda store: store.put_many({"a": b"new a" * 5000, "b": b"new b" * 6000}),
    "delete": lambda store: store.delete(["a", "b"]),
    "purge": lambda store: store.purge(),
    "evict by hand": lambda store: store.evict(0, 0),
    "evict by puts": lambda store: [store.put_many({f"filler {i}": bytes(500 * KIB)}) for i in range(9)],
}
