"""The messages of RDMA: connecting queue pairs, and moving batches.

`messages.py` has the tables of all messages.
"""

from typing import ClassVar

import attrs
from attrs import validators

from infinistore.protocol.fields import Keys, Numbers, count, text
from infinistore.protocol.versions import Capability, NewerFields

__all__ = ["RdmaConnect", "RdmaConnectReply", "RdmaFetch", "RdmaFill", "RdmaGet", "RdmaGetReply", "RdmaPut"]


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
