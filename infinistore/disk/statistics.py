"""The figures of a tier and of its disks."""

import attrs

from infinistore.disk.health import DiskState
from infinistore.disk.volume import VolumeStatistics

__all__ = ["DiskStatistics", "TierStatistics"]


@attrs.frozen(kw_only=True)
class DiskStatistics:
    """One disk. Counters are since the start; sizes in bytes."""

    number: int
    state: DiskState
    alarm: str
    """Why it is not healthy, or has less room than it was given, and what to do; else
    empty."""
    hung_jobs: int
    """Jobs that are out and late."""
    hangs: int
    read_blocks: int
    """Blocks read into the pool, and verified."""
    read_bytes: int
    written_blocks: int
    """Blocks made durable."""
    written_bytes: int
    write_rate: float
    """What it took of late, in bytes per second; 0 if unknown."""
    damaged_blocks: int
    """Blocks that did not have their checksum: misses."""
    read_errors: int
    write_errors: int
    volume: VolumeStatistics


@attrs.frozen(kw_only=True)
class TierStatistics:
    """All disks of a store. Counters are since the start; sizes in bytes."""

    disks: tuple[DiskStatistics, ...]
    queued_bytes: int
    """What is due and waits for a disk."""
    ageing_bytes: int
    """What was put and is not due yet."""
    pinned_bytes: int
    """What is pinned because it is being written, by footprint."""
    skipped_blocks: int
    """Blocks not written because too much waited."""
    skipped_bytes: int
    evicted_blocks: int
    """Blocks that were gone, or replaced, before it was their turn."""
    failed_blocks: int
    """Blocks that no disk took."""
    promoted_blocks: int
    """Blocks read from disk into the pool."""
    promoted_bytes: int
    no_room_blocks: int
    """Blocks not read because the pool had no room."""
    late_blocks: int
    """Blocks not read because nobody waited for them any more."""
    prefetch_bytes: int
    """What prefetches have asked for and was not read yet."""
    prefetch_skipped_blocks: int
    """Blocks that prefetches left, because they had asked for too much."""
    reinserted_blocks: int
    """Blocks kept from a segment that was overwritten."""
    held_bytes: int
    """What is held on disk."""
    unsafe_keys: int
    """Keys deleted that a disk, which could not be written, may bring back."""
