"""Requests: what a store is asked to do, as data, with arguments that were checked.

The methods of a store make requests; connections, the embedded engine, or a store made
of stores carry them out. Whoever does can read the keys of a request, cut it into parts
that go to different places, and merge the results. `AsyncStore.removals` and its
blocking twin iterate over what `Removed` finds (`infinistore.client.api.results`).
`closed` makes the error of a store that carries out nothing any more.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import attrs

from infinistore.client.memory.buffers import DeviceBatch
from infinistore.client.memory.views import Kept, Leased, ReservedRoom
from infinistore.cluster.membership import View
from infinistore.errors import KeyNotFound, StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import BatchRequest, KeyedRequest, StoreRequest


def closed(why: str) -> StoreUnavailable:
    """Return the error for a store that was closed, or opened before a fork."""
    error = StoreUnavailable(why)
    error.store_is_closed = True
    return error


class Batch(NamedTuple):
    """Keys, and for each of them the bytes to store or the memory to read into."""

    keys: list[str]
    views: list[memoryview]

    def where(self, chosen: Iterable[object]) -> "Batch":
        """Return the part of the batch for which `chosen` is true."""
        flags = list(chosen)
        return Batch(list(compress(self.keys, flags)), list(compress(self.views, flags)))

    def at(self, positions: Sequence[int]) -> "Batch":
        """Return the part of the batch at these positions."""
        keys, views = self
        return Batch([keys[i] for i in positions], [views[i] for i in positions])


def check_all_there(keys: Sequence[str], found: Sequence[object | None]) -> None:
    """Raise `KeyNotFound` if anything in `found` is None."""
    if None in found:
        missing = [key for key, value in zip(keys, found, strict=True) if value is None]
        raise KeyNotFound(f"{len(missing)} of {len(keys)} keys are not in the store, first {missing[0][:100]!r}")


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
    """How many more are on disk and are not read, because reading ahead has a bounded
    part of the pool."""
    hold: str = ""


@attrs.define
class Put(BatchRequest[list[str]]):
    """Store a batch; the result is the keys that were skipped because they were there.

    Parts can be stored in different places: the results of `at` are added up. If
    `ttl_us` is not 0, the blocks end after that many microseconds. If `since` is not 0,
    it is the server's mark, and the blocks are copies: keys that are there, or were
    deleted after the mark, are skipped.
    """

    batch: Batch
    replace: bool = True
    ttl_us: int = 0
    since: int = 0
    idempotent = False
    moves_blocks = True

    @property
    def keys(self) -> Sequence[str]:
        """The keys of the batch."""
        return self.batch.keys

    def at(self, positions: Sequence[int]) -> Self:
        """Return the same request for the keys at these positions only."""
        return attrs.evolve(self, batch=self.batch.at(positions))


@attrs.define
class Get(KeyedRequest[bytearray | None]):
    """Read blocks into new memory; None for each that is missing."""

    keys: Sequence[str]
    moves_blocks = True


@attrs.define
class GetInto(KeyedRequest[int | None]):
    """Read blocks into the caller's memory; the result is the stored lengths.

    With `all_or_nothing`, a block is not wanted if another one is missing.
    """

    batch: Batch
    all_or_nothing: bool = False
    moves_blocks = True

    @property
    def keys(self) -> Sequence[str]:
        """The keys of the batch."""
        return self.batch.keys

    def at(self, positions: Sequence[int]) -> Self:
        """Return the same request for the keys at these positions only."""
        return attrs.evolve(self, batch=self.batch.at(positions))


@attrs.define
class PutFromDevice(BatchRequest[list[str]]):
    """Store a batch that lies in registered memory of GPUs; the result is as of
    `Put`.
    """

    batch: DeviceBatch
    replace: bool = True
    ttl_us: int = 0
    idempotent = False
    moves_blocks = True

    @property
    def keys(self) -> Sequence[str]:
        """The keys of the batch."""
        return self.batch.keys

    def at(self, positions: Sequence[int]) -> Self:
        """Return the same request for the keys at these positions only."""
        return attrs.evolve(self, batch=self.batch.at(positions))


@attrs.define
class GetToDevice(KeyedRequest[int | None]):
    """Read blocks into registered memory of GPUs; the result is as of `GetInto`."""

    batch: DeviceBatch
    all_or_nothing: bool = False
    moves_blocks = True

    @property
    def keys(self) -> Sequence[str]:
        """The keys of the batch."""
        return self.batch.keys

    def at(self, positions: Sequence[int]) -> Self:
        """Return the same request for the keys at these positions only."""
        return attrs.evolve(self, batch=self.batch.at(positions))


@attrs.define
class Lease(BatchRequest[Leased]):
    """Pin blocks and look at them in place; `verify` checks their checksums."""

    keys: Sequence[str]
    verify: bool
    moves_blocks = True
    pins = True


@attrs.define
class Reserve(StoreRequest[ReservedRoom]):
    """Take room for blocks of these sizes, which the caller writes in place."""

    keys: list[str]
    sizes: Sequence[int]
    kept: Kept
    moves_blocks = True


@attrs.define
class Commit(StoreRequest[None]):
    """Store what was written to reserved room, visible at once; `ttl_us` is as of
    `Put`.
    """

    room: ReservedRoom
    kept: Kept
    ttl_us: int = 0
    idempotent = False
    moves_blocks = True


@attrs.define
class Exists(KeyedRequest[bool]):
    """Tell for each key whether it is there."""

    keys: Sequence[str]

    def merge(self, parts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> Found:
        """Put the results of parts into the order of the keys, and add up what is on
        disk.
        """
        parts = list(parts)
        on_disk = sum(found.on_disk for _, found in parts if isinstance(found, Found))
        return Found.partly_on_disk(super().merge(parts), on_disk)


@attrs.define
class MatchPrefix(BatchRequest[Matched]):
    """Count the leading keys that are there.

    With `hold_s` seconds, what was counted is held.
    """

    keys: Sequence[str]
    hold_s: float = 0


@attrs.define
class ReleaseHold(StoreRequest[bool]):
    """End a hold; False if it has ended, or was another server's."""

    hold: str
    idempotent = False


@attrs.define
class Marks(StoreRequest[Mapping[str, int | KeptError]]):
    """Ask the nodes that these keys are written to for a mark; the result has them by
    the id of the node: 0 if it makes none, or its error.
    """

    keys: Sequence[str]


@attrs.define
class EndCopies(StoreRequest[bool]):
    """Let the copies that are under way from node to node of a cluster store nothing
    from now on; the result is whether there may be any.
    """


@attrs.define
class Copy(StoreRequest[list[str]]):
    """Put a batch to a cluster, as copies: with the mark of each node, by its id."""

    batch: Batch
    marks: Mapping[str, int | KeptError]
    ttl_us: int = 0
    idempotent = False
    moves_blocks = True


@attrs.define
class Prefetch(BatchRequest[Prefetched]):
    """Begin to read blocks from disk into memory; with `hold_s` seconds, hold what is
    there.
    """

    keys: Sequence[str]
    hold_s: float = 0


@attrs.define
class ListKeys(StoreRequest[list[str]]):
    """One page of keys, in code point order."""

    prefix: str
    limit: int
    after: str
    every_node: bool = False
    """Whether a node of a cluster that does not answer makes it fail."""


Place: TypeAlias = tuple[int, int]
"""The id of a log of removals, and the number to go on from."""


@attrs.frozen
class RemovedKeys:
    """Keys that a store has removed, and whether others may have been missed.

    A key is in it if a read did not find it when the store answered. The first batch
    has no keys: what is removed from then on is told.
    """

    keys: list[str] = attrs.field(factory=list)
    missed: int | None = 0
    """How many removals are not told, because more happened than the store keeps; None
    if nobody knows how many: the server is another one, or was restarted or purged, or
    reads of a cluster do not look any more wherever they did."""
    problem: str = ""
    """Why the store could not be asked; empty if it was."""

    @property
    def gap(self) -> bool:
        """Whether removals were missed. Ask the store which keys are there still."""
        return self.missed != 0


@attrs.frozen
class Followed:
    """What was found, and from where to go on, by the ids of nodes. A cluster has the
    view in which that is so.
    """

    places: Mapping[str, Place]
    removed: RemovedKeys
    view: View | None = None


@attrs.define
class Removed(StoreRequest[Followed]):
    """Ask which keys were removed since `places`, which are those of a `view`, and wait
    for one at most `wait_s`.

    Without places it begins. The place of a server by itself is that of the node "".
    """

    places: Mapping[str, Place]
    wait_s: float
    view: View | None = None
    waits: ClassVar[bool] = True

    def at(self, node: str) -> "Removed":
        """Return the request for one node, as if it were all there is."""
        place: Any = self.places.get(node)
        return Removed({} if place is None else {"": place}, self.wait_s)
