"""Every message of the protocol, one attrs class each, and the table of their kinds.

A request names a batch of keys where it names any. Lists of numbers travel packed (`Numbers`), eight bytes each.
What each field means on the wire is told in `docs/protocol.md`; a test holds the two together.
"""

from typing import ClassVar, TypeAlias

import attrs
from attrs import validators

from infinistore.protocol.fields import Keys, Numbers, Tree, count, ratio, text
from infinistore.protocol.rdma_messages import (
    RdmaConnect,
    RdmaConnectReply,
    RdmaFetch,
    RdmaFill,
    RdmaGet,
    RdmaGetReply,
    RdmaPut,
)

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
    "MapTables",
    "MapTablesReply",
    "MatchPrefix",
    "MatchPrefixReply",
    "Message",
    "Numbers",
    "Prepare",
    "PrepareReply",
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
    "Touch",
    "Tree",
    "Verify",
    "VerifyReply",
]

PROTOCOL_VERSION = 1
MISSING = 2**64 - 1
"""The size that a reply gives for a key that is not in the store."""
NO_CHECKSUM = 0
"""The checksum of a block that was written without one."""


@attrs.frozen
class Hello:
    """The first frame of a connection, from the client.

    `token` is empty where the client has none; `name` is what the server's statistics call this client.
    """

    KIND: ClassVar[int] = 0x01
    name: str = attrs.field(default="", validator=text)
    token: str = attrs.field(default="", validator=text, repr=False)


@attrs.frozen
class HelloReply:
    """The server's answer: who it is, and the limits that requests must keep to.

    `instance` is a random id, new in every run of a server. `unix_socket` is the path where the same server can be
    reached from the same host, or empty. `rdma` is the link of the port that it serves RDMA by, or empty.
    """

    KIND: ClassVar[int] = 0x81
    instance: str = attrs.field(validator=text)
    server_version: str = attrs.field(validator=text)
    max_body_bytes: int = attrs.field(validator=count)
    max_batch_keys: int = attrs.field(validator=count)
    max_batch_bytes: int = attrs.field(validator=count)
    max_value_bytes: int = attrs.field(validator=count)
    unix_socket: str = attrs.field(default="", validator=text)
    rdma: str = attrs.field(default="", validator=text)


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
    hold_us: int = attrs.field(default=0, validator=count)


@attrs.frozen
class MatchPrefixReply:
    """How many leading keys are there, and the id of the hold (0: none was asked for, or nothing matched)."""

    KIND: ClassVar[int] = 0x85
    matched: int = attrs.field(validator=count)
    hold: int = attrs.field(default=0, validator=count)


@attrs.frozen
class ReleaseHold:
    """End a hold before its time. The count in the reply is 1 if it was there, else 0."""

    KIND: ClassVar[int] = 0x06
    hold: int = attrs.field(validator=count)


@attrs.frozen
class Delete:
    """Delete keys. The count in the reply says how many were there."""

    KIND: ClassVar[int] = 0x07
    keys: Keys


@attrs.frozen
class ListKeys:
    """One page of the keys that begin with `prefix` and come after `after`, in code point order."""

    KIND: ClassVar[int] = 0x08
    prefix: str = attrs.field(default="", validator=text)
    after: str = attrs.field(default="", validator=text)
    limit: int = attrs.field(default=1000, validator=count)


@attrs.frozen
class KeysReply:
    """The page. It is the last one if it is shorter than the limit that the server used, which `limit` tells."""

    KIND: ClassVar[int] = 0x88
    keys: Keys
    limit: int = attrs.field(validator=count)


@attrs.frozen
class Purge:
    """Delete everything. The count in the reply says how many keys there were."""

    KIND: ClassVar[int] = 0x09


@attrs.frozen
class Evict:
    """If more than `high` of the pool is used, evict cold blocks until at most `low` is. The reply counts blocks."""

    KIND: ClassVar[int] = 0x0A
    low: float = attrs.field(converter=float, validator=ratio)
    high: float = attrs.field(converter=float, validator=ratio)


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
    """

    KIND: ClassVar[int] = 0x18
    reservation: int = attrs.field(validator=count)
    keys: Keys
    checksums: bool = attrs.field(default=True, validator=validators.instance_of(bool))


@attrs.frozen
class PrepareReply:
    """If not `accepted`, somebody else is writing one of these keys, and the batch needs a `Commit`.

    `removals` is as in a LeaseReply; 0 also if the client had better not remember where these blocks are.
    """

    KIND: ClassVar[int] = 0x98
    accepted: bool = attrs.field(validator=validators.instance_of(bool))
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


@attrs.frozen
class CountReply:
    """The answer to every request that is answered by one number."""

    KIND: ClassVar[int] = 0x80
    count: int = attrs.field(validator=count)


@attrs.frozen
class ErrorReply:
    """The request failed. `code` is one of `infinistore.errors`; if `fatal`, the server closes the connection next.

    The layout of this message and of the header is the same in every version of the protocol.
    """

    KIND: ClassVar[int] = 0xFF
    code: int = attrs.field(validator=count)
    message: str = attrs.field(validator=text)
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
    | MapTables
    | Reserve
    | Commit
    | Prepare
    | Lease
    | Release
    | Abort
    | Touch
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
    | MapTablesReply
    | ReserveReply
    | PrepareReply
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
    MapTables: MapTablesReply,
    Reserve: ReserveReply,
    Commit: PutReply,
    Prepare: PrepareReply,
    Lease: LeaseReply,
    RdmaConnect: RdmaConnectReply,
    RdmaPut: PutReply,
    RdmaGet: RdmaGetReply,
    RdmaFill: CountReply,
    RdmaFetch: CountReply,
}
"""Which reply answers which request, besides `ErrorReply`, which answers any. What is in `ONE_WAY` is not answered."""

ONE_WAY: tuple[type[Request], ...] = (Release, Abort, Touch)
"""The requests that have no reply."""

KINDS: dict[int, type[Message]] = {cls.KIND: cls for cls in (*REPLIES, *REPLIES.values(), *ONE_WAY, ErrorReply)}
