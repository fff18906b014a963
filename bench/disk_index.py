"""What the index of a disk costs: memory, look-ups, changes, and its way back.

    python bench/disk_index.py [--records 10M]

There is no disk: segments are made up as they are read, and only the processor time that
the volume itself takes is counted. A stall is the longest single step, by the clock.
"""

import argparse
import random
import time
from collections.abc import Callable

import numpy as np

from infinistore.disk import format as disk_format
from infinistore.disk.format import End, Footer, Listing, Superblock
from infinistore.disk.jobs import Job, ReadInto, Replace, Result, Write, WriteSuperblock, aligned, file_bytes
from infinistore.disk.volume import Volume
from infinistore.sizes import in_units, parse_size

UUID, SEED = bytes(range(16)), 12345
SEGMENT_BYTES = 256 << 20
ROWS = 2048  # blocks of 128 KiB
KEY_BYTES = 40


class MadeUpDisk:
    """Answers the jobs of a volume whose segments are full of random records."""

    def __init__(self, segments: int) -> None:
        self.segments = segments
        self.superblock = Superblock(0, UUID, bytes(16), SEED, 0, 1, SEGMENT_BYTES, 0, 0, 0)
        self.snapshot = b""
        self.written_bytes = 0

    def footer(self, number: int) -> bytes:
        chance = np.random.default_rng(number)
        keys = chance.integers(97, 123, ROWS * KEY_BYTES, dtype=np.uint8).tobytes()
        marks = chance.integers(2, 2**63, (3, ROWS), dtype=np.uint64) * np.uint64(2)
        listing = Listing.of(
            [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)],
            marks[0],
            marks[1],
            checksum=marks[2],
            page=np.arange(ROWS) * 31 + 1,
            length=120_000,
            flags=0,
            tenant=0,
            expiry=0,
        )
        batches = ROWS // 256
        sequences = [self.incarnation(number) + one for one in range(batches)]
        header = Footer(number, UUID, self.incarnation(number), 0, batches, ROWS, len(keys))
        return disk_format.encode_footer(header, sequences, [256] * batches, listing, SEED)

    @staticmethod
    def incarnation(number: int) -> int:
        return (1 << 32) + 1 + number * ROWS

    def run(self, job: Job) -> Result:
        match job:
            case WriteSuperblock():
                self.superblock = disk_format.decode_superblocks(job.data.ljust(8192, b"\0"))
            case Replace():
                self.snapshot = b"".join(job.views)
            case Write():
                self.written_bytes += file_bytes(job.views)
                return Result(job, transferred_bytes=file_bytes(job.views))
            case ReadInto() if job.file == "snapshot":
                view = job.views[0]
                view[:] = self.snapshot[job.offset : job.offset + len(view)].ljust(len(view), b"\0")
            case ReadInto() if job.offset:
                number, view = int(job.file.removeprefix("segments/")), job.views[0]
                length = disk_format.footer_bytes(ROWS // 256, ROWS, ROWS * KEY_BYTES)
                end = End(number, UUID, self.incarnation(number), 0, 1, length, self.incarnation(number) + 7)
                last = job.offset == SEGMENT_BYTES - disk_format.END_BYTES
                data = disk_format.encode_end(end, SEED) if last else self.footer(number)
                view[: len(data)] = data
            case _:
                pass
        return Result(job)

    def open(self) -> Volume:
        files = {f"segments/{number}": SEGMENT_BYTES for number in range(self.segments)}
        if self.snapshot:
            files["snapshot"] = len(self.snapshot)
        superblock = disk_format.encode_superblock(self.superblock) + bytes(4096)
        capacity = (self.segments + 64) * SEGMENT_BYTES * 21 // 20
        return Volume.open(0, superblock=superblock, files=files, capacity_bytes=capacity)


def drive(volume: Volume, disk: MadeUpDisk, until: Callable[[], bool]) -> tuple[float, float]:
    """Run a volume; return the seconds that it took, and its longest step."""
    total = longest = 0.0
    while not until():
        begun, start = time.thread_time(), time.perf_counter()
        more = volume.step()
        total, longest = total + time.thread_time() - begun, max(longest, time.perf_counter() - start)
        jobs = volume.jobs()
        for result in map(disk.run, jobs):
            begun = time.thread_time()
            volume.done(result)
            total += time.thread_time() - begun
        if not more and not jobs and not volume.events():
            break
    return total, longest


def each(call: Callable[[], object], rounds: int = 300) -> float:
    """Return the median of the microseconds that a call takes."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[rounds // 2] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", default="10M", help="how many (10M is 10 x 2**20)")
    records = int(parse_size(parser.parse_args().records))
    disk = MadeUpDisk(-(-records // ROWS))
    volume = disk.open()
    took, stall = drive(volume, disk, lambda: volume.state == "open")
    figures = volume.statistics()
    print(f"{figures.records:,} records from footers: {took:.1f} s, stall {stall * 1e3:.0f} ms")
    print(f"index: {figures.index_bytes / figures.records:.1f} bytes a record")

    drive(volume, disk, lambda: False)
    keys = [f"model/{number:032x}" for number in range(256)]
    data = memoryview(bytes(4096))
    numbers = iter(range(1 << 30))

    def append(length: int = 65536) -> None:
        some = [f"new/{next(numbers):032x}" for _ in range(128)]
        view = memoryview(bytearray(length))
        assert volume.append(some, [length] * 128, [1] * 128, [view] * 128) is not None
        drive(volume, disk, lambda: False)

    assert volume.append(keys, [4096] * 256, [1] * 256, [data] * 256) is not None
    drive(volume, disk, lambda: False)
    print(f"contains, 256 keys: {each(lambda: volume.contains(keys)):.0f} us")
    print(f"find, 256 keys: {each(lambda: volume.find(keys)):.0f} us")
    print(f"append to durable, 128 blocks: {each(append, 60):.0f} us")

    before, blocks_before = disk.written_bytes, volume.statistics().appended_bytes
    chance = random.Random(1)
    while volume.statistics().appended_bytes - blocks_before < 2 << 30:
        count = chance.randrange(16, 33)  # batches of 1 to 2 MiB
        some = [f"more/{next(numbers):032x}" for _ in range(count)]
        assert volume.append(some, [65536] * count, [1] * count, [memoryview(bytes(65536))] * count) is not None
        drive(volume, disk, lambda: False)
    amplification = (disk.written_bytes - before) / (volume.statistics().appended_bytes - blocks_before)
    print(f"write amplification, batches of 1 to 2 MiB: {amplification:.4f}")

    volume.close()
    took, stall = drive(volume, disk, lambda: volume.state == "closed")
    print(f"snapshot of {in_units(aligned(len(disk.snapshot)) >> 20 << 20)}: {took:.1f} s, stall {stall * 1e3:.0f} ms")
    volume = disk.open()
    took, stall = drive(volume, disk, lambda: volume.state == "open")
    print(f"{volume.statistics().records:,} records from the snapshot: {took:.1f} s, stall {stall * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
