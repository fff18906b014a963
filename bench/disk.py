"""The SSD tier against fio: interleaved, each round in another order, past the page
cache.

    python bench/disk.py [--folder PATH] [--size-mib N] [--rounds N] [--json]

fio (apt-get install fio; its job is bench/disk.fio) runs four jobs with four requests
each, O_DIRECT, of the same bytes. Its rate is what a disk gives; disks of virtual
machines swing by a factor of two within a minute, so only the ratio of one round counts.
Reported are medians of the rounds.

- runner: the threads that run the tier's jobs (`infinistore/disk_io`), on segments of
  256 MiB, from and to a pool. Writes are batches of 32 MiB, each made durable before it
  counts; reads are hashed.
- tier: the same below a store (`infinistore/disk`), driven in one thread as in a
  server. Writing behind is from the first put until everything is durable. Cold reading
  is from the pool being empty until all blocks are in it again, verified; of 256 KiB
  and less, one prefix of 64 MiB after the other. Blocks of 64 KiB are read across: a
  prefix was written as 32 layers, one after the other, and is asked for token by token,
  as engines do. Deleted blocks make the room for the next round, so segments are
  overwritten and nothing is written twice.

Files lie in a temporary folder below PATH, which should be on the disk to measure, and
are removed at the end. Segments and fio's files exist before the first round.
"""

import argparse
import json
import os
import select
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from xxhash import xxh3_64_intdigest

from infinistore.allocators import create_allocator
from infinistore.core import Journal, Pool, StoreCore, Watermarks, create_arena
from infinistore.disk.jobs import Allocate, Flush, Job, ReadInto, Result, Write
from infinistore.disk.settings import TierSettings
from infinistore.disk.tier import DiskTier
from infinistore.disk.volume import Volume
from infinistore.disk.waits import Wait
from infinistore.disk_io import ThreadRunner, open_folder
from infinistore.sizes import KIB, MIB

JOB_FILE = Path(__file__).with_name("disk.fio")
SEGMENT_BYTES = 256 * MIB
BATCH_BYTES = 32 * MIB
PREFIX_BYTES = 64 * MIB
UNIT_BYTES = 64 * KIB
READ_BYTES = 4 * MIB
LAYERS = 32
READS_AT_A_TIME = 8
FIO_JOBS = 4


class Fio:
    """What the disk gives."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        self.size_bytes = size_bytes

    def rate(self, way: str, block_bytes: int) -> float:
        """Return bytes per second: `way` is read or write."""
        environment = os.environ | {
            "BENCH_FOLDER": str(self.folder),
            "BENCH_RW": way,
            "BENCH_BLOCK": str(block_bytes),
            "BENCH_JOB_SIZE": str(self.size_bytes // FIO_JOBS),
        }
        command = ["fio", "--output-format=json", str(JOB_FILE)]
        ended = subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"fio: {ended.stderr or ended.stdout}")
        [job] = json.loads(ended.stdout[ended.stdout.index("{") :])["jobs"]
        return float(job[way]["io_bytes"]) / (float(job[way]["runtime"]) / 1e3)


class Tier:
    """A store with a disk, as a server drives it."""

    def __init__(self, folder: Path, size_bytes: int, content: bytes | None = None, *, compress: bool = False) -> None:
        self.size_bytes = size_bytes
        self.pool = Pool(create_allocator("bitmap", UNIT_BYTES))
        self.core = StoreCore(self.pool, clock=time.monotonic, watermarks=Watermarks(1.0, 1.0), journal=Journal())
        arena = create_arena(0, size_bytes + 64 * MIB, prefault_threads=2, name="bench")
        same = os.urandom(UNIT_BYTES)  # so each block has the same bytes
        arena.memory[:] = (content or same) * (arena.length // len(content or same))
        digests = {size: xxh3_64_intdigest(arena.memory[:size]) for size in (MIB, 256 * KIB)}
        self.checksums = digests if content is None else {}
        self.core.add_arena(arena)
        self.client = self.core.open_client("bench")
        settings = TierSettings(admission="eager", compress=compress, queue_s=1000.0, wait_s=1000.0)
        self.tier = DiskTier(self.core, clock=time.monotonic, settings=settings)
        self.runner = ThreadRunner()
        self.runner.add(0, open_folder(folder))
        capacity_bytes = 3 * size_bytes + SEGMENT_BYTES * 2
        self.volume = Volume.create(
            0, capacity_bytes=capacity_bytes, uuid=os.urandom(16), seed=1, segment_bytes=SEGMENT_BYTES
        )
        self.tier.add(self.volume)
        self.keys: list[str] = []
        self.block_bytes = 0
        """Of the blocks with these keys, which are all that there are."""
        self.rounds = 0
        self._poll = select.poll()
        self._poll.register(self.runner.fd, select.POLLIN)
        self._drive(lambda: self.volume.state == "open")
        for _ in range(4):  # until each segment has been written once
            self.write(MIB)

    def write(self, block_bytes: int) -> float:
        """Put blocks until the pool is full, and wait until they are durable; return
        bytes per second.
        """
        self._delete()
        self.rounds += 1
        self.block_bytes = block_bytes
        count = self.size_bytes // block_bytes
        keys = self.keys = [f"{block_bytes}/{self.rounds}/{number:08}" for number in range(count)]
        start = time.perf_counter()
        a_batch = BATCH_BYTES // block_bytes
        for first in range(0, count, a_batch):
            some = keys[first : first + a_batch]
            reservation = self.core.reserve(self.client, [block_bytes] * len(some))
            checksum = self.checksums.get(block_bytes)
            self.core.commit(reservation, some, None if checksum is None else [checksum] * len(some))
            self._step(0.0)
        self._wait(self.tier.flush(None, time.monotonic() + 1000))
        return self.size_bytes / (time.perf_counter() - start)

    def read(self, block_bytes: int, layers: int = 1) -> float:
        """Read all blocks into an empty pool, and verify them; return bytes per
        second. A prefix is so many layers, and is asked for across them.
        """
        if block_bytes != self.block_bytes:
            self.write(block_bytes)
        keys = self.keys
        self.core.evict(0.0, 0.0)
        step = PREFIX_BYTES // block_bytes if block_bytes < MIB else len(keys)
        start = time.perf_counter()
        for first in range(0, len(keys), step):
            tokens = step // layers
            asked = [key for token in range(tokens) for key in keys[first + token : first + step : tokens]]
            self._wait(self.tier.want(asked, time.monotonic() + 1000))
        elapsed_s = time.perf_counter() - start
        if not all(self.core.exists(keys)):
            raise SystemExit("blocks are missing")
        return self.size_bytes / elapsed_s

    def close(self) -> None:
        """End the threads."""
        self.runner.close(timeout_s=10)
        self.pool.close()

    def _delete(self) -> None:
        """Make room for other blocks, on disk and in the pool."""
        if self.keys:
            self.core.delete(self.keys)
            self._wait(self.tier.delete(self.keys, time.monotonic() + 1000).wait)
        self.core.evict(0.0, 0.0)

    def _wait(self, wait: Wait | None) -> None:
        if wait is not None:
            self._drive(lambda: wait.settled)
            if wait.unmet:
                raise SystemExit(f"{wait.unmet} blocks did not get to the disk or back")

    def _drive(self, until: Callable[[], bool]) -> None:
        while not until():
            self._step(1.0)

    def _step(self, most_s: float) -> None:
        results = self.runner.take()
        if results:
            self.tier.done(results)
        self.runner.submit(self.tier.jobs())
        deadline = self.tier.next_deadline()
        if most_s and not results:
            self._poll.poll(max(0.0, min(most_s, most_s if deadline is None else deadline - time.monotonic())) * 1000)


class Runner:
    """The threads of a disk, without a tier above them."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.runner = ThreadRunner()
        disk = open_folder(folder)
        self.direct = disk.direct
        self.runner.add(0, disk)
        self.arena = create_arena(0, BATCH_BYTES * 4, prefault_threads=2, name="bench")
        self.arena.memory[:] = os.urandom(MIB) * (self.arena.length // MIB)  # zeros are written faster by some disks
        segments = -(-size_bytes // SEGMENT_BYTES)
        self._run(iter([Allocate(0, f"segments/{number}", SEGMENT_BYTES) for number in range(segments)]), 2)
        self.write(MIB)

    def write(self, block_bytes: int) -> float:
        """Write batches of blocks, each flushed before it counts; return bytes per
        second.
        """
        start = time.perf_counter()
        self._run(self._writes(block_bytes), 2, lambda job: Flush(0, job.file) if isinstance(job, Write) else None)
        return self.size_bytes / (time.perf_counter() - start)

    def read(self, block_bytes: int) -> float:
        """Read and hash all blocks; return bytes per second."""
        start = time.perf_counter()
        self._run(self._reads(block_bytes), READS_AT_A_TIME)
        return self.size_bytes / (time.perf_counter() - start)

    def close(self) -> None:
        """End the threads."""
        self.runner.close(timeout_s=10)
        self.arena.close()

    def _writes(self, block_bytes: int) -> Iterator[Job]:
        for number, (segment, offset) in enumerate(self._places(BATCH_BYTES)):
            yield Write(0, segment, offset, self._blocks(number % 4 * BATCH_BYTES, BATCH_BYTES, block_bytes))

    def _reads(self, block_bytes: int) -> Iterator[Job]:
        for number, (segment, offset) in enumerate(self._places(READ_BYTES)):
            views = self._blocks(number % 32 * READ_BYTES, READ_BYTES, block_bytes)
            yield ReadInto(0, segment, offset, views, [block_bytes] * len(views))

    def _blocks(self, start: int, length: int, block_bytes: int) -> list[memoryview]:
        memory = self.arena.memory
        return [memory[place : place + block_bytes] for place in range(start, start + length, block_bytes)]

    def _places(self, step: int) -> Iterator[tuple[str, int]]:
        for place in range(0, self.size_bytes, step):
            yield f"segments/{place // SEGMENT_BYTES}", place % SEGMENT_BYTES

    def _run(self, jobs: Iterator[Job], at_a_time: int, then: Callable[[Job], Job | None] = lambda job: None) -> None:
        """Run jobs, so many at a time, each with another one after it if there is."""
        poll = select.poll()
        poll.register(self.runner.fd, select.POLLIN)
        running = 0
        while True:
            while running < at_a_time and (job := next(jobs, None)) is not None:
                self.runner.submit([job])
                running += 1
            if not running:
                return
            poll.poll()
            for result in self.runner.take():
                check(result)
                following = then(result.job)
                if following is None:
                    running -= 1
                else:
                    self.runner.submit([following])


def check(result: Result) -> None:
    """Stop if a job failed."""
    if result.errno:
        raise SystemExit(f"{result.job}: {os.strerror(result.errno)}")
    if isinstance(result.job, ReadInto) and 0 in result.checksums:
        raise SystemExit(f"{result.job}: short")


def main() -> None:
    """Measure, and print a table."""
    arguments = parse()
    if shutil.which("fio") is None:
        print("not measured: there is no fio to compare with (apt-get install fio)")
        return
    size_bytes = arguments.size_mib * MIB
    with tempfile.TemporaryDirectory(prefix="infinistore-bench-", dir=arguments.folder) as folder:
        fio = Fio(Path(folder), size_bytes)
        runner = Runner(Path(folder, "disk"), size_bytes)
        tier = Tier(Path(folder, "tier"), size_bytes)
        fio.rate("write", MIB)
        things: dict[str, Callable[[], float]] = {}
        for block_bytes in (MIB, 256 * KIB):
            for way, of_runner, of_tier in (("write", runner.write, tier.write), ("read", runner.read, tier.read)):
                name = f"{way} {block_bytes // KIB} KiB"
                things[f"{name}: fio"] = lambda way=way, size=block_bytes: fio.rate(way, size)  # type: ignore[misc]
                things[f"{name}: runner"] = lambda call=of_runner, size=block_bytes: call(size)  # type: ignore[misc]
                things[f"{name}: tier"] = lambda call=of_tier, size=block_bytes: call(size)  # type: ignore[misc]
        across = f"read {UNIT_BYTES // KIB} KiB across"
        things[f"{across}: fio"] = lambda: fio.rate("read", UNIT_BYTES)
        things[f"{across}: tier"] = lambda: tier.read(UNIT_BYTES, LAYERS)
        rates = in_turns(things, arguments.rounds)
        runner.close()
        tier.close()
    report(rates, as_json=arguments.json, direct=runner.direct)


def in_turns(things: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return the rate of each thing in each round."""
    rates: dict[str, list[float]] = {name: [] for name in things}
    names = list(things)
    for number in range(rounds):
        turned = names if number % 2 else names[::-1]
        for name in turned[number % len(names) :] + turned[: number % len(names)]:
            rates[name].append(things[name]())
    return rates


def report(rates: dict[str, list[float]], *, as_json: bool, direct: bool) -> None:
    """Print medians, and the median of the ratios to fio's rate of the same round."""
    rows = []
    for name, of_one in rates.items():
        yardstick = rates[f"{name.partition(':')[0]}: fio"]
        ratios = [one / other for one, other in zip(of_one, yardstick, strict=True)]
        rows.append((name, statistics.median(of_one), statistics.median(ratios), min(ratios), max(ratios)))
    if as_json:
        print(json.dumps({"direct": direct, "rates": rates}))
        return
    if not direct:
        print("O_DIRECT does not work in this folder: the page cache is measured")
    print(f"{'':<28}{'GB/s':>8}{'of fio':>10}{'from':>8}{'to':>8}")
    for name, rate, ratio, low, high in rows:
        print(f"{name:<28}{rate / 1e9:>8.2f}{ratio:>10.2f}{low:>8.2f}{high:>8.2f}")


def parse() -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--size-mib", type=int, default=1024, help="a multiple of 32; default: 1024")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print the rates of all rounds, in bytes per second")
    return parser.parse_args()


if __name__ == "__main__":
    main()
