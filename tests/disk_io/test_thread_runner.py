"""Jobs run by threads, in real files: results, priorities, faults, and ends."""

import errno
import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from xxhash import xxh3_64_intdigest

from infinistore.disk.jobs import (
    ALIGNMENT_BYTES,
    Allocate,
    Compress,
    Flush,
    HashBlocks,
    Job,
    ReadInto,
    Replace,
    Result,
    Write,
    WriteSuperblock,
    aligned,
)
from infinistore.disk_io import DiskFolder, ThreadRunner, open_folder
from infinistore.disk_io.files import DiskFiles
from infinistore.disk_io.runner import PIECE_BYTES, DiskThreads
from infinistore.errors import StoreUnavailable
from infinistore.sizes import MIB
from tests.bad_days.test_fork import in_child
from tests.disk_io.driving import is_woken, memory_of, run
from tests.disk_io.hanging import HangingFiles

SEGMENT = "segments/0"
MakeRunner = Callable[..., ThreadRunner]


@pytest.fixture
def runner(runner_of: MakeRunner, folder: DiskFolder) -> ThreadRunner:
    """A runner with one disk, and a segment of 8 MiB on it."""
    made = runner_of()
    made.add(0, folder)
    [allocated] = run(made, [Allocate(0, SEGMENT, 8 * MIB)])
    assert allocated.errno == 0
    return made


def blocks_of(*sizes: int) -> list[bytes]:
    return [os.urandom(size) for size in sizes]


def room_for(blocks: list[bytes]) -> list[memoryview]:
    return memory_of(*(bytes(len(block)) for block in blocks))


@pytest.mark.parametrize(
    "sizes",
    [
        (4 * MIB,),
        (256 << 10,) * 9,
        (64 << 10,) * 40,
        (1, 4095, 4096, 4097, 100_000, PIECE_BYTES + 1, 3, PIECE_BYTES - 1),
        (),
    ],
    ids=["one large", "neighbours", "small", "of any length", "none"],
)
def test_blocks_come_back_as_they_were_written_with_their_hashes(runner: ThreadRunner, sizes: tuple[int, ...]) -> None:
    blocks = blocks_of(*sizes)
    place = 3 * ALIGNMENT_BYTES

    written, flushed = (
        run(runner, [job])[0] for job in (Write(0, SEGMENT, place, memory_of(*blocks)), Flush(0, SEGMENT))
    )
    read = room_for(blocks)
    [result] = run(runner, [ReadInto(0, SEGMENT, place, read, list(map(len, blocks)))])

    assert (written.errno, flushed.errno, result.errno) == (0, 0, 0)
    assert written.transferred_bytes == result.transferred_bytes
    assert list(map(bytes, read)) == blocks
    assert list(result.checksums) == list(map(xxh3_64_intdigest, blocks))


def test_memory_that_is_not_aligned_is_read_and_written_too(runner: ThreadRunner) -> None:
    blocks = blocks_of(70_000, 5000)
    run(runner, [Write(0, SEGMENT, 0, [memoryview(bytearray(b"123" + block))[3:] for block in blocks])])
    read = [memoryview(bytearray(len(block) + 1))[1:] for block in blocks]

    run(runner, [ReadInto(0, SEGMENT, 0, read)])

    assert list(map(bytes, read)) == blocks


def test_a_block_is_followed_by_zeros_on_the_disk(runner: ThreadRunner, path: Path) -> None:
    for content in (b"\xff" * 9000, b"\xee" * 10):
        run(runner, [Write(0, SEGMENT, 0, memory_of(content))])

    assert (path / SEGMENT).read_bytes()[:ALIGNMENT_BYTES] == b"\xee" * 10 + bytes(ALIGNMENT_BYTES - 10)


def test_the_other_jobs_do_what_they_say(runner: ThreadRunner, path: Path) -> None:
    blocks = blocks_of(10, 20)
    hashed, replaced, written = run(
        runner,
        [
            HashBlocks(0, memory_of(*blocks)),
            Replace(0, "snapshot", memory_of(*blocks)),
            WriteSuperblock(0, 1, b"superblock"),
        ],
    )

    assert list(hashed.checksums) == list(map(xxh3_64_intdigest, blocks))
    assert replaced.errno == written.errno == 0
    assert (path / "snapshot").read_bytes() == b"".join(blocks)
    assert (path / "disk").read_bytes()[ALIGNMENT_BYTES:].rstrip(b"\0") == b"superblock"


@pytest.mark.parametrize("pages", [3, 2 * PIECE_BYTES // ALIGNMENT_BYTES + 1])
def test_blocks_are_compressed_and_decompressed_where_they_were_read(runner: ThreadRunner, pages: int) -> None:
    shrinks = blocks_of(ALIGNMENT_BYTES)[0] * pages
    mixed = bytearray(blocks_of(2 * pages * ALIGNMENT_BYTES)[0])
    mixed[1::2] = bytes(len(mixed) // 2)
    blocks = [shrinks, bytes(mixed), *blocks_of(5000)]
    [made] = run(runner, [Compress(0, memory_of(*blocks))])
    stored = [block if packed is None else packed for block, packed in zip(blocks, made.compressed, strict=True)]
    assert made.compressed[2] is None
    assert [len(one) < len(block) for one, block in zip(stored, blocks, strict=True)] == [True, True, False]
    run(runner, [Write(0, SEGMENT, 0, memory_of(*stored))])

    views = memory_of(*(bytes(aligned(len(one))) for one in stored))
    into = [memoryview(bytearray(len(block))) for block in blocks[:2]]
    [read] = run(runner, [ReadInto(0, SEGMENT, 0, views, list(map(len, blocks)), [*into, None])])
    assert list(read.checksums) == list(map(xxh3_64_intdigest, blocks))
    assert [bytes(into[0]), bytes(into[1]), bytes(views[2][:5000])] == blocks


def test_many_jobs_at_a_time_are_all_answered(runner: ThreadRunner) -> None:
    blocks = blocks_of(*[20_000] * 200)
    places = [number * 5 * ALIGNMENT_BYTES for number in range(200)]
    run(runner, [Write(0, SEGMENT, place, memory_of(block)) for place, block in zip(places, blocks, strict=True)])
    read = room_for(blocks)

    results = run(runner, [ReadInto(0, SEGMENT, place, [view]) for place, view in zip(places, read, strict=True)])

    assert {result.errno for result in results} == {0}
    assert list(map(bytes, read)) == blocks


def test_a_read_over_the_end_fills_what_there_is(runner: ThreadRunner, path: Path) -> None:
    (path / "snapshot").write_bytes(b"s" * 5000)
    for view in (memoryview(bytearray(b"x" * 20_001))[1:], *memory_of(b"x" * 20_000)):
        [result] = run(runner, [ReadInto(0, "snapshot", 0, [view])])
        assert (result.errno, result.transferred_bytes) == (0, 5000)
        assert bytes(view[:5000]) == b"s" * 5000


def test_a_read_beyond_the_end_is_short_and_hashes_what_came(runner: ThreadRunner) -> None:
    views = memory_of(*[bytes(MIB)] * 3)
    [result] = run(runner, [ReadInto(0, SEGMENT, 6 * MIB, views, [MIB] * 3)])

    assert (result.errno, result.transferred_bytes) == (0, 2 * MIB)
    assert list(result.checksums) == [xxh3_64_intdigest(bytes(MIB))] * 2 + [0]


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (ReadInto(0, "segments/9", 0, memory_of(b"x")), errno.ENOENT),
        (Write(0, "segments/9", 0, memory_of(b"x")), errno.ENOENT),
        (Flush(0, "segments/9"), errno.ENOENT),
        (Allocate(0, "elsewhere/9", 4096), errno.ENOENT),
        (Replace(0, "segments", memory_of(b"x")), errno.EISDIR),
        (ReadInto(7, SEGMENT, 0, memory_of(b"x")), errno.ENODEV),
        (Allocate(0, SEGMENT, 1 << 62), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Job) else "",
)
def test_what_the_kernel_refuses_is_in_the_result(runner: ThreadRunner, job: Job, code: int | None) -> None:
    [result] = run(runner, [job])

    assert result.job is job
    assert result.errno == code if code else result.errno


def test_a_job_that_nobody_could_run_ends_in_an_error_and_the_thread_goes_on(
    runner: ThreadRunner, caplog: pytest.LogCaptureFixture
) -> None:
    released = memoryview(bytearray(10))
    released.release()
    with caplog.at_level(logging.CRITICAL, "infinistore.disk"):
        results = run(runner, [HashBlocks(0, [released])] * 1 + [HashBlocks(0, memory_of(b"x"))])

    assert [result.errno for result in results] == [errno.EIO, 0]


def test_the_log_has_the_first_job_that_fails_and_later_how_many_did(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, answers = Clock(), Answers()
    files = DiskFiles(open_folder(path))
    files.allocate(SEGMENT, 8 * MIB)
    disk = threads_of(files, answers, clock)

    def fail(times: int) -> None:
        for _ in range(times):
            disk.submit(Flush(0, "segments/9"))
        answers.after(times)

    with caplog.at_level(logging.WARNING, "infinistore.disk"):
        fail(5)
        clock.now += 11
        fail(1)
        monkeypatch.setattr(files, "flush", Mock(side_effect=MemoryError))
        clock.now += 11
        fail(1)
    disk.stop()
    assert disk.join(timeout_s=60)
    fields = [
        {name: one.__dict__.get(name) for name in ("disk", "job", "problem", "left_out")} for one in caplog.records
    ]
    missing = {"disk": str(path), "job": "Flush segments/9", "problem": "No such file or directory", "left_out": None}
    assert [one.message for one in caplog.records] == ["a job of a disk failed"] * 3
    assert fields == [missing, missing | {"left_out": 4}, missing | {"problem": "Cannot allocate memory"}]


def test_nobody_is_woken_without_a_result_and_once_for_several(runner: ThreadRunner) -> None:
    assert not is_woken(runner)
    assert runner.take() == []
    run(runner, [HashBlocks(0, memory_of(b"x")) for _ in range(20)])
    assert not is_woken(runner)


def test_disks_do_not_wait_for_each_other(runner_of: MakeRunner, tmp_path: Path) -> None:
    runner = runner_of()
    for volume in (0, 1):
        runner.add(volume, open_folder(tmp_path / str(volume)))
    run(runner, [Allocate(volume, SEGMENT, MIB) for volume in (0, 1)])
    run(runner, [Write(volume, SEGMENT, 0, memory_of(b"%d" % volume)) for volume in (0, 1)])

    for volume in (0, 1):
        assert (tmp_path / str(volume) / SEGMENT).read_bytes()[:1] == b"%d" % volume


def test_memory_is_let_go_once_its_job_was_answered(runner: ThreadRunner) -> None:
    class Memory(bytearray):
        """One that can be watched."""

    for job_of in (
        lambda view: Write(0, SEGMENT, 0, [view]),
        lambda view: ReadInto(0, SEGMENT, 0, [view]),
        lambda view: HashBlocks(0, [view]),
    ):
        memory = Memory(5000)
        watched = weakref.ref(memory)
        run(runner, [job_of(memoryview(memory))])
        run(runner, [HashBlocks(0, [])] * 1 + [ReadInto(0, SEGMENT, 0, [])])  # the threads have gone on
        del memory
        gc.collect()
        assert watched() is None


def disk_threads() -> int:
    """How many threads have disks. Others, such as Trio's, end when they like."""
    return sum(thread.name.startswith("infinistore-disk-") for thread in threading.enumerate())


def test_a_closed_runner_takes_no_jobs_and_frees_the_folder(runner: ThreadRunner, path: Path) -> None:
    before = disk_threads()
    assert runner.close(timeout_s=60)
    assert runner.close(timeout_s=60)

    assert disk_threads() == before - 8
    with pytest.raises(StoreUnavailable, match="the disks of this store are closed"):
        runner.submit([])
    with pytest.raises(StoreUnavailable):
        runner.take()
    open_folder(path).close()


@pytest.mark.process
def test_a_forked_child_has_no_runner_and_the_parent_goes_on(runner: ThreadRunner) -> None:
    def it_is_closed_here() -> None:
        with pytest.raises(StoreUnavailable, match="fork"):
            runner.submit([])
        with pytest.raises(StoreUnavailable, match="fork"):
            runner.take()
        assert runner.close(timeout_s=60)
        with suppress(OSError):
            os.fstat(runner.fd)
            raise AssertionError("its descriptor is open")

    in_child(it_is_closed_here)
    [result] = run(runner, [Flush(0, SEGMENT)])
    assert result.errno == 0


def test_without_threads_there_is_no_disk_and_nothing_is_left(
    runner_of: MakeRunner, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    left = iter([True, True, False])

    def some(thread: threading.Thread) -> None:
        if not next(left):
            raise RuntimeError("can't start new thread")
        start(thread)

    before = disk_threads()
    monkeypatch.setattr(threading.Thread, "start", some)
    with pytest.raises(StoreUnavailable, match="no more threads"):
        runner_of().add(0, open_folder(path))
    monkeypatch.undo()

    assert disk_threads() == before
    open_folder(path).close()


# A disk that hangs


class Answers:
    """Collects results, and says when there are so many."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self._more = threading.Semaphore(0)

    def __call__(self, result: Result) -> None:
        self.results.append(result)
        self._more.release()

    def after(self, count: int) -> list[Result]:
        """Wait for so many more; return all."""
        for _ in range(count):
            assert self._more.acquire(timeout=60)
        return self.results


class Clock:
    """A clock that stands until it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def threads_of(files: DiskFiles, answers: Answers, clock: Clock | None = None) -> DiskThreads:
    return DiskThreads(
        "test",
        files,
        answers,
        readers=1,
        writers=1,
        piece_bytes=PIECE_BYTES,
        clock=clock or Clock(),
    )


@pytest.fixture
def hanging(path: Path) -> HangingFiles:
    files = HangingFiles(open_folder(path))
    files.allocate(SEGMENT, 8 * MIB)
    return files


def test_a_disk_that_hangs_is_left_behind_locked_and_answers_when_it_returns(
    hanging: HangingFiles, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Answers()
    disk = threads_of(hanging, answers)
    stuck, waiting = (ReadInto(0, SEGMENT, 0, memory_of(b"old")) for _ in range(2))
    disk.submit(stuck)
    disk.submit(waiting)
    assert hanging.asked.acquire(timeout=60)

    disk.stop()
    with caplog.at_level(logging.WARNING, "infinistore.disk"):
        assert not disk.join(timeout_s=0)  # real time: the disk hangs

    assert [(result.job, result.errno) for result in answers.after(1)] == [(waiting, errno.ENODEV)]
    [record] = caplog.records
    assert (record.__dict__["disk"], record.__dict__["waits_for"]) == (str(path), "ReadInto segments/0")
    with pytest.raises(Exception, match="in use by this process"):
        open_folder(path)

    hanging.answer.set()
    assert disk.join(timeout_s=60)
    assert [result.errno for result in answers.after(1)] == [errno.ENODEV, 0]
    assert bytes(stuck.views[0]) == bytes(3)
    open_folder(path).close()


def test_other_threads_go_on_while_one_hangs(hanging: HangingFiles) -> None:
    clock = Clock()
    answers = Answers()
    disk = threads_of(hanging, answers, clock)
    disk.submit(ReadInto(0, SEGMENT, 0, memory_of(b"1")))
    assert hanging.asked.acquire(timeout=60)
    clock.now += 7

    disk.submit(Flush(0, SEGMENT))
    assert [result.errno for result in answers.after(1)] == [0]
    statistics = disk.statistics()
    assert (statistics.running, statistics.queued_reads, statistics.oldest_s) == (1, 0, 7.0)

    hanging.answer.set()
    disk.stop()
    assert disk.join(timeout_s=60)
