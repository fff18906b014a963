"""Faults that other tests inject are those that they ask for."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from infinistore.disk.jobs import ALIGNMENT_BYTES, Allocate, Flush, Job, ReadInto, Write
from infinistore.disk_io import ThreadRunner, open_folder
from infinistore.sizes import MIB
from tests.disk_io.driving import is_woken, memory_of, run
from tests.disk_io.faulty_runner import Fail, Fault, FaultyRunner, Hang, Rot, Short

SEGMENT = "segments/0"
BLOCKS = [b"a" * 5000, b"b" * 5000]


@pytest.fixture
def faults() -> dict[Job, Fault]:
    return {}


@pytest.fixture
def runner(path: Path, faults: dict[Job, Fault]) -> Iterator[FaultyRunner]:
    made = FaultyRunner(ThreadRunner(), faults.get)
    made.add(0, open_folder(path))
    run(made, [Allocate(0, SEGMENT, MIB)])
    run(made, [Write(0, SEGMENT, 0, memory_of(*BLOCKS))])
    yield made
    assert made.close(timeout_s=60)


def reading() -> ReadInto:
    return ReadInto(0, SEGMENT, 0, memory_of(*[bytes(5000)] * 2), [5000, 5000])


def test_an_error_does_nothing(runner: FaultyRunner, faults: dict[Job, Fault]) -> None:
    faults[job := Write(0, SEGMENT, 0, memory_of(b"new"))] = Fail(errno.ENOSPC)
    faults[sync := Flush(0, SEGMENT)] = Fail()

    assert [result.errno for result in run(runner, [job, sync, reading()])] == [errno.ENOSPC, errno.EIO, 0]
    run(runner, [read := reading()])
    assert list(map(bytes, read.views)) == BLOCKS


def test_a_short_transfer_does_a_part(runner: FaultyRunner, faults: dict[Job, Fault]) -> None:
    faults[write := Write(0, SEGMENT, 0, memory_of(b"new", b"not written"))] = Short(1)
    [short] = run(runner, [write])
    assert (short.errno, short.transferred_bytes) == (errno.ENOSPC, ALIGNMENT_BYTES)

    faults[read := reading()] = Short(1)
    [short] = run(runner, [read])
    assert (short.errno, short.transferred_bytes) == (0, 2 * ALIGNMENT_BYTES)
    assert list(short.checksums) == [xxh3_64_intdigest(read.views[0]), 0]
    assert bytes(read.views[0][:4]) == b"new\0"
    assert bytes(read.views[1]) == bytes(5000)


def test_rot_changes_bytes_and_hashes(runner: FaultyRunner, faults: dict[Job, Fault]) -> None:
    faults[read := reading()] = Rot()
    [result] = run(runner, [read])

    for view, block, checksum in zip(read.views, BLOCKS, result.checksums, strict=True):
        assert bytes(view) != block
        assert checksum != xxh3_64_intdigest(block)


def test_what_hangs_is_carried_out_in_the_end(runner: FaultyRunner, faults: dict[Job, Fault]) -> None:
    faults[read := reading()] = Hang()
    runner.submit([read])
    run(runner, [reading()])

    assert not is_woken(runner)
    assert runner.hanging() == [read]
    runner.end_hangs()
    assert is_woken(runner, 60)
    assert [result.job for result in runner.take()] == [read]
    assert list(map(bytes, read.views)) == BLOCKS
