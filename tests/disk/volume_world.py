"""One volume on a simulated disk, and what its user must see."""

import random
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from infinistore.disk.compression import compress
from infinistore.disk.jobs import ReadInto, Result
from infinistore.disk.volume import Durable, Location, Lost, Reclaim, Shrunk, Volume
from tests.simulation.disk import SUPERBLOCK, SimulatedDisk

SEGMENT_BYTES = 64 * 1024
CAPACITY_BYTES = 5 << 18
STEPS = 100_000


class VolumeWorld:
    """A disk, its volume, and whoever runs the one on the other."""

    def __init__(
        self,
        seed: int = 0,
        *,
        capacity_bytes: int = CAPACITY_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        compresses: bool = False,
    ) -> None:
        self.chance = random.Random(seed)
        self.disk = SimulatedDisk(self.chance)
        self.capacity_bytes = capacity_bytes
        self.volume = Volume.create(
            0, capacity_bytes=capacity_bytes, uuid=bytes(range(16)), seed=12345, segment_bytes=segment_bytes
        )
        self.volume.compresses = compresses
        self.ended: dict[int, Durable | Lost] = {}
        self.offers: list[Reclaim] = []
        self.accept_offers = True

    def start(self) -> None:
        """Start the jobs that the volume wants, after all its steps."""
        for _ in range(STEPS):
            if not self.volume.step():
                break
        self.disk.start(self.volume.jobs())
        for event in self.volume.events():
            if isinstance(event, Reclaim):
                self.offers.append(event)
                if self.accept_offers:
                    self.volume.reclaimed(event.segment)
            elif not isinstance(event, Shrunk):
                self.ended[event.token] = event

    def finish(self, result: Result) -> None:
        """Hand in one result."""
        self.volume.done(result)
        self.start()

    def settle(self) -> None:
        """Run all jobs, and all that follow from them."""
        self.start()
        for _ in range(STEPS):
            if not self.disk.under_way:
                return
            self.finish(self.disk.finish(self.chance.choice(self.disk.under_way)))
        raise AssertionError("the volume never rests")

    def reopen(self) -> None:
        """Open the disk anew, as it was; the index is not there yet."""
        compresses = self.volume.compresses
        self.volume = Volume.open(
            0,
            superblock=self.disk.contents(SUPERBLOCK),
            files=self.disk.files(),
            capacity_bytes=self.capacity_bytes,
        )
        self.volume.compresses = compresses
        self.ended.clear()
        self.offers.clear()

    def crash(self) -> None:
        """Lose power, and open the disk anew."""
        self.disk.crash()
        self.reopen()

    def restart(self) -> None:
        """Lose power, and recover."""
        self.crash()
        self.settle()

    def put(self, blocks: dict[str, bytes], sources: Sequence[Location | None] | None = None) -> int | None:
        """Append a batch; an empty block stands for a tombstone."""
        values = list(blocks.values())
        return self.volume.append(
            list(blocks),
            list(map(len, values)),
            [xxh3_64_intdigest(value) if value else 0 for value in values],
            [memoryview(self.stored(value)) for value in values],
            sources=sources,
        )

    def stored(self, value: bytes) -> bytes:
        """Return what is written of a block."""
        packed = compress(memoryview(value)) if value and self.volume.compresses else None
        return value if packed is None else packed

    def write(self, blocks: dict[str, bytes]) -> None:
        """Append a batch, and see it become durable."""
        token = self.put(blocks)
        assert token is not None
        self.settle()
        assert isinstance(self.ended[token], Durable)

    def get(self, key: str) -> bytes | None:
        """Read a block as the tier does: what has the wrong checksum is a miss."""
        location = self.volume.find([key])[0]
        return None if location is None else self.read(key, location)

    def read(self, key: str, location: Location) -> bytes | None:
        """Read and verify what is at a location; drop the record if that fails."""
        data = bytearray(location.length)
        views, blocks = [memoryview(data)], list[memoryview | None]()
        if location.saved_pages:
            views, blocks = [memoryview(bytearray(location.stored_bytes))], [*views]
        job = ReadInto(0, f"segments/{location.segment}", location.offset, views, [location.length], blocks)
        self.disk.start([job])
        result = self.disk.finish(job)
        if result.errno or result.checksums[0] != location.checksum:
            self.volume.drop(key, location)
            return None
        return bytes(data)
