"""All keys with a prefix: every key once, in as few requests as a server allows."""

from collections.abc import Iterator
from typing import Any

import pytest

from infinistore import blocking
from infinistore.blocking import PAGE_KEYS, key_pages
from infinistore.core.limits import CoreLimits


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
    assert CoreLimits().max_page_keys == PAGE_KEYS


@pytest.mark.parametrize(("count", "listings"), [(0, 1), (3, 1), (10_000, 2), (10_001, 2), (25_000, 3)])
def test_a_listing_is_asked_for_once_for_ten_thousand_keys(
    store: blocking.BlockingStore, monkeypatch: pytest.MonkeyPatch, count: int, listings: int
) -> None:
    put(store, "one", 2)
    put(store, "two/", 2)
    keys = put(store, "one/", count)
    asked: list[str] = []
    listed = store.keys

    def note(*args: Any, **options: Any) -> list[str]:
        asked.append(options["after"])
        return listed(*args, **options)

    monkeypatch.setattr(store, "keys", note)

    assert [key for page in key_pages(store, "one/") for key in page] == keys
    assert len(asked) == listings


def test_pages_have_every_key_once_also_if_it_is_deleted_meanwhile(store: blocking.BlockingStore) -> None:
    keys = put(store, "one/", 25_000)
    found = []
    for page in key_pages(store, "one/"):
        found += page
        store.delete(page[::2])

    assert found == keys
    assert len(store.keys(limit=PAGE_KEYS * 2)) == 12_500
