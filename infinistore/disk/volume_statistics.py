"""What a volume says of itself."""

from typing import Literal, TypeAlias

import attrs

__all__ = ["VolumeState", "VolumeStatistics"]

VolumeState: TypeAlias = Literal["recovering", "open", "read-only", "closing", "closed"]


@attrs.frozen(kw_only=True)
class VolumeStatistics:
    """What a volume is and has done; sizes in bytes."""

    state: VolumeState
    capacity_bytes: int
    """The room of all segments that it may have. It shrinks when the disk is full."""
    allocated_bytes: int
    """The room of the segments that exist."""
    used_bytes: int
    """The part of these that holds batches, dead ones included."""
    segments: int
    quarantined_segments: int
    """Abandoned segments that a write which hangs may still reach: they are not used
    again before it returns."""
    records: int
    """Keys that `find` finds."""
    index_bytes: int
    appended_blocks: int
    appended_bytes: int
    """The bytes of these blocks, without padding."""
    reinserted_bytes: int
    """The part of these that was appended again (`sources`)."""
    written_bytes: int
    """All that was written: blocks, padding, tables, footers, snapshots."""
    tombstones: int
    lost_batches: int
    abandoned_segments: int
    recycled_segments: int
    damaged_batches: int
    """Found by recovery: batches lost to bit rot, or torn by a crash."""
    snapshots: int
