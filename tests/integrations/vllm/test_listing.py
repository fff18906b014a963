"""All keys with a prefix: in how many requests they are listed and deleted."""

from collections.abc import Iterator
from typing import Any

import pytest

from infinistore import blocking
from infinistore.integrations.vllm.listing import PAGE_KEYS, delete_all, pages
from infinistore.server.session.requests import MAX_PAGE_KEYS


class Counted:
    """Counts the listings, of which each makes a server look at all its keys."""

    def __init__(self, store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listings = 0
        listed = store.keys

        def keys(*args: Any, **options: Any) -> list[str]:
            self.listings += 1
            return listed(*args, **options)

        monkeypatch.setattr(store, "keys", keys)


@pytest.fixture
def store() -> Iterator[blocking.BlockingStore]:
    with blocking.open_store(pool_bytes=8 << 20, minimal_allocate_bytes=64) as store:
        yield store


def put(store: blocking.BlockingStore, prefix: str, count: int) -> list[str]:
    keys = [f"{prefix}{number:05}" for number in range(count)]
    for first in range(0, count, 5000):
        store.put_many(dict.fromkeys(keys[first : first + 5000], b"block"))
    return keys


def test_a_page_is_as_large_as_a_server_gives() -> None:
    assert PAGE_KEYS == MAX_PAGE_KEYS


@pytest.mark.parametrize(("count", "listings"), [(0, 1), (3, 1), (10_000, 2), (10_001, 2), (50_000, 6)])
def test_many_keys_are_deleted_with_one_listing_for_ten_thousand(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch, count: int, listings: int
) -> None:
    kept = [*put(store, "vllm/one", 2), *put(store, "vllm/two/", 2)]
    put(store, "vllm/one/", count)
    counted = Counted(store, monkeypatch)

    assert delete_all(store, "vllm/one/") == count
    assert counted.listings == listings
    assert store.keys() == sorted(kept)


def test_pages_have_every_key_once_also_if_it_is_deleted_meanwhile(store: blocking.BlockingStore) -> None:
    keys = put(store, "vllm/", 25_000)
    found = []
    for page in pages(store, "vllm/"):
        found += page
        store.delete(page[::2])

    assert found == keys
    assert len(store.keys(limit=PAGE_KEYS * 2)) == 12_500
