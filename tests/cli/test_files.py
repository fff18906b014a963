"""Files in a store: what was put comes back, and what is not whole is never handed out as if it were."""

import io
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.cli.files import Manifest, delete_files, open_file, put_file
from infinistore.errors import ChecksumMismatch, KeyNotFound, OutOfMemory

MAGIC = b"infinistore-file 1\n"


@pytest.fixture
def store() -> Iterator[BlockingStore]:
    with blocking.open_store(pool_bytes=1 << 20, minimal_allocate_bytes=64) as opened:
        yield opened


class _Pipe(io.BytesIO):
    """Gives a few bytes at a time, as a pipe may."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(7 if size is None or size < 0 else min(7, size))


def _put(store: BlockingStore, data: bytes, block_bytes: int = 10, *, replace: bool = True) -> int:
    stored = put_file(store, "key", io.BytesIO(data), block_bytes, replace=replace)
    assert stored.stored
    return stored.blocks


def _get(store: BlockingStore) -> bytes:
    return b"".join(open_file(store, "key")[1])


contents = st.one_of(st.binary(max_size=300), st.binary(max_size=50).map(lambda tail: MAGIC + tail))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents, st.integers(1, 100), st.sampled_from([io.BytesIO, _Pipe]))
def test_what_was_put_is_got(store: BlockingStore, data: bytes, block_bytes: int, source: type[io.BytesIO]) -> None:
    stored = put_file(store, "key", source(data), block_bytes, replace=True)
    assert stored.size_bytes == len(data)
    assert _get(store) == data
    # Nothing of an earlier, longer file is left behind.
    assert len(store.keys()) == 1 + stored.blocks


def test_a_file_of_one_block_is_stored_as_it_is(store: BlockingStore) -> None:
    assert _put(store, b"0123456789") == 0
    assert store.get("key") == b"0123456789"


def test_a_longer_file_is_blocks_and_a_manifest(store: BlockingStore) -> None:
    assert _put(store, b"0123456789a") == 2
    assert store.keys() == ["key", "key#0", "key#1"]
    assert store.get("key#0") == b"0123456789"
    assert store.get("key").startswith(MAGIC)


def test_a_lost_block_makes_the_file_missing_and_says_which(store: BlockingStore) -> None:
    _put(store, bytes(35))
    store.delete(["key#2"])
    with pytest.raises(KeyNotFound, match="missing block 2 of 4"):
        open_file(store, "key")


def test_a_block_lost_while_the_file_is_read_is_noticed(store: BlockingStore) -> None:
    _put(store, bytes(35))
    _, pieces = open_file(store, "key")
    store.delete(["key#0"])
    with pytest.raises(KeyNotFound, match="missing block 0 of 4"):
        list(pieces)


def test_blocks_of_two_puts_are_not_taken_for_a_file(store: BlockingStore) -> None:
    _put(store, b"a" * 35)
    store.put("key#1", b"b" * 10)
    with pytest.raises(ChecksumMismatch):
        _get(store)


def test_a_file_larger_than_the_pool_is_refused_and_leaves_nothing(store: BlockingStore) -> None:
    with pytest.raises(OutOfMemory):
        _put(store, bytes(3 << 20), block_bytes=1 << 16)
    assert store.keys("key") == []


def test_keep_leaves_the_key_as_it_was(store: BlockingStore) -> None:
    _put(store, b"first", replace=False)
    assert not put_file(store, "key", io.BytesIO(b"second"), 10, replace=False).stored
    assert _get(store) == b"first"


def test_deleting_a_file_deletes_its_blocks(store: BlockingStore) -> None:
    _put(store, bytes(35))
    store.put("other", b"x")
    assert delete_files(store, ["key", "nothing"]) == 1
    assert store.keys() == ["other"]


@given(st.binary(max_size=60))
def test_a_value_that_only_looks_like_a_manifest_is_a_value(tail: bytes) -> None:
    with blocking.open_store(pool_bytes=1 << 16, minimal_allocate_bytes=64) as store:
        store.put("key", MAGIC + tail)
        assert _get(store) == MAGIC + tail


def test_a_manifest_stays_small_enough_to_be_told_from_a_value() -> None:
    largest = Manifest(1 << 63, 1 << 63, 1 << 63, "f" * 16)
    assert len(largest.encode()) <= 256
