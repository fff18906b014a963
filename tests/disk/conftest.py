"""A small store over small simulated disks, driven by hand."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import xxhash

from infinistore.allocators import create_allocator
from infinistore.core import CoreLimits, Journal, Pool, StoreCore, Watermarks, create_arena
from infinistore.disk.format import most_snapshot_bytes
from infinistore.disk.jobs import Job, Result, Write
from infinistore.disk.settings import TierSettings
from infinistore.disk.tier import DiskTier
from infinistore.disk.tiers import Steps, Tiers
from infinistore.disk.volume import Volume
from infinistore.disk.waits import Wait
from tests.core.conftest import FakeClock
from tests.simulation.disk import SUPERBLOCK, SimulatedDisk

UNIT_BYTES = 4096
SEGMENT_BYTES = 256 * 1024
FOREVER = 1e9


def content(name: str, length: int = UNIT_BYTES) -> bytes:
    return random.Random(name).randbytes(length)


class Machine:
    """A store, its tier, and its disks, which survive it: `restart` opens them anew."""

    def __init__(
        self,
        *,
        disks: int = 1,
        segments: int = 8,
        pool_bytes: int = 64 * UNIT_BYTES,
        unit_bytes: int = UNIT_BYTES,
        settings: TierSettings | None = None,
        seed: int = 0,
        max_batch_keys: int = 1024,
    ) -> None:
        self.clock = FakeClock()
        self.random = random.Random(seed)
        self.settings = settings or TierSettings(admission="eager", group_s=0.001)
        self.pool_bytes, self.unit_bytes = pool_bytes, unit_bytes
        self.max_batch_keys = max_batch_keys
        self.capacity_bytes = segments * SEGMENT_BYTES + most_snapshot_bytes(segments, SEGMENT_BYTES) + 2 * UNIT_BYTES
        self.disks = [SimulatedDisk(random.Random(seed + number), number) for number in range(disks)]
        self.stuck: Callable[[Job], bool] = lambda job: False
        """Jobs that hang."""
        self.pools: list[Pool] = []
        self.start()

    def start(self) -> None:
        """Open the store, with what the disks have."""
        pool = Pool(create_allocator("bitmap", self.unit_bytes))
        self.pools.append(pool)
        self.core = StoreCore(
            pool,
            clock=self.clock,
            random=random.Random(1),
            limits=CoreLimits(max_batch_keys=self.max_batch_keys),
            watermarks=Watermarks(1.0, 1.0),
            journal=Journal(reads=True),
        )
        self.core.add_arena(create_arena(0, self.pool_bytes))
        self.client = self.core.open_client("a client")
        self.tier = DiskTier(self.core, clock=self.clock, settings=self.settings, random=random.Random(2))
        self.tiers = Tiers(self.core, self.tier)
        self.driven: DiskTier | Tiers = self.tier
        """What gives jobs and takes results; `tiers` hides errors that nobody expects.
        """
        self.volumes = [self.open_volume(disk) for disk in self.disks]
        for volume in self.volumes:
            self.tier.add(volume)

    def open_volume(self, disk: SimulatedDisk) -> Volume:
        superblock = disk.contents(SUPERBLOCK)
        if superblock:
            return Volume.open(
                disk.number, superblock=superblock, files=disk.files(), capacity_bytes=self.capacity_bytes
            )
        return Volume.create(
            disk.number,
            capacity_bytes=self.capacity_bytes,
            uuid=self.random.randbytes(16),
            seed=self.random.getrandbits(64),
            segment_bytes=SEGMENT_BYTES,
        )

    def restart(self) -> None:
        """Lose power, and start again; all volumes recover."""
        self.crash()
        self.settle()

    def crash(self) -> None:
        """Lose power, and start again, with volumes that have yet to recover."""
        for disk in self.disks:
            disk.crash()
        self.start()

    def close(self) -> None:
        for pool in self.pools:
            pool.close()

    # Driving

    def start_jobs(self) -> None:
        for job in self.driven.jobs():
            self.disks[job.volume].start([job])

    def finish(self, disk: SimulatedDisk, job: Job) -> None:
        self.driven.done([disk.finish(job)])

    def step(self) -> bool:
        """Start what is to start, and finish all that does not hang; return whether
        there was anything."""
        self.start_jobs()
        jobs = [(disk, job) for disk in self.disks for job in disk.under_way if not self.stuck(job)]
        self.random.shuffle(jobs)
        results: list[Result] = [disk.finish(job) for disk, job in jobs]
        self.driven.done(results)
        deadline = self.driven.next_deadline()
        return bool(results) or (deadline is not None and deadline <= self.clock.now)

    def begin_writing(self) -> None:
        """Let what waits be written, but nothing end."""
        self.start_jobs()
        self.clock.now += self.settings.group_s
        self.start_jobs()
        assert any(isinstance(job, Write) for disk in self.disks for job in disk.under_way)

    def settle(self, most_s: float = 5.0) -> None:
        """Go on until nothing happens any more for so long."""
        end = self.clock.now + most_s
        for _ in range(10_000):
            while self.step():
                pass
            deadline = self.driven.next_deadline()
            if deadline is None or deadline > end:
                return
            self.clock.now = max(deadline, self.clock.now)
        raise AssertionError("it does not come to rest")

    def take(self, steps: Steps[int], meanwhile: Callable[[], object] = lambda: None) -> int:
        """Take the steps of a request as a store does, and return its result;
        `meanwhile` comes after the first wait."""
        while True:
            try:
                wait = next(steps)
            except StopIteration as end:
                return int(end.value)
            if wait is not None:
                self.until(wait)
                meanwhile()
                meanwhile = bool

    def until(self, wait: Wait | None) -> Wait:
        """Go on until a wait is settled."""
        assert wait is not None
        for _ in range(10_000):
            if wait.settled:
                return wait
            if not self.step() and not wait.settled:
                deadline = self.driven.next_deadline()
                assert deadline is not None
                self.clock.now = max(deadline, self.clock.now)
        raise AssertionError("it is never settled")

    # What clients do

    def put(self, values: dict[str, bytes], *, checksums: bool = True, replace: bool = True) -> None:
        reservation = self.core.reserve(self.client, [len(value) for value in values.values()])
        for view, value in zip(reservation.views, values.values(), strict=True):
            view[:] = value
        hashes = [xxhash.xxh3_64_intdigest(value) for value in values.values()] if checksums else None
        self.core.commit(reservation, list(values), hashes, replace=replace)

    def put_names(self, *names: str, **options: Any) -> None:
        self.put({name: content(name) for name in names}, **options)

    def put_apart(self, *names: str) -> None:
        """Put blocks in a batch of its own each, and let them be written."""
        for name in names:
            self.put_names(name)
        self.settle()

    def put_on_disk(self, *names: str, **options: Any) -> None:
        """Put blocks that are on disk only, when it returns."""
        self.put_names(*names, **options)
        assert self.on_disk(*names)

    def get(self, *keys: str) -> list[bytes | None]:
        """Read as a server does: want, wait, lease."""
        wait = next(self.tiers.fetch(keys, 100, whole=True)[1], None)
        if wait is not None:
            self.until(wait)
        return self.peek(*keys)

    def peek(self, *keys: str) -> list[bytes | None]:
        """Read what is in memory."""
        lease = self.core.lease(self.client, keys)
        values = [None if view is None else bytes(view) for view in lease.views]
        self.core.release(lease)
        return values

    def flush(self, *keys: str) -> int:
        """Make keys durable; return how many are not."""
        return self.until(self.tier.flush(keys or None, self.clock.now + 100)).unmet

    def delete(self, *keys: str) -> int:
        deletion = self.tier.delete(keys, self.clock.now + 100)
        assert self.until(deletion.wait).unmet == 0
        return deletion.deleted

    def forget_memory(self) -> None:
        """Evict everything from memory."""
        self.core.evict(0.0, 0.0)
        assert len(self.core) == 0

    def on_disk(self, *keys: str) -> bool:
        """Put keys out of memory, and onto disk."""
        unmet = self.flush(*keys)
        self.forget_memory()
        return unmet == 0 and self.tier.exists(keys) == b"\2" * len(keys)


@pytest.fixture
def make_machine() -> Iterator[Callable[..., Machine]]:
    machines: list[Machine] = []

    def make(**options: Any) -> Machine:
        machine = Machine(**options)
        machines.append(machine)
        machine.settle()
        return machine

    yield make
    for machine in machines:
        machine.close()


@pytest.fixture
def machine(make_machine: Callable[..., Machine]) -> Machine:
    return make_machine()
