"""The requests that are not messages: those that move blocks, and those that mean
something to several servers only.

The methods of a store make requests; connections, the embedded engine, or a store made
of stores carry them out. A request without payload is a message
(`infinistore.protocol.messages`), as a store with and without a server knows it.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, cast

import attrs

from infinistore.client.memory.buffers import DeviceBatch
from infinistore.client.memory.views import Leased, ReservationLink, ReservedRoom
from infinistore.cluster.membership import View
from infinistore.errors import KeyNotFound, StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import (
    MISSING,
    BatchRequest,
    FollowRemovals,
    FollowRemovalsReply,
    KeyedRequest,
    ListKeys,
    StoreRequest,
)


def store_closed_error(why: str) -> StoreUnavailable:
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


class _OfBatch:
    """A request about the keys of its batch."""

    __slots__ = ()
    batch: Any

    @property
    def keys(self) -> Sequence[str]:
        """The keys of the batch."""
        keys: Sequence[str] = self.batch.keys
        return keys

    def at(self, positions: Sequence[int]) -> Self:
        """Return the same request for the keys at these positions only."""
        return cast(Self, attrs.evolve(cast(Any, self), batch=self.batch.at(positions)))


@attrs.define
class Put(_OfBatch, BatchRequest[list[str]]):
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


@attrs.define
class Get(KeyedRequest[bytearray | None]):
    """Read blocks into new memory; None for each that is missing."""

    keys: Sequence[str]
    moves_blocks = True


@attrs.define
class GetInto(_OfBatch, KeyedRequest[int | None]):
    """Read blocks into the caller's memory; the result is the stored lengths.

    With `all_or_nothing`, a block is not wanted if another one is missing.
    """

    batch: Batch
    all_or_nothing: bool = False
    moves_blocks = True


@attrs.define
class PutFromDevice(_OfBatch, BatchRequest[list[str]]):
    """Store a batch from registered memory of GPUs; the result is as of `Put`."""

    batch: DeviceBatch
    replace: bool = True
    ttl_us: int = 0
    idempotent = False
    moves_blocks = True


@attrs.define
class GetToDevice(_OfBatch, KeyedRequest[int | None]):
    """Read blocks into registered memory of GPUs; the result is as of `GetInto`."""

    batch: DeviceBatch
    all_or_nothing: bool = False
    moves_blocks = True


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
    kept: ReservationLink
    moves_blocks = True


@attrs.define
class Commit(StoreRequest[None]):
    """Store what was written to reserved room; `ttl_us` is as of `Put`."""

    room: ReservedRoom
    kept: ReservationLink
    ttl_us: int = 0
    idempotent = False
    moves_blocks = True


@attrs.define
class ReleaseHolds(StoreRequest[bool]):
    """End the holds that a token names; False if they have ended or are of others."""

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


@attrs.frozen
class ListKeysOfEveryNode(ListKeys):
    """List keys, or fail if a node of a cluster does not answer."""


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
class FollowRemovalsOfNodes(StoreRequest[Followed]):
    """Ask which keys were removed since `places`, which are those of a `view`, and wait
    for one at most `wait_s`.

    Without places it begins. The place of a server by itself is that of the node "".
    """

    places: Mapping[str, Place]
    wait_s: float
    view: View | None = None
    waits: ClassVar[bool] = True

    def at(self, node: str) -> "FollowRemovalsOfNodes":
        """Return the request for one node, as if it were all there is."""
        place: Any = self.places.get(node)
        return FollowRemovalsOfNodes({} if place is None else {"": place}, self.wait_s)

    @property
    def message(self) -> FollowRemovals:
        """What a server by itself is asked."""
        log, number = self.places.get("", (0, 0))
        return FollowRemovals(log, number, wait_us=int(self.wait_s * 1e6))


def followed(reply: FollowRemovalsReply) -> Followed:
    """Return what the reply of a server by itself says."""
    missed = None if reply.missed == MISSING else reply.missed
    return Followed({"": (reply.log, reply.number)}, RemovedKeys(reply.keys, missed))
