"""The messages of RDMA: connecting queue pairs, and batches that the server moves out of and into a client's memory.

They are part of the protocol like those in `messages.py`, which has the tables of all of them.
"""

from typing import ClassVar

import attrs
from attrs import validators

from infinistore.protocol.fields import Keys, Numbers, count, text

__all__ = ["RdmaConnect", "RdmaConnectReply", "RdmaFetch", "RdmaFill", "RdmaGet", "RdmaGetReply", "RdmaPut"]


@attrs.frozen
class RdmaConnect:
    """Connect the client's queue pair to one that the server makes for it. From then on RDMA may be asked for.

    `queue` and `packet` are the number of the queue pair and of its first packet; `gid` is 32 hexadecimal digits.
    """

    KIND: ClassVar[int] = 0x20
    queue: int = attrs.field(validator=count)
    packet: int = attrs.field(validator=count)
    gid: str = attrs.field(validator=text)
    lid: int = attrs.field(default=0, validator=count)
    mtu: int = attrs.field(default=1024, validator=count)
    reads: int = attrs.field(default=1, validator=count)


@attrs.frozen
class RdmaConnectReply:
    """The server's end, which is ready. The fields are those of `RdmaConnect`."""

    KIND: ClassVar[int] = 0xA0
    queue: int = attrs.field(validator=count)
    packet: int = attrs.field(validator=count)
    gid: str = attrs.field(validator=text)
    lid: int = attrs.field(default=0, validator=count)
    mtu: int = attrs.field(default=1024, validator=count)
    reads: int = attrs.field(default=1, validator=count)


@attrs.frozen
class RdmaPut:
    """Store a batch that the server reads out of the client's registered memory. Answered like a Put.

    `remote_keys` has one key for each block, or a single one for all. `checksums` is empty, or one for each block.
    """

    KIND: ClassVar[int] = 0x21
    keys: Keys
    sizes: Numbers
    addresses: Numbers
    remote_keys: Numbers
    checksums: Numbers
    replace: bool = attrs.field(default=True, validator=validators.instance_of(bool))


@attrs.frozen
class RdmaGet:
    """Read a batch, which the server writes into the client's registered memory.

    With `region_bytes` 0, `addresses` has a place for each block, of at least its capacity. Otherwise it has one, of a
    span of so many bytes, and the blocks that are there go into it back to back. A batch of at most `inline_bytes`
    comes as payload instead. One that is longer than the span is leased, to be fetched in pieces.

    With `read_back`, the server reads a byte of each memory that it has written to before it replies. That pushes
    before it what the client's card has taken but not yet written, to the memory of a GPU for example.
    """

    KIND: ClassVar[int] = 0x22
    keys: Keys
    capacities: Numbers
    addresses: Numbers
    remote_keys: Numbers
    region_bytes: int = attrs.field(default=0, validator=count)
    inline_bytes: int = attrs.field(default=0, validator=count)
    read_back: bool = attrs.field(default=False, validator=validators.instance_of(bool))


@attrs.frozen
class RdmaGetReply:
    """`sizes` and `checksums` are as in a GetReply, with a checksum for each.

    The blocks are where the request said; or, if `inline`, follow as payload; or, if `lease` is not 0, wait for
    `RdmaFetch` and `Release`.
    """

    KIND: ClassVar[int] = 0xA2
    sizes: Numbers
    checksums: Numbers
    lease: int = attrs.field(default=0, validator=count)
    inline: bool = attrs.field(default=False, validator=validators.instance_of(bool))


@attrs.frozen
class RdmaFill:
    """Read a piece of a reserved batch out of the client's registered memory. The count in the reply is its length.

    `first_byte` counts from the batch's beginning, its blocks end to end.
    """

    KIND: ClassVar[int] = 0x23
    reservation: int = attrs.field(validator=count)
    first_byte: int = attrs.field(validator=count)
    length: int = attrs.field(validator=count)
    address: int = attrs.field(validator=count)
    remote_key: int = attrs.field(validator=count)


@attrs.frozen
class RdmaFetch:
    """Write a piece of a leased batch into the client's registered memory. The count in the reply is its length.

    `first_byte` counts from the beginning of the blocks that are there, end to end.
    """

    KIND: ClassVar[int] = 0x24
    lease: int = attrs.field(validator=count)
    first_byte: int = attrs.field(validator=count)
    length: int = attrs.field(validator=count)
    address: int = attrs.field(validator=count)
    remote_key: int = attrs.field(validator=count)
