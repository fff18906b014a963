"""The messages of the protocol, as attrs classes, and the table of their kinds.

A request carries a batch of keys. Lists of numbers travel packed (`Numbers`), eight
bytes each. `docs/protocol.md` describes each field; a test compares the two.
`NEWER_FIELDS` says what a receiver does with fields of a newer minor version.
`CAPABILITY`, if there is one, says what the receiver must be able to do. Those of
shared memory and RDMA are in `mover_messages.py`. A `Shard` is what a field of
`HelloReply` says of each process of a server.
"""

import enum
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import attrs
from attrs import validators

from infinistore.errors import ProtocolError
from infinistore.protocol.fields import Keys, Numbers, Tree, count, ratio, text
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
from infinistore.protocol.versions import Capability, NewerFields

__all__ = [
    "KINDS",
    "MISSING",
    "MOST_SHARDS",
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
    "Shard",
    "Statistics",
    "StatisticsReply",
    "TakeOver",
    "TakeOverReply",
    "TakeOverStep",
    "TimesLeft",
    "TimesLeftReply",
    "Touch",
    "Tree",
    "Verify",
    "VerifyReply",
    "shards_from_texts",
    "shards_to_texts",
]


MOST_SHARDS = 256
"""How many shards a server may have."""


@attrs.frozen
class Shard:
    """Where a shard is reached: its TCP port, and its Unix socket or an empty text."""

    port: int
    unix_socket: str = ""

    def __str__(self) -> str:
        """As it crosses the wire: `PORT`, or `PORT PATH`."""
        return f"{self.port} {self.unix_socket}" if self.unix_socket else str(self.port)


def shards_to_texts(shards: Sequence[Shard]) -> Keys:
    """Return what `HelloReply.shards` says of these shards, in order."""
    return Keys([str(shard) for shard in shards])


def shards_from_texts(texts: Sequence[str]) -> tuple[Shard, ...]:
    """Return the shards of a `HelloReply`; none if the server has no others.

    Raises:
        ProtocolError: these are no shards, or too many.
    """
    if len(texts) > MOST_SHARDS:
        raise ProtocolError(f"the server says that it has {len(texts)} shards; at most {MOST_SHARDS} are possible")
    shards = tuple(_shard(text) for text in texts)
    if len({shard.port for shard in shards}) < len(shards):
        raise ProtocolError("the server gave the same port for two shards")
    return shards


def _shard(text: str) -> Shard:
    port, _, path = text.partition(" ")
    is_number = port.isascii() and port.isdecimal() and len(port) <= 5
    if not is_number or not 0 < int(port) < 65536 or (path and not path.startswith("/")):
        raise ProtocolError(f"the server gave no address of a shard: {text[:80]!r}")
    return Shard(int(port), path)


@attrs.frozen
class Flush:
    """Write blocks to disk now, and wait until they are durable.

    The count in the reply is the number of keys whose blocks are.
    """

    KIND: ClassVar[int] = 0x0D
    CAPABILITY: ClassVar = Capability.DISK
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys


@attrs.frozen
class Prefetch:
    """Begin to read blocks from disk into memory, the first ones first.

    If `hold_us` is not 0, a hold protects what is there from eviction for that many
    microseconds.
    """

    KIND: ClassVar[int] = 0x0E
    CAPABILITY: ClassVar = Capability.DISK
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys
    hold_us: int = attrs.field(default=0, validator=count)


@attrs.frozen
class PrefetchReply:
    """How many blocks are being read, and the id of the hold.

    `skipped` counts those on disk that are not read, because reading ahead has a
    bounded part of the pool. `hold` is 0 if none was requested, or nothing is there.
    """

    KIND: ClassVar[int] = 0x8E
    CAPABILITY: ClassVar = Capability.DISK
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    reading: int = attrs.field(validator=count)
    skipped: int = attrs.field(default=0, validator=count)
    hold: int = attrs.field(default=0, validator=count)


@attrs.frozen
class ListKeys:
    """Request one page of keys with `prefix`, after `after`, in code point order."""

    KIND: ClassVar[int] = 0x08
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    prefix: str = attrs.field(default="", validator=text)
    after: str = attrs.field(default="", validator=text)
    limit: int = attrs.field(default=1000, validator=count)


@attrs.frozen
class KeysReply:
    """One page of keys.

    `limit` is the limit that the server used. A page with fewer keys is the last.
    """

    KIND: ClassVar[int] = 0x88
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    keys: Keys
    limit: int = attrs.field(validator=count)


@attrs.frozen
class Purge:
    """Delete everything. The count in the reply says how many keys existed."""

    KIND: ClassVar[int] = 0x09
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED


@attrs.frozen
class Evict:
    """If more than `high` of the pool is in use, evict blocks until at most `low` is.

    The count in the reply is the number of evicted blocks.
    """

    KIND: ClassVar[int] = 0x0A
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    low: float = attrs.field(converter=float, validator=ratio)
    high: float = attrs.field(converter=float, validator=ratio)


@attrs.frozen
class Statistics:
    """Request the statistics; with `details`, also what takes longer to collect."""

    KIND: ClassVar[int] = 0x0B
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    details: bool = False


@attrs.frozen
class StatisticsReply:
    """The statistics as nested maps, with the names of `infinistore.statistics.Stats`.

    The maps are "server", "store" and, on request, "details". No other message has
    lists.
    """

    KIND: ClassVar[int] = 0x8B
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    statistics: Tree


@attrs.frozen
class Removed:
    """Ask which keys were removed since the removal with this number of this log.

    If there are none, the server waits up to `wait_us` for one. With `log` 0, it says
    at once where to begin.
    """

    KIND: ClassVar[int] = 0x1B
    CAPABILITY: ClassVar = Capability.REMOVALS
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    log: int = attrs.field(default=0, validator=count)
    number: int = attrs.field(default=0, validator=count)
    limit: int = attrs.field(default=10_000, validator=count)
    wait_us: int = attrs.field(default=0, validator=count)


@attrs.frozen
class RemovedReply:
    """Keys that were removed and are not there now, and where to go on.

    `missed` removals before these are not known any more; `MISSING` if nobody knows how
    many.
    """

    KIND: ClassVar[int] = 0x9B
    CAPABILITY: ClassVar = Capability.REMOVALS
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    log: int = attrs.field(validator=count)
    number: int = attrs.field(validator=count)
    keys: Keys
    missed: int = attrs.field(default=0, validator=count)


@attrs.frozen
class Mark:
    """Ask for a mark, which `Put.since` names.

    With `ends_earlier`, a put that names an earlier one stores nothing from now on.
    """

    KIND: ClassVar[int] = 0x1C
    CAPABILITY: ClassVar = Capability.COPIES
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    ends_earlier: bool = attrs.field(default=False, validator=validators.instance_of(bool))


@attrs.frozen
class Pin:
    """Protect keys from eviction, or with `pinned` false, protect them no more.

    If `ttl_us` is not 0, the protection ends after that many microseconds. What is
    protected for longer stays so.
    """

    KIND: ClassVar[int] = 0x0F
    CAPABILITY: ClassVar = Capability.RETENTION
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys
    pinned: bool = attrs.field(default=True, validator=validators.instance_of(bool))
    ttl_us: int = attrs.field(default=0, validator=count, metadata={"since": 1})


@attrs.frozen
class PinReply:
    """One byte for each key: 1 if it is pinned now, or was before it was unpinned."""

    KIND: ClassVar[int] = 0x8F
    CAPABILITY: ClassVar = Capability.RETENTION
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    pinned: bytes = attrs.field(validator=validators.instance_of(bytes))


@attrs.frozen
class TimesLeft:
    """Ask when keys end."""

    KIND: ClassVar[int] = 0x1A
    CAPABILITY: ClassVar = Capability.RETENTION
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys


@attrs.frozen
class TimesLeftReply:
    """After how many microseconds each key ends.

    0 for a key that does not, `MISSING` for one that is not in memory.
    """

    KIND: ClassVar[int] = 0x9A
    CAPABILITY: ClassVar = Capability.RETENTION
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    times: Numbers


class TakeOverStep(enum.IntEnum):
    """How far the process is that takes over."""

    BEGIN = 0
    """It asks for the sockets that the server listens on."""
    HAND_OVER = 1
    """It is ready: the server ends its service and tells what its pool has."""
    END = 2
    """It has all it needs. Only a server without `Capability.OWNERSHIP` is asked, which
    ends and never serves again."""


@attrs.frozen
class TakeOver:
    """One step on the way to take the server's place; see `TakeOverStep`.

    `first` is the number of the first descriptor that is wanted: one reply carries only
    so many.
    """

    KIND: ClassVar[int] = 0x19
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    CAPABILITY: ClassVar = Capability.TAKE_OVER
    step: int = attrs.field(validator=count)
    first: int = attrs.field(default=0, validator=count)


@attrs.frozen
class TakeOverReply:
    """Descriptors from number `first` on come with the first byte.

    `names` says what all descriptors of the step are, and `numbers` has a number for
    each: the length of an arena, else 0.
    """

    KIND: ClassVar[int] = 0x99
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    CAPABILITY: ClassVar = Capability.TAKE_OVER
    names: Keys
    numbers: Numbers


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
    is one of (`infinistore.protocol.messages`); it is empty if there are no others.
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
