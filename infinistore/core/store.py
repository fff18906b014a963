"""StoreCore: the store, without sockets, tasks, threads or a clock of its own.

Every call is synchronous, takes a whole batch, and either does all of it or raises and
changes nothing (but see `reserve` on eviction). The same calls, clock and random
numbers give the same answers, so a plain model can check them.

What it promises:

- A reservation is invisible until `commit`, which makes its whole batch visible at
  once. The last commit of a key wins.
- A lease pins. Eviction, deletion and replacement never move, free or reuse leased
  bytes. A block that loses its key while it is pinned gives its space back with the
  last pin.
- A batch touches its keys from last to first, so the head of a prefix outlives its
  tail. commit, lease and the matches touch; `exists` does not.
- A strategy decides what is evicted first (`infinistore.eviction`): by default the
  least recently used. One `reserve` never evicts more than its batch needs plus a fixed
  number.
- Everything is bounded by `CoreLimits`.

What it leaves to others: to call from one thread at a time; to check keys where they
enter (`check_keys`); to move bytes; to promise, by calling `close_client`, that nobody
touches the client's space any more; and to make arenas.

The removals, eviction and growth (`space`), holds, and pins that clients set without a
request (`pins`) are parts of it, in modules of their own.

`find_one`, `use_one` and `write_one` are for one block at a time, in one step: nothing
is pinned or reserved, because nobody else comes between. A lease, a reservation and
what they keep for the time until their end are most of what a short block costs. A
caller that has all of its bytes, or copies them before it calls anything else, needs
neither.
"""

import random as random_module
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

from infinistore.allocators.base import Extent
from infinistore.core.arena import Arena
from infinistore.core.clients import Client, Hazard, Lease, Reservation, read_of
from infinistore.core.deletions import Deletions
from infinistore.core.hot_groups import HotGroups
from infinistore.core.index import Entry, Index, first_keys, leading_within, length_of
from infinistore.core.journal import Journal
from infinistore.core.limits import CoreLimits, Watermarks
from infinistore.core.pins import HAZARDS_PER_BLOCK, HazardPins, Holds, PinTable, Retired
from infinistore.core.pool import Pool
from infinistore.core.removals import RemovalLog, Removals, Unverified
from infinistore.core.retention import Retention
from infinistore.core.space import EvictionCause, Growth, Space
from infinistore.errors import UnknownReservation
from infinistore.eviction.base import Eviction, LeastRecentlyUsed
from infinistore.statistics import EvictionStatistics, StoreStatistics

Written: TypeAlias = Callable[[], Sequence[int] | None]
"""Returns the checksums of the blocks: an empty list if their writer made none, None
while they are not written yet."""


class CommittedIndex:
    """The index of a store, empty at first, its prepared reservations, and the only way
    to it: commit what has been written, end what is over.

    The blocks of a prepared reservation have names before they are written. The writer
    makes them visible without a call, by a word in shared memory that `written` reads.
    Every lookup has to see them. So the only way to the index is `up_to_date`, which
    commits them first, and removes the keys whose time to live is over: to everybody
    else the batch was committed at that moment. Only `touch` and `use` do not: they
    change recency, and do not tell what exists.

    `commit` commits a prepared reservation, with its keys and checksums; `expire`
    removes the keys whose time is over; `eviction` is the class of the strategy.
    """

    def __init__(
        self,
        commit: Callable[[Index, Reservation, Sequence[str], Sequence[int]], object],
        retention: Retention,
        expire: Callable[[Index], object],
        eviction: type[Eviction],
    ) -> None:
        self.__index = Index(eviction)
        self._prepared: dict[Reservation, tuple[Sequence[str], Written]] = {}
        self._prepared_keys: set[str] = set()
        self._commit = commit
        self._ends = retention.ends
        self._expire = expire

    def up_to_date(self) -> Index:
        """Commit what has been written by now, and end what is over; return the index
        for one operation."""
        if self._prepared:
            for reservation, (keys, written) in list(self._prepared.items()):  # each is forgotten meanwhile
                checksums = written()
                if checksums is not None:
                    self._commit(self.__index, reservation, keys, checksums)
        if self._ends:
            self._expire(self.__index)
        return self.__index

    def prepare(self, reservation: Reservation, keys: Sequence[str], written: Written) -> None:
        """Commit a reservation once it is written; none of its keys is in another that
        is prepared."""
        self._prepared[reservation] = keys, written
        self._prepared_keys.update(keys)

    def is_prepared(self, reservation: Reservation) -> bool:
        """Whether a reservation is prepared."""
        return reservation in self._prepared

    def forget(self, reservation: Reservation) -> None:
        """Forget a reservation that was committed or given up, if it was prepared."""
        if reservation in self._prepared:
            keys, _ = self._prepared.pop(reservation)
            self._prepared_keys.difference_update(keys)

    def names_any(self, keys: Sequence[str]) -> bool:
        """Whether a block of one of these keys may be written at any moment."""
        return bool(self._prepared_keys) and not self._prepared_keys.isdisjoint(keys)

    def touch(self, keys: Sequence[str]) -> None:
        """Make keys the most recent ones, the first key the most recent of all.

        Missing keys are ignored.
        """
        try:
            self.__index.touch(keys)
        except KeyError:
            self.use(keys)

    def touch_one(self, key: str) -> None:
        """Make a key the most recent one. KeyError if it is missing."""
        self.__index.touch_one(key)

    def use(self, keys: Sequence[str]) -> list[Entry]:
        """As `touch`; return the entries of those that are there."""
        entries = self.__index.get_many(keys)
        if not all(entries):
            keys = [key for key, entry in zip(keys, entries, strict=True) if entry is not None]
        self.__index.touch(keys)
        return list(filter(None, entries))


class StoreCore:
    """A key-value store over a pool of memory. Keys are str, values bytes in the pool.

    `clock` returns seconds on a monotonic clock. `random` creates the ids of holds; the
    default is the operating system's generator. `growth` states how much the pool may
    grow; the default is not at all. `journal` is told what is committed and removed.
    `eviction` is the class of the strategy that decides what is evicted first.

    The parts are for this folder only.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        clock: Callable[[], float],
        limits: CoreLimits | None = None,
        watermarks: Watermarks | None = None,
        random: random_module.Random | None = None,
        growth: Growth | None = None,
        journal: Journal | None = None,
        eviction: type[Eviction] = LeastRecentlyUsed,
    ) -> None:
        random = random or random_module.SystemRandom()
        self.pool = pool
        self.limits = limits or CoreLimits()
        self.watermarks = watermarks or Watermarks()
        self.growth = growth or Growth()
        self.journal = journal
        self._reads = journal if journal is not None and journal.reads else None  # only if it follows reads
        self.clients: set[Client] = set()  # only `open_client` and `close_client` change it
        self.pins = PinTable(pool.footprint)
        """By leases, holds and hazards."""
        self.retention = Retention(pool, self.pins, self.limits, clock)
        """What ends at a time, and what is protected from eviction."""
        self.removal_log = RemovalLog(clock, random)
        """The last removals, while somebody follows them."""
        self.deletions = Deletions(random)
        """What keeps copies from other stores from bringing deleted keys back."""
        self.retired = self.make_retired()
        self.removals = self.make_removals()
        self.space = self.make_space()
        self.holds = Holds(pool, self.pins, self.retired, self.limits, clock=clock, random=random)
        self.hazard_pins = HazardPins(self.pins, self.retired)
        self.retired.scan_hazards, self.retired.unread_hazards = self.hazard_pins.scan, self.hazard_pins.unread
        self.committed = CommittedIndex(self._commit_written, self.retention, self.removals.expire, eviction)
        self.retention.look = self.committed.up_to_date
        self.unverified: Unverified | None = None
        """Blocks of an earlier process that nobody has hashed since; None if there are
        none."""
        self.hot_groups = HotGroups()
        self.hits = 0
        """Keys that a lease found, or a client without a request."""
        self.hit_bytes = 0
        """The lengths of their blocks."""
        self.misses = 0
        """Keys that a lease did not find."""
        self.puts = 0
        """Blocks committed, without those skipped."""
        self.put_bytes = 0
        """Their lengths."""

    def make_retired(self) -> Retired:
        """Make a part. Called once, as the two below; subclasses may make another."""
        return Retired(self.pool, self.pins)

    def make_removals(self) -> Removals:
        """Make a part."""
        return Removals(
            *(self.pool, self.retired, self.retention),
            log=self.removal_log,
            deletions=self.deletions,
            journal=self.journal,
        )

    def make_space(self) -> Space:
        """Make a part."""
        return Space(
            *(self.pool, self.pins, self.retired, self.removals, self.retention),
            watermarks=self.watermarks,
            growth=self.growth,
        )

    @property
    def index(self) -> Index:
        """The index, after everything written so far has been committed. An operation
        takes it once, before anything else: others may write between two reads. Most
        operations call `up_to_date` directly, which saves a call."""
        return self.committed.up_to_date()

    # Clients

    def open_client(self, name: str, *, counted: bool = True) -> Client:
        """Return a new client without pins or reservations. `name` is for messages;
        see `Client` for `counted`."""
        client = Client(name, counted=counted)
        self.clients.add(client)
        return client

    def close_client(self, client: Client) -> None:
        """Abort its reservations, release its leases, forget it; idempotent. The caller
        promises that nobody reads or writes the client's space any more."""
        if client.state == "closed":
            return
        self.commit_written()
        self.hazard_pins.remove(client)
        client.state = "closed"
        for reservation in list(client.reservations):
            self._abort(reservation)
        for lease in list(client.leases):
            self._release(lease)
        self.clients.remove(client)

    def quarantine(self, client: Client) -> None:
        """Keep all that the client has pinned until `close_client`: it may still write.

        From now on `abort` and `release` do nothing for it, and every other call raises
        ValueError.
        """
        if client.state == "open":
            client.state = "quarantined"

    def accept_hazards(
        self, client: Client, read_hazards: Callable[[], list[Hazard]], count_unread: Callable[[], int] = lambda: 1
    ) -> None:
        """Let a client pin blocks without a request, by the hazards it sets.

        `read_hazards` returns them, and may call `note_use`. It is called before space
        is reused (and after `on_removal`), and for the statistics; less often if there
        are many: `count_unread` returns about how many it would read, 0 if the same as
        the last time. Hazards for blocks that do not exist have no effect.
        """
        client.check_open()
        self.expect_hazards()
        self.hazard_pins.add(client, read_hazards, count_unread)

    def expect_hazards(self) -> None:
        """Prepare for `accept_hazards`: instant if empty, else 0.1 us per block."""
        if self.retired.stored is None:
            self.retired.expect_hazards(self.index.entries())

    def catch_up(self) -> None:
        """Commit what clients have written, and pin what they read, without a request.

        Call it before reading anything else that this changes, such as traffic.
        """
        self.commit_written()
        self.retired.reclaim()

    def scan_hazards(self, client: Client) -> None:
        """As `catch_up`, but scan the hazards of this client only."""
        self.commit_written()
        self.hazard_pins.scan_client(client)

    @property
    def max_pinned_bytes(self) -> int:
        """How much one client may lease and reserve together, in bytes."""
        return int(self.limits.max_pinned_ratio * self.pool.capacity_bytes)

    @property
    def on_removal(self) -> Callable[[Sequence[Entry]], object] | None:
        """Called with blocks that lose their keys, before their space is reused."""
        return self.removals.on_removal

    @on_removal.setter
    def on_removal(self, value: Callable[[Sequence[Entry]], object] | None) -> None:
        self.removals.on_removal = value

    # Writing

    def reserve(self, client: Client, sizes: Sequence[int]) -> Reservation:
        """Reserve space for one batch: a block per size (bytes, positive), in order.

        Evicts if the pool would be fuller than the high watermark. A batch that cannot
        fit beside what is leased, held and reserved evicts nothing. If free space is
        too fragmented, a bounded amount is evicted and the batch may still be refused;
        only this refusal changes anything.

        ValueTooLarge: a value is larger than the limit, or than the pool could ever
        place. LimitExceeded: too many keys in the batch, or too much pinned by this
        client. OutOfMemory: no space now.
        """
        client.check_open()
        index = self.committed.up_to_date()
        if self.hazard_pins.clients:
            self.hazard_pins.scan_in_turns(client, HAZARDS_PER_BLOCK)
        self.holds.expire()
        footprint_bytes = self._check_sizes(client, sizes)
        return self._open(client, self.space.reserve(index, sizes, footprint_bytes), footprint_bytes)

    def reserve_spare(self, client: Client, sizes: Sequence[int]) -> Reservation | None:
        """Reserve space for a batch that may come; None unless there is plenty.

        Evicts nothing. Raises what `reserve` does, except OutOfMemory.
        """
        client.check_open()
        footprint_bytes = self._check_sizes(client, sizes)
        extents = self.space.reserve_spare(sizes, footprint_bytes)
        return None if extents is None else self._open(client, extents, footprint_bytes)

    def _check_sizes(self, client: Client, sizes: Sequence[int]) -> int:
        """Check a batch that is to be reserved against the limits; return its footprint
        in bytes."""
        self.limits.check_batch(len(sizes))
        self.space.check_sizes(sizes, self.limits.max_value_bytes)
        footprint_bytes = self.pool.footprints(sizes)
        self.limits.check_share(client.name, client.pinned_bytes, footprint_bytes, self.pool.capacity_bytes)
        return footprint_bytes

    def _open(self, client: Client, extents: list[Extent], footprint_bytes: int) -> Reservation:
        reservation = Reservation(self.pool, client, extents, footprint_bytes)
        client.reserved_bytes += footprint_bytes
        client.reservations[reservation] = None
        return reservation

    def _close(self, reservation: Reservation, state: Literal["committed", "aborted"]) -> None:
        reservation.state = state
        self.space.reserved_bytes -= reservation.footprint_bytes
        reservation.client.reserved_bytes -= reservation.footprint_bytes
        reservation.client.reservations.pop(reservation, None)

    def commit(
        self,
        reservation: Reservation,
        keys: Sequence[str],
        checksums: Sequence[int] | None,
        *,
        replace: bool = True,
        free: bool = True,
        ttl_s: float = 0,
        since: int = 0,
    ) -> list[int]:
        """Name the blocks of a reservation, one key each, and make all of them visible.

        `checksums` are the xxh3-64 of the blocks; None if the writer made none. A key
        that exists is replaced. With `replace=False` it is kept and touched, and the
        space of its new block is freed. Returns the positions of the keys that were
        kept; the same again if the reservation is already committed.

        With `ttl_s`, the keys end after so many seconds, as if deleted.

        With `since`, a mark of `deletions`, this is a copy: it replaces nothing, and
        keys that were deleted since then are among the positions returned, too.

        With `free=False` the caller calls `free_replaced` after it has sent the answer:
        freeing the replaced blocks takes a third of the time.

        ValueError, and the reservation stays open: not one key (and checksum) per
        block, or a key twice. UnknownReservation: it was aborted.
        """
        index = self.committed.up_to_date()
        if reservation.state != "committed":
            self._check_names(reservation, keys, None if checksums is None else len(checksums))
            self._commit(index, reservation, keys, checksums, replace=replace, ttl_s=ttl_s, since=since)
        if free:
            self.retired.tidy()
        return reservation.skipped

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
        self.retired.tidy()

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
            self.removals.replace(index, keys, entries)
        elif index.disjoint(keys):
            index.insert(keys, entries)
        else:
            keys, entries = self._insert_missing(index, reservation, keys, entries)
        self.retired.note_stored(entries)
        self._close(reservation, "committed")
        if ttl_s and entries:
            self.retention.end_in(keys, ttl_s)
            if self.journal is not None:
                self.journal.append("delete", keys)  # what ends is in memory only, and so is its key
        self._count_put(reservation.client, keys, entries)

    def _count_put(self, client: Client, keys: Sequence[str], entries: Sequence[Entry]) -> None:
        """Count blocks that were committed, and tell the journal."""
        if self.journal is not None and entries:
            self.journal.append("put", keys, entries)
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
        if since:
            gone = self.deletions.since(since, keys)
            exists = [there | deleted for there, deleted in zip(exists, gone, strict=True)]
        reservation.skipped = [i for i, there in enumerate(exists) if there]
        self.pool.free([reservation.extents[i] for i in reservation.skipped])
        missing = [key for key, there in zip(keys, exists, strict=True) if not there]
        inserted = [entry for entry, there in zip(entries, exists, strict=True) if not there]
        index.insert(missing, inserted)
        index.touch(index.those_there(keys) if since else keys)
        return missing, inserted

    def free_replaced(self) -> None:
        """Free the blocks that commits with `free=False` replaced; idempotent."""
        self.retired.tidy()

    def prepare(self, reservation: Reservation, keys: Sequence[str], written: Written) -> bool:
        """Name the blocks of a reservation before they are written.

        They become visible, as by `commit` with `replace=True`, when `written` returns
        their checksums (an empty list if there are none) instead of None. It is called
        before every access to the index. Until then the place of a block with one of
        these keys may change at any moment: see `is_being_written`. Returns False, and
        changes nothing, if one of the keys is being written already.

        Errors are those of `commit`; UnknownReservation also if it was committed.
        """
        index = self.committed.up_to_date()
        self._check_names(reservation, keys, None)
        if self.committed.names_any(keys):
            return False
        self.removals.announce(list(filter(None, index.get_many(keys))))
        self.committed.prepare(reservation, keys, written)
        return True

    def is_being_written(self, keys: Sequence[str]) -> bool:
        """Whether a block with one of these keys may become visible at any moment."""
        return self.committed.names_any(keys)

    def commit_written(self) -> None:
        """Commit the prepared reservations that have been written by now."""
        self.committed.up_to_date()

    def abort(self, reservation: Reservation) -> None:
        """Free the space of a reservation; idempotent. No effect if it is committed."""
        self.commit_written()
        if reservation.client.state == "open":
            self._abort(reservation)

    def _abort(self, reservation: Reservation) -> None:
        if reservation.state == "open":
            self.committed.forget(reservation)
            self._close(reservation, "aborted")
            self.pool.free(reservation.extents)

    def write_one(self, client: Client, key: str, value: memoryview, checksum: int, *, replace: bool) -> bool:
        """Store a block; False if the key exists and is not to be replaced.

        The space of a replaced block is free after `free_replaced`. Errors
        are those of `reserve`; after one, nothing has changed.
        """
        client.check_open()
        index = self.committed.up_to_date()
        if self.hazard_pins.clients:
            self.hazard_pins.scan_in_turns(client, HAZARDS_PER_BLOCK)
        self.holds.expire()
        sizes = [len(value)]
        footprint_bytes = self._check_sizes(client, sizes)
        extents = self.space.reserve(index, sizes, footprint_bytes)
        self.space.reserved_bytes -= footprint_bytes
        entry = (*extents[0], checksum)
        try:
            self.pool.view(extents[0])[:] = value
            if replace:
                self.removals.replace(index, (key,), (entry,))
            elif index.get(key) is None:
                index.insert((key,), (entry,))
            else:
                index.touch_one(key)
        finally:
            stored = index.get(key) == entry
            if not stored:
                self.pool.free(extents)
        if stored:
            self.retired.note_stored((entry,))
            self._count_put(client, (key,), (entry,))
        return stored

    # Reading

    def lease(self, client: Client, keys: Sequence[str], *, max_bytes: int | None = None, touch: bool = True) -> Lease:
        """Pin the blocks of these keys and touch them. Missing keys pin nothing.

        With `max_bytes`, only as many leading keys as have that many bytes together,
        but at least one. The others are neither looked up nor counted. `touch` is as in
        `match_prefix`.

        A key may occur several times; each counts against the client's share.
        LimitExceeded, and nothing pinned or touched: too many keys, or too much pinned
        by this client.
        """
        index = self.committed.up_to_date()
        client.check_open()
        self.limits.check_batch(len(keys))
        entries = index.get_many(keys)
        found, pinned = _present(keys, entries)
        lengths = list(map(length_of, pinned))
        if max_bytes is not None and sum(lengths) > max_bytes:
            fitting = leading_within(entries, max_bytes)
            keys, entries = keys[:fitting], entries[:fitting]
            found, pinned = _present(keys, entries)
            lengths = list(map(length_of, pinned))
        if self.unverified is not None and self.unverified.verify(index, found):
            return self.lease(client, keys, max_bytes=max_bytes, touch=touch)  # without those that were dropped
        footprint_bytes = self.pool.footprints(lengths)
        self.hazard_pins.scan_client(client)
        self.limits.check_share(client.name, client.pinned_bytes, footprint_bytes, self.pool.capacity_bytes)
        self.pins.add(pinned, footprint_bytes)
        if touch:
            index.touch(found)
        all_lengths = (
            lengths if len(lengths) == len(keys) else [0 if entry is None else length_of(entry) for entry in entries]
        )
        lease = Lease(self.pool, client, entries, pinned, lengths=all_lengths, footprint_bytes=footprint_bytes)
        client.leased_bytes += footprint_bytes
        client.leases[lease] = None
        if client.counted:
            self.misses += len(keys) - len(pinned)
            if pinned:
                self._count_read(found, len(pinned), sum(lengths))
        return lease

    def find_one(self, client: Client, key: str) -> Entry | None:
        """Return the entry of a key, or None. This is no use of it: see `use_one`.

        Its bytes are to be copied at once: after the next call on the store they may be
        another block's. As nothing is pinned, this counts against no limit.
        """
        index = self.committed.up_to_date()
        client.check_open()
        unverified = self.unverified
        if unverified is not None and unverified.verify(index, (key,)):
            return None  # it was damaged, and has been dropped
        return index.get(key)

    def use_one(self, client: Client, key: str, entry: Entry | None) -> None:
        """Touch a key that `find_one` has just found, and count a read of its block;
        None counts as a miss."""
        if entry is not None:
            self.committed.touch_one(key)
        if not client.counted:
            return
        if entry is None:
            self.misses += 1
            return
        self._count_read((key,), 1, length_of(entry))

    def release(self, lease: Lease) -> None:
        """End a lease; idempotent. Its views must not be used any more."""
        if lease.client.state == "open":
            self._release(lease)

    def _release(self, lease: Lease) -> None:
        if not lease.released:
            lease.released = True
            lease.client.leased_bytes -= lease.footprint_bytes
            lease.client.leases.pop(lease, None)
            self.retired.unpin(lease.pinned, lease.footprint_bytes)

    def note_use(self, keys: Sequence[str], *, read: bool) -> int:
        """Touch keys that a client used without a request; return the bytes it read.

        With `read` their blocks count as read. Missing keys are ignored. LimitExceeded:
        too many keys.
        """
        self.limits.check_batch(len(keys))
        used = self.committed.use(keys)
        if not read:
            return 0
        read_bytes = sum(map(length_of, used))
        if used:
            self._count_read(keys, len(used), read_bytes)
        return read_bytes

    def _count_read(self, keys: Sequence[str], count: int, read_bytes: int) -> None:
        """Count a read of so many blocks of these keys."""
        self.hits += count
        self.hit_bytes += read_bytes
        groups = self.hot_groups
        groups.left -= count
        if groups.left < 0:
            groups.sample(keys)
        if self._reads is not None:
            self._reads.append("read", keys)

    def exists(self, keys: Sequence[str]) -> bytes:
        """Return one byte per key: 1 if it exists. LimitExceeded: too many."""
        index = self.committed.up_to_date()
        self.limits.check_batch(len(keys))
        return index.contains_many(keys)

    def match_prefix(self, keys: Sequence[str], *, touch: bool = True) -> int:
        """Count the leading keys that exist, up to the first that does not; touch them.

        With `touch=False` the caller calls `touch` after it has sent the answer:
        touching takes as long as the search. LimitExceeded: too many keys.
        """
        index = self.committed.up_to_date()
        self.limits.check_batch(len(keys))
        found = index.leading(keys)
        if touch:
            index.touch(found)
        return len(found)

    def touch(self, keys: Sequence[str]) -> None:
        """Make keys the most recent ones, the first key the most recent of all.

        Missing keys are ignored.
        """
        self.committed.touch(keys)

    def hold_prefix(self, client: Client, keys: Sequence[str], hold_s: float) -> tuple[int, int]:
        """Match a prefix and pin it for `hold_s` seconds; return (count, hold id).

        The hold outlives the client: it ends after its time, or with `release_hold`. If
        nothing matches, there is no hold and its id is 0. ValueError: `hold_s` is not
        positive. LimitExceeded, and nothing pinned or touched: too many keys, `hold_s`
        above the limit, or more than all holds together may pin.
        """
        client.check_open()
        self.limits.check_batch(len(keys))
        self.holds.check_time(hold_s)
        index = self.committed.up_to_date()
        self.holds.expire()
        found = index.leading(keys)
        if not found:
            return 0, 0
        entries: list[Entry] = index.get_many(found)  # type: ignore[assignment]
        hold_id = self.holds.add(entries, hold_s)
        index.touch(found)
        return len(found), hold_id

    def release_hold(self, hold_id: int) -> bool:
        """End a hold; False if there is none with this id, or no longer."""
        self.expire_holds()
        return self.holds.release(hold_id)

    def expire_holds(self) -> float | None:
        """End the holds whose time is over; return when the next ends, or None."""
        return self.holds.expire()

    # Removing

    def delete(self, keys: Sequence[str]) -> int:
        """Remove keys, and return how many were there. LimitExceeded: too many keys."""
        index = self.committed.up_to_date()
        self.limits.check_batch(len(keys))
        return self.removals.delete(index, keys)

    def purge(self, max_keys: int | None = None) -> int:
        """Remove all keys, or the coldest `max_keys`; return how many. 1 us per key."""
        return self.removals.purge(self.committed.up_to_date(), max_keys)

    def purge_in_slices(self) -> Iterator[int]:
        """Remove the keys that are there now, 4,096 at a time; yield how many. New
        keys stay."""
        return self.removals.purge_in_slices(self.committed.up_to_date)

    def evict(self, low: float, high: float, cause: EvictionCause = "manual", *, max_blocks: int | None = None) -> int:
        """Evict down to `low` of the capacity if more than `high` is used.

        Returns the number of blocks evicted. `max_blocks` bounds how many this call
        examines, about 1 us each, so that a caller can work in slices (after the first
        one, with `high` equal to `low`). ValueError unless 0 <= low <= high <= 1.
        """
        if not 0 <= low <= high <= 1:
            raise ValueError(f"watermarks must be 0 <= low <= high <= 1, not low={low} and high={high}")
        index = self.committed.up_to_date()
        self.retired.reclaim()  # which may free space
        capacity = self.pool.capacity_bytes
        if self.pool.used_bytes <= high * capacity:
            return 0
        self.expire_holds()
        return self.space.evict(index, self.pool.used_bytes - low * capacity, cause, max_blocks)

    def evict_keys(self, keys: Sequence[str]) -> int:
        """Evict these blocks, whether they are cold or not; return how many."""
        return self.space.evict_keys(self.committed.up_to_date(), keys)

    # Growth

    def add_arena(self, arena: Arena) -> None:
        """Add an arena to the pool. ValueError if it is out of order."""
        self.pool.add_arena(arena)
        self.growth.added(arena.length)

    # Looking

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.index)

    def keys(self, prefix: str = "", limit: int = 1000, after: str = "") -> list[str]:
        """Return up to `limit` keys with a prefix, after `after`, in code point order.

        Scans every key: 0.2 s for a million. A server filters `all_keys` in slices.
        """
        return first_keys(self.index, prefix, limit, after)

    def all_keys(self) -> list[str]:
        """Return every key, coldest first: about 15 ms for a million."""
        return list(self.index)

    def sample(self, limit: int) -> list[tuple[str, int]]:
        """Return up to `limit` keys with the lengths of their blocks: all, or a random
        sample. It takes 0.3 us per key, and a few milliseconds at most."""
        index = self.committed.up_to_date()
        keys = index.sample(limit)
        return list(zip(keys, map(length_of, filter(None, index.get_many(keys))), strict=True))

    def verify(self, key: str) -> bool:
        """Hash a stored block again; False if that is not its checksum: it is gone."""
        return not self.removals.drop_if_damaged(self.committed.up_to_date(), key)

    def statistics(self) -> StoreStatistics:
        """Return a snapshot. Only the clients are iterated over."""
        index = self.committed.up_to_date()
        self.retired.reclaim()
        quarantined = [client for client in self.clients if client.state == "quarantined"]
        return StoreStatistics(
            capacity_bytes=self.pool.capacity_bytes,
            growable_bytes=self.growth.growable_bytes,
            used_bytes=self.pool.used_bytes,
            reserved_bytes=self.space.reserved_bytes,
            pinned_bytes=self.pins.bytes,
            held_bytes=self.holds.bytes,
            condemned_bytes=self.pool.footprints(list(map(length_of, self.retired.condemned))),
            quarantined_bytes=sum(client.pinned_bytes for client in quarantined),
            keys=len(index),
            clients=sum(client.counted for client in self.clients),
            quarantined_clients=len(quarantined),
            reservations=sum(len(client.reservations) for client in self.clients),
            leases=sum(len(client.leases) + len(set(map(read_of, client.hazards))) for client in self.clients),
            holds=len(self.holds),
            arenas=len(self.pool.arenas),
            hits=self.hits,
            misses=self.misses,
            puts=self.puts,
            put_bytes=self.put_bytes,
            hit_bytes=self.hit_bytes,
            protected_keys=self.retention.protected_keys,
            protected_bytes=self.retention.protected_bytes,
            expired=self.removals.expired,
            deleted=self.removals.deleted,
            checksum_drops=self.removals.checksum_drops,
            evicted=EvictionStatistics(**self.space.evicted),
            wanted_capacity_bytes=round(index.reuse.wanted.pools * self.pool.capacity_bytes),
            hottest_group_share=self.hot_groups.share(),
            avoidable_puts=index.reuse.wanted.avoidable,
            allocator=self.pool.statistics(),
        )


def _present(keys: Sequence[str], entries: list[Entry | None]) -> tuple[Sequence[str], list[Entry]]:
    """Return the keys that are there, and their entries."""
    if all(entries):  # the usual case
        return keys, entries  # type: ignore[return-value]
    found = [key for key, entry in zip(keys, entries, strict=True) if entry is not None]
    return found, [entry for entry in entries if entry is not None]


def _duplicate(keys: Sequence[str]) -> str:
    return next(key for key, count in Counter(keys).items() if count > 1)
