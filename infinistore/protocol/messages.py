"""Every message of the protocol, one attrs class each, and the table of their kinds.

A request names a batch of keys where it names any. Lists of numbers travel packed (`Numbers`), eight bytes each.
What each field means on the wire is told in `docs/protocol.md`; a test holds the two together.
"""

from array import array
from typing import ClassVar, NewType, TypeAlias

import attrs
from attrs import validators

from infinistore.keys import MAX_KEY_BYTES

__all__ = [
    "KINDS",
    "MISSING",
    "NO_CHECKSUM",
    "ONE_WAY",
    "PROTOCOL_VERSION",
    "Abort",
    "Commit",
    "CountReply",
    "Delete",
    "ErrorReply",
    "Evict",
    "Exists",
    "ExistsReply",
    "Get",
    "GetReply",
    "Hello",
    "HelloReply",
    "Keys",
    "KeysReply",
    "Lease",
    "LeaseReply",
    "ListKeys",
    "MapArenas",
    "MapArenasReply",
    "MatchPrefix",
    "MatchPrefixReply",
    "Message",
    "Numbers",
    "Purge",
    "Put",
    "PutReply",
    "RdmaConnect",
    "RdmaConnectReply",
    "RdmaFetch",
    "RdmaFill",
    "RdmaGet",
    "RdmaGetReply",
    "RdmaPut",
    "Release",
    "ReleaseHold",
    "Reply",
    "Request",
    "Reserve",
    "ReserveReply",
    "Statistics",
    "StatisticsReply",
    "Tree",
    "Verify",
    "VerifyReply",
]

PROTOCOL_VERSION = 1
MISSING = 2**64 - 1
"""The size that a reply gives for a key that is not in the store."""
NO_CHECKSUM = 0
"""The checksum of a block that was written without one."""

Keys = NewType("Keys", list[str])
"""Keys in request order. On the wire they are one text, joined by NUL (`infinistore.keys`)."""
Numbers = NewType("Numbers", "array[int]")
"""Unsigned 64-bit numbers, packed little-endian on the wire; `array('Q')` in memory."""
Tree = NewType("Tree", dict[str, object])
"""Nested maps and lists of plain values."""


def _count(_: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if not isinstance(value, int) or not 0 <= value < 2**64:  # one call, where attrs' own validators take four
        raise ValueError(f"{attribute.name} is a whole number from 0 to 2**64 - 1, not {value!r}")


_text = validators.and_(validators.instance_of(str), validators.max_len(MAX_KEY_BYTES))
_ratio = validators.and_(validators.instance_of(float), validators.ge(0.0), validators.le(1.0))


@attrs.frozen
class Hello:
    """The first frame of a connection, from the client.

    `token` is empty where the client has none; `name` is what the server's statistics call this client.
    """

    KIND: ClassVar[int] = 0x01
    name: str = attrs.field(default="", validator=_text)
    token: str = attrs.field(default="", validator=_text, repr=False)


@attrs.frozen
class HelloReply:
    """The server's answer: who it is, and the limits that requests must keep to.

    `instance` is a random id, new in every run of a server. `unix_socket` is the path where the same server can be
    reached from the same host, or empty. `rdma` is the link of the port that it serves RDMA by, or empty.
    """

    KIND: ClassVar[int] = 0x81
    instance: str = attrs.field(validator=_text)
    server_version: str = attrs.field(validator=_text)
    max_body_bytes: int = attrs.field(validator=_count)
    max_batch_keys: int = attrs.field(validator=_count)
    max_batch_bytes: int = attrs.field(validator=_count)
    max_value_bytes: int = attrs.field(validator=_count)
    unix_socket: str = attrs.field(default="", validator=_text)
    rdma: str = attrs.field(default="", validator=_text)


@attrs.frozen
class Put:
    """Store a batch. The payload is the blocks back to back and then, if `checksums`, one xxh3-64 for each of them.

    The checksums come last so that the writer can hash a block just before it sends it.
    """

    KIND: ClassVar[int] = 0x02
    keys: Keys
    sizes: Numbers
    checksums: bool = True
    replace: bool = True


@attrs.frozen
class PutReply:
    """`skipped` holds the indices of the blocks that were not stored because their key was there (`replace=False`)."""

    KIND: ClassVar[int] = 0x82
    skipped: Numbers


@attrs.frozen
class Get:
    """Read a batch. `capacities` is empty, or holds the room there is for each block."""

    KIND: ClassVar[int] = 0x03
    keys: Keys
    capacities: Numbers
    checksums: bool = True


@attrs.frozen
class GetReply:
    """`sizes` by key, `MISSING` for what is not there; the payload is the present blocks back to back.

    `checksums` is empty if the request wanted none; else one number a key, `NO_CHECKSUM` where there is none.
    """

    KIND: ClassVar[int] = 0x83
    sizes: Numbers
    checksums: Numbers


@attrs.frozen
class Exists:
    """Ask which keys are there; with `touch`, this counts as a use of them."""

    KIND: ClassVar[int] = 0x04
    keys: Keys
    touch: bool = attrs.field(default=False, validator=validators.instance_of(bool))


@attrs.frozen
class ExistsReply:
    """One byte a key: 1 if it is there, else 0."""

    KIND: ClassVar[int] = 0x84
    present: bytes = attrs.field(validator=validators.instance_of(bytes))


@attrs.frozen
class MatchPrefix:
    """Count the leading keys that are there, and keep them there for `hold_us` microseconds if that is not 0."""

    KIND: ClassVar[int] = 0x05
    keys: Keys
    hold_us: int = attrs.field(default=0, validator=_count)


@attrs.frozen
class MatchPrefixReply:
    """How many leading keys are there, and the id of the hold (0: none was asked for, or nothing matched)."""

    KIND: ClassVar[int] = 0x85
    matched: int = attrs.field(validator=_count)
    hold: int = attrs.field(default=0, validator=_count)


@attrs.frozen
class ReleaseHold:
    """End a hold before its time. The count in the reply is 1 if it was there, else 0."""

    KIND: ClassVar[int] = 0x06
    hold: int = attrs.field(validator=_count)


@attrs.frozen
class Delete:
    """Delete keys. The count in the reply says how many were there."""

    KIND: ClassVar[int] = 0x07
    keys: Keys


@attrs.frozen
class ListKeys:
    """One page of the keys that begin with `prefix` and come after `after`, in code point order."""

    KIND: ClassVar[int] = 0x08
    prefix: str = attrs.field(default="", validator=_text)
    after: str = attrs.field(default="", validator=_text)
    limit: int = attrs.field(default=1000, validator=_count)


@attrs.frozen
class KeysReply:
    """The page. It is the last one if it is shorter than the limit that the server used, which `limit` tells."""

    KIND: ClassVar[int] = 0x88
    keys: Keys
    limit: int = attrs.field(validator=_count)


@attrs.frozen
class Purge:
    """Delete everything. The count in the reply says how many keys there were."""

    KIND: ClassVar[int] = 0x09


@attrs.frozen
class Evict:
    """If more than `high` of the pool is used, evict cold blocks until at most `low` is. The reply counts blocks."""

    KIND: ClassVar[int] = 0x0A
    low: float = attrs.field(converter=float, validator=_ratio)
    high: float = attrs.field(converter=float, validator=_ratio)


@attrs.frozen
class Statistics:
    """Ask for the store's statistics; with `details` also for what takes longer to gather."""

    KIND: ClassVar[int] = 0x0B
    details: bool = False


@attrs.frozen
class StatisticsReply:
    """The statistics as nested maps, by the names of `infinistore.statistics.Stats`: "server", "store" and, on request,
    "details". No other message has lists.
    """

    KIND: ClassVar[int] = 0x8B
    statistics: Tree


@attrs.frozen
class Verify:
    """A reader saw a wrong checksum: hash these blocks again where they lie, and drop those that are bad."""

    KIND: ClassVar[int] = 0x0C
    keys: Keys


@attrs.frozen
class VerifyReply:
    """One byte a key: 1 if the stored block is sound (or gone), 0 if it was bad and has been dropped."""

    KIND: ClassVar[int] = 0x8C
    sound: bytes = attrs.field(validator=validators.instance_of(bytes))


@attrs.frozen
class MapArenas:
    """Ask for the descriptors of the arenas from number `first` on. Over a Unix socket only."""

    KIND: ClassVar[int] = 0x10
    first: int = attrs.field(default=0, validator=_count)


@attrs.frozen
class MapArenasReply:
    """The lengths of the arenas, in bytes; their descriptors come beside the frame (SCM_RIGHTS), in the same order.

    `writable` tells if they may be mapped for writing.
    """

    KIND: ClassVar[int] = 0x90
    lengths: Numbers
    writable: bool = attrs.field(validator=validators.instance_of(bool))


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
    reservation: int = attrs.field(validator=_count)
    places: Numbers


@attrs.frozen
class Commit:
    """Name the blocks of a reservation, and make them visible at once. Answered like a Put.

    `checksums` is empty, or has one number for each block.
    """

    KIND: ClassVar[int] = 0x12
    reservation: int = attrs.field(validator=_count)
    keys: Keys
    checksums: Numbers
    replace: bool = attrs.field(default=True, validator=validators.instance_of(bool))


@attrs.frozen
class Lease:
    """Pin a batch where it is, for reading in mapped arenas, until `Release`.

    `capacities` is as in a Get. A batch of at most `inline_bytes` comes as payload instead, and is not pinned.
    """

    KIND: ClassVar[int] = 0x14
    keys: Keys
    capacities: Numbers
    inline_bytes: int = attrs.field(default=0, validator=_count)


@attrs.frozen
class LeaseReply:
    """Where the blocks are. `sizes` are as in a GetReply; `places` as in a ReserveReply, 0 for what is not there.

    If `lease` is 0, `places` is empty and the blocks that are there follow as payload.
    """

    KIND: ClassVar[int] = 0x94
    lease: int = attrs.field(validator=_count)
    sizes: Numbers
    checksums: Numbers
    places: Numbers


@attrs.frozen
class Release:
    """End a lease. It has no reply: the client need not wait.

    0 is the lease that the last `Lease` made, if it made one: for a client that no longer waits for the reply.
    """

    KIND: ClassVar[int] = 0x15
    lease: int = attrs.field(validator=_count)


@attrs.frozen
class Abort:
    """Give the room of a reservation back. It has no reply, either."""

    KIND: ClassVar[int] = 0x16
    reservation: int = attrs.field(validator=_count)


@attrs.frozen
class RdmaConnect:
    """Connect the client's queue pair to one that the server makes for it. From then on RDMA may be asked for.

    `queue` and `packet` are the number of the queue pair and of its first packet; `gid` is 32 hexadecimal digits.
    """

    KIND: ClassVar[int] = 0x20
    queue: int = attrs.field(validator=_count)
    packet: int = attrs.field(validator=_count)
    gid: str = attrs.field(validator=_text)
    lid: int = attrs.field(default=0, validator=_count)
    mtu: int = attrs.field(default=1024, validator=_count)
    reads: int = attrs.field(default=1, validator=_count)


@attrs.frozen
class RdmaConnectReply:
    """The server's end, which is ready. The fields are those of `RdmaConnect`."""

    KIND: ClassVar[int] = 0xA0
    queue: int = attrs.field(validator=_count)
    packet: int = attrs.field(validator=_count)
    gid: str = attrs.field(validator=_text)
    lid: int = attrs.field(default=0, validator=_count)
    mtu: int = attrs.field(default=1024, validator=_count)
    reads: int = attrs.field(default=1, validator=_count)


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
    """

    KIND: ClassVar[int] = 0x22
    keys: Keys
    capacities: Numbers
    addresses: Numbers
    remote_keys: Numbers
    region_bytes: int = attrs.field(default=0, validator=_count)
    inline_bytes: int = attrs.field(default=0, validator=_count)


@attrs.frozen
class RdmaGetReply:
    """`sizes` and `checksums` are as in a GetReply, with a checksum for each.

    The blocks are where the request said; or, if `inline`, follow as payload; or, if `lease` is not 0, wait for
    `RdmaFetch` and `Release`.
    """

    KIND: ClassVar[int] = 0xA2
    sizes: Numbers
    checksums: Numbers
    lease: int = attrs.field(default=0, validator=_count)
    inline: bool = attrs.field(default=False, validator=validators.instance_of(bool))


@attrs.frozen
class RdmaFill:
    """Read a piece of a reserved batch out of the client's registered memory. The count in the reply is its length.

    `first_byte` counts from the batch's beginning, its blocks end to end.
    """

    KIND: ClassVar[int] = 0x23
    reservation: int = attrs.field(validator=_count)
    first_byte: int = attrs.field(validator=_count)
    length: int = attrs.field(validator=_count)
    address: int = attrs.field(validator=_count)
    remote_key: int = attrs.field(validator=_count)


@attrs.frozen
class RdmaFetch:
    """Write a piece of a leased batch into the client's registered memory. The count in the reply is its length.

    `first_byte` counts from the beginning of the blocks that are there, end to end.
    """

    KIND: ClassVar[int] = 0x24
    lease: int = attrs.field(validator=_count)
    first_byte: int = attrs.field(validator=_count)
    length: int = attrs.field(validator=_count)
    address: int = attrs.field(validator=_count)
    remote_key: int = attrs.field(validator=_count)


@attrs.frozen
class CountReply:
    """The answer to every request that is answered by one number."""

    KIND: ClassVar[int] = 0x80
    count: int = attrs.field(validator=_count)


@attrs.frozen
class ErrorReply:
    """The request failed. `code` is one of `infinistore.errors`; if `fatal`, the server closes the connection next.

    The layout of this message and of the header is the same in every version of the protocol.
    """

    KIND: ClassVar[int] = 0xFF
    code: int = attrs.field(validator=_count)
    message: str = attrs.field(validator=_text)
    fatal: bool = attrs.field(default=False, validator=validators.instance_of(bool))


Request: TypeAlias = (
    Hello
    | Put
    | Get
    | Exists
    | MatchPrefix
    | ReleaseHold
    | Delete
    | ListKeys
    | Purge
    | Evict
    | Statistics
    | Verify
    | MapArenas
    | Reserve
    | Commit
    | Lease
    | Release
    | Abort
    | RdmaConnect
    | RdmaPut
    | RdmaGet
    | RdmaFill
    | RdmaFetch
)
Reply: TypeAlias = (
    HelloReply
    | PutReply
    | GetReply
    | ExistsReply
    | MatchPrefixReply
    | KeysReply
    | StatisticsReply
    | VerifyReply
    | MapArenasReply
    | ReserveReply
    | LeaseReply
    | RdmaConnectReply
    | RdmaGetReply
    | CountReply
    | ErrorReply
)
Message: TypeAlias = Request | Reply

REPLIES: dict[type[Request], type[Reply]] = {
    Hello: HelloReply,
    Put: PutReply,
    Get: GetReply,
    Exists: ExistsReply,
    MatchPrefix: MatchPrefixReply,
    ReleaseHold: CountReply,
    Delete: CountReply,
    ListKeys: KeysReply,
    Purge: CountReply,
    Evict: CountReply,
    Statistics: StatisticsReply,
    Verify: VerifyReply,
    MapArenas: MapArenasReply,
    Reserve: ReserveReply,
    Commit: PutReply,
    Lease: LeaseReply,
    RdmaConnect: RdmaConnectReply,
    RdmaPut: PutReply,
    RdmaGet: RdmaGetReply,
    RdmaFill: CountReply,
    RdmaFetch: CountReply,
}
"""Which reply answers which request, besides `ErrorReply`, which answers any. What is in `ONE_WAY` is not answered."""

ONE_WAY: tuple[type[Request], ...] = (Release, Abort)
"""The requests that have no reply."""

KINDS: dict[int, type[Message]] = {cls.KIND: cls for cls in (*REPLIES, *REPLIES.values(), *ONE_WAY, ErrorReply)}
