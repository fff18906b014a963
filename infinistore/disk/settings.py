"""The settings of the tier, and its fixed bounds."""

from typing import Final, Literal, TypeAlias

import attrs
from attrs.validators import gt, in_

from infinistore.sizes import MIB

Admission: TypeAlias = Literal["lazy", "eager", "second-use"]

LARGEST_READ_BYTES: Final = 4 * MIB
"""The most that one job reads, and that is promoted in one step. Several disks also
take parts of this size in turn, so that a prefix is read from all of them."""
MOST_BLOCKS_PER_GROUP: Final = 128
"""The most blocks of one read or batch: about a millisecond of work at a stretch."""
SORTED_BYTES: Final = 64 * MIB
"""Of a request, the part that is read in the order in which it lies on the disks. Parts
are read in the order of the request: what is late is then missing at its end."""
MOST_READS: Final = 8
"""Reads of blocks under way on one disk. More would not be any faster."""
MOST_GROUPS: Final = 4
"""Batches under way on one disk: written, flushed, and made ready at the same time."""
MOST_PINNED_BYTES: Final = 64 * MIB
"""What is pinned to be written, at most; or an eighth of the pool, if that is less."""


@attrs.frozen(kw_only=True)
class TierSettings:
    """What an operator may set, and the bounds of the tier's own work."""

    admission: Admission = attrs.field(default="lazy", validator=in_(("lazy", "eager", "second-use")))
    """When a block is written: `lazy`, once a quarter of the pool has been put after
    it; `eager`, at once; `second-use`, when it was read once."""
    compress: bool = False
    """Whether blocks are compressed on disk, as far as that saves pages. It needs
    zstandard (`--disk-compress`)."""
    wait_s: float = attrs.field(default=1.0, validator=gt(0.0))
    """How long a read waits for the disks at most (`--disk-wait`)."""
    queue_s: float = attrs.field(default=2.0, validator=gt(0.0))
    """How much may wait to be written, as seconds at the measured rate."""
    group_bytes: int = attrs.field(default=16 * MIB, validator=gt(0))
    """The most that is written and flushed as one batch."""
    group_s: float = attrs.field(default=0.1, validator=gt(0.0))
    """How long a smaller batch waits for more."""
    hang_s: float = attrs.field(default=10.0, validator=gt(0.0))
    """After this a job counts as hung. What it touches stays so until it returns."""
    write_rate_beside_reads: float = attrs.field(default=200e6, validator=gt(0.0))
    """How many bytes per second are written to a disk while it is read."""
    snapshot_s: float = attrs.field(default=300.0, validator=gt(0.0))
    """How often the index of a disk is saved, if something was written there."""
