"""The operations of a store, as exchanges: written once, driven by Trio, by threads or by asyncio.

`Operations` is what a store can do. `RemoteOperations` (in `remote_operations.py`) does it over a connection;
`EmbeddedOperations` (in `embedded.py`) does it to a store in this process. Arguments have been checked (`arguments.py`)
when they come here.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from infinistore.client.in_place import Leased, ReservedRoom
from infinistore.protocol.effects import Exchange
from infinistore.statistics import Stats

__all__ = ["Batch", "Operation", "Operations"]

_T = TypeVar("_T")


class Batch(NamedTuple):
    """Keys, and for each of them the bytes to store or the memory to read into."""

    keys: list[str]
    views: list[memoryview]

    def where(self, chosen: Iterable[object]) -> "Batch":
        """Return the part of the batch for which `chosen` is true."""
        flags = list(chosen)
        return Batch(list(compress(self.keys, flags)), list(compress(self.views, flags)))


class Operations(Protocol):
    """What a store can do; each method is an exchange. See the clients' methods for what they promise."""

    def put_many(self, batch: Batch, replace: bool) -> Exchange[list[str]]:
        """Store the batch; return the keys that were skipped."""

    def get_many(self, keys: Sequence[str]) -> Exchange[list[bytearray | None]]:
        """Read the batch into memory of its own; None for what is missing."""

    def get_many_into(self, batch: Batch, all_or_nothing: bool) -> Exchange[list[int | None]]:
        """Read the batch into the caller's memory; return the stored lengths."""

    def lease(self, keys: Sequence[str], verify: bool) -> Exchange[Leased]:
        """Pin the batch and return views of it; `verify` checks their checksums."""

    def reserve(self, keys: list[str], sizes: Sequence[int]) -> Exchange[ReservedRoom]:
        """Take room for a batch that the caller will write."""

    def commit(self, room: ReservedRoom) -> Exchange[None]:
        """Store what was written to the room, visible at once."""

    def exists_many(self, keys: Sequence[str]) -> Exchange[list[bool]]:
        """Tell for each key whether it is there."""

    def match_prefix(self, keys: Sequence[str], hold_s: float) -> Exchange[tuple[int, str]]:
        """Count the leading keys that are there; return the count and the token of the hold."""

    def release_hold(self, hold: str) -> Exchange[bool]:
        """End a hold; False if it has ended."""

    def delete(self, keys: Sequence[str]) -> Exchange[int]:
        """Delete keys; return how many were there."""

    def keys(self, prefix: str, limit: int, after: str) -> Exchange[list[str]]:
        """One page of keys, in code point order."""

    def evict(self, low: float, high: float) -> Exchange[int]:
        """Evict cold blocks; return how many."""

    def purge(self) -> Exchange[int]:
        """Delete everything; return how many keys there were."""

    def stats(self, details: bool) -> Exchange[Stats]:
        """The statistics of the store."""


Operation: TypeAlias = Callable[[Operations], Exchange[_T]]
"""What a client's method hands to its driver: given operations, the exchange to run."""
