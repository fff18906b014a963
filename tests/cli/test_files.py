"""Files in a store: what was put comes back, and what is not whole is never handed out
as if it were.
"""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.cli.files import MAX_BLOCKS, BadManifest, Manifest, delete_files, open_file, parse_manifest, put_file
from infinistore.errors import ChecksumMismatch, KeyNotFound, LimitExceeded, OutOfMemory

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


# Manifests that no put has written

SOUND = {"size_bytes": 35, "block_bytes": 10, "blocks": 4, "xxh3": "0123456789abcdef"}
IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "no block size": {"block_bytes": 0},
    "more blocks than memory": {"size_bytes": 10**15, "block_bytes": 1, "blocks": 10**15},
    "more blocks than the bytes": {"blocks": 10**12},
    "fewer blocks than the bytes": {"blocks": 3},
    "less than nothing": {"size_bytes": -10, "blocks": -1},
    "a fraction": {"blocks": 4.0},
    "infinity": {"size_bytes": float("inf")},
    "a truth": {"size_bytes": True, "blocks": True},
    "a text": {"blocks": "4"},
    "a list": {"blocks": [4]},
    "no checksum": {"xxh3": None},
    "a checksum of another kind": {"xxh3": "0123"},
    "a checksum with a line more": {"xxh3": "0123456789abcdef\n"},
}


def _manifest(**said: Any) -> bytes:
    return MAGIC + json.dumps(SOUND | said).encode()


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_manifest_that_cannot_be_true_is_one_error_that_says_what_to_do(store: BlockingStore, what: str) -> None:
    value = _manifest(**IMPOSSIBLE[what])
    store.put("key", value)
    for read in (lambda: open_file(store, "key"), lambda: delete_files(store, ["other", "key"])):
        with pytest.raises(BadManifest, match=r"'key'.*put the file again, or delete"):
            read()
    assert store.get("key") == value
    assert _put(store, b"a new file") == 0
    assert _get(store) == b"a new file"


def test_a_manifest_whose_blocks_could_have_no_keys_is_refused() -> None:
    assert parse_manifest("k" * 1022, _manifest()) is not None
    with pytest.raises(BadManifest, match="too long"):
        parse_manifest("k" * 1023, _manifest())


numbers = st.integers() | st.integers(0, 100) | st.floats() | st.booleans() | st.none() | st.text(max_size=5)
fields = st.fixed_dictionaries(
    {}, optional=dict.fromkeys((*SOUND, "another"), numbers) | {"xxh3": st.just(SOUND["xxh3"]) | numbers}
)


@given(st.binary(max_size=100) | fields.map(lambda said: json.dumps(said).encode()))
def test_any_bytes_are_a_sound_manifest_or_a_value_or_one_error(said: bytes) -> None:
    try:
        manifest = parse_manifest("key", MAGIC + said)
    except BadManifest:
        return
    if manifest is None:
        return
    assert 0 <= manifest.blocks <= MAX_BLOCKS
    assert sum(len(keys) for _, keys in manifest.block_keys("key")) == manifest.blocks
    assert sum(map(manifest.length_of, range(manifest.blocks))) == manifest.size_bytes


@given(st.fixed_dictionaries({"size_bytes": numbers, "block_bytes": numbers, "blocks": numbers}))
def test_a_manifest_is_sound_or_refused_whatever_its_numbers_are(said: dict[str, Any]) -> None:
    try:
        manifest = parse_manifest("key", _manifest(**said))
    except BadManifest:
        return
    if manifest is not None:  # None: too long to be one
        assert sum(map(manifest.length_of, range(manifest.blocks))) == manifest.size_bytes


def test_a_manifest_of_many_blocks_that_are_not_there_is_a_missing_file(store: BlockingStore) -> None:
    store.put("key", _manifest(size_bytes=MAX_BLOCKS, block_bytes=1, blocks=MAX_BLOCKS))
    with pytest.raises(KeyNotFound, match="missing block 0 of 1048576"):
        open_file(store, "key")


@pytest.mark.parametrize("length", [9, 11, 1000])
def test_a_block_that_is_longer_or_shorter_than_the_manifest_says_is_not_read_as_a_part(
    store: BlockingStore, length: int
) -> None:
    _put(store, bytes(35))
    store.put("key#1", bytes(length))
    with pytest.raises(ChecksumMismatch, match="not the file that was put"):
        _get(store)


def test_a_file_of_too_many_blocks_is_refused_and_leaves_nothing(
    store: BlockingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinistore.cli.files.MAX_BLOCKS", 3)
    monkeypatch.setattr("infinistore.cli.files._BATCH_BYTES", 10)
    with pytest.raises(LimitExceeded, match="--block-size"):
        _put(store, bytes(35))
    assert store.keys() == []


def test_a_key_that_leaves_no_room_for_the_numbers_of_blocks_is_refused(store: BlockingStore) -> None:
    assert put_file(store, "k" * 1022, io.BytesIO(bytes(35)), 10, replace=True).blocks == 4
    for length in (1022, 1023):
        with pytest.raises(LimitExceeded, match="shorter key"):
            put_file(store, "k" * length, io.BytesIO(bytes(350 if length == 1022 else 35)), 10, replace=True)
    assert store.keys("k" * 1023) == []
