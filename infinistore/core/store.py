"""StoreCore: the store itself, without sockets, tasks, threads or a clock of its own.

Every call is synchronous, takes a whole batch, and either does all of it or raises and changes nothing (but see
`reserve` on eviction). Same calls, same clock, same random numbers: same answers. So a plain model can check it.

What it promises:

- A reservation is seen by nobody until `commit`, which makes its whole batch visible at once. The last commit of a key
  wins.
- A lease pins. Eviction, deletion and replacement never move, free or re-use leased bytes; a block that loses its key
  while it is pinned gives its room back with the last pin.
- A batch touches its keys from last to first, so the head of a prefix outlives its tail. commit, lease and the matches
  touch; `exists` does not.
- Eviction is least recently used first. One `reserve` never evicts more than its batch needs plus a fixed number.
- Everything is bounded by `CoreLimits`.

What it leaves to others: to call from one thread at a time; to check keys where they enter (`check_keys`); to move
bytes; to promise, by calling `close_client`, that nobody touches the client's room any more; and to make arenas.

Growth is I/O, so it is not done here. While `growable_bytes` is positive and a reservation had to evict, or was
refused, `growth_wanted` is set and `on_growth_wanted` is called once. The server then makes an arena and calls
`add_arena`, which clears it (or `stop_growth`, when it cannot). Meanwhile, what does not fit is OutOfMemory.
"""

import heapq
import random as random_module
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Literal

import xxhash

from infinistore.core.arena import Arena
from infinistore.core.clients import Client, Lease, Reservation
from infinistore.core.eviction import EXTRA_STEPS, FRAGMENTATION_ROUNDS, FRAGMENTATION_STEPS, take_coldest
from infinistore.core.holds import Holds
from infinistore.core.index import NO_CHECKSUM, Entry, Index
from infinistore.core.limits import CoreLimits, Watermarks
from infinistore.core.pins import PinTable
from infinistore.core.pool import Pool
from infinistore.core.statistics import EvictionStatistics, StoreStatistics
from infinistore.errors import LimitExceeded, OutOfMemory, UnknownReservation, ValueTooLarge

__all__ = ["EvictionCause", "StoreCore"]

EvictionCause = Literal["on_demand", "fragmentation", "periodic", "manual"]

_EXTENT = itemgetter(0, 1, 2)
_LENGTH = itemgetter(2)


class StoreCore:
    """A key-value store over a pool of memory. Keys are str, values are bytes in the pool.

    `clock` returns seconds on a monotonic clock. `random` makes the ids of holds; without one they come from the
    operating system. `growable_bytes` is how much the pool may still grow.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        clock: Callable[[], float],
        limits: CoreLimits | None = None,
        watermarks: Watermarks | None = None,
        random: random_module.Random | None = None,
        growable_bytes: int = 0,
        on_growth_wanted: Callable[[], object] | None = None,
    ) -> None:
        self.pool = pool
        self.limits = limits or CoreLimits()
        self.watermarks = watermarks or Watermarks()
        self.growable_bytes = growable_bytes
        self.growth_wanted = False
        self.on_growth_wanted = on_growth_wanted
        self._clock = clock
        self._index = Index()
        self._pins = PinTable(pool.footprint)  # by leases and holds
        self._held = PinTable(pool.footprint)  # by holds alone
        self._holds = Holds(random or random_module.SystemRandom())
        self._condemned: set[Entry] = set()  # pinned, but no longer in the index
        self._clients: set[Client] = set()
        self._reserved_bytes = 0
        self._draining = False  # on the way from the high watermark down to the low one
        self._counters: Counter[str] = Counter()
        self._evicted: Counter[EvictionCause] = Counter()

    # Clients

    def open_client(self, name: str) -> Client:
        """Return a new client, which holds nothing. `name` is for messages."""
        client = Client(name)
        self._clients.add(client)
        return client

    def close_client(self, client: Client) -> None:
        """Abort the client's reservations, release its leases, and forget it; idempotent.

        The caller promises that nobody writes or reads in its room any more.
        """
        if client.state == "closed":
            return
        client.state = "closed"
        for reservation in list(client.reservations):
            self._abort(reservation)
        for lease in list(client.leases):
            self._release(lease)
        self._clients.remove(client)

    def quarantine(self, client: Client) -> None:
        """Keep all that the client holds until `close_client`: its connection is lost, but it may still write.

        From now on its `abort` and `release` do nothing, and everything else raises ValueError.
        """
        if client.state == "open":
            client.state = "quarantined"

    # Writing

    def reserve(self, client: Client, sizes: Sequence[int]) -> Reservation:
        """Take room for one batch: a block per size (bytes, positive), in order.

        Evicts when the pool would be fuller than the high watermark. A batch that cannot fit beside what is leased,
        held and reserved evicts nothing. One that has room, but not in large enough pieces, evicts a bounded amount
        and may be refused all the same; that is the only refusal that changes anything.

        ValueTooLarge: a value larger than the limit, or than the pool could ever place. LimitExceeded: too many keys
        in the batch, or too much held by this client. OutOfMemory: no room now.
        """
        self._check_open(client)
        self._check_batch(len(sizes))
        self.expire_holds()
        if sizes:
            self._check_sizes(min(sizes), max(sizes))
        footprint_bytes = sum(map(self.pool.footprint, sizes))
        self._check_share(client, footprint_bytes)
        self._make_room(footprint_bytes)
        extents = self.pool.allocate(sizes)
        rounds = 0
        while extents is None:
            self._make_larger_pieces(footprint_bytes, rounds)
            extents = self.pool.allocate(sizes)
            rounds += 1
        reservation = Reservation(self.pool, client, extents, footprint_bytes)
        self._reserved_bytes += footprint_bytes
        client.reserved_bytes += footprint_bytes
        client.reservations.add(reservation)
        return reservation

    def commit(
        self,
        reservation: Reservation,
        keys: Sequence[str],
        checksums: Sequence[int] | None,
        *,
        replace: bool = True,
    ) -> list[int]:
        """Name the blocks of a reservation, one key each, and make them all visible at once.

        `checksums` are the xxh3-64 of each block, or None when the writer made none. A key that exists is replaced;
        with `replace=False` it is left as it is (but touched), and the room of its new block is given back. Returns
        the positions of the keys that were skipped so; the same again when the reservation is already committed.

        ValueError, and the reservation stays open: not one key (and checksum) per block, a key twice.
        UnknownReservation: it was aborted.
        """
        if reservation.state == "committed":
            return reservation.skipped
        if reservation.state == "aborted":
            raise UnknownReservation("this reservation was aborted; reserve again and write the blocks again")
        self._check_open(reservation.client)
        blocks = len(reservation.extents)
        if len(keys) != blocks or (checksums is not None and len(checksums) != blocks):
            given = f"{len(keys)} keys" if checksums is None else f"{len(keys)} keys and {len(checksums)} checksums"
            raise ValueError(f"a reservation of {blocks} blocks needs as many keys (and checksums), not {given}")
        if len(set(keys)) != blocks:
            raise ValueError(f"a key may be in a put only once, and this one is there twice: {_duplicate(keys)!r:.80}")
        hashes = repeat(NO_CHECKSUM) if checksums is None else checksums
        columns = zip(*reservation.extents, strict=True)
        entries: list[Entry] = list(zip(*columns, hashes, strict=False)) if blocks else []
        self._close_reservation(reservation, "committed")
        if self._index.disjoint(keys):
            self._index.insert(keys, entries)
        elif replace:
            self._drop(self._index.remove_many(keys))
            self._index.insert(keys, entries)
        else:
            entries = self._insert_missing(reservation, keys, entries)
        self._counters["puts"] += len(entries)
        self._counters["put_bytes"] += sum(map(_LENGTH, entries))
        return reservation.skipped

    def abort(self, reservation: Reservation) -> None:
        """Give the room of a reservation back; idempotent, and nothing for one that is committed."""
        if reservation.client.state == "open":
            self._abort(reservation)

    # Reading

    def lease(self, client: Client, keys: Sequence[str], *, max_bytes: int | None = None) -> Lease:
        """Pin the blocks of these keys where they are, and touch them. A missing key pins nothing.

        With `max_bytes`, only as many leading keys as have that many bytes together, but at least one; the others are
        neither looked up nor counted.

        A key may be named more than once; it then counts as often against the client's share. LimitExceeded, and
        nothing pinned or touched: too many keys, or too much held by this client.
        """
        self._check_open(client)
        self._check_batch(len(keys))
        entries = self._index.get_many(keys)
        if max_bytes is not None:
            fitting = _leading_within(entries, max_bytes)
            keys, entries = keys[:fitting], entries[:fitting]
        found: Sequence[str] = keys
        pinned: list[Entry] = entries  # type: ignore[assignment]
        if None in entries:
            found = [key for key, entry in zip(keys, entries, strict=True) if entry is not None]
            pinned = [entry for entry in entries if entry is not None]
        lengths = list(map(_LENGTH, pinned))
        footprint_bytes = sum(map(self.pool.footprint, lengths))
        self._check_share(client, footprint_bytes)
        self._pins.add(pinned)
        self._index.touch(found)
        lease = Lease(self.pool, client, entries, pinned, footprint_bytes)
        client.leased_bytes += footprint_bytes
        client.leases.add(lease)
        self._counters["hits"] += len(pinned)
        self._counters["misses"] += len(keys) - len(pinned)
        self._counters["hit_bytes"] += sum(lengths)
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease; idempotent. Its views must not be used any more."""
        if lease.client.state == "open":
            self._release(lease)

    def exists(self, keys: Sequence[str]) -> bytes:
        """Return one byte per key: 1 if it is there, 0 if not. Touches nothing. LimitExceeded: too many keys."""
        self._check_batch(len(keys))
        return self._index.contains_many(keys)

    def match_prefix(self, keys: Sequence[str]) -> int:
        """Return how many of the leading keys are there, up to the first that is not, and touch those.

        LimitExceeded: too many keys.
        """
        self._check_batch(len(keys))
        found = self._index.leading(keys)
        self._index.touch(found)
        return len(found)

    def hold_prefix(self, client: Client, keys: Sequence[str], hold_s: float) -> tuple[int, int]:
        """Match a prefix, and pin what was counted for `hold_s` seconds. Returns (count, hold id).

        The hold does not end with the client: `release_hold` ends it from anywhere, and its time does. Id 0 with
        count 0: nothing matched, and there is no hold. ValueError: `hold_s` is not positive. LimitExceeded, and
        nothing pinned or touched: too many keys, `hold_s` above the limit, or more than all holds together may pin.
        """
        self._check_open(client)
        self._check_batch(len(keys))
        if not hold_s > 0:
            raise ValueError(f"hold_s must be more than 0 seconds, not {hold_s}")
        if hold_s > self.limits.max_hold_s:
            raise LimitExceeded(f"hold_s={hold_s:g} is above the limit max_hold_s={self.limits.max_hold_s:g} seconds")
        self.expire_holds()
        found = self._index.leading(keys)
        if not found:
            return 0, 0
        entries: list[Entry] = self._index.get_many(found)  # type: ignore[assignment]
        held_bytes = self._held.bytes + self._held.added_bytes(entries)
        bound_bytes = int(self.limits.max_held_ratio * self.pool.capacity_bytes)
        if held_bytes > bound_bytes:
            raise LimitExceeded(
                f"all holds together would pin {held_bytes} bytes, and max_held_ratio={self.limits.max_held_ratio:g}"
                f" allows {bound_bytes}; release holds sooner, hold a shorter prefix, or match without a hold"
            )
        self._pins.add(entries)
        self._held.add(entries)
        self._index.touch(found)
        return len(found), self._holds.add(entries, self._clock() + hold_s)

    def release_hold(self, hold_id: int) -> bool:
        """End a hold. False if there is none with this id: never made, released, or over."""
        self.expire_holds()
        entries = self._holds.remove(hold_id)
        if entries is None:
            return False
        self._unhold(entries)
        return True

    def expire_holds(self) -> float | None:
        """End the holds whose time is over. Returns when the next one ends, on the clock; None if there is none."""
        if not len(self._holds):
            return None
        for entries in self._holds.remove_ended(self._clock()):
            self._unhold(entries)
        return self._holds.next_end()

    # Removing

    def delete(self, keys: Sequence[str]) -> int:
        """Remove keys, and return how many were there. LimitExceeded: too many keys."""
        self._check_batch(len(keys))
        entries = self._index.remove_many(keys)
        self._drop(entries)
        self._counters["deleted"] += len(entries)
        return len(entries)

    def purge(self, max_keys: int | None = None) -> int:
        """Remove every key, or the coldest `max_keys` of them; return how many. About 1 us each."""
        count = len(self._index) if max_keys is None else min(max_keys, len(self._index))
        entries = [self._index.pop_coldest()[1] for _ in range(count)]
        self._drop(entries)
        self._counters["deleted"] += count
        return count

    def evict(self, low: float, high: float, cause: EvictionCause = "manual", *, max_blocks: int | None = None) -> int:
        """If more than `high` of the capacity is used, evict until at most `low` of it is. Returns blocks evicted.

        `max_blocks` bounds how many blocks this call looks at, about 1 us each, so that a caller can do it in slices
        (the slices after the first with `high` equal to `low`). ValueError unless 0 <= low <= high <= 1.
        """
        if not 0 <= low <= high <= 1:
            raise ValueError(f"watermarks must be 0 <= low <= high <= 1, not low={low} and high={high}")
        capacity = self.pool.capacity_bytes
        if self.pool.used_bytes <= high * capacity:
            return 0
        self.expire_holds()
        return self._evict(self.pool.used_bytes - low * capacity, cause, max_blocks)[0]

    # Looking

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._index)

    def keys(self, prefix: str = "", limit: int = 1000, after: str = "") -> list[str]:
        """Return up to `limit` keys that begin with `prefix` and come after `after`, in code point order.

        Looks at every key in the store: about 0.1 s for a million. For people and tools, not for the hot path.
        """
        found: Iterable[str] = filter(after.__lt__, self._index) if after else self._index
        if prefix:
            found = (key for key in found if key.startswith(prefix))
        return heapq.nsmallest(limit, found)

    def verify(self, key: str) -> bool:
        """Hash a stored block again, and drop it if it is not what its writer hashed.

        False if it was dropped. True if it is sound, has no checksum, or is not there. Does not touch.
        """
        entry = self._index.get(key)
        if entry is None or entry[3] == NO_CHECKSUM:
            return True
        if xxhash.xxh3_64_intdigest(self.pool.view(entry[:3])) == entry[3]:
            return True
        self._drop(self._index.remove_many([key]))
        self._counters["checksum_drops"] += 1
        return False

    def statistics(self) -> StoreStatistics:
        """Return a snapshot. Cheap: nothing is scanned but the clients."""
        quarantined = [client for client in self._clients if client.state == "quarantined"]
        counters = self._counters
        evicted = self._evicted
        return StoreStatistics(
            capacity_bytes=self.pool.capacity_bytes,
            growable_bytes=self.growable_bytes,
            used_bytes=self.pool.used_bytes,
            reserved_bytes=self._reserved_bytes,
            pinned_bytes=self._pins.bytes,
            held_bytes=self._held.bytes,
            condemned_bytes=sum(map(self.pool.footprint, map(_LENGTH, self._condemned))),
            quarantined_bytes=sum(client.pinned_bytes for client in quarantined),
            keys=len(self._index),
            clients=len(self._clients),
            quarantined_clients=len(quarantined),
            reservations=sum(len(client.reservations) for client in self._clients),
            leases=sum(len(client.leases) for client in self._clients),
            holds=len(self._holds),
            arenas=len(self.pool.arenas),
            hits=counters["hits"],
            misses=counters["misses"],
            puts=counters["puts"],
            put_bytes=counters["put_bytes"],
            hit_bytes=counters["hit_bytes"],
            deleted=counters["deleted"],
            checksum_drops=counters["checksum_drops"],
            evicted=EvictionStatistics(
                on_demand=evicted["on_demand"],
                fragmentation=evicted["fragmentation"],
                periodic=evicted["periodic"],
                manual=evicted["manual"],
            ),
            allocator=self.pool.statistics(),
        )

    # Growth

    def add_arena(self, arena: Arena) -> None:
        """Make the pool larger by an arena that was wanted, or by the first one."""
        self.pool.add_arena(arena)
        self.growable_bytes = max(0, self.growable_bytes - arena.length)
        self.growth_wanted = False

    def stop_growth(self) -> None:
        """Say that the pool stays as it is: there is no memory for another arena."""
        self.growable_bytes = 0
        self.growth_wanted = False

    def _want_growth(self) -> None:
        if self.growable_bytes > 0 and not self.growth_wanted:
            self.growth_wanted = True
            if self.on_growth_wanted is not None:
                self.on_growth_wanted()

    # Room

    def _make_room(self, wanted_bytes: int) -> None:
        """Evict what a batch of `wanted_bytes` needs, and a little more on the way down to the low watermark."""
        capacity = self.pool.capacity_bytes
        if wanted_bytes > capacity - self._pins.bytes - self._reserved_bytes:
            self._want_growth()
            raise self._out_of_memory(f"a batch of {wanted_bytes} bytes does not fit")
        excess = self.pool.used_bytes + wanted_bytes - self.watermarks.high * capacity
        if excess > 0:
            self._want_growth()
            self._draining = True
            self._evict(excess, "on_demand")
        if self._draining:
            excess = self.pool.used_bytes + wanted_bytes - self.watermarks.low * capacity
            evicted, _ = self._evict(excess, "on_demand", EXTRA_STEPS)
            self._draining = evicted == EXTRA_STEPS

    def _make_larger_pieces(self, wanted_bytes: int, rounds: int) -> None:
        """Evict for a batch that was refused although its bytes are free; OutOfMemory after the last round."""
        self._want_growth()
        if rounds < FRAGMENTATION_ROUNDS:
            steps = FRAGMENTATION_STEPS >> (FRAGMENTATION_ROUNDS - rounds)
            if self._evict(wanted_bytes << rounds, "fragmentation", steps)[0]:
                return
        raise self._out_of_memory(
            f"a batch of {wanted_bytes} bytes does not fit into the pieces that are free, and eviction did not join"
            " enough of them; blocks of one size do not splinter the pool"
        )

    def _evict(self, wanted_bytes: float, cause: EvictionCause, max_steps: int | None = None) -> tuple[int, int]:
        """Evict at least `wanted_bytes`, or all that can be. Returns (blocks, bytes) evicted."""
        evictable_bytes = self.pool.used_bytes - self._pins.bytes - self._reserved_bytes
        wanted_bytes = min(wanted_bytes, evictable_bytes)
        if wanted_bytes <= 0:
            return 0, 0
        steps = len(self._index) if max_steps is None else max_steps
        entries, evicted_bytes = take_coldest(self._index, self._pins.counts, self.pool.footprint, wanted_bytes, steps)
        self.pool.free(list(map(_EXTENT, entries)))
        self._evicted[cause] += len(entries)
        return len(entries), evicted_bytes

    def _out_of_memory(self, what: str) -> OutOfMemory:
        remedy = (
            "the pool is about to grow: try again in a moment"
            if self.growable_bytes > 0
            else "release leases and reservations sooner, write smaller batches, or give the server a larger pool"
        )
        return OutOfMemory(
            f"{what}: {self._pins.bytes} bytes are leased or held and {self._reserved_bytes} are being written, of"
            f" {self.pool.capacity_bytes} bytes in the pool; {remedy}"
        )

    def _drop(self, entries: list[Entry]) -> None:
        """Free blocks that have lost their key: now, or with their last pin."""
        pinned = self._pins.counts
        if pinned and not pinned.keys().isdisjoint(entries):
            self._condemned.update(entry for entry in entries if entry in pinned)
            entries = [entry for entry in entries if entry not in pinned]
        self.pool.free(list(map(_EXTENT, entries)))

    def _unpin(self, entries: Sequence[Entry]) -> None:
        ended = self._pins.remove(entries)
        if self._condemned and not self._condemned.isdisjoint(ended):
            gone = [entry for entry in ended if entry in self._condemned]
            self._condemned.difference_update(gone)
            self.pool.free(list(map(_EXTENT, gone)))

    def _unhold(self, entries: list[Entry]) -> None:
        self._held.remove(entries)
        self._unpin(entries)

    def _insert_missing(self, reservation: Reservation, keys: Sequence[str], entries: list[Entry]) -> list[Entry]:
        """Insert the keys of a batch that are not there, touch all of it, and give back the room of the others.

        Returns the entries that were inserted.
        """
        exists = self._index.contains_many(keys)
        reservation.skipped = [i for i, there in enumerate(exists) if there]
        self.pool.free([reservation.extents[i] for i in reservation.skipped])
        inserted = [entry for entry, there in zip(entries, exists, strict=True) if not there]
        self._index.insert([key for key, there in zip(keys, exists, strict=True) if not there], inserted)
        self._index.touch(keys)
        return inserted

    def _close_reservation(self, reservation: Reservation, state: Literal["committed", "aborted"]) -> None:
        reservation.state = state
        self._reserved_bytes -= reservation.footprint_bytes
        reservation.client.reserved_bytes -= reservation.footprint_bytes
        reservation.client.reservations.discard(reservation)

    def _abort(self, reservation: Reservation) -> None:
        if reservation.state == "open":
            self._close_reservation(reservation, "aborted")
            self.pool.free(reservation.extents)

    def _release(self, lease: Lease) -> None:
        if not lease.released:
            lease.released = True
            lease.client.leased_bytes -= lease.footprint_bytes
            lease.client.leases.discard(lease)
            self._unpin(lease.pinned)

    # Checks

    def _check_open(self, client: Client) -> None:
        if client.state != "open":
            raise ValueError(f"client {client.name!r} is {client.state}")

    def _check_batch(self, count: int) -> None:
        if count > self.limits.max_batch_keys:
            raise LimitExceeded(
                f"{count} keys in one batch are more than max_batch_keys={self.limits.max_batch_keys}; split the batch"
            )

    def _check_sizes(self, smallest: int, largest: int) -> None:
        if smallest <= 0:
            raise ValueError(f"a value must have at least one byte, not {smallest}")
        limit = self.limits.max_value_bytes
        if limit is not None and largest > limit:
            raise ValueTooLarge(f"a value of {largest} bytes is above the limit max_value_bytes={limit}")
        # No block spans two arenas, so the largest value is what the largest arena, or one still to come, can place.
        bound = max(self.pool.largest_arena_bytes, self.growable_bytes)
        if self.pool.footprint(largest) > bound:
            raise ValueTooLarge(
                f"a value of {largest} bytes is larger than the pool can ever place ({bound} bytes in one piece);"
                " split it, or give the server a larger pool"
            )

    def _check_share(self, client: Client, wanted_bytes: int) -> None:
        """Refuse more than one client's share of the pool; who holds nothing may have any one batch."""
        held_bytes = client.pinned_bytes
        bound_bytes = int(self.limits.max_pinned_ratio * self.pool.capacity_bytes)
        if held_bytes and held_bytes + wanted_bytes > bound_bytes:
            raise LimitExceeded(
                f"client {client.name!r} holds {held_bytes} bytes leased or reserved and asks for {wanted_bytes} more;"
                f" max_pinned_ratio={self.limits.max_pinned_ratio:g} allows {bound_bytes} bytes; release or commit"
                " first"
            )


def _duplicate(keys: Sequence[str]) -> str:
    return next(key for key, count in Counter(keys).items() if count > 1)


def _leading_within(entries: Sequence[Entry | None], max_bytes: int) -> int:
    """Return how many leading entries have at most `max_bytes` together, at least one (of a batch that has any)."""
    total = 0
    for position, entry in enumerate(entries):
        if entry is not None:
            total += entry[2]
            if total > max_bytes and position:
                return position
    return len(entries)
