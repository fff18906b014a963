"""The messages of clients that move blocks by themselves: mapping arenas and tables, reserving and leasing places.

They are part of the protocol like those in `messages.py`, which has the tables of all of them. A `Reserve`, a `Commit`
and an `Abort` also begin and end a put by RDMA.
"""

from typing import ClassVar

import attrs
from attrs import validators

from infinistore.protocol.fields import Keys, Numbers, count

__all__ = [
    "Abort",
    "Commit",
    "Lease",
    "LeaseReply",
    "MapArenas",
    "MapArenasReply",
    "MapTables",
    "MapTablesReply",
    "Prepare",
    "PrepareReply",
    "Release",
    "Reserve",
    "ReserveReply",
    "Touch",
]


@attrs.frozen
class MapArenas:
    """Ask for the descriptors of the arenas from number `first` on. Over a Unix socket only."""

    KIND: ClassVar[int] = 0x10
    first: int = attrs.field(default=0, validator=count)


@attrs.frozen
class MapArenasReply:
    """The lengths of the arenas, in bytes; their descriptors come beside the frame (SCM_RIGHTS), in the same order.

    `writable` tells if they may be mapped for writing.
    """

    KIND: ClassVar[int] = 0x90
    lengths: Numbers
    writable: bool = attrs.field(validator=validators.instance_of(bool))


@attrs.frozen
class MapTables:
    """Ask for the tables by which a client reads again, without asking, what it has read. Over a Unix socket only."""

    KIND: ClassVar[int] = 0x13


@attrs.frozen
class MapTablesReply:
    """The descriptors of the removal table and of this connection's hazard table come beside the frame, in this order.

    `granule_bytes` of the pool share one entry of the removal table. It is 0, and nothing comes beside the frame, if
    the server has no such tables, or no memory for one more. A client that pins something already pins no more than
    `max_pinned_bytes` without asking; each block counts as a multiple of `unit_bytes`.
    """

    KIND: ClassVar[int] = 0x93
    granule_bytes: int = attrs.field(validator=count)
    max_pinned_bytes: int = attrs.field(default=0, validator=count)
    unit_bytes: int = attrs.field(default=1, validator=count)


@attrs.frozen
class Reserve:
    """Take room for a batch that the client will write into mapped arenas by itself, and then `Commit`.

    A `spare` one is for a batch that may come. It takes only room that is free, and is answered by reservation 0 if
    there is not much of that.
    """

    KIND: ClassVar[int] = 0x11
    sizes: Numbers
    spare: bool = attrs.field(default=False, validator=validators.instance_of(bool))


@attrs.frozen
class ReserveReply:
    """Where the room is; 0 and no places for a spare one that was not granted.

    A place is the number of an arena times 2**48, plus the offset in it, in bytes.
    """

    KIND: ClassVar[int] = 0x91
    reservation: int = attrs.field(validator=count)
    places: Numbers


@attrs.frozen
class Commit:
    """Name the blocks of a reservation, and make them visible at once. Answered like a Put.

    `checksums` is empty, or has one number for each block.
    """

    KIND: ClassVar[int] = 0x12
    reservation: int = attrs.field(validator=count)
    keys: Keys
    checksums: Numbers
    replace: bool = attrs.field(default=True, validator=validators.instance_of(bool))


@attrs.frozen
class Prepare:
    """Name the blocks of a reservation before they are written. The client makes them visible by itself: when they are
    there, it writes the number of the reservation, and their checksums if there are any, to its commit word.

    If it has `sizes`, and 0 for the reservation, it takes the room as well, like a `Reserve`.
    """

    KIND: ClassVar[int] = 0x18
    reservation: int = attrs.field(validator=count)
    keys: Keys
    sizes: Numbers
    checksums: bool = attrs.field(default=True, validator=validators.instance_of(bool))


@attrs.frozen
class PrepareReply:
    """If not `accepted`, somebody else is writing one of these keys, and the batch needs a `Commit`.

    `reservation` is its number, and `places` are as in a ReserveReply if room was asked for: that is the client's also
    if this was not accepted. `removals` is as in a LeaseReply; 0 also if the client had better not remember where these
    blocks are.
    """

    KIND: ClassVar[int] = 0x98
    accepted: bool = attrs.field(validator=validators.instance_of(bool))
    reservation: int = attrs.field(validator=count)
    places: Numbers
    removals: int = attrs.field(default=0, validator=count)


@attrs.frozen
class Lease:
    """Pin a batch where it is, for reading in mapped arenas, until `Release`.

    `capacities` is as in a Get. A batch of at most `inline_bytes` comes as payload instead, and is not pinned.
    """

    KIND: ClassVar[int] = 0x14
    keys: Keys
    capacities: Numbers
    inline_bytes: int = attrs.field(default=0, validator=count)


@attrs.frozen
class LeaseReply:
    """Where the blocks are. `sizes` are as in a GetReply; `places` as in a ReserveReply, 0 for what is not there.

    If `lease` is 0, the blocks that are there follow as payload. `removals` is how many the removal table has counted
    by now; 0 if the server has no such table.
    """

    KIND: ClassVar[int] = 0x94
    lease: int = attrs.field(validator=count)
    sizes: Numbers
    checksums: Numbers
    places: Numbers
    removals: int = attrs.field(default=0, validator=count)


@attrs.frozen
class Touch:
    """Count as a use of these keys that the client did not need to ask about, and with `read` as a read of their
    blocks. It has no reply."""

    KIND: ClassVar[int] = 0x17
    keys: Keys
    read: bool = attrs.field(default=True, validator=validators.instance_of(bool))


@attrs.frozen
class Release:
    """End a lease. It has no reply: the client need not wait.

    0 is the lease that the last `Lease` made, if it made one: for a client that no longer waits for the reply.
    """

    KIND: ClassVar[int] = 0x15
    lease: int = attrs.field(validator=count)


@attrs.frozen
class Abort:
    """Give the room of a reservation back. It has no reply, either."""

    KIND: ClassVar[int] = 0x16
    reservation: int = attrs.field(validator=count)
