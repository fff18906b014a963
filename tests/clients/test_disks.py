"""Stores with a disk below their memory: every kind of client finds what memory had no
room for.
"""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest

from infinistore.blocking import BlockingStore
from infinistore.config import ServerConfig
from infinistore.disk.demotion import Demotion
from infinistore.disk.jobs import ReadInto
from infinistore.disk_io import store_disks
from infinistore.disk_io.store_disks import StoreDisks, open_disks
from infinistore.disk_settings import DiskPlace
from infinistore.errors import ConfigError, DiskFailed, KeyNotFound
from tests.clients.stores import EMBEDDED, STORES, Loops, Opened, differing
from tests.disk_io.faulty_runner import FaultyRunner, Hang
from tests.server.running import KIB, MIB, make_config

ON_DISK = differing(STORES, "embedded-threads", "shm-trio")
"""Where the disks are: in the process of the client, and in the server's. How blocks
come from there does not depend on how they go on.
"""
POOL_BYTES = 2 * MIB
BLOCK_BYTES = 64 * KIB


def with_disk(folder: Path, **settings: Any) -> ServerConfig:
    """A server, or the pool of an embedded store, with much more room on disk."""
    plain = {"prealloc_bytes": POOL_BYTES, "minimal_allocate_bytes": 4 * KIB, "disk_admission": "eager"}
    return make_config(**{**plain, "disks": (DiskPlace(folder, 64 * MIB),), **settings})


def blocks_of(total_bytes: int, size: int = BLOCK_BYTES) -> dict[str, bytes]:
    chance = random.Random(1)
    return {f"k{index:04}": chance.randbytes(size) for index in range(total_bytes // size)}


def put_durably(opened: Opened, blocks: dict[str, bytes], step: int = 8) -> None:
    """Put blocks, a few at a time, each batch durable before the next."""
    keys = list(blocks)
    for first in range(0, len(keys), step):
        some = keys[first : first + step]
        opened.store.put_many({key: blocks[key] for key in some})
        assert opened.store.flush([*some, "not there"]) == len(some)  # it counts those that are durable


def read(store: BlockingStore, keys: list[str]) -> list[bytes | None]:
    return [None if block is None else bytes(block) for block in store.get_many(keys)]


def until_recovered(opened: Opened) -> None:
    while True:
        disk = opened.store.stats().disk
        assert disk is not None
        if disk.disks[0].state != "recovering":
            return


@pytest.mark.parametrize("kind", differing(STORES))
def test_what_memory_has_no_room_for_is_read_from_disk(kind: str, loops: Loops, tmp_path: Path) -> None:
    blocks = blocks_of(4 * POOL_BYTES)
    keys = list(blocks)
    with STORES[kind](loops, with_disk(tmp_path / "disk"), {}, 1) as opened:
        store = opened.store
        put_durably(opened, blocks)
        found = store.exists_many([*keys, "missing"])
        assert found == [True] * len(keys) + [False]
        assert 0 < found.in_memory < len(keys) / 2
        match = store.match_prefix([*keys, "missing"])
        assert (match, match.in_memory) == (len(keys), found.in_memory)
        # One by one, and all in one call, which is more than the pool holds at a time.
        assert store.get(keys[0]) == blocks[keys[0]]
        assert read(store, [*keys, "missing"]) == [*blocks.values(), None]
        room = [bytearray(BLOCK_BYTES) for _ in keys]
        lengths = store.get_many_into(list(zip(keys, room, strict=True)))
        assert lengths == [BLOCK_BYTES] * len(keys)
        assert list(map(bytes, room)) == list(blocks.values())
        with store.lease(keys[:4], verify=True) as views:
            assert [bytes(view or b"") for view in views] == [blocks[key] for key in keys[:4]]
        with pytest.raises(KeyNotFound):
            store.get_many_into([(keys[0], room[0]), ("missing", room[1])], all_or_nothing=True)


@pytest.mark.parametrize("kind", ON_DISK)
def test_what_was_durable_is_there_when_the_store_is_opened_again(kind: str, loops: Loops, tmp_path: Path) -> None:
    blocks = blocks_of(2 * POOL_BYTES)
    config = with_disk(tmp_path / "disk")
    with STORES[kind](loops, config, {}, 1) as opened:
        put_durably(opened, blocks)
        assert opened.store.delete(list(blocks)[:2]) == 2
    with STORES[kind](loops, config, {}, 1) as opened:
        until_recovered(opened)
        found = opened.store.exists_many(list(blocks))
        assert (found, found.in_memory) == ([False] * 2 + [True] * (len(blocks) - 2), 0)
        assert read(opened.store, list(blocks)) == [None, None, *list(blocks.values())[2:]]
        assert opened.store.purge() >= 0
    with STORES[kind](loops, config, {}, 1) as opened:
        until_recovered(opened)
        assert not any(opened.store.exists_many(list(blocks)))


@pytest.mark.parametrize("kind", ON_DISK)
def test_a_prefetch_brings_the_head_of_a_prefix_into_memory(kind: str, loops: Loops, tmp_path: Path) -> None:
    blocks = blocks_of(2 * POOL_BYTES)
    keys = list(blocks)
    with STORES[kind](loops, with_disk(tmp_path / "disk"), {}, 1) as opened:
        put_durably(opened, blocks)
        store = opened.store
        assert store.exists_many(keys[:8]).in_memory == 0
        ahead = store.prefetch([*keys[: len(keys) // 2], "missing"], hold_s=60)
        assert ahead.reading >= 8
        assert ahead.reading + ahead.skipped + store.exists_many(keys[: len(keys) // 2]).in_memory >= len(keys) // 2
        while store.exists_many(keys[:8]).in_memory < 8:
            pass
        before = store.stats().disk
        assert read(store, keys[:8]) == [blocks[key] for key in keys[:8]]
        after = store.stats().disk
        assert before is not None
        assert after is not None
        assert after.late_blocks == before.late_blocks
        assert store.release_hold(ahead.hold)
        assert not store.release_hold(ahead.hold)


@pytest.mark.parametrize("kind", ON_DISK)
def test_an_equal_block_on_disk_is_not_written_twice(kind: str, loops: Loops, tmp_path: Path) -> None:
    blocks = blocks_of(2 * POOL_BYTES)
    with STORES[kind](loops, with_disk(tmp_path / "disk"), {}, 1) as opened:
        put_durably(opened, blocks)
        assert opened.store.put_many(blocks, replace=False) == list(blocks)
        assert read(opened.store, list(blocks)) == list(blocks.values())
        disk = opened.store.stats().disk
        assert disk is not None
        assert disk.disks[0].written_blocks == len(blocks)
        assert disk.disks[0].device_written_bytes < 1.5 * sum(map(len, blocks.values()))


@pytest.mark.parametrize("kind", differing(STORES))
def test_a_store_without_a_disk_has_nothing_durable_and_reads_nothing_ahead(kind: str, loops: Loops) -> None:
    with STORES[kind](loops, make_config(), {}, 1) as opened:
        store = opened.store
        store.put_many({"a": b"1", "b": b"2"})
        assert store.flush(["a", "b"]) == 0
        ahead = store.prefetch(["a", "b", "missing"])
        assert (ahead.reading, ahead.skipped, ahead.hold) == (0, 0, "")
        held = store.prefetch(["a", "b", "missing"], hold_s=60)
        assert store.release_hold(held.hold)
        assert store.stats().disk is None
        assert store.exists_many(["a", "missing"]).in_memory == 1


@pytest.mark.parametrize("kind", EMBEDDED)
def test_a_disk_belongs_to_one_store_at_a_time(kind: str, loops: Loops, tmp_path: Path) -> None:
    config = with_disk(tmp_path / "disk")
    with STORES[kind](loops, config, {}, 1) as opened:
        opened.store.put("a", b"1")
        with pytest.raises(ConfigError, match="in use by this process"), STORES[kind](loops, config, {}, 1):
            pass
        assert opened.store.get("a") == b"1"
    with STORES[kind](loops, config, {}, 1) as opened:
        until_recovered(opened)
        assert opened.store.get("a") == b"1"  # what waited was written when the store was closed


def test_what_is_evicted_while_other_blocks_are_read_is_not_missing(
    tmp_path: Path, loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty: list[FaultyRunner] = []
    hangs = False

    def opening(places: Sequence[DiskPlace], chance: random.Random) -> StoreDisks:
        opened = open_disks(places, chance)
        faulty.append(FaultyRunner(opened.runner, lambda job: Hang() if hangs and isinstance(job, ReadInto) else None))
        return attrs.evolve(opened, runner=faulty[0])

    monkeypatch.setattr(store_disks, "open_disks", opening)
    blocks = blocks_of(2 * POOL_BYTES)
    keys = [min(blocks), max(blocks)]  # on disk, in memory
    config = with_disk(tmp_path / "disk", disk_wait_s=60.0)
    with STORES["embedded-threads"](loops, config, {}, 1) as opened:
        put_durably(opened, blocks)
        assert opened.store.exists_many(keys).in_memory == 1
        hangs = True
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(read, opened.store, keys)
            while not faulty[0].hanging():
                pass
            opened.look(lambda: opened.core.evict_keys(keys[1:]))
            hangs = False
            faulty[0].end_hangs()
            assert found.result() == [blocks[key] for key in keys]


@pytest.mark.parametrize("kind", ["shm-threads", "embedded-threads", "embedded-trio"])
def test_an_error_in_the_tier_ends_the_disks_and_the_store_goes_on(
    kind: str, loops: Loops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("as told")

    with STORES[kind](loops, with_disk(tmp_path / "disk"), {}, 1) as opened:
        store = opened.store
        put_durably(opened, {"a": b"1", "b": b"2", "c": b"3"})
        monkeypatch.setattr(Demotion, "work", fail)
        store.put("d", b"4")
        with pytest.raises(DiskFailed, match="as told"):
            store.flush(["d"])
        with pytest.raises(DiskFailed, match="deleted meanwhile may be back"):
            store.delete(["a"])
        assert read(store, ["a", "b", "d", "missing"]) == [None, b"2", b"4", None]
        assert store.exists_many(["a", "b", "missing"]) == [False, True, False]
        with pytest.raises(DiskFailed):
            store.purge()
        assert read(store, ["b"]) == [None]
        store.put("e", b"5")
        assert store.get("e") == b"5"
        disk = store.stats().disk
        assert disk is not None
        assert (disk.disks[0].state, "RuntimeError: as told" in disk.disks[0].alarm) == ("off", True)
    monkeypatch.undo()
    with STORES[kind](loops, with_disk(tmp_path / "disk"), {}, 1) as opened:
        until_recovered(opened)
        assert opened.store.get("c") == b"3"


def test_what_waits_is_written_although_all_before_it_was_evicted(tmp_path: Path, loops: Loops) -> None:
    blocks = blocks_of(64 * MIB, 256 * KIB)
    with STORES["embedded-threads"](loops, with_disk(tmp_path / "disk"), {}, 1) as opened:
        for key, block in blocks.items():  # much faster than they can be written
            opened.store.put(key, block)
        done, written = 0, 0
        while done < len(blocks):
            disk = opened.store.stats().disk
            assert disk is not None
            written = disk.disks[0].written_blocks
            done = written + disk.evicted_blocks + disk.skipped_blocks
        assert done == len(blocks)
        assert written > 0


def test_what_waits_is_written_although_others_close_the_store_too(tmp_path: Path, loops: Loops) -> None:
    blocks, config = blocks_of(4 * MIB), with_disk(tmp_path / "disk", prealloc_bytes=8 * MIB)
    with STORES["embedded-threads"](loops, config, {}, 1) as opened, ThreadPoolExecutor() as threads:
        opened.store.put_many(blocks)
        for closed in [threads.submit(opened.store.close) for _ in range(4)]:
            closed.result()
    with STORES["embedded-threads"](loops, config, {}, 1) as opened:
        until_recovered(opened)
        assert read(opened.store, list(blocks)) == list(blocks.values())


@pytest.mark.nightly
def test_a_pool_of_64_mib_over_a_disk_of_2_gib(loops: Loops, tmp_path: Path) -> None:
    blocks = blocks_of(8 * 64 * MIB, MIB)
    folder = tmp_path / "disk"
    config = with_disk(folder, prealloc_bytes=64 * MIB, disks=(DiskPlace(folder, 2048 * MIB),))
    with STORES["shm-threads"](loops, config, {}, 1) as opened:
        put_durably(opened, blocks, step=32)
        for _ in range(2):
            assert read(opened.store, list(blocks)) == list(blocks.values())


@pytest.mark.nightly
def test_a_disk_of_2_gib_that_was_filled_has_the_newest_blocks(loops: Loops, tmp_path: Path) -> None:
    """More than the disk takes, through a pool of 64 MiB, and then all that is left."""
    stretch = random.Random(1).randbytes(MIB - 8)
    folder = tmp_path / "disk"
    config = with_disk(folder, prealloc_bytes=64 * MIB, disks=(DiskPlace(folder, 2048 * MIB),))
    with STORES["embedded-threads"](loops, config, {}, 1) as opened:
        store = opened.store
        for first in range(0, 2560, 32):
            some = {f"k{index:04}": index.to_bytes(8, "big") + stretch for index in range(first, first + 32)}
            store.put_many(some)
            assert store.flush(list(some)) == len(some)
        keys = [f"k{index:04}" for index in range(2560)]
        there = store.exists_many(keys)
        assert 1024 < sum(there) < 2048
        assert all(there[-1024:])
        for first in range(0, 2560, 32):
            for index, block in enumerate(store.get_many(keys[first : first + 32]), first):
                assert (block is not None) == there[index]
                if block is not None:
                    assert block[:8] == index.to_bytes(8, "big")
                    assert block[8:] == stretch
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.parent.name == "segments") <= 2048 * MIB
