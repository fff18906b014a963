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
from infinistore.protocol.shared_memory_messages import (
    Abort,
    Commit,
    Lease,
    LeaseReply,
    MapArenas,
    MapArenasReply,
    MapTables,
    MapTablesReply,
    Prepare,
    PrepareReply,
    Release,
    Reserve,
    ReserveReply,
    Touch,
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
