"""The simulated disk keeps what it must, and loses what it may."""

import errno
import random

import pytest
import xxhash

from infinistore.disk.format import Superblock, encode_superblock
from infinistore.disk.jobs import (
    Allocate,
    Flush,
    HashBlocks,
    Job,
    ReadInto,
    Replace,
    Result,
    Write,
    WriteSuperblock,
)
from tests.simulation.disk import SECTOR_BYTES, SimulatedDisk
from tests.simulation.disks import DiskSettings, SimulatedDisks
from tests.simulation.world import World

FILE, PAGE = "segments/0", 4096
OLD, NEW = b"o" * PAGE, b"n" * PAGE


@pytest.fixture(params=range(8))
def disk(request: pytest.FixtureRequest) -> SimulatedDisk:
    disk = SimulatedDisk(random.Random(request.param))
    run(disk, Allocate(0, FILE, 4 * PAGE))
    return disk


def run(disk: SimulatedDisk, job: Job) -> Result:
    disk.start([job])
    return disk.finish(job)


def write(offset: int, *blocks: bytes) -> Write:
    return Write(0, FILE, offset, [memoryview(block) for block in blocks])


def read(disk: SimulatedDisk, offset: int = 0, length: int = PAGE) -> bytes:
    into = bytearray(length)
    run(disk, ReadInto(0, FILE, offset, [memoryview(into)]))
    return bytes(into)


def sectors(data: bytes) -> set[bytes]:
    return {data[start : start + SECTOR_BYTES] for start in range(0, len(data), SECTOR_BYTES)}


def test_what_was_flushed_survives_a_crash(disk: SimulatedDisk) -> None:
    run(disk, write(0, OLD, b"short"))
    assert run(disk, Flush(0, FILE)).errno == 0
    disk.crash()
    assert read(disk, 0, 2 * PAGE) == OLD + b"short".ljust(PAGE, b"\0")


def test_what_was_not_flushed_is_kept_or_lost_sector_by_sector() -> None:
    kept = []
    for seed in range(40):
        disk = SimulatedDisk(random.Random(seed))
        run(disk, Allocate(0, FILE, PAGE))
        run(disk, write(0, OLD))
        run(disk, Flush(0, FILE))
        run(disk, write(0, NEW))
        assert read(disk) == NEW  # until then, all see it
        disk.crash()
        assert sectors(read(disk)) <= sectors(OLD + NEW)
        kept.append(read(disk))
    assert OLD in kept and NEW in kept
    assert any(len(sectors(one)) == 2 for one in kept)


def test_a_flush_covers_only_what_had_ended_before_it_began() -> None:
    lost = 0
    for seed in range(20):
        disk = SimulatedDisk(random.Random(seed))
        run(disk, Allocate(0, FILE, PAGE))
        flush = Flush(0, FILE)
        disk.start([flush])
        run(disk, write(0, NEW))
        disk.finish(flush)
        disk.crash()
        lost += read(disk) != NEW
    assert lost


def test_later_writes_may_be_there_without_earlier_ones() -> None:
    found = set()
    for seed in range(40):
        disk = SimulatedDisk(random.Random(seed))
        run(disk, Allocate(0, FILE, 2 * PAGE))
        run(disk, write(0, OLD))
        run(disk, write(PAGE, NEW))
        disk.crash()
        found.add((read(disk, 0) == OLD, read(disk, PAGE) == NEW))
    assert found == {(True, True), (True, False), (False, True), (False, False)}


def test_jobs_under_way_may_or_may_not_have_happened_at_a_crash() -> None:
    found = set()
    for seed in range(40):
        disk = SimulatedDisk(random.Random(seed))
        run(disk, Replace(0, "snapshot", [memoryview(OLD)]))
        disk.start([Replace(0, "snapshot", [memoryview(NEW)]), WriteSuperblock(0, 1, NEW), Allocate(0, FILE, PAGE)])
        disk.crash()
        assert disk.under_way == []
        found.add((disk.contents("snapshot"), FILE in disk.files()))
        assert sectors(disk.contents("disk")[PAGE:]) <= sectors(NEW + bytes(PAGE))
    assert found == {(one, there) for one in (OLD, NEW) for there in (True, False)}


def test_what_a_failed_flush_lost_stays_lost() -> None:
    lost = 0
    for seed in range(20):
        disk = SimulatedDisk(random.Random(seed))
        run(disk, Allocate(0, FILE, PAGE))
        run(disk, write(0, NEW))
        disk.faults.flush_error = 1.0
        assert run(disk, Flush(0, FILE)).errno == errno.EIO
        disk.faults.heal()
        assert run(disk, Flush(0, FILE)).errno == 0
        disk.crash()
        lost += read(disk) != NEW
    assert lost


def test_a_read_hashes_what_it_read_and_nothing_that_it_did_not(disk: SimulatedDisk) -> None:
    run(disk, write(0, OLD, NEW))
    into = [memoryview(bytearray(PAGE)), memoryview(bytearray(PAGE))]
    whole = run(disk, ReadInto(0, FILE, 0, into, [5, PAGE]))
    assert whole.checksums == [xxhash.xxh3_64_intdigest(OLD[:5]), xxhash.xxh3_64_intdigest(NEW)]
    assert whole.transferred_bytes == 2 * PAGE
    cut = run(disk, ReadInto(0, FILE, 3 * PAGE, into, [5, PAGE]))
    assert (cut.errno, cut.transferred_bytes, cut.checksums[1]) == (0, PAGE, 0)
    assert run(disk, HashBlocks(0, [memoryview(b"abc")])).checksums == [xxhash.xxh3_64_intdigest(b"abc")]


def test_faults_come_as_often_as_was_said(disk: SimulatedDisk) -> None:
    disk.faults.read_error = disk.faults.write_error = 1.0
    assert run(disk, ReadInto(0, FILE, 0, [memoryview(bytearray(PAGE))])).errno == errno.EIO
    assert run(disk, write(0, NEW)).errno == errno.EIO
    assert run(disk, WriteSuperblock(0, 0, NEW)).errno == errno.EIO
    disk.faults.heal()
    assert run(disk, write(0, NEW)).errno == 0
    disk.faults.short_read = 1.0
    assert run(disk, ReadInto(0, FILE, 0, [memoryview(bytearray(PAGE))])).transferred_bytes <= PAGE
    assert run(disk, ReadInto(0, "segments/1", 0, [memoryview(bytearray(PAGE))])).errno == errno.ENOENT


def test_a_misdirected_write_says_that_all_is_well() -> None:
    wrong = 0
    for seed in range(20):
        disk = SimulatedDisk(random.Random(seed))
        run(disk, Allocate(0, FILE, 4 * PAGE))
        disk.faults.misdirected_write = 1.0
        assert run(disk, write(0, NEW)).errno == 0
        assert read(disk, 0, 4 * PAGE).count(NEW) == 1
        wrong += read(disk) != NEW
    assert wrong


def test_a_disk_is_full_when_all_that_it_has_is_allocated() -> None:
    disk = SimulatedDisk(random.Random(0), free_bytes=4 * PAGE)
    assert run(disk, Allocate(0, FILE, 3 * PAGE)).errno == 0
    assert run(disk, Allocate(0, FILE, 3 * PAGE)).errno == 0
    assert run(disk, Allocate(0, "segments/1", 2 * PAGE)).errno == errno.ENOSPC
    assert disk.files() == {FILE: 3 * PAGE}


def test_bits_rot_and_files_are_cut_or_lost(disk: SimulatedDisk) -> None:
    run(disk, write(0, OLD))
    disk.rot(FILE, 7)
    assert read(disk) == OLD[:7] + bytes([OLD[7] ^ 1]) + OLD[8:]
    disk.truncate(FILE, 100)
    twin = disk.copy(random.Random(0))
    disk.remove(FILE)
    assert (disk.files(), twin.files()) == ({}, {FILE: 100})
    twin.wipe()
    assert twin.files() == {}


@pytest.mark.parametrize("seed", range(20))
def test_a_crash_in_the_first_superblock_leaves_a_new_disk_or_one(seed: int) -> None:
    world = World(seed)
    plug = SimulatedDisks(DiskSettings(disks=1))
    plug.start(world)
    [disk] = plug.disks
    superblock = Superblock(0, bytes(16), bytes(16), 1, 0, 0, 256 * 1024, 0, 0, 0)
    disk.start([WriteSuperblock(0, 0, encode_superblock(superblock))])
    disk.crash()
    assert plug.open_volume(disk, random.Random(seed)).number == 0
