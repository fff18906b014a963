"""A disk that loses, tears, reorders, rots and hangs, as real ones do; from a seed.

It runs jobs (`infinistore.disk.jobs`) on files in memory, one at a time and in the
order that its user chooses: a job that is never finished hangs. Nothing here knows a
clock, so a rule machine drives it as a simulated world does.

What it does when it crashes is what a disk and its kernel may do at worst. Of what was
not flushed, each sector of 512 bytes is there or not, whatever was written before or
after it, and jobs that were under way count as such writes. A flush makes durable what
was written to its file by jobs that had ended before it began, and no more is promised.
"""

import errno
import random
from collections.abc import Callable, Iterator, Sequence

import attrs
import xxhash

from infinistore.disk.compression import checksum, compress
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

__all__ = ["SECTOR_BYTES", "SUPERBLOCK", "DiskFaults", "SimulatedDisk"]

SECTOR_BYTES = 512
SUPERBLOCK = "disk"


@attrs.define
class DiskFaults:
    """How likely each fault is, as the chance of one job. All are 0 at first."""

    read_error: float = 0.0
    """A read ends with EIO; what it read until then may be in its views."""
    write_error: float = 0.0
    """A write, or another change, ends with EIO, and some of it is on the disk."""
    flush_error: float = 0.0
    """A flush ends with EIO. What it was to make durable may never be."""
    short_read: float = 0.0
    """A read ends early, as if the file ended there."""
    misdirected_write: float = 0.0
    """A write goes to another place of its file, and says that all is well."""
    misdirected_read: float = 0.0
    """A read comes from another place of its file, and says that all is well."""

    def heal(self) -> None:
        """Set every chance to 0."""
        for field in attrs.fields(DiskFaults):
            setattr(self, field.name, 0.0)


class _File:
    """`seen` is what reads return; `durable` what a crash leaves at least, until
    something of `unflushed` came there: (offset, bytes) in the order written."""

    def __init__(self, length: int = 0) -> None:
        self.seen = bytearray(length)
        self.durable = bytearray(length)
        self.unflushed: list[tuple[int, bytes]] = []

    def write(self, offset: int, data: bytes) -> None:
        _put(self.seen, offset, data)
        self.unflushed.append((offset, data))

    def write_durably(self, offset: int, data: bytes) -> None:
        _put(self.seen, offset, data)
        _put(self.durable, offset, data)

    def flush(self, writes: Sequence[tuple[int, bytes]]) -> None:
        """Make these writes durable, and forget that they were not."""
        for offset, data in writes:
            _put(self.durable, offset, data)
        self.forget(writes)

    def forget(self, writes: Sequence[tuple[int, bytes]]) -> None:
        known = set(map(id, writes))
        self.unflushed = [write for write in self.unflushed if id(write) not in known]


class SimulatedDisk:
    """The folder of one disk, and the jobs that were started on it.

    `free_bytes` bounds what `Allocate` can have. `number` is the disk's in its tier.
    """

    def __init__(self, chance: random.Random, number: int = 0, *, free_bytes: int = 1 << 40) -> None:
        self.number = number
        self.faults = DiskFaults()
        self.free_bytes = free_bytes
        self.under_way: list[Job] = []
        """What was started and is not finished, in the order started."""
        self.history: list[Job] = []
        """Every job that was finished, in that order."""
        self.on_fault: Callable[[str], object] = lambda name: None
        """Called with the name of each fault that happens."""
        self._chance = chance
        self.stored: dict[str, _File] = {}
        """The files by name."""
        self._flushing: dict[Job, list[tuple[int, bytes]]] = {}

    # Jobs

    def start(self, jobs: Sequence[Job]) -> None:
        """Take jobs; nothing happens before they are finished."""
        for job in jobs:
            assert job.volume == self.number
            _check(job)
            self.under_way.append(job)
            if isinstance(job, Flush) and job.file in self.stored:
                self._flushing[job] = list(self.stored[job.file].unflushed)

    def finish(self, job: Job) -> Result:
        """Carry out a job that is under way, and return its result."""
        self.under_way.remove(job)
        self.history.append(job)
        match job:
            case ReadInto():
                return self._read(job)
            case HashBlocks():
                return Result(job, checksums=[xxhash.xxh3_64_intdigest(view) for view in job.views])
            case Compress():
                return Result(job, compressed=[compress(view) for view in job.views])
            case Write():
                return self._write(job)
            case Flush():
                return self._flush(job)
            case Allocate():
                return self._allocate(job)
            case Replace() | WriteSuperblock():
                return self._change(job)

    def finish_all(self) -> list[Result]:
        """Finish what is under way, in any order."""
        jobs = list(self.under_way)
        self._chance.shuffle(jobs)
        return [self.finish(job) for job in jobs]

    # Calamities

    def crash(self) -> None:
        """Lose power: jobs under way never end, and of what was not flushed each sector
        is kept or lost."""
        for job in self.under_way:
            match job:
                case Write():
                    self.stored.setdefault(job.file, _File()).unflushed += _pieces(job)
                case Allocate() if self._luck():
                    self._file(job.file, job.length_bytes)
                case WriteSuperblock():
                    file = self._superblock(job)
                    file.unflushed.append((job.copy * ALIGNMENT_BYTES, job.data))
                case Replace() if self._luck():
                    self._replace(job)
                case _:
                    pass
        self.under_way.clear()
        self._flushing.clear()
        for file in self.stored.values():
            self._persist_some(file, file.unflushed)
            file.unflushed.clear()
            file.seen[:] = file.durable

    def rot(self, file: str, offset: int, bit: int = 0) -> None:
        """Flip one bit of a file."""
        for data in (self.stored[file].seen, self.stored[file].durable):
            data[offset] ^= 1 << bit

    def truncate(self, file: str, length: int) -> None:
        """Cut a file off."""
        del self.stored[file].seen[length:], self.stored[file].durable[length:]

    def remove(self, file: str) -> None:
        """Lose a file."""
        del self.stored[file]

    def wipe(self) -> None:
        """Become a new disk, empty and healthy."""
        self.stored.clear()
        self._flushing.clear()
        self.under_way.clear()
        self.faults.heal()

    # Looking

    def files(self) -> dict[str, int]:
        """Return the files and their lengths in bytes, without the superblock."""
        return {name: len(file.seen) for name, file in sorted(self.stored.items()) if name != SUPERBLOCK}

    def contents(self, file: str) -> bytes:
        """Return a file as it is read now; empty if there is none."""
        return bytes(self.stored[file].seen) if file in self.stored else b""

    def copy(self, chance: random.Random) -> "SimulatedDisk":
        """Return an equal disk, with the same jobs under way and without faults."""
        twin = SimulatedDisk(chance, self.number, free_bytes=self.free_bytes)
        for name, file in self.stored.items():
            copied = twin.stored[name] = _File()
            copied.seen, copied.durable = bytearray(file.seen), bytearray(file.durable)
            copied.unflushed = list(file.unflushed)
        twin.under_way = list(self.under_way)
        return twin

    # How jobs end

    def _read(self, job: ReadInto) -> Result:
        file = self.stored.get(job.file)
        if file is None:
            return Result(job, errno.ENOENT)
        if self._happens("read_error"):
            return Result(job, errno.EIO)
        offset = job.offset
        if self._happens("misdirected_read"):
            offset = self._elsewhere(file)
        end = len(file.seen)
        if self._happens("short_read"):
            end = min(end, offset + self._chance.randrange(sum(map(len, job.views)) + 1))
        start, checksums = offset, []
        for number, view in enumerate(job.views):
            data = file.seen[start : min(start + len(view), end)]
            view[: len(data)] = data
            if job.hash_lengths:
                checksums.append(checksum(job, number) if len(data) == len(view) else 0)
            start += aligned(len(view))
        return Result(job, transferred_bytes=max(0, min(start, end) - offset), checksums=checksums)

    def _write(self, job: Write) -> Result:
        file = self.stored.get(job.file)
        if file is None:
            return Result(job, errno.ENOENT)
        pieces = _pieces(job)
        if self._happens("write_error"):
            for piece in self._sectors(pieces):
                file.write(*piece)
            return Result(job, errno.EIO)
        shift = self._elsewhere(file) - job.offset if self._happens("misdirected_write") else 0
        for offset, data in pieces:
            file.write(offset + shift, data)
        return Result(job, transferred_bytes=sum(len(data) for _, data in pieces))

    def _flush(self, job: Flush) -> Result:
        file = self.stored.get(job.file)
        writes = self._flushing.pop(job, [])
        if file is None:
            return Result(job, errno.ENOENT)
        if self._happens("flush_error"):
            self._persist_some(file, writes)
            file.forget(writes)  # no later flush knows of them any more
            return Result(job, errno.EIO)
        file.flush(writes)
        return Result(job)

    def _allocate(self, job: Allocate) -> Result:
        if self._happens("write_error"):
            return Result(job, errno.EIO)
        there = len(self.stored[job.file].seen) if job.file in self.stored else 0
        if job.length_bytes - there > self.free_bytes:
            return Result(job, errno.ENOSPC)
        self.free_bytes -= max(0, job.length_bytes - there)
        self._file(job.file, job.length_bytes)
        return Result(job)

    def _change(self, job: Replace | WriteSuperblock) -> Result:
        fails = self._happens("write_error")
        if isinstance(job, Replace):
            if not fails or self._luck():
                self._replace(job)
        else:
            whole = [(job.copy * ALIGNMENT_BYTES, job.data)]
            file = self._superblock(job)
            for piece in self._sectors(whole) if fails else whole:
                file.write_durably(*piece)
        return Result(job, errno.EIO if fails else 0)

    def _replace(self, job: Replace) -> None:
        data = b"".join(job.views)
        file = self.stored[job.file] = _File(len(data))
        file.write_durably(0, data)

    def _superblock(self, job: WriteSuperblock) -> _File:
        """Return the file as long as a copy makes it, whatever is kept of that copy:
        file systems do not end a file in the middle of a page.
        """
        return self._file(SUPERBLOCK, (job.copy + 1) * ALIGNMENT_BYTES)

    def _file(self, name: str, length: int) -> _File:
        file = self.stored.setdefault(name, _File())
        for data in (file.seen, file.durable):
            data.extend(bytes(max(0, length - len(data))))
        return file

    # Chance

    def _happens(self, fault: str) -> bool:
        probability: float = getattr(self.faults, fault)
        happens = probability > 0 and self._chance.random() < probability
        if happens:
            self.on_fault(fault)
        return happens

    def _luck(self) -> bool:
        return self._chance.random() < 0.5

    def _elsewhere(self, file: _File) -> int:
        return self._chance.randrange(max(1, len(file.seen) // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES

    def _persist_some(self, file: _File, writes: Sequence[tuple[int, bytes]]) -> None:
        shuffled = list(writes)
        self._chance.shuffle(shuffled)
        for offset, data in self._sectors(shuffled):
            _put(file.durable, offset, data)
        length = max(len(file.seen), len(file.durable))
        for contents in (file.seen, file.durable):
            contents.extend(bytes(length - len(contents)))

    def _sectors(self, writes: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield what is kept of writes: all, nothing, the beginning, or any sectors."""
        for offset, data in writes:
            sectors = range(0, len(data), SECTOR_BYTES)
            kept = self._chance.choice(
                [
                    sectors,
                    sectors[:0],
                    sectors[: self._chance.randrange(len(sectors) + 1)],
                    [start for start in sectors if self._luck()],
                ]
            )
            for start in kept:
                yield offset + start, data[start : start + SECTOR_BYTES]


def _put(contents: bytearray, offset: int, data: bytes) -> None:
    contents.extend(bytes(max(0, offset + len(data) - len(contents))))
    contents[offset : offset + len(data)] = data


def _pieces(job: Write) -> list[tuple[int, bytes]]:
    """What a write puts where, padding included, as the job has it now: whoever changes
    a view before the write has ended changes what is written."""
    pieces, offset = [], job.offset
    for view in job.views:
        data = bytes(view)
        pieces.append((offset, data + bytes(aligned(len(data)) - len(data))))
        offset += aligned(len(data))
    return pieces


def _check(job: Job) -> None:
    """What every runner may rely on."""
    if isinstance(job, ReadInto | Write):
        assert job.offset >= 0 and job.offset % ALIGNMENT_BYTES == 0
        assert job.views and all(view.format == "B" and len(view) for view in job.views)
    if isinstance(job, ReadInto):
        assert not any(view.readonly for view in job.views)
        assert len(job.hash_lengths) in (0, len(job.views))
        blocks = job.blocks or [None] * len(job.views)
        assert len(blocks) == len(job.views)
        assert all(
            block is not None or length <= len(view)
            for length, view, block in zip(job.hash_lengths, job.views, blocks, strict=False)
        )
    if isinstance(job, WriteSuperblock):
        assert job.copy in (0, 1) and 0 < len(job.data) <= ALIGNMENT_BYTES
