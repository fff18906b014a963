"""Reads: leases, holds and prefix matches, samples, and what counts as use; and which
blocks nobody has hashed since another process wrote them.

A store that takes the memory of an earlier process over believes no byte of it: a block
is served once its bytes have the checksum that its writer made. Whoever reads asks for
the keys at hand; the rest is hashed in slices, the most recently used blocks first.
What does not match is dropped.

Leaves to others: the counts of pins, and what happens to a block without a key when its
last pin ends (`pins`); to call `verify` before the bytes of a block are read, and
`verify_some` again and again.
"""

from collections.abc import Mapping, Sequence

from infinistore.core.clients import Client, Lease
from infinistore.core.committed import CommittedIndex
from infinistore.core.index import Entry, Index, leading_within, length_of
from infinistore.core.journal import Journal
from infinistore.core.limits import CoreLimits
from infinistore.core.pins import HazardPins, Holds, PinTable, Retired
from infinistore.core.pool import Pool
from infinistore.core.removals import Removals


class Unverified:
    """The blocks of `waiting`, in the order in which they are hashed if nobody asks for
    them."""

    def __init__(self, removals: Removals, waiting: Mapping[str, Entry]) -> None:
        self._removals = removals
        self._waiting = dict(waiting)
        self._order = iter(list(waiting))
        self.dropped = 0
        """How many did not match their checksums."""

    def __len__(self) -> int:
        return len(self._waiting)

    def verify(self, index: Index, keys: Sequence[str]) -> bool:
        """Hash the blocks of these keys that nobody has hashed; whether any was
        dropped."""
        if not self._waiting or self._waiting.keys().isdisjoint(keys):
            return False
        before = self.dropped
        for key in keys:
            self._verify(index, key)
        return self.dropped > before

    def verify_some(self, index: Index, most_bytes: int) -> bool:
        """Hash about so many bytes of blocks, at least one block; whether any is
        left."""
        for key in self._order:
            most_bytes -= self._verify(index, key)
            if most_bytes <= 0:
                break
        return bool(self._waiting)

    def _verify(self, index: Index, key: str) -> int:
        """Hash a block, if it still has its key; return how many bytes that were."""
        entry = self._waiting.pop(key, None)
        if entry is None or index.get(key) != entry:  # replaced, deleted or evicted meanwhile
            return 0
        self.dropped += self._removals.drop_if_damaged(index, key)
        return length_of(entry)


class Reads:
    """The reads of one store. What each method promises, the method of `StoreCore` with
    its name says."""

    def __init__(
        self,
        pool: Pool,
        limits: CoreLimits,
        committed: CommittedIndex,
        *,
        pins: PinTable,
        retired: Retired,
        holds: Holds,
        hazard_pins: HazardPins,
        journal: Journal | None,
    ) -> None:
        self.hits = 0
        """Keys that a lease found, or a client without a request."""
        self.hit_bytes = 0
        """The lengths of their blocks."""
        self.misses = 0
        """Keys that a lease did not find."""
        self.unverified: Unverified | None = None
        """Blocks of an earlier process that nobody has hashed since; None if there are
        none."""
        self._pool = pool
        self._limits = limits
        self._committed = committed
        self._pins = pins
        self._retired = retired
        self._holds = holds
        self._hazard_pins = hazard_pins
        self._journal = journal if journal is not None and journal.reads else None

    def lease(self, client: Client, keys: Sequence[str], max_bytes: int | None, *, touch: bool) -> Lease:
        """Pin the blocks of these keys."""
        index = self._committed.up_to_date()
        client.check_open()
        self._limits.check_batch(len(keys))
        entries = index.get_many(keys)
        found, pinned = _present(keys, entries)
        lengths = list(map(length_of, pinned))
        if max_bytes is not None and sum(lengths) > max_bytes:
            fitting = leading_within(entries, max_bytes)
            keys, entries = keys[:fitting], entries[:fitting]
            found, pinned = _present(keys, entries)
            lengths = list(map(length_of, pinned))
        if self.unverified is not None and self.unverified.verify(index, found):
            return self.lease(client, keys, max_bytes, touch=touch)  # without those that were dropped
        footprint_bytes = self._pool.footprints(lengths)
        self._hazard_pins.scan_client(client)
        self._limits.check_share(client.name, client.pinned_bytes, footprint_bytes, self._pool.capacity_bytes)
        self._pins.add(pinned, footprint_bytes)
        if touch:
            index.touch(found)
        all_lengths = (
            lengths if len(lengths) == len(keys) else [0 if entry is None else length_of(entry) for entry in entries]
        )
        lease = Lease(self._pool, client, entries, pinned, lengths=all_lengths, footprint_bytes=footprint_bytes)
        client.leased_bytes += footprint_bytes
        client.leases[lease] = None
        if client.counted:
            self.hits += len(pinned)
            self.misses += len(keys) - len(pinned)
            self.hit_bytes += sum(lengths)
            if self._journal is not None and pinned:
                self._journal.append("read", found, pinned)
        return lease

    def count(self, client: Client, key: str, entry: Entry | None) -> None:
        """Count a read of one block; `entry` is None if it was missing."""
        if not client.counted:
            return
        if entry is None:
            self.misses += 1
            return
        self.hits += 1
        self.hit_bytes += length_of(entry)
        if self._journal is not None:
            self._journal.append("read", (key,), (entry,))

    def release(self, lease: Lease) -> None:
        """End a lease, if it has not ended."""
        if not lease.released:
            lease.released = True
            lease.client.leased_bytes -= lease.footprint_bytes
            lease.client.leases.pop(lease, None)
            self._retired.unpin(lease.pinned, lease.footprint_bytes)

    def note_use(self, keys: Sequence[str], *, read: bool) -> int:
        """Touch keys that a client has used, and with `read` count their blocks as
        read; return those bytes."""
        self._limits.check_batch(len(keys))
        used = self._committed.use(keys)
        if not read:
            return 0
        read_bytes = sum(map(length_of, used))
        self.hits += len(used)
        self.hit_bytes += read_bytes
        if self._journal is not None and used:
            self._journal.append("read", keys, ())
        return read_bytes

    def match_prefix(self, keys: Sequence[str], *, touch: bool) -> int:
        """Count the leading keys that are present."""
        index = self._committed.up_to_date()
        self._limits.check_batch(len(keys))
        found = index.leading(keys)
        if touch:
            index.touch(found)
        return len(found)

    def hold_prefix(self, client: Client, keys: Sequence[str], hold_s: float) -> tuple[int, int]:
        """Match a prefix and hold it; return (count, hold id), the id 0 if nothing
        matched."""
        client.check_open()
        self._limits.check_batch(len(keys))
        self._holds.check_time(hold_s)
        index = self._committed.up_to_date()
        self._holds.expire()
        found = index.leading(keys)
        if not found:
            return 0, 0
        entries: list[Entry] = index.get_many(found)  # type: ignore[assignment]
        hold_id = self._holds.add(entries, hold_s)
        index.touch(found)
        return len(found), hold_id

    def sample(self, limit: int) -> list[tuple[str, int]]:
        """Return up to `limit` keys with the lengths of their blocks."""
        index = self._committed.up_to_date()
        keys = index.sample(limit)
        return list(zip(keys, map(length_of, filter(None, index.get_many(keys))), strict=True))


def _present(keys: Sequence[str], entries: list[Entry | None]) -> tuple[Sequence[str], list[Entry]]:
    """Return the keys that are there, and their entries."""
    if all(entries):  # the usual case
        return keys, entries  # type: ignore[return-value]
    found = [key for key, entry in zip(keys, entries, strict=True) if entry is not None]
    return found, [entry for entry in entries if entry is not None]
