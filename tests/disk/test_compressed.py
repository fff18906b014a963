"""A store whose blocks are compressed on disk, as far as they get shorter."""

import errno
import sys
from collections.abc import Callable
from typing import TypeVar

import attrs
import pytest

from infinistore.disk.compression import compress
from infinistore.disk.format import COMPRESSED_VERSION, LEAD, SAVED_SHIFT, VERSION, Listing, decode_superblocks
from infinistore.disk.inspection import DamagedBlock, Inspector
from infinistore.disk.jobs import Compress, HashBlocks, Job, Result, Steps, Write, WriteSuperblock
from infinistore.disk.records import fingerprints
from infinistore.disk.recovery import groups_of, read_blocks
from infinistore.disk.settings import TierSettings
from infinistore.errors import ConfigError
from tests.disk.conftest import UNIT_BYTES, Machine, content
from tests.simulation.disk import SUPERBLOCK, SimulatedDisk

PLAIN = TierSettings(admission="eager", group_s=0.001)
COMPRESSING = attrs.evolve(PLAIN, compress=True)
MakeMachine = Callable[..., Machine]


def block(name: str, pages: int = 3) -> bytes:
    """Bytes of which every other one is zero: they get shorter by a half."""
    data = bytearray(content(name, pages * UNIT_BYTES))
    data[1::2] = bytes(len(data) // 2)
    return bytes(data)


def packed(name: str, pages: int = 3) -> bytes:
    found = compress(memoryview(block(name, pages)))
    assert found is not None
    return found


@pytest.fixture
def machine(make_machine: MakeMachine) -> Machine:
    return make_machine(settings=COMPRESSING)


def put_on_disk(machine: Machine, *names: str, **options: bool) -> None:
    machine.put({name: block(name) for name in names}, **options)
    assert machine.on_disk(*names)


def version(disk: SimulatedDisk) -> int:
    """The version of the newest superblock."""
    copies = disk.contents(SUPERBLOCK)
    newest = decode_superblocks(copies)
    found: int = LEAD.unpack_from(copies, newest.revision % 2 * UNIT_BYTES)[2]
    assert newest.compressed == found - VERSION
    return found


_T = TypeVar("_T")


def drive(disk: SimulatedDisk, steps: Steps[_T]) -> _T:
    """Run steps on a disk; return what they return."""
    results = None
    try:
        while True:
            jobs = steps.send(results) if results is not None else next(steps)
            assert not isinstance(jobs, str)
            disk.start(jobs)
            results = [disk.finish(job) for job in jobs]
    except StopIteration as end:
        found: _T = end.value
        return found


def start_with(machine: Machine, settings: TierSettings) -> None:
    """End cleanly, and start with other settings."""
    machine.until(machine.tier.close(machine.clock.now + 100))
    machine.settings = settings
    machine.start()
    machine.settle()


@pytest.mark.parametrize("checksums", [True, False])
def test_a_block_takes_fewer_pages_and_comes_back_whole(machine: Machine, checksums: bool) -> None:
    put_on_disk(machine, "a", "b", "c", checksums=checksums)
    (disk,) = machine.disks
    assert packed("b") in disk.contents("segments/0")
    assert machine.get("a", "b", "c") == [block("a"), block("b"), block("c")]
    [figures] = machine.tier.statistics().disks
    assert figures.written_bytes == figures.read_bytes == 3 * len(block("a"))
    assert figures.stored_bytes == 3 * 2 * UNIT_BYTES


def test_neighbours_are_read_as_one_compressed_or_not(machine: Machine) -> None:
    blocks = {"a": block("a"), "b": content("b", 5000), "c": block("c")}
    machine.put(blocks)
    assert machine.on_disk(*blocks)
    (disk,) = machine.disks
    disk.history.clear()
    assert machine.get(*blocks) == list(blocks.values())
    assert len(disk.history) == 1


def test_random_bytes_are_stored_as_they_are(machine: Machine) -> None:
    machine.put_on_disk("a")
    assert content("a") in machine.disks[0].contents("segments/0")
    assert machine.get("a") == [content("a")]
    assert machine.tier.statistics().disks[0].stored_bytes == UNIT_BYTES


def test_a_block_that_is_damaged_is_a_miss_and_its_neighbours_are_not(machine: Machine) -> None:
    put_on_disk(machine, "a", "b", "c")
    (disk,) = machine.disks
    disk.rot("segments/0", disk.contents("segments/0").index(packed("b")) + 2000)
    assert machine.get("a", "b", "c") == [block("a"), None, block("c")]
    assert machine.tier.exists(["b"]) == b"\0"
    assert machine.tier.statistics().disks[0].damaged_blocks == 1


def test_after_a_crash_blocks_that_are_whole_are_there(machine: Machine) -> None:
    put_on_disk(machine, "a", "b")
    machine.restart()
    assert machine.get("a", "b") == [block("a"), block("b")]


def test_after_a_clean_end_the_index_comes_from_the_snapshot(machine: Machine) -> None:
    put_on_disk(machine, "a", "b")
    machine.disks[0].history.clear()
    start_with(machine, COMPRESSING)
    assert machine.get("a", "b") == [block("a"), block("b")]


def test_a_block_that_is_kept_when_its_segment_is_overwritten_moves_compressed(make_machine: MakeMachine) -> None:
    machine = make_machine(segments=3, settings=COMPRESSING)
    put_on_disk(machine, "kept")
    for number in range(300):
        machine.put_names(str(number))
        machine.settle()
        if number % 20 == 0:
            machine.forget_memory()
            assert machine.get("kept") == [block("kept")]
    assert machine.tier.statistics().reinserted_blocks > 0
    machine.forget_memory()
    assert machine.get("kept") == [block("kept")]
    assert packed("kept") in b"".join(machine.disks[0].contents(f"segments/{number}") for number in range(3))


@pytest.mark.parametrize("kind", [HashBlocks, Compress])
def test_a_put_in_place_of_a_block_that_is_being_compressed_wins(machine: Machine, kind: type[Job]) -> None:
    machine.stuck = lambda job: isinstance(job, kind)
    machine.put({"a": block("a"), "b": block("b")}, checksums=False)
    machine.settle(1.0)
    machine.put({"a": block("newer")})
    machine.stuck = lambda job: False
    assert machine.on_disk("a", "b")
    assert machine.get("a", "b") == [block("newer"), block("b")]


def test_a_job_that_fails_to_compress_is_tried_again(machine: Machine) -> None:
    (disk,) = machine.disks
    machine.stuck = lambda job: isinstance(job, Compress)
    machine.put({"a": block("a")})
    machine.settle(1.0)
    [job] = [job for job in disk.under_way if isinstance(job, Compress)]
    disk.under_way.remove(job)
    machine.driven.done([Result(job, errno.ENOMEM)])
    machine.stuck = lambda job: False
    assert machine.on_disk("a")
    assert machine.get("a") == [block("a")]


def test_a_store_that_does_not_compress_reads_what_another_one_has(machine: Machine) -> None:
    put_on_disk(machine, "a")
    start_with(machine, PLAIN)
    put_on_disk(machine, "b")
    assert block("b") in machine.disks[0].contents("segments/0")
    assert machine.get("a", "b") == [block("a"), block("b")]
    assert version(machine.disks[0]) == COMPRESSED_VERSION


def test_a_disk_of_the_first_version_is_gone_on_with(make_machine: MakeMachine) -> None:
    machine = make_machine(settings=PLAIN)
    put_on_disk(machine, "a")
    assert version(machine.disks[0]) == VERSION
    start_with(machine, PLAIN)
    assert version(machine.disks[0]) == VERSION
    start_with(machine, COMPRESSING)
    assert version(machine.disks[0]) == COMPRESSED_VERSION
    machine.disks[0].rot(SUPERBLOCK, UNIT_BYTES)  # the other copy says so, too
    assert version(machine.disks[0]) == COMPRESSED_VERSION
    machine.disks[0].rot(SUPERBLOCK, UNIT_BYTES)
    machine.disks[0].rot(SUPERBLOCK, 0)
    assert version(machine.disks[0]) == COMPRESSED_VERSION
    machine.disks[0].rot(SUPERBLOCK, 0)
    put_on_disk(machine, "b")
    assert machine.get("a", "b") == [block("a"), block("b")]


def test_nothing_compressed_is_written_before_the_disk_says_so(make_machine: MakeMachine) -> None:
    machine = make_machine(settings=PLAIN)
    put_on_disk(machine, "a")
    machine.until(machine.tier.close(machine.clock.now + 100))
    machine.settings = COMPRESSING
    machine.disks[0].history.clear()
    machine.start()
    put_on_disk(machine, "b")
    kinds = [type(job) for job in machine.disks[0].history]
    assert kinds.index(WriteSuperblock) < kinds.index(Compress) < kinds.index(Write)
    for disk in machine.disks:
        disk.crash()
    assert version(machine.disks[0]) == COMPRESSED_VERSION


def test_without_zstandard_a_disk_with_compressed_blocks_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_disk(machine, "a")
    before = machine.disks[0].contents(SUPERBLOCK)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"has compressed blocks, which need zstandard.*the extra `compression`"):
        machine.start()
    monkeypatch.undo()
    assert machine.disks[0].contents(SUPERBLOCK) == before
    machine.restart()
    assert machine.get("a") == [block("a")]


def test_a_disk_is_verified_by_its_blocks_as_they_were(machine: Machine) -> None:
    machine.put({"a": block("a"), "b": block("b", 7), "c": content("c", 5000)})
    assert machine.on_disk("a", "b", "c")
    machine.until(machine.tier.close(machine.clock.now + 100))
    (disk,) = machine.disks
    place = disk.contents("segments/0").index(packed("b", 7))
    inspector = Inspector(decode_superblocks(disk.contents(SUPERBLOCK)), disk.files())
    contents = drive(disk, inspector.inspect(lambda: None))
    assert (contents.keys, contents.keys_bytes) == (3, 10 * UNIT_BYTES + 5000)
    verified = drive(disk, inspector.verify(0))
    assert (verified.blocks, verified.blocks_bytes, verified.damaged) == (3, 10 * UNIT_BYTES + 5000, [])
    disk.rot("segments/0", place + 100)
    [damaged] = drive(disk, inspector.verify(0)).damaged
    assert damaged == DamagedBlock("b", 0, place, 7 * UNIT_BYTES, True, 0)


def test_what_is_verified_at_once_is_bounded_as_it_will_be_in_memory() -> None:
    """A page may have very much: here, a page each has 1 MiB but a page."""
    pages = 256
    listing = Listing.of(
        [b"key"] * 10,
        *fingerprints(["key"] * 10, 1),
        checksum=0,
        page=[0, 1, 2, 3, 4, 5, 6, 7, 100, 101],
        length=(pages - 1) * UNIT_BYTES,
        flags=(pages - 2) << SAVED_SHIFT,
        tenant=0,
        expiry=0,
    )
    assert groups_of(listing, range(9)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert groups_of(listing, [0, 2, 3, 9]) == [[0], [2, 3], [9]]
    job = read_blocks(0, 3, listing, [2, 3])
    assert (job.file, job.offset, list(map(len, job.views))) == ("segments/3", 2 * UNIT_BYTES, [UNIT_BYTES] * 2)
    assert [len(one or b"") for one in job.blocks] == [(pages - 1) * UNIT_BYTES] * 2
