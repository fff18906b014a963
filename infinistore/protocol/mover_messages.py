"""The messages of movers: shared memory maps arenas and tables, reserves and leases;
RDMA connects queue pairs and moves batches.

`messages.py` has the tables of all messages. `Reserve`, `Commit` and `Abort` also start
and end a put by RDMA.
"""

from typing import ClassVar

import attrs
from attrs import validators

from infinistore.protocol.fields import Keys, Numbers, count, text
from infinistore.protocol.versions import Capability, NewerFields


@attrs.frozen
class MapArenas:
    """Request the descriptors of the arenas from number `first` on.

    Over a Unix socket only.
    """

    KIND: ClassVar[int] = 0x10
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.SHARED_MEMORY
    first: int = attrs.field(default=0, validator=count)


@attrs.frozen
class MapArenasReply:
    """The lengths of the arenas, in bytes.

    Their descriptors come with the frame (SCM_RIGHTS).

    If both ends have the capability LIVENESS_PIPE, one more descriptor comes last: the
    reading end of a pipe that hangs up when the server ends. `writable` says whether
    the arenas may be mapped for writing.
    """

    KIND: ClassVar[int] = 0x90
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.SHARED_MEMORY
    lengths: Numbers
    writable: bool = attrs.field(validator=validators.instance_of(bool))


@attrs.frozen
class MapTables:
    """Request the tables that let a client read known blocks without a request.

    Over a Unix socket only.
    """

    KIND: ClassVar[int] = 0x13
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.TABLES


@attrs.frozen
class MapTablesReply:
    """The removal table and the hazard table, whose descriptors come with the frame.

    `granule_bytes` of the pool share one entry of the removal table. It is 0, and there
    are no descriptors, if the server has no such tables, or no memory for another. A
    client that has pins sends a request before it pins more than `max_pinned_bytes` in
    total; each block counts as a multiple of `unit_bytes`.
    """

    KIND: ClassVar[int] = 0x93
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.TABLES
    granule_bytes: int = attrs.field(validator=count)
    max_pinned_bytes: int = attrs.field(default=0, validator=count)
    unit_bytes: int = attrs.field(default=1, validator=count)


@attrs.frozen
class Reserve:
    """Allocate space for a batch that the client will write into mapped arenas.

    `Commit` follows. A `spare` reservation is for a batch that may follow. Nothing is
    evicted for it; the reply has reservation 0 if little space is free.
    """

    KIND: ClassVar[int] = 0x11
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.SHARED_MEMORY | Capability.RDMA
    sizes: Numbers
    spare: bool = attrs.field(default=False, validator=validators.instance_of(bool))


@attrs.frozen
class ReserveReply:
    """The space, as packed offsets (`packed_offsets`).

    For a spare reservation that was not granted, `reservation` is 0 and `places` is
    empty.
    """

    KIND: ClassVar[int] = 0x91
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.SHARED_MEMORY | Capability.RDMA
    reservation: int = attrs.field(validator=count)
    places: Numbers


@attrs.frozen
class Commit:
    """Name the blocks of a reservation and make them visible, all at once.

    `checksums` is empty, or has one number for each block. `ttl_us` is as in a Put. The
    reply is a PutReply.
    """

    KIND: ClassVar[int] = 0x12
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.SHARED_MEMORY | Capability.RDMA
    reservation: int = attrs.field(validator=count)
    keys: Keys
    checksums: Numbers
    replace: bool = attrs.field(default=True, validator=validators.instance_of(bool))
    ttl_us: int = attrs.field(default=0, validator=count, metadata={"since": 1})


@attrs.frozen
class Prepare:
    """Name the blocks of a reservation before they are written.

    The client makes them visible later: it writes their checksums, if there are any,
    and the number of the reservation to its commit word. With `sizes`, and 0 as the
    reservation, this also allocates the space, like a `Reserve`.
    """

    KIND: ClassVar[int] = 0x18
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.COMMIT_WORD
    reservation: int = attrs.field(validator=count)
    keys: Keys
    sizes: Numbers
    checksums: bool = attrs.field(default=True, validator=validators.instance_of(bool))


@attrs.frozen
class PrepareReply:
    """Whether the commit word suffices.

    If it is not `accepted`, another client is writing one of these keys, and the batch
    needs a `Commit`. `places` are as in a ReserveReply if space was requested; the
    space belongs to the client even if this was not accepted. `removals` is as in a
    LeaseReply, or 0 if the client should not remember where these blocks are.
    """

    KIND: ClassVar[int] = 0x98
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.COMMIT_WORD
    accepted: bool = attrs.field(validator=validators.instance_of(bool))
    reservation: int = attrs.field(validator=count)
    places: Numbers
    removals: int = attrs.field(default=0, validator=count)


@attrs.frozen
class Lease:
    """Pin a batch for reading in mapped arenas, until `Release`.

    `capacities` is as in a Get. A batch of at most `inline_bytes` comes as payload
    instead, and is not pinned.
    """

    KIND: ClassVar[int] = 0x14
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.SHARED_MEMORY
    keys: Keys
    capacities: Numbers
    inline_bytes: int = attrs.field(default=0, validator=count)


@attrs.frozen
class LeaseReply:
    """Where the blocks are.

    `sizes` are as in a GetReply, `places` as in a ReserveReply, 0 for a key that is not
    in the store. If `lease` is 0, the present blocks follow as payload. `removals` is
    the current count of the removal table, 0 if the server has none.
    """

    KIND: ClassVar[int] = 0x94
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.SHARED_MEMORY
    lease: int = attrs.field(validator=count)
    sizes: Numbers
    checksums: Numbers
    places: Numbers
    removals: int = attrs.field(default=0, validator=count)


@attrs.frozen
class Touch:
    """Report the use of keys without a request; with `read`, a read of their blocks.

    It has no reply.
    """

    KIND: ClassVar[int] = 0x17
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.TABLES
    keys: Keys
    read: bool = attrs.field(default=True, validator=validators.instance_of(bool))


@attrs.frozen
class Release:
    """End a lease. It has no reply, so the client does not wait.

    0 is the lease that the last `Lease` made, if it made one: for a client that no
    longer waits for the reply.
    """

    KIND: ClassVar[int] = 0x15
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.SHARED_MEMORY | Capability.RDMA
    lease: int = attrs.field(validator=count)


@attrs.frozen
class Abort:
    """Give the space of a reservation back. It has no reply."""

    KIND: ClassVar[int] = 0x16
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.SHARED_MEMORY | Capability.RDMA
    reservation: int = attrs.field(validator=count)


@attrs.frozen
class RdmaConnect:
    """Connect the client's queue pair to a new one of the server.

    RDMA requests may follow.

    `queue` and `packet` are the number of the queue pair and of its first packet. `gid`
    has 32 hexadecimal digits.
    """

    KIND: ClassVar[int] = 0x20
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.RDMA
    queue: int = attrs.field(validator=count)
    packet: int = attrs.field(validator=count)
    gid: str = attrs.field(validator=text)
    lid: int = attrs.field(default=0, validator=count)
    mtu: int = attrs.field(default=1024, validator=count)
    reads: int = attrs.field(default=1, validator=count)


@attrs.frozen
class RdmaConnectReply:
    """The server's queue pair, which is connected.

    The fields are those of `RdmaConnect`.
    """

    KIND: ClassVar[int] = 0xA0
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.RDMA
    queue: int = attrs.field(validator=count)
    packet: int = attrs.field(validator=count)
    gid: str = attrs.field(validator=text)
    lid: int = attrs.field(default=0, validator=count)
    mtu: int = attrs.field(default=1024, validator=count)
    reads: int = attrs.field(default=1, validator=count)


@attrs.frozen
class RdmaPut:
    """Store a batch that the server reads from the client's registered memory.

    `remote_keys` has one key for each block, or a single one for all. `checksums` is
    empty, or has one number for each block. `ttl_us` is as in a Put. The reply is a
    PutReply.
    """

    KIND: ClassVar[int] = 0x21
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.RDMA
    keys: Keys
    sizes: Numbers
    addresses: Numbers
    remote_keys: Numbers
    checksums: Numbers
    replace: bool = attrs.field(default=True, validator=validators.instance_of(bool))
    ttl_us: int = attrs.field(default=0, validator=count, metadata={"since": 1})


@attrs.frozen
class RdmaGet:
    """Read a batch, which the server writes into the client's registered memory.

    If `region_bytes` is 0, `addresses` has an address for each block. Otherwise it has
    one, of a span of that many bytes, and the present blocks go into it back to back. A
    batch of at most `inline_bytes` comes as payload instead. A batch that is longer
    than the span is leased, to be fetched in pieces.

    With `read_back`, the server reads a byte of each memory that it has written to
    before it replies. The read completes after the writes, so bytes that the client's
    card has acknowledged but not written, for example to the memory of a GPU, have
    arrived.
    """

    KIND: ClassVar[int] = 0x22
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.RDMA
    keys: Keys
    capacities: Numbers
    addresses: Numbers
    remote_keys: Numbers
    region_bytes: int = attrs.field(default=0, validator=count)
    inline_bytes: int = attrs.field(default=0, validator=count)
    read_back: bool = attrs.field(default=False, validator=validators.instance_of(bool))


@attrs.frozen
class RdmaGetReply:
    """Where the blocks are: at the requested addresses, in the payload, or leased.

    `sizes` and `checksums` are as in a GetReply, with a checksum for each block. The
    blocks are the payload if it is `inline`. If `lease` is not 0, `RdmaFetch` and
    `Release` follow.
    """

    KIND: ClassVar[int] = 0xA2
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.RDMA
    sizes: Numbers
    checksums: Numbers
    lease: int = attrs.field(default=0, validator=count)
    inline: bool = attrs.field(default=False, validator=validators.instance_of(bool))


@attrs.frozen
class RdmaFill:
    """Read a piece of a reserved batch from the client's registered memory.

    `first_byte` counts from the start of the batch, its blocks back to back. The count
    in the reply is the length of the piece.
    """

    KIND: ClassVar[int] = 0x23
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.RDMA
    reservation: int = attrs.field(validator=count)
    first_byte: int = attrs.field(validator=count)
    length: int = attrs.field(validator=count)
    address: int = attrs.field(validator=count)
    remote_key: int = attrs.field(validator=count)


@attrs.frozen
class RdmaFetch:
    """Write a piece of a leased batch into the client's registered memory.

    `first_byte` counts from the start of the present blocks, back to back. The count in
    the reply is the length of the piece.
    """

    KIND: ClassVar[int] = 0x24
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.RDMA
    lease: int = attrs.field(validator=count)
    first_byte: int = attrs.field(validator=count)
    length: int = attrs.field(validator=count)
    address: int = attrs.field(validator=count)
    remote_key: int = attrs.field(validator=count)
