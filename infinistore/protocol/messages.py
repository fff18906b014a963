"""Every message of the protocol, as attrs classes, and the table of their kinds.

A request carries a batch of keys. Lists of numbers travel packed (`Numbers`), eight
bytes each. `docs/protocol.md` describes each field; a test compares the two.
`NEWER_FIELDS` says what a receiver does with fields of a newer minor version.
`CAPABILITY`, if there is one, says what the receiver must be able to do.
"""

from typing import ClassVar, TypeAlias

import attrs
from attrs import validators

from infinistore.protocol.disk_messages import Flush, Prefetch, PrefetchReply
from infinistore.protocol.fields import Keys, Numbers, Tree, count, text
from infinistore.protocol.management_messages import Evict, KeysReply, ListKeys, Purge, Statistics, StatisticsReply
from infinistore.protocol.mover_messages import (
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
    RdmaConnect,
    RdmaConnectReply,
    RdmaFetch,
    RdmaFill,
    RdmaGet,
    RdmaGetReply,
    RdmaPut,
    Release,
    Reserve,
    ReserveReply,
    Touch,
)
from infinistore.protocol.removal_messages import Mark, Removed, RemovedReply
from infinistore.protocol.retention_messages import Pin, PinReply, TimesLeft, TimesLeftReply
from infinistore.protocol.take_over_messages import TakeOver, TakeOverReply
from infinistore.protocol.versions import NewerFields

__all__ = [
    "KINDS",
    "MISSING",
    "NO_CHECKSUM",
    "ONE_WAY",
    "Abort",
    "Commit",
    "CountReply",
    "Delete",
    "ErrorReply",
    "Evict",
    "Exists",
    "ExistsReply",
    "Flush",
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
    "Mark",
    "MatchPrefix",
    "MatchPrefixReply",
    "Message",
    "Numbers",
    "Pin",
    "PinReply",
    "Prefetch",
    "PrefetchReply",
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
    "Removed",
    "RemovedReply",
    "Reply",
    "Request",
    "Reserve",
    "ReserveReply",
    "Statistics",
    "StatisticsReply",
    "TakeOver",
    "TakeOverReply",
    "TimesLeft",
    "TimesLeftReply",
    "Touch",
    "Tree",
    "Verify",
    "VerifyReply",
]

MISSING = 2**64 - 1
"""The size that a reply gives for a key that is not in the store."""
NO_CHECKSUM = 0
"""The checksum of a block that was written without one."""


@attrs.frozen
class Hello:
    """The first frame of a connection, from the client.

    `token` is empty if the client has none. `name` identifies the client in the
    statistics.
    """

    KIND: ClassVar[int] = 0x01
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    name: str = attrs.field(default="", validator=text)
    token: str = attrs.field(default="", validator=text, repr=False)


@attrs.frozen
class HelloReply:
    """The server's answer to `Hello`: its identity, and the limits for requests.

    `instance` is a random id, new in every run of a server. `unix_socket` is the path
    of the same server for clients on its host, or empty. `rdma` is the link of the port
    that it uses for RDMA, or empty. `shards` says where the shards are that this server
    is one of (`infinistore.protocol.shards`); it is empty if there are no others.
    """

    KIND: ClassVar[int] = 0x81
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    instance: str = attrs.field(validator=text)
    server_version: str = attrs.field(validator=text)
    max_body_bytes: int = attrs.field(validator=count)
    max_batch_keys: int = attrs.field(validator=count)
    max_batch_bytes: int = attrs.field(validator=count)
    max_value_bytes: int = attrs.field(validator=count)
    unix_socket: str = attrs.field(default="", validator=text)
    rdma: str = attrs.field(default="", validator=text)
    shards: Keys = attrs.field(factory=lambda: Keys([]), metadata={"since": 1})


@attrs.frozen
class Put:
    """Store a batch.

    The payload is the blocks back to back, then their checksums if there are any.

    The checksums come last, 8 bytes each, so that the writer can hash a block just
    before it sends it. If `ttl_us` is not 0, the blocks end after that many
    microseconds. If `since` is not 0, it is a mark: a key that is there, or was deleted
    after it, is skipped.
    """

    KIND: ClassVar[int] = 0x02
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys
    sizes: Numbers
    checksums: bool = True
    replace: bool = True
    ttl_us: int = attrs.field(default=0, validator=count, metadata={"since": 1})
    since: int = attrs.field(default=0, validator=count, metadata={"since": 1})


@attrs.frozen
class PutReply:
    """The batch is stored.

    `skipped` has the indices of the blocks that were not stored because their key
    existed (`replace=False`), or had been deleted (`since`).
    """

    KIND: ClassVar[int] = 0x82
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    skipped: Numbers


@attrs.frozen
class Get:
    """Read a batch.

    `capacities` is empty, or has the length of the buffer for each block.
    """

    KIND: ClassVar[int] = 0x03
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys
    capacities: Numbers
    checksums: bool = True


@attrs.frozen
class GetReply:
    """The blocks, back to back in the payload.

    `sizes` has one number for each key, `MISSING` for a key that is not in the store.
    `checksums` is empty if none were requested; else it has one number for each key,
    `NO_CHECKSUM` for a block that has none.
    """

    KIND: ClassVar[int] = 0x83
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    sizes: Numbers
    checksums: Numbers


@attrs.frozen
class Exists:
    """Ask which keys are in the store. With `touch`, this counts as a use of them."""

    KIND: ClassVar[int] = 0x04
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys
    touch: bool = attrs.field(default=False, validator=validators.instance_of(bool))


@attrs.frozen
class ExistsReply:
    """One byte for each key: 1 if it is in the store, else 0.

    `on_disk` counts those that are on disk only.
    """

    KIND: ClassVar[int] = 0x84
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    present: bytes = attrs.field(validator=validators.instance_of(bytes))
    on_disk: int = attrs.field(default=0, validator=count, metadata={"since": 1})


@attrs.frozen
class MatchPrefix:
    """Count the leading keys that are in the store.

    If `hold_us` is not 0, a hold protects them from eviction for that many
    microseconds.
    """

    KIND: ClassVar[int] = 0x05
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys
    hold_us: int = attrs.field(default=0, validator=count)


@attrs.frozen
class MatchPrefixReply:
    """How many leading keys are in the store, and the id of the hold.

    `hold` is 0 if none was requested, or nothing matched. `on_disk` counts the keys
    among them that are on disk only.
    """

    KIND: ClassVar[int] = 0x85
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    matched: int = attrs.field(validator=count)
    hold: int = attrs.field(default=0, validator=count)
    on_disk: int = attrs.field(default=0, validator=count, metadata={"since": 1})


@attrs.frozen
class ReleaseHold:
    """End a hold before it expires. The count in the reply is 1 if it existed,
    else 0.
    """

    KIND: ClassVar[int] = 0x06
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    hold: int = attrs.field(validator=count)


@attrs.frozen
class Delete:
    """Delete keys. The count in the reply says how many existed."""

    KIND: ClassVar[int] = 0x07
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys


@attrs.frozen
class Verify:
    """Report a wrong checksum: the server hashes the blocks, and drops bad ones."""

    KIND: ClassVar[int] = 0x0C
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys


@attrs.frozen
class VerifyReply:
    """One byte for each key: 0 if the block was bad and has been dropped, else 1."""

    KIND: ClassVar[int] = 0x8C
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    sound: bytes = attrs.field(validator=validators.instance_of(bytes))


@attrs.frozen
class CountReply:
    """The reply to every request that is answered by one number."""

    KIND: ClassVar[int] = 0x80
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    count: int = attrs.field(validator=count)


@attrs.frozen
class ErrorReply:
    """The request failed. `code` is one of `infinistore.errors`.

    If it is `fatal`, the server closes the connection. The layout of this message and
    of the header is the same in every major version of the protocol.
    """

    KIND: ClassVar[int] = 0xFF
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
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
    | Flush
    | Prefetch
    | Pin
    | TimesLeft
    | Removed
    | Mark
    | MapArenas
    | MapTables
    | Reserve
    | Commit
    | Prepare
    | Lease
    | Release
    | Abort
    | Touch
    | TakeOver
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
    | PrefetchReply
    | PinReply
    | TimesLeftReply
    | RemovedReply
    | MapArenasReply
    | MapTablesReply
    | ReserveReply
    | PrepareReply
    | LeaseReply
    | TakeOverReply
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
    Flush: CountReply,
    Prefetch: PrefetchReply,
    Pin: PinReply,
    TimesLeft: TimesLeftReply,
    Removed: RemovedReply,
    Mark: CountReply,
    MapArenas: MapArenasReply,
    MapTables: MapTablesReply,
    Reserve: ReserveReply,
    Commit: PutReply,
    Prepare: PrepareReply,
    Lease: LeaseReply,
    TakeOver: TakeOverReply,
    RdmaConnect: RdmaConnectReply,
    RdmaPut: PutReply,
    RdmaGet: RdmaGetReply,
    RdmaFill: CountReply,
    RdmaFetch: CountReply,
}
"""The reply to each request. `ErrorReply` may answer any of them."""

ONE_WAY: tuple[type[Request], ...] = (Release, Abort, Touch)
"""The requests that have no reply."""

KINDS: dict[int, type[Message]] = {cls.KIND: cls for cls in (*REPLIES, *REPLIES.values(), *ONE_WAY, ErrorReply)}
