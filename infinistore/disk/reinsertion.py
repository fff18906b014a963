"""Re-insertion: what is worth keeping of a segment that is about to be overwritten.

That is what was read of late, most often read first, and what is in memory now: nobody
would write that again when it is evicted. It is read and appended again, a few blocks
at a time and in the order of the log, behind everything else that a disk has to read.
Whatever goes wrong here only loses copies.
"""

from collections import deque
from collections.abc import Sequence

import attrs
import numpy as np

from infinistore.core import StoreCore
from infinistore.disk.disks import Disk
from infinistore.disk.jobs import ALIGNMENT_BYTES, ReadInto, Result, aligned
from infinistore.disk.settings import LARGEST_READ_BYTES, MOST_BLOCKS_PER_GROUP
from infinistore.disk.volume import Location, Reclaim


@attrs.define(eq=False)
class _Rescue:
    """A segment of one disk, and what is still to be read of it."""

    segment: int
    blocks: deque[tuple[str, Location]]
    is_busy: bool = False
    token: int | None = None
    read: tuple[list[str], list[Location], list[memoryview]] | None = None
    """What was read, and is to be appended."""


class Reinsertion:
    """The segments of one tier that are about to be overwritten."""

    def __init__(self, core: StoreCore) -> None:
        self.reinserted_blocks = 0
        self._core = core
        self._rescues: dict[Disk, deque[_Rescue]] = {}

    def begin(self, disk: Disk, reclaim: Reclaim) -> None:
        """Rescue what is worth it of a segment."""
        in_memory = self._core.index.contains_many(reclaim.keys)
        worth = [i for i, reads in enumerate(reclaim.reads) if reads or in_memory[i]]
        worth.sort(key=lambda i: -reclaim.reads[i])
        chosen, left_bytes = [], disk.volume.reinsertion_bytes
        for i in worth:
            if reclaim.locations[i].stored_bytes <= left_bytes:
                left_bytes -= reclaim.locations[i].stored_bytes
                chosen.append(i)
        blocks = deque((reclaim.keys[i], reclaim.locations[i]) for i in sorted(chosen))
        self._rescues.setdefault(disk, deque()).append(_Rescue(reclaim.segment, blocks))

    def remove(self, disk: Disk) -> None:
        """Rescue nothing more from a disk."""
        self._rescues.pop(disk, None)

    def work(self) -> None:
        """Read and append what can be now."""
        for disk, rescues in self._rescues.items():
            while rescues and self._advance(disk, rescues[0]):
                rescues.popleft()

    def ended(self, disk: Disk, token: int) -> bool:
        """Note that a batch is durable or lost; False if it is not one of these."""
        for rescue in self._rescues.get(disk, ()):
            if rescue.token == token:
                rescue.token, rescue.is_busy = None, False
                return True
        return False

    def _advance(self, disk: Disk, rescue: _Rescue) -> bool:
        """Do what can be done; return whether the segment may be overwritten."""
        if rescue.read is not None and not self._append(disk, rescue, *rescue.read):
            rescue.blocks.clear()
        rescue.read = None
        if rescue.is_busy:
            return False
        if not rescue.blocks or not disk.is_writable or disk.traffic.hung:
            disk.volume.reclaimed(rescue.segment)
            return True
        if not disk.traffic.reads:
            self._read(disk, rescue)
        return False

    def _read(self, disk: Disk, rescue: _Rescue) -> None:
        keys: list[str] = []
        locations: list[Location] = []
        gathered_bytes = 0  # decompressed
        while rescue.blocks and len(keys) < MOST_BLOCKS_PER_GROUP:
            key, location = rescue.blocks[0]
            end = locations[-1].offset + locations[-1].stored_bytes if locations else location.offset
            if location.offset != end or (locations and gathered_bytes + location.length > LARGEST_READ_BYTES):
                break
            rescue.blocks.popleft()
            gathered_bytes += aligned(location.length)
            keys.append(key)
            locations.append(location)
        memory = aligned_memory(sum(one.stored_bytes for one in locations))
        first = locations[0].offset
        views = [memory[one.offset - first :][: one.stored_bytes] for one in locations]
        # Compressed blocks are moved as they are, and decompressed only to be verified.
        blocks = [memoryview(bytearray(one.length)) if one.saved_pages else None for one in locations]
        rescue.is_busy = True

        def ended(result: Result) -> None:
            rescue.is_busy = False
            good = [
                i
                for i, checksum in enumerate(result.checksums)
                if not result.errno and checksum == locations[i].checksum
            ]
            if good:
                rescue.read = (
                    [keys[i] for i in good],
                    [locations[i] for i in good],
                    [views[i][: locations[i].length] for i in good],
                )

        lengths = [one.length for one in locations]
        job = ReadInto(disk.number, f"segments/{rescue.segment}", first, views, lengths, blocks)
        disk.traffic.start(job, ended)

    def _append(
        self,
        disk: Disk,
        rescue: _Rescue,
        keys: Sequence[str],
        locations: Sequence[Location],
        views: Sequence[memoryview],
    ) -> bool:
        rescue.token = disk.volume.append(
            keys,
            [one.length for one in locations],
            [one.checksum for one in locations],
            views,
            own_checksums=[one.own_checksum for one in locations],
            sources=locations,
        )
        rescue.is_busy = rescue.token is not None
        self.reinserted_blocks += len(keys) if rescue.is_busy else 0
        return rescue.is_busy


def aligned_memory(length_bytes: int) -> memoryview:
    """Return new memory whose address is a multiple of `ALIGNMENT_BYTES`."""
    memory = np.empty(length_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memoryview(memory)[start : start + length_bytes]  # type: ignore[arg-type]
