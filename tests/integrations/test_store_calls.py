"""The calls of a store as every engine wants them, without an engine."""

import logging
from collections.abc import Iterator

import pytest

from infinistore import blocking
from infinistore.errors import StoreUnavailable
from infinistore.integrations.internal.blocking_store_calls import match_and_hold, pin_loaded, read_exactly
from infinistore.integrations.internal.record import Record
from tests.integrations.disks import bring_back


@pytest.fixture
def store() -> Iterator[blocking.BlockingStore]:
    with blocking.open_store(pool_bytes=1 << 20, minimal_allocate_bytes=64) as store:
        store.put_many({"a": b"aaaa", "b": b"bbbb", "short": b"s", "long": b"too long"})
        yield store


@pytest.fixture
def record() -> Record:
    return Record(logging.getLogger("of a test"), "of a test")


def read(store: blocking.BlockingStore, record: Record, *keys: str) -> tuple[list[bool | None], list[bytes]]:
    buffers = [bytearray(4) for _ in keys]
    hits = read_exactly(store, [(key, memoryview(buffer)) for key, buffer in zip(keys, buffers, strict=True)], record)
    return hits, [bytes(buffer) for buffer, is_hit in zip(buffers, hits, strict=True) if is_hit]


@pytest.mark.parametrize("bad", [["short"], ["long"], ["short", "long"]])
@pytest.mark.parametrize("with_disk", [False, True])
def test_a_bad_block_is_told_from_a_missing_one_deleted_and_keeps_no_other_from_being_read(
    store: blocking.BlockingStore, record: Record, bad: list[str], with_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_disk:
        bring_back(monkeypatch)
    hits, contents = read(store, record, "a", *bad, "missing", "b")
    assert hits == [True, *[False] * len(bad), None, True]
    assert contents == [b"aaaa", b"bbbb"]
    assert store.exists_many(["a", *bad, "b"]) == [True, *[False] * len(bad), True]
    assert record.counts["bad"] == len(bad)


def test_what_the_store_does_not_hold_is_found_all_the_same(store: blocking.BlockingStore, record: Record) -> None:
    for hold_s, holds in ((1e6, 0), (10.0, 1)):
        match = match_and_hold(store, ["a", "b", "missing"], hold_s, record)
        assert (match, bool(match.hold), store.stats().store.holds) == (2, bool(holds), holds)
    assert record.counts == {"failed": 1}


def test_a_refused_hold_is_logged_again_after_one_that_was_not(
    store: blocking.BlockingStore, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    for hold_s in (1e6, 1e6, 0.0, 10.0, 1e6):  # 0: no hold, which says nothing of holds
        match_and_hold(store, ["a", "b"], hold_s, record)
    assert [word for entry in caplog.records for word in ("failed,", "again;") if word in entry.getMessage()] == [
        *("failed,", "again;", "failed,")
    ]


def test_what_was_loaded_is_pinned_if_that_is_set_and_a_failure_is_counted(
    store: blocking.BlockingStore, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable("gone")

    for pin_s, pinned in ((None, 0), (3600.0, 1)):
        pin_loaded(store, ["a"], pin_s, record)
        assert store.stats().store.protected_keys == pinned
    pin_loaded(store, [], 3600.0, record)
    monkeypatch.setattr(store, "pin", fail)
    pin_loaded(store, ["a"], 3600.0, record)
    assert record.counts == {"failed": 1}
