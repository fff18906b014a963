"""The messages of the protocol, as attrs classes, and the table of their kinds.

A request carries a batch of keys. Lists of numbers travel packed (`Numbers`), eight
bytes each. `docs/protocol.md` describes each field; a test compares the two. Each reply
stands before the requests that it answers.
"""

import enum
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, NewType, NoReturn, Self, TypeVar, cast

import attrs
from attrs import validators

from infinistore.errors import ProtocolError, VersionMismatch
from infinistore.keys import MAX_KEY_BYTES
from infinistore.protocol.versions import Capability, NewerFields
from infinistore.statistics import Stats

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
Keys = NewType("Keys", list[str])
"""Keys in request order.

On the wire they are one text, joined by NUL (`infinistore.keys`).
"""
Numbers = NewType("Numbers", "array[int]")
"""Unsigned 64-bit numbers, packed little-endian on the wire; `array('Q')` in memory."""
Tree = NewType("Tree", dict[str, object])
"""Nested maps and lists of plain values."""

MISSING = 2**64 - 1
"""The size that a reply gives for a key that is not in the store."""
NO_CHECKSUM = 0
"""The checksum of a block that was written without one."""


def _count(_: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    """Raise `ValueError` unless this is an unsigned 64-bit number."""
    if not isinstance(value, int) or not 0 <= value < 2**64:  # attrs' own validators take four calls
        raise ValueError(f"{attribute.name} is a whole number from 0 to 2**64 - 1, not {value!r}")


if TYPE_CHECKING:
    from attrs import frozen as _frozen
else:  # setting the fields of a frozen instance takes three times as long
    _frozen = attrs.define(unsafe_hash=True, on_setattr=attrs.setters.NO_OP)


@_frozen
class Message:
    """What crosses the wire: a frame holds one message."""

    KIND: ClassVar[int]
    """The number of the message in the header of its frame."""
    NEWER_FIELDS: ClassVar[NewerFields] = NewerFields.REFUSED
    """What a receiver does with fields of a newer minor version."""
    CAPABILITY: ClassVar[Capability] = Capability(0)
    """The capabilities one of which the receiver must have; none if all know it."""


@_frozen
class Reply(Message):
    """Answers a request."""

    @property
    def result(self) -> Any:
        """What a store returns to its caller."""
        return self


@_frozen
class Request(Message):
    """Asks a server for something, or tells it something."""

    REPLY: ClassVar[type[Reply] | None] = None
    """What answers it, unless an `ErrorReply` does; None: nothing does."""

    def of_older_server(self) -> Any:
        """Return the result where the server does not know this request.

        Raises:
            VersionMismatch: there is none.
        """
        name = type(self).__name__
        raise VersionMismatch(f"the peer does not understand {name}; install the same release of infinistore on both")


class StoreRequest(Generic[_T_co]):
    """What a method of a store asks for. Its type parameter is the type of the result.

    A request without payload is a message, and crosses the wire as it is. Requests that
    move blocks are those of the client (`infinistore.client.requests`).
    """

    __slots__ = ()
    idempotent: ClassVar[bool] = True
    """Whether it may be tried again when its outcome is not known."""
    moves_blocks: ClassVar[bool] = False
    """Whether it moves blocks, so that it takes one of the connections for those."""
    waits: ClassVar[bool] = False
    """Whether the server may wait, so that it takes a connection of its own."""
    pins: ClassVar[bool] = False
    """Whether what it pins may outlive the call."""
    kept: Any = None
    """The reservation that this request begins or ends, if it does."""


class BatchRequest(StoreRequest[_T_co]):
    """A request about keys, which can be cut into parts with some of them."""

    __slots__ = ()

    @property
    def keys(self) -> Sequence[str]:
        """The keys, in the order of the caller."""
        raise NotImplementedError

    def at(self, positions: Sequence[int]) -> Self:
        """Return the same request for the keys at these positions only."""
        keys, whole = self.keys, cast(Any, self)
        return cast(Self, attrs.evolve(whole, keys=[keys[i] for i in positions]))


class KeyedRequest(BatchRequest[list[_T]]):
    """A request whose result has one item for each key."""

    __slots__ = ()

    def merge(self, parts: Iterable[tuple[Sequence[int], Sequence[_T]]]) -> list[_T]:
        """Put results, each with its positions, into the order of the keys."""
        merged: list[Any] = [None] * len(self.keys)
        for positions, results in parts:
            for position, result in zip(positions, results, strict=True):
                merged[position] = result
        return merged


class CountingRequest(BatchRequest[int]):
    """A request whose result is a number of keys."""

    __slots__ = ()

    def merge(self, parts: Iterable[tuple[Sequence[int], int]]) -> int:
        """Add the results of parts up."""
        return sum(count for _, count in parts)


class Found(list[bool]):
    """For each key of an `exists_many` whether it is there: a list.

    `in_memory` says how many of the keys that are there are in memory. The others are
    on disk, and a read waits for them.
    """

    on_disk = 0
    """How many are on disk only."""

    @property
    def in_memory(self) -> int:
        """How many are in memory."""
        return self.count(True) - self.on_disk

    @classmethod
    def partly_on_disk(cls, present: Iterable[bool], on_disk: int) -> "Found":
        """Return a list of what is there, of which so many are on disk only."""
        found = cls(present)
        found.on_disk = on_disk
        return found


class Matched(NamedTuple):
    """What a prefix match found: how many leading keys, the token of the hold or an
    empty text, and how many of the keys are on disk only.
    """

    matched: int
    hold: str = ""
    on_disk: int = 0


@attrs.frozen
class Prefetched:
    """What `prefetch` does from now on, in the background.

    `hold` is a token for `release_hold`, empty without a hold.
    """

    reading: int
    """How many blocks are being read from disk, or will be, the first ones first."""
    skipped: int = 0
    """How many are on disk and are not read: reading ahead has a bounded room."""
    hold: str = ""


_text = validators.and_(validators.instance_of(str), validators.max_len(MAX_KEY_BYTES))
_ratio = validators.and_(validators.instance_of(float), validators.ge(0.0), validators.le(1.0))

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


@_frozen
class ErrorReply(Reply):
    """The request failed. `code` is one of `infinistore.errors`.

    If it is `fatal`, the server closes the connection. The layout of this message and
    of the header is the same in every major version of the protocol.
    """

    KIND = 0xFF
    NEWER_FIELDS = NewerFields.IGNORED
    code: int = attrs.field(validator=_count)
    message: str = attrs.field(validator=_text)
    fatal: bool = attrs.field(default=False, validator=validators.instance_of(bool))


@_frozen
class CountReply(Reply):
    """The reply to every request that is answered by one number."""

    KIND = 0x80
    NEWER_FIELDS = NewerFields.IGNORED
    count: int = attrs.field(validator=_count)

    @property
    def result(self) -> int:
        """The number."""
        return self.count


@_frozen
class HelloReply(Reply):
    """The server's answer to `Hello`: its identity, and the limits for requests.

    `instance` is a random id, new in every run of a server. `unix_socket` is the path
    of the same server for clients on its host, or empty. `rdma` is the link of the port
    that it uses for RDMA, or empty. `shards` has the addresses of all shards of this
    server, this one included (`Shard`); it is empty if there are no others.
    """

    KIND = 0x81
    NEWER_FIELDS = NewerFields.IGNORED
    instance: str = attrs.field(validator=_text)
    server_version: str = attrs.field(validator=_text)
    max_body_bytes: int = attrs.field(validator=_count)
    max_batch_keys: int = attrs.field(validator=_count)
    max_batch_bytes: int = attrs.field(validator=_count)
    max_value_bytes: int = attrs.field(validator=_count)
    unix_socket: str = attrs.field(default="", validator=_text)
    rdma: str = attrs.field(default="", validator=_text)
    shards: Keys = attrs.field(factory=lambda: Keys([]), metadata={"since": 1})


@_frozen
class Hello(Request):
    """The first frame of a connection, from the client.

    `token` is empty if the client has none. `name` identifies the client in the
    statistics.
    """

    KIND = 0x01
    REPLY = HelloReply
    NEWER_FIELDS = NewerFields.IGNORED
    name: str = attrs.field(default="", validator=_text)
    token: str = attrs.field(default="", validator=_text, repr=False)


@_frozen
class PutReply(Reply):
    """The batch is stored.

    `skipped` has the indices of the blocks that were not stored because their key
    existed (`replace=False`), or had been deleted (`since`).
    """

    KIND = 0x82
    NEWER_FIELDS = NewerFields.IGNORED
    skipped: Numbers


@_frozen
class Put(Request):
    """Store a batch.

    The payload is the blocks back to back, then their checksums if there are any.

    The checksums come last, 8 bytes each, so that the writer can hash a block just
    before it sends it. If `ttl_us` is not 0, the blocks end after that many
    microseconds. If `since` is not 0, it is a mark: a key that is there, or was deleted
    after it, is skipped.
    """

    KIND = 0x02
    REPLY = PutReply
    keys: Keys
    sizes: Numbers
    checksums: bool = True
    replace: bool = True
    ttl_us: int = attrs.field(default=0, validator=_count, metadata={"since": 1})
    since: int = attrs.field(default=0, validator=_count, metadata={"since": 1})


@_frozen
class GetReply(Reply):
    """The blocks, back to back in the payload.

    `sizes` has one number for each key, `MISSING` for a key that is not in the store.
    `checksums` is empty if none were requested; else it has one number for each key,
    `NO_CHECKSUM` for a block that has none.
    """

    KIND = 0x83
    sizes: Numbers
    checksums: Numbers


@_frozen
class Get(Request):
    """Read a batch.

    `capacities` is empty, or has the length of the buffer for each block.
    """

    KIND = 0x03
    REPLY = GetReply
    keys: Keys
    capacities: Numbers
    checksums: bool = True


@_frozen
class ExistsReply(Reply):
    """One byte for each key: 1 if it is in the store, else 0.

    `on_disk` counts those that are on disk only.
    """

    KIND = 0x84
    NEWER_FIELDS = NewerFields.IGNORED
    present: bytes = attrs.field(validator=validators.instance_of(bytes))
    on_disk: int = attrs.field(default=0, validator=_count, metadata={"since": 1})

    @property
    def result(self) -> Found:
        """Whether each key is there.

        Raises:
            ProtocolError: the reply does not tell.
        """
        if self.present.translate(None, b"\0\1"):
            raise ProtocolError("the server says of a key that it is neither there nor missing")
        if not self.present:  # which cannot be cast
            return Found(())
        # list(map(bool, present)) takes five times as long.
        flags: Any = memoryview(self.present).cast("?").tolist()
        return Found.partly_on_disk(flags, self.on_disk) if self.on_disk else Found(flags)


@_frozen
class Exists(Request, KeyedRequest[bool]):
    """Ask which keys are in the store. With `touch`, this counts as a use of them."""

    KIND = 0x04
    REPLY = ExistsReply
    keys: Keys
    touch: bool = False

    def merge(self, parts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> Found:
        """Put results into the order of the keys, and add up what is on disk."""
        parts = list(parts)
        on_disk = sum(found.on_disk for _, found in parts if isinstance(found, Found))
        return Found.partly_on_disk(super().merge(parts), on_disk)


@_frozen
class MatchPrefixReply(Reply):
    """How many leading keys are in the store, and the id of the hold.

    `hold` is 0 if none was requested, or nothing matched. `on_disk` counts the keys
    among them that are on disk only.
    """

    KIND = 0x85
    NEWER_FIELDS = NewerFields.IGNORED
    matched: int = attrs.field(validator=_count)
    hold: int = attrs.field(default=0, validator=_count)
    on_disk: int = attrs.field(default=0, validator=_count, metadata={"since": 1})

    @property
    def result(self) -> Matched:
        """What was found, with the id of the hold as its token."""
        return Matched(self.matched, f"{self.hold:x}" if self.hold else "", self.on_disk)


@_frozen
class MatchPrefix(Request, BatchRequest[Matched]):
    """Count the leading keys that are in the store.

    If `hold_us` is not 0, a hold protects them from eviction for that many
    microseconds.
    """

    KIND = 0x05
    REPLY = MatchPrefixReply
    keys: Keys
    hold_us: int = attrs.field(default=0, validator=_count)


@_frozen
class ReleaseHold(Request):
    """End a hold before it expires. The count in the reply is 1 if it existed,
    else 0.
    """

    KIND = 0x06
    REPLY = CountReply
    hold: int = attrs.field(validator=_count)


@_frozen
class Delete(Request, CountingRequest):
    """Delete keys. The count in the reply says how many existed."""

    KIND = 0x07
    REPLY = CountReply
    idempotent = False
    keys: Keys


@_frozen
class VerifyReply(Reply):
    """One byte for each key: 0 if the block was bad and has been dropped, else 1."""

    KIND = 0x8C
    NEWER_FIELDS = NewerFields.IGNORED
    sound: bytes = attrs.field(validator=validators.instance_of(bytes))


@_frozen
class Verify(Request):
    """Report a wrong checksum: the server hashes the blocks, and drops bad ones."""

    KIND = 0x0C
    REPLY = VerifyReply
    keys: Keys


@_frozen
class Flush(Request, CountingRequest):
    """Write blocks to disk now, and wait until they are durable.

    The count in the reply is the number of keys whose blocks are.
    """

    KIND = 0x0D
    REPLY = CountReply
    CAPABILITY = Capability.DISK
    keys: Keys

    def of_older_server(self) -> int:
        """Return that nothing is durable: a server of an older release has no disk."""
        return 0


@_frozen
class PrefetchReply(Reply):
    """How many blocks are being read, and the id of the hold.

    `skipped` counts those on disk that are not read, because reading ahead has a
    bounded part of the pool. `hold` is 0 if none was requested, or nothing is there.
    """

    KIND = 0x8E
    CAPABILITY = Capability.DISK
    NEWER_FIELDS = NewerFields.IGNORED
    reading: int = attrs.field(validator=_count)
    skipped: int = attrs.field(default=0, validator=_count)
    hold: int = attrs.field(default=0, validator=_count)

    @property
    def result(self) -> Prefetched:
        """What is being read, with the id of the hold as its token."""
        return Prefetched(self.reading, self.skipped, f"{self.hold:x}" if self.hold else "")


@_frozen
class Prefetch(Request, BatchRequest[Prefetched]):
    """Begin to read blocks from disk into memory, the first ones first.

    If `hold_us` is not 0, a hold protects what is there from eviction for that many
    microseconds.
    """

    KIND = 0x0E
    REPLY = PrefetchReply
    CAPABILITY = Capability.DISK
    keys: Keys
    hold_us: int = attrs.field(default=0, validator=_count)


@_frozen
class KeysReply(Reply):
    """One page of keys.

    `limit` is the limit that the server used. A page with fewer keys is the last.
    """

    KIND = 0x88
    NEWER_FIELDS = NewerFields.IGNORED
    keys: Keys
    limit: int = attrs.field(validator=_count)

    @property
    def result(self) -> list[str]:
        """The keys."""
        return self.keys


@_frozen
class ListKeys(Request, StoreRequest[list[str]]):
    """Request one page of keys with `prefix`, after `after`, in code point order."""

    KIND = 0x08
    REPLY = KeysReply
    prefix: str = attrs.field(default="", validator=_text)
    after: str = attrs.field(default="", validator=_text)
    limit: int = attrs.field(default=1000, validator=_count)


@_frozen
class Purge(Request, StoreRequest[int]):
    """Delete everything. The count in the reply says how many keys existed."""

    KIND = 0x09
    REPLY = CountReply
    idempotent = False


@_frozen
class Evict(Request, StoreRequest[int]):
    """If more than `high` of the pool is in use, evict blocks until at most `low` is.

    The count in the reply is the number of evicted blocks.
    """

    KIND = 0x0A
    REPLY = CountReply
    idempotent = False
    low: float = attrs.field(converter=float, validator=_ratio)
    high: float = attrs.field(converter=float, validator=_ratio)


@_frozen
class StatisticsReply(Reply):
    """The statistics as nested maps, with the names of `infinistore.statistics.Stats`.

    The maps are "server", "store" and, on request, "details". No other message has
    lists.
    """

    KIND = 0x8B
    NEWER_FIELDS = NewerFields.IGNORED
    statistics: Tree


@_frozen
class Statistics(Request, StoreRequest[Stats]):
    """Request the statistics; with `details`, also what takes longer to collect."""

    KIND = 0x0B
    REPLY = StatisticsReply
    details: bool = False


@_frozen
class FollowRemovalsReply(Reply):
    """Keys that were removed and are not there now, and where to go on.

    `missed` removals before these are not known any more; `MISSING` if nobody knows how
    many.
    """

    KIND = 0x9B
    CAPABILITY = Capability.REMOVALS
    NEWER_FIELDS = NewerFields.IGNORED
    log: int = attrs.field(validator=_count)
    number: int = attrs.field(validator=_count)
    keys: Keys
    missed: int = attrs.field(default=0, validator=_count)


@_frozen
class FollowRemovals(Request):
    """Ask which keys were removed since the removal with this number of this log.

    If there are none, the server waits up to `wait_us` for one. With `log` 0, it says
    at once where to begin.
    """

    KIND = 0x1B
    REPLY = FollowRemovalsReply
    CAPABILITY = Capability.REMOVALS
    log: int = attrs.field(default=0, validator=_count)
    number: int = attrs.field(default=0, validator=_count)
    limit: int = attrs.field(default=10_000, validator=_count)
    wait_us: int = attrs.field(default=0, validator=_count)

    def of_older_server(self) -> NoReturn:
        """Raise `VersionMismatch`."""
        raise VersionMismatch(
            "the server's release does not tell what it removes; ask with exists_many, or install this release there,"
            " too"
        )


@_frozen
class Mark(Request, StoreRequest[int]):
    """Ask for a mark, which `Put.since` names. It is 0 if the server makes none.

    With `ends_earlier`, a put that names an earlier one stores nothing from now on.
    """

    KIND = 0x1C
    REPLY = CountReply
    CAPABILITY = Capability.COPIES
    ends_earlier: bool = attrs.field(default=False, validator=validators.instance_of(bool))

    def of_older_server(self) -> int:
        """Return 0: a server of an older release makes no marks."""
        return 0


@_frozen
class PinReply(Reply):
    """One byte for each key: 1 if it is pinned now, or was before it was unpinned."""

    KIND = 0x8F
    CAPABILITY = Capability.RETENTION
    NEWER_FIELDS = NewerFields.IGNORED
    pinned: bytes = attrs.field(validator=validators.instance_of(bytes))

    @property
    def result(self) -> list[bool]:
        """Whether each key is pinned now, or was."""
        return list(map(bool, self.pinned))


@_frozen
class Pin(Request, KeyedRequest[bool]):
    """Protect keys from eviction, or with `pinned` false, protect them no more.

    If `ttl_us` is not 0, the protection ends after that many microseconds. What is
    protected for longer stays so.
    """

    KIND = 0x0F
    REPLY = PinReply
    idempotent = False
    CAPABILITY = Capability.RETENTION
    keys: Keys
    pinned: bool = attrs.field(default=True, validator=validators.instance_of(bool))
    ttl_us: int = attrs.field(default=0, validator=_count, metadata={"since": 1})


@_frozen
class TimesLeftReply(Reply):
    """After how many microseconds each key ends.

    0 for a key that does not, `MISSING` for one that is not in memory.
    """

    KIND = 0x9A
    CAPABILITY = Capability.RETENTION
    NEWER_FIELDS = NewerFields.IGNORED
    times: Numbers

    @property
    def result(self) -> list[int | None]:
        """The times; None for a key that is not in memory."""
        return [None if time == MISSING else time for time in self.times]


class TakeOverStep(enum.IntEnum):
    """How far the process is that takes over."""

    BEGIN = 0
    """It asks for the sockets that the server listens on."""
    HAND_OVER = 1
    """It is ready: the server ends its service and tells what its pool has."""
    END = 2
    """It has all it needs. Only a server without `Capability.OWNERSHIP` is asked, which
    ends and never serves again."""


@_frozen
class TimesLeft(Request, KeyedRequest[int | None]):
    """Ask after how many microseconds keys end: 0 for those that do not, None for those
    that are missing.
    """

    KIND = 0x1A
    REPLY = TimesLeftReply
    CAPABILITY = Capability.RETENTION
    keys: Keys

    def of_older_server(self) -> list[int | None]:
        """Return that no key ends."""
        return [0] * len(self.keys)


@_frozen
class TakeOverReply(Reply):
    """Descriptors from number `first` on come with the first byte.

    `names` says what all descriptors of the step are, and `numbers` has a number for
    each: the length of an arena, else 0.
    """

    KIND = 0x99
    NEWER_FIELDS = NewerFields.IGNORED
    CAPABILITY = Capability.TAKE_OVER
    names: Keys
    numbers: Numbers


@_frozen
class TakeOver(Request):
    """One step on the way to take the server's place; see `TakeOverStep`.

    `first` is the number of the first descriptor that is wanted: one reply carries only
    so many.
    """

    KIND = 0x19
    REPLY = TakeOverReply
    CAPABILITY = Capability.TAKE_OVER
    step: int = attrs.field(validator=_count)
    first: int = attrs.field(default=0, validator=_count)


@_frozen
class MapArenasReply(Reply):
    """The lengths of the arenas, in bytes.

    Their descriptors come with the frame (SCM_RIGHTS).

    If both ends have the capability LIVENESS_PIPE, one more descriptor comes last: the
    reading end of a pipe that hangs up when the server ends. `writable` says whether
    the arenas may be mapped for writing.
    """

    KIND = 0x90
    CAPABILITY = Capability.SHARED_MEMORY
    lengths: Numbers
    writable: bool = attrs.field(validator=validators.instance_of(bool))


@_frozen
class MapArenas(Request):
    """Request the descriptors of the arenas from number `first` on.

    Over a Unix socket only.
    """

    KIND = 0x10
    REPLY = MapArenasReply
    CAPABILITY = Capability.SHARED_MEMORY
    first: int = attrs.field(default=0, validator=_count)


@_frozen
class MapTablesReply(Reply):
    """The removal table and the hazard table, whose descriptors come with the frame.

    `granule_bytes` of the pool share one entry of the removal table. It is 0, and there
    are no descriptors, if the server has no such tables, or no memory for another. A
    client that has pins sends a request before it pins more than `max_pinned_bytes` in
    total; each block counts as a multiple of `unit_bytes`.
    """

    KIND = 0x93
    CAPABILITY = Capability.TABLES
    granule_bytes: int = attrs.field(validator=_count)
    max_pinned_bytes: int = attrs.field(default=0, validator=_count)
    unit_bytes: int = attrs.field(default=1, validator=_count)


@_frozen
class MapTables(Request):
    """Request the tables that let a client read known blocks without a request.

    Over a Unix socket only.
    """

    KIND = 0x13
    REPLY = MapTablesReply
    CAPABILITY = Capability.TABLES


@_frozen
class ReserveReply(Reply):
    """The space, as packed offsets (`packed_offsets`).

    For a spare reservation that was not granted, `reservation` is 0 and `places` is
    empty.
    """

    KIND = 0x91
    CAPABILITY = Capability.SHARED_MEMORY | Capability.RDMA
    reservation: int = attrs.field(validator=_count)
    places: Numbers


@_frozen
class Reserve(Request):
    """Allocate space for a batch that the client will write into mapped arenas.

    `Commit` follows. A `spare` reservation is for a batch that may follow. Nothing is
    evicted for it; the reply has reservation 0 if little space is free.
    """

    KIND = 0x11
    REPLY = ReserveReply
    CAPABILITY = Capability.SHARED_MEMORY | Capability.RDMA
    sizes: Numbers
    spare: bool = attrs.field(default=False, validator=validators.instance_of(bool))


@_frozen
class Commit(Request):
    """Name the blocks of a reservation and make them visible, all at once.

    `checksums` is empty, or has one number for each block. `ttl_us` is as in a Put. The
    reply is a PutReply.
    """

    KIND = 0x12
    REPLY = PutReply
    CAPABILITY = Capability.SHARED_MEMORY | Capability.RDMA
    reservation: int = attrs.field(validator=_count)
    keys: Keys
    checksums: Numbers
    replace: bool = attrs.field(default=True, validator=validators.instance_of(bool))
    ttl_us: int = attrs.field(default=0, validator=_count, metadata={"since": 1})


@_frozen
class PrepareReply(Reply):
    """Whether the commit word suffices.

    If it is not `accepted`, another client is writing one of these keys, and the batch
    needs a `Commit`. `places` are as in a ReserveReply if space was requested; the
    space belongs to the client even if this was not accepted. `removals` is as in a
    LeaseReply, or 0 if the client should not remember where these blocks are.
    """

    KIND = 0x98
    CAPABILITY = Capability.COMMIT_WORD
    accepted: bool = attrs.field(validator=validators.instance_of(bool))
    reservation: int = attrs.field(validator=_count)
    places: Numbers
    removals: int = attrs.field(default=0, validator=_count)


@_frozen
class Prepare(Request):
    """Name the blocks of a reservation before they are written.

    The client makes them visible later: it writes their checksums, if there are any,
    and the number of the reservation to its commit word. With `sizes`, and 0 as the
    reservation, this also allocates the space, like a `Reserve`.
    """

    KIND = 0x18
    REPLY = PrepareReply
    CAPABILITY = Capability.COMMIT_WORD
    reservation: int = attrs.field(validator=_count)
    keys: Keys
    sizes: Numbers
    checksums: bool = attrs.field(default=True, validator=validators.instance_of(bool))


@_frozen
class LeaseReply(Reply):
    """Where the blocks are.

    `sizes` are as in a GetReply, `places` as in a ReserveReply, 0 for a key that is not
    in the store. If `lease` is 0, the present blocks follow as payload. `removals` is
    the current count of the removal table, 0 if the server has none.
    """

    KIND = 0x94
    CAPABILITY = Capability.SHARED_MEMORY
    lease: int = attrs.field(validator=_count)
    sizes: Numbers
    checksums: Numbers
    places: Numbers
    removals: int = attrs.field(default=0, validator=_count)


@_frozen
class Lease(Request):
    """Pin a batch for reading in mapped arenas, until `Release`.

    `capacities` is as in a Get. A batch of at most `inline_bytes` comes as payload
    instead, and is not pinned.
    """

    KIND = 0x14
    REPLY = LeaseReply
    CAPABILITY = Capability.SHARED_MEMORY
    keys: Keys
    capacities: Numbers
    inline_bytes: int = attrs.field(default=0, validator=_count)


@_frozen
class Touch(Request):
    """Report the use of keys without a request; with `read`, a read of their blocks.

    `took_us` is how long an earlier read took that was measured; 0 if none is reported.
    It has no reply.
    """

    KIND = 0x17
    CAPABILITY = Capability.TABLES
    keys: Keys
    read: bool = attrs.field(default=True, validator=validators.instance_of(bool))
    took_us: int = attrs.field(default=0, validator=_count, metadata={"since": 1})


@_frozen
class Release(Request):
    """End a lease. It has no reply, so the client does not wait.

    0 is the lease that the last `Lease` made, if it made one: for a client that no
    longer waits for the reply.
    """

    KIND = 0x15
    CAPABILITY = Capability.SHARED_MEMORY | Capability.RDMA
    lease: int = attrs.field(validator=_count)


@_frozen
class Abort(Request):
    """Give the space of a reservation back. It has no reply."""

    KIND = 0x16
    CAPABILITY = Capability.SHARED_MEMORY | Capability.RDMA
    reservation: int = attrs.field(validator=_count)


@_frozen
class QueuePair(Message):
    """One end of an RDMA connection.

    `queue` and `packet` are the number of the queue pair and of its first packet. `gid`
    has 32 hexadecimal digits.
    """

    CAPABILITY = Capability.RDMA
    queue: int = attrs.field(validator=_count)
    packet: int = attrs.field(validator=_count)
    gid: str = attrs.field(validator=_text)
    lid: int = attrs.field(default=0, validator=_count)
    mtu: int = attrs.field(default=1024, validator=_count)
    reads: int = attrs.field(default=1, validator=_count)


@_frozen
class RdmaConnectReply(QueuePair, Reply):
    """The server's queue pair, which is connected."""

    KIND = 0xA0


@_frozen
class RdmaConnect(QueuePair, Request):
    """Connect the client's queue pair to a new one of the server.

    RDMA requests may follow.
    """

    KIND = 0x20
    REPLY = RdmaConnectReply


@_frozen
class RdmaPut(Request):
    """Store a batch that the server reads from the client's registered memory.

    `remote_keys` has one key for each block, or a single one for all. `checksums` is
    empty, or has one number for each block. `ttl_us` is as in a Put. The reply is a
    PutReply.
    """

    KIND = 0x21
    REPLY = PutReply
    CAPABILITY = Capability.RDMA
    keys: Keys
    sizes: Numbers
    addresses: Numbers
    remote_keys: Numbers
    checksums: Numbers
    replace: bool = attrs.field(default=True, validator=validators.instance_of(bool))
    ttl_us: int = attrs.field(default=0, validator=_count, metadata={"since": 1})


@_frozen
class RdmaGetReply(Reply):
    """Where the blocks are: at the requested addresses, in the payload, or leased.

    `sizes` and `checksums` are as in a GetReply, with a checksum for each block. The
    blocks are the payload if it is `inline`. If `lease` is not 0, `RdmaFetch` and
    `Release` follow.
    """

    KIND = 0xA2
    CAPABILITY = Capability.RDMA
    sizes: Numbers
    checksums: Numbers
    lease: int = attrs.field(default=0, validator=_count)
    inline: bool = attrs.field(default=False, validator=validators.instance_of(bool))


@_frozen
class RdmaGet(Request):
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

    KIND = 0x22
    REPLY = RdmaGetReply
    CAPABILITY = Capability.RDMA
    keys: Keys
    capacities: Numbers
    addresses: Numbers
    remote_keys: Numbers
    region_bytes: int = attrs.field(default=0, validator=_count)
    inline_bytes: int = attrs.field(default=0, validator=_count)
    read_back: bool = attrs.field(default=False, validator=validators.instance_of(bool))


@_frozen
class RdmaFill(Request):
    """Read a piece of a reserved batch from the client's registered memory.

    `first_byte` counts from the start of the batch, its blocks back to back. The count
    in the reply is the length of the piece.
    """

    KIND = 0x23
    REPLY = CountReply
    CAPABILITY = Capability.RDMA
    reservation: int = attrs.field(validator=_count)
    first_byte: int = attrs.field(validator=_count)
    length: int = attrs.field(validator=_count)
    address: int = attrs.field(validator=_count)
    remote_key: int = attrs.field(validator=_count)


@_frozen
class RdmaFetch(Request):
    """Write a piece of a leased batch into the client's registered memory.

    `first_byte` counts from the start of the present blocks, back to back. The count in
    the reply is the length of the piece.
    """

    KIND = 0x24
    REPLY = CountReply
    CAPABILITY = Capability.RDMA
    lease: int = attrs.field(validator=_count)
    first_byte: int = attrs.field(validator=_count)
    length: int = attrs.field(validator=_count)
    address: int = attrs.field(validator=_count)
    remote_key: int = attrs.field(validator=_count)


_ALL: Final = [cls for cls in list(globals().values()) if isinstance(cls, type) and hasattr(cls, "KIND")]
KINDS: Final[Mapping[int, type[Message]]] = {cls.KIND: cls for cls in _ALL}
"""The messages by their numbers."""
_REQUESTS: Final[Sequence[type[Request]]] = [cls for cls in _ALL if issubclass(cls, Request)]
REPLIES: Final[Mapping[type[Request], type[Reply]]] = {cls: cls.REPLY for cls in _REQUESTS if cls.REPLY is not None}
"""The reply to each request. `ErrorReply` may answer any of them."""
ONE_WAY: Final = tuple(cls for cls in _REQUESTS if cls.REPLY is None)
"""The requests that have no reply."""
