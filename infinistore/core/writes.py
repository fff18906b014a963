"""Writes: from the reservation of space to the commit that makes a batch visible.

A batch is committed by a call, or was prepared and is committed when its writer says
that it is written (see `committed`). Either way all of its keys become visible in one
step.

Leaves to others: which blocks are evicted for a reservation (`space`), and when the
space of replaced blocks is free again (`pins`).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from infinistore.allocators.base import Extent
from infinistore.core.clients import Client, Reservation
from infinistore.core.committed import CommittedIndex, Written
from infinistore.core.index import Entry, Index, length_of
from infinistore.core.journal import Journal
from infinistore.core.limits import CoreLimits
from infinistore.core.pins import HAZARDS_PER_BLOCK, HazardPins, Holds, Retired
from infinistore.core.pool import Pool
from infinistore.core.removals import Removals
from infinistore.core.retention import Retention
from infinistore.core.space import Space
from infinistore.errors import UnknownReservation


class Writes:
    """The writes of one store. What each method promises, the method of `StoreCore`
    with its name says."""

    def __init__(
        self,
        pool: Pool,
        limits: CoreLimits,
        *,
        space: Space,
        removals: Removals,
        retired: Retired,
        retention: Retention,
        holds: Holds,
        hazard_pins: HazardPins,
        journal: Journal | None,
    ) -> None:
        self.committed = CommittedIndex(self._commit_written, retention, removals.expire)
        """The index of the store. It is made here, because to reach it is to commit
        what has been written."""
        self.puts = 0
        """Blocks committed, without those skipped."""
        self.put_bytes = 0
        """Their lengths."""
        self._pool = pool
        self._limits = limits
        self._space = space
        self._removals = removals
        self._retired = retired
        self._retention = retention
        self._holds = holds
        self._hazard_pins = hazard_pins
        self._journal = journal

    def reserve(self, client: Client, sizes: Sequence[int]) -> Reservation:
        """Take space for one batch, evicting as needed."""
        client.check_open()
        index = self.committed.up_to_date()
        if self._hazard_pins.clients:
            self._hazard_pins.scan_in_turns(client, HAZARDS_PER_BLOCK)
        self._holds.expire()
        footprint_bytes = self.check(client, sizes)
        return self._open(client, self._space.reserve(index, sizes, footprint_bytes), footprint_bytes)

    def reserve_spare(self, client: Client, sizes: Sequence[int]) -> Reservation | None:
        """Take space for one batch that may come, if there is plenty."""
        client.check_open()
        footprint_bytes = self.check(client, sizes)
        extents = self._space.reserve_spare(sizes, footprint_bytes)
        return None if extents is None else self._open(client, extents, footprint_bytes)

    def commit(
        self,
        reservation: Reservation,
        keys: Sequence[str],
        checksums: Sequence[int] | None,
        *,
        replace: bool,
        ttl_s: float = 0,
        since: int = 0,
    ) -> list[int]:
        """Make a batch visible; the space of replaced blocks is for `Retired.tidy` to
        free."""
        index = self.committed.up_to_date()
        if reservation.state != "committed":
            self._check_names(reservation, keys, None if checksums is None else len(checksums))
            self._commit(index, reservation, keys, checksums, replace=replace, ttl_s=ttl_s, since=since)
        return reservation.skipped

    def prepare(self, reservation: Reservation, keys: Sequence[str], written: Written) -> bool:
        """Name the blocks of a reservation that is still being written."""
        index = self.committed.up_to_date()
        self._check_names(reservation, keys, None)
        if self.committed.names_any(keys):
            return False
        self._removals.announce(list(filter(None, index.get_many(keys))))
        self.committed.prepare(reservation, keys, written)
        return True

    def is_being_written(self, keys: Sequence[str]) -> bool:
        """Whether a prepared block with one of these keys may become visible at any
        moment."""
        return self.committed.names_any(keys)

    def abort(self, reservation: Reservation) -> None:
        """Give the space of a reservation back, if it is open."""
        if reservation.state == "open":
            self.committed.forget(reservation)
            self._close(reservation, "aborted")
            self._pool.free(reservation.extents)

    def check(self, client: Client, sizes: Sequence[int]) -> int:
        """Check a batch that is to be reserved against the limits; return its footprint
        in bytes."""
        self._limits.check_batch(len(sizes))
        self._space.check_sizes(sizes, self._limits.max_value_bytes)
        footprint_bytes = self._pool.footprints(sizes)
        self._limits.check_share(client.name, client.pinned_bytes, footprint_bytes, self._pool.capacity_bytes)
        return footprint_bytes

    def _check_names(self, reservation: Reservation, keys: Sequence[str], checksums: int | None) -> None:
        """Check that keys, and so many checksums if there are any, fit a reservation
        that is open."""
        if reservation.state != "open":
            raise UnknownReservation(
                f"this reservation was {reservation.state}; reserve again and write the blocks again"
            )
        reservation.client.check_open()
        blocks = len(reservation.extents)
        if len(keys) != blocks or checksums not in (None, blocks):
            given = f"{len(keys)} keys" if checksums is None else f"{len(keys)} keys and {checksums} checksums"
            raise ValueError(f"a reservation of {blocks} blocks needs as many keys (and checksums), not {given}")
        if len(set(keys)) != blocks:
            raise ValueError(f"a key may be in a put only once, and this one is there twice: {_duplicate(keys)!r:.80}")
        if self.committed.is_prepared(reservation):
            raise ValueError("this reservation was prepared: its blocks have names already")

    def _commit_written(
        self, index: Index, reservation: Reservation, keys: Sequence[str], checksums: Sequence[int]
    ) -> None:
        self._commit(index, reservation, keys, checksums or None, replace=True)
        self.committed.forget(reservation)
        self._retired.tidy()

    def _commit(
        self,
        index: Index,
        reservation: Reservation,
        keys: Sequence[str],
        checksums: Sequence[int] | None,
        *,
        replace: bool,
        ttl_s: float = 0,
        since: int = 0,
    ) -> None:
        entries = reservation.entries(checksums)
        if since:
            keys, entries = self._insert_missing(index, reservation, keys, entries, since)
        elif replace:
            self._removals.replace(index, keys, entries)
        elif index.disjoint(keys):
            index.insert(keys, entries)
        else:
            keys, entries = self._insert_missing(index, reservation, keys, entries)
        self._retired.note_stored(entries)
        self._close(reservation, "committed")
        if ttl_s and entries:
            self._retention.end_in(keys, ttl_s)
            if self._journal is not None:
                self._journal.append("delete", keys, ())  # what ends is in memory only, and so is its key
        self.count(reservation.client, keys, entries)

    def count(self, client: Client, keys: Sequence[str], entries: Sequence[Entry]) -> None:
        """Count blocks that were committed, and tell the journal."""
        if self._journal is not None and entries:
            self._journal.append("put", keys, entries)
        if client.counted:
            self.puts += len(entries)
            self.put_bytes += sum(map(length_of, entries))

    def _insert_missing(
        self, index: Index, reservation: Reservation, keys: Sequence[str], entries: list[Entry], since: int = 0
    ) -> tuple[list[str], list[Entry]]:
        """Insert the keys of a batch that are missing and were not deleted after the
        mark `since`, touch all of it, and free the space of the others.

        Returns the keys that were inserted, and their entries.
        """
        exists: Sequence[int] = index.contains_many(keys)
        deletions = self._removals.deletions
        if since and deletions is not None:
            exists = [there | gone for there, gone in zip(exists, deletions.since(since, keys), strict=True)]
        reservation.skipped = [i for i, there in enumerate(exists) if there]
        self._pool.free([reservation.extents[i] for i in reservation.skipped])
        missing = [key for key, there in zip(keys, exists, strict=True) if not there]
        inserted = [entry for entry, there in zip(entries, exists, strict=True) if not there]
        index.insert(missing, inserted)
        index.touch(index.those_there(keys) if since else keys)
        return missing, inserted

    def _open(self, client: Client, extents: list[Extent], footprint_bytes: int) -> Reservation:
        reservation = Reservation(self._pool, client, extents, footprint_bytes)
        client.reserved_bytes += footprint_bytes
        client.reservations[reservation] = None
        return reservation

    def _close(self, reservation: Reservation, state: Literal["committed", "aborted"]) -> None:
        reservation.state = state
        self._space.reserved_bytes -= reservation.footprint_bytes
        reservation.client.reserved_bytes -= reservation.footprint_bytes
        reservation.client.reservations.pop(reservation, None)


def _duplicate(keys: Sequence[str]) -> str:
    return next(key for key, count in Counter(keys).items() if count > 1)
