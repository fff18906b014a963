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

import random as random_module
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from operator import itemgetter
from typing import Literal

import xxhash

from infinistore.allocators.base import Extent
from infinistore.core.arena import Arena
from infinistore.core.clients import Client, Lease, OwnRead, Reservation
from infinistore.core.holds import Holds
from infinistore.core.index import NO_CHECKSUM, Entry, Index, first_keys, leading_within
from infinistore.core.limits import CoreLimits, Watermarks
from infinistore.core.own_pins import OwnPins
from infinistore.core.pins import PinTable
from infinistore.core.pool import Pool
from infinistore.core.prepared import Prepared, Written
from infinistore.core.room import EvictionCause, Room
from infinistore.core.statistics import EvictionStatistics, StoreStatistics
from infinistore.errors import UnknownReservation

__all__ = ["StoreCore"]

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
        self._index = Index()
        self._pins = PinTable(pool.footprint)  # by leases and holds
        self._clients: set[Client] = set()
        self._prepared = Prepared()
        self._room = Room(pool, self._index, self._pins, watermarks or Watermarks())
        self._holds = Holds(
            pool, self._pins, self._room, self.limits, clock=clock, random=random or random_module.SystemRandom()
        )
        self._own_pins = OwnPins(pool, self._pins, self._room)
        self._room.look_at_pins = self._own_pins.look
        self._room.growable_bytes = growable_bytes
        self._room.on_growth_wanted = on_growth_wanted
        self._counters: Counter[str] = Counter()

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
        self.settle()
        self._own_pins.remove(client)
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

    def let_read(self, client: Client, look: Callable[[], list[OwnRead]]) -> None:
        """Let a client pin blocks by itself, too: those that `look` tells of, whenever it is asked.

        It is asked before room is used again, after `on_removal` was told of the removal, and for the statistics. It
        may tell of blocks that are not there, and never were. It may also call `note_use`.
        """
        self._check_open(client)
        self._own_pins.add(client, look)

    def catch_up(self) -> None:
        """Bring up to date what clients have done by themselves: commit what they have written, and pin what they read.

        Whoever looks at more than this object tells, at traffic for example, calls it first.
        """
        self.settle()
        self._own_pins.look()

    @property
    def max_pinned_bytes(self) -> int:
        """How much one client may hold, leased and reserved together: see `CoreLimits.max_pinned_ratio`."""
        return int(self.limits.max_pinned_ratio * self.pool.capacity_bytes)

    @property
    def on_removal(self) -> Callable[[Sequence[Entry]], object] | None:
        """Called with blocks that lose their keys, before their room is used again."""
        return self._room.on_removal

    @on_removal.setter
    def on_removal(self, value: Callable[[Sequence[Entry]], object] | None) -> None:
        self._room.on_removal = value

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
        self.catch_up()
        self.expire_holds()
        self.limits.check_batch(len(sizes))
        self._room.check_sizes(sizes, self.limits.max_value_bytes)
        footprint_bytes = self.pool.footprints(sizes)
        self.limits.check_share(client.name, client.pinned_bytes, footprint_bytes, self.pool.capacity_bytes)
        return self._open_reservation(client, self._room.reserve(sizes, footprint_bytes), footprint_bytes)

    def reserve_spare(self, client: Client, sizes: Sequence[int]) -> Reservation | None:
        """As `reserve`, for a batch that may come: None if there is not plenty of room. Evicts nothing.

        Raises what `reserve` does, but not OutOfMemory.
        """
        self._check_open(client)
        self.limits.check_batch(len(sizes))
        self._room.check_sizes(sizes, self.limits.max_value_bytes)
        footprint_bytes = self.pool.footprints(sizes)
        self.limits.check_share(client.name, client.pinned_bytes, footprint_bytes, self.pool.capacity_bytes)
        extents = self._room.reserve_spare(sizes, footprint_bytes)
        return None if extents is None else self._open_reservation(client, extents, footprint_bytes)

    def commit(
        self,
        reservation: Reservation,
        keys: Sequence[str],
        checksums: Sequence[int] | None,
        *,
        replace: bool = True,
        free: bool = True,
    ) -> list[int]:
        """Name the blocks of a reservation, one key each, and make them all visible at once.

        `checksums` are the xxh3-64 of each block, or None when the writer made none. A key that exists is replaced;
        with `replace=False` it is left as it is (but touched), and the room of its new block is given back. Returns
        the positions of the keys that were skipped so; the same again when the reservation is already committed.

        With `free=False` it leaves the room of the blocks that were replaced to the caller, who calls `free_replaced`
        as soon as the answer is on its way: giving it back takes a third of the time.

        ValueError, and the reservation stays open: not one key (and checksum) per block, a key twice.
        UnknownReservation: it was aborted.
        """
        self.settle()
        if reservation.state == "committed":
            return reservation.skipped
        self._check_names(reservation, keys, None if checksums is None else len(checksums))
        self._commit(reservation, keys, checksums, replace=replace)
        if free:
            self.free_replaced(reservation)
        return reservation.skipped

    def prepare(self, reservation: Reservation, keys: Sequence[str], written: Written) -> bool:
        """Name the blocks of a reservation that is still being written; keys that exist will be replaced.

        They become visible, as by `commit`, when `written` returns their checksums, or an empty list if their writer
        made none; until then it returns None. It is asked before anything is looked up. From now on, nobody should
        rely on where blocks with these keys were: `is_being_written`. False, and nothing is done, if that is so of one
        of the keys already.

        Errors are those of `commit`; UnknownReservation also if it was committed.
        """
        self.settle()
        self._check_names(reservation, keys, None)
        if self._prepared.names_any(keys):
            return False
        self._room.tell_removal(list(filter(None, self._index.get_many(keys))))
        self._prepared.add(reservation, keys, written)
        return True

    def is_being_written(self, keys: Sequence[str]) -> bool:
        """Whether a block with one of these keys may become visible at any moment."""
        return self._prepared.names_any(keys)

    def settle(self) -> None:
        """Commit what was prepared and has been written by now."""
        for reservation, keys, checksums in self._prepared.take_written():
            self._commit(reservation, keys, checksums or None, replace=True)
            self.free_replaced(reservation)

    def _check_names(self, reservation: Reservation, keys: Sequence[str], checksums: int | None) -> None:
        """Check that keys, and so many checksums if there are any, fit a reservation that is open."""
        if reservation.state != "open":
            raise UnknownReservation(
                f"this reservation was {reservation.state}; reserve again and write the blocks again"
            )
        self._check_open(reservation.client)
        blocks = len(reservation.extents)
        if len(keys) != blocks or checksums not in (None, blocks):
            given = f"{len(keys)} keys" if checksums is None else f"{len(keys)} keys and {checksums} checksums"
            raise ValueError(f"a reservation of {blocks} blocks needs as many keys (and checksums), not {given}")
        if len(set(keys)) != blocks:
            raise ValueError(f"a key may be in a put only once, and this one is there twice: {_duplicate(keys)!r:.80}")
        if reservation in self._prepared:
            raise ValueError("this reservation was prepared: its blocks have names already")

    def _commit(
        self, reservation: Reservation, keys: Sequence[str], checksums: Sequence[int] | None, *, replace: bool
    ) -> None:
        entries = reservation.entries(checksums)
        self._close_reservation(reservation, "committed")
        if replace:
            reservation.replaced = self._index.remove_many(keys)
            self._room.tell_removal(reservation.replaced)
            self._index.insert(keys, entries)
        elif self._index.disjoint(keys):
            self._index.insert(keys, entries)
        else:
            entries = self._insert_missing(reservation, keys, entries)
        self._counters["puts"] += len(entries)
        self._counters["put_bytes"] += sum(map(_LENGTH, entries))

    def free_replaced(self, reservation: Reservation) -> None:
        """Give back the room of the blocks that a commit with `free=False` replaced; idempotent."""
        if reservation.replaced:
            replaced, reservation.replaced = reservation.replaced, []
            self._room.drop(replaced)

    def abort(self, reservation: Reservation) -> None:
        """Give the room of a reservation back; idempotent, and nothing for one that is committed."""
        self.settle()
        if reservation.client.state == "open":
            self._abort(reservation)

    # Reading

    def lease(self, client: Client, keys: Sequence[str], *, max_bytes: int | None = None, touch: bool = True) -> Lease:
        """Pin the blocks of these keys where they are, and touch them. A missing key pins nothing. `touch` is as in
        `match_prefix`.

        With `max_bytes`, only as many leading keys as have that many bytes together, but at least one; the others are
        neither looked up nor counted.

        A key may be named more than once; it then counts as often against the client's share. LimitExceeded, and
        nothing pinned or touched: too many keys, or too much held by this client.
        """
        self.settle()
        self._check_open(client)
        self.limits.check_batch(len(keys))
        entries = self._index.get_many(keys)
        found, pinned = _present(keys, entries)
        lengths = list(map(_LENGTH, pinned))
        if max_bytes is not None and sum(lengths) > max_bytes:
            fitting = leading_within(entries, max_bytes)
            keys, entries = keys[:fitting], entries[:fitting]
            found, pinned = _present(keys, entries)
            lengths = list(map(_LENGTH, pinned))
        footprint_bytes = self.pool.footprints(lengths)
        self._own_pins.look_at(client)
        self.limits.check_share(client.name, client.pinned_bytes, footprint_bytes, self.pool.capacity_bytes)
        self._pins.add(pinned, footprint_bytes)
        if touch:
            self._index.touch(found)
        all_lengths = lengths if len(lengths) == len(keys) else [0 if entry is None else entry[2] for entry in entries]
        lease = Lease(self.pool, client, entries, pinned, lengths=all_lengths, footprint_bytes=footprint_bytes)
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

    def note_use(self, keys: Sequence[str], *, read: bool) -> int:
        """Touch keys that a client used by itself, and with `read` count their blocks as read; return those bytes.

        Those that are gone are passed over. LimitExceeded: too many keys.
        """
        self.limits.check_batch(len(keys))
        found, used = _present(keys, self._index.get_many(keys))
        self._index.touch(found)
        if not read:
            return 0
        read_bytes: int = sum(map(_LENGTH, used))
        self._counters["hits"] += len(used)
        self._counters["hit_bytes"] += read_bytes
        return read_bytes

    def exists(self, keys: Sequence[str]) -> bytes:
        """Return one byte per key: 1 if it is there, 0 if not. Touches nothing. LimitExceeded: too many keys."""
        self.settle()
        self.limits.check_batch(len(keys))
        return self._index.contains_many(keys)

    def match_prefix(self, keys: Sequence[str], *, touch: bool = True) -> int:
        """Return how many of the leading keys are there, up to the first that is not, and touch those.

        With `touch=False` it leaves that to the caller, who calls `touch` as soon as the answer is on its way: moving a
        thousand keys to the warm end takes as long as finding them. LimitExceeded: too many keys.
        """
        self.settle()
        self.limits.check_batch(len(keys))
        found = self._index.leading(keys)
        if touch:
            self._index.touch(found)
        return len(found)

    def touch(self, keys: Sequence[str]) -> None:
        """Make the keys the warmest, the first of them the warmest of all; those that are gone are passed over."""
        try:
            self._index.touch(keys)
        except KeyError:
            self._index.touch([key for key in keys if self._index.get(key) is not None])

    def hold_prefix(self, client: Client, keys: Sequence[str], hold_s: float) -> tuple[int, int]:
        """Match a prefix, and pin what was counted for `hold_s` seconds. Returns (count, hold id).

        The hold does not end with the client: `release_hold` ends it from anywhere, and its time does. Id 0 with
        count 0: nothing matched, and there is no hold. ValueError: `hold_s` is not positive. LimitExceeded, and
        nothing pinned or touched: too many keys, `hold_s` above the limit, or more than all holds together may pin.
        """
        self._check_open(client)
        self.limits.check_batch(len(keys))
        self._holds.check_time(hold_s)
        self.settle()
        self.expire_holds()
        found = self._index.leading(keys)
        if not found:
            return 0, 0
        entries: list[Entry] = self._index.get_many(found)  # type: ignore[assignment]
        hold_id = self._holds.add(entries, hold_s)
        self._index.touch(found)
        return len(found), hold_id

    def release_hold(self, hold_id: int) -> bool:
        """End a hold. False if there is none with this id: never made, released, or over."""
        self.expire_holds()
        return self._holds.release(hold_id)

    def expire_holds(self) -> float | None:
        """End the holds whose time is over. Returns when the next one ends, on the clock; None if there is none."""
        return self._holds.expire()

    # Removing

    def delete(self, keys: Sequence[str]) -> int:
        """Remove keys, and return how many were there. LimitExceeded: too many keys."""
        self.settle()
        self.limits.check_batch(len(keys))
        entries = self._index.remove_many(keys)
        self._room.remove(entries)
        self._counters["deleted"] += len(entries)
        return len(entries)

    def purge(self, max_keys: int | None = None) -> int:
        """Remove every key, or the coldest `max_keys` of them; return how many. About 1 us each."""
        self.settle()
        count = len(self._index) if max_keys is None else min(max_keys, len(self._index))
        entries = [self._index.pop_item(False)[1] for _ in range(count)]
        self._room.remove(entries)
        self._counters["deleted"] += count
        return count

    def evict(self, low: float, high: float, cause: EvictionCause = "manual", *, max_blocks: int | None = None) -> int:
        """If more than `high` of the capacity is used, evict until at most `low` of it is. Returns blocks evicted.

        `max_blocks` bounds how many blocks this call looks at, about 1 us each, so that a caller can do it in slices
        (the slices after the first with `high` equal to `low`). ValueError unless 0 <= low <= high <= 1.
        """
        if not 0 <= low <= high <= 1:
            raise ValueError(f"watermarks must be 0 <= low <= high <= 1, not low={low} and high={high}")
        self.catch_up()  # which may give room back
        capacity = self.pool.capacity_bytes
        if self.pool.used_bytes <= high * capacity:
            return 0
        self.expire_holds()
        return self._room.evict(self.pool.used_bytes - low * capacity, cause, max_blocks)

    # Looking

    def __len__(self) -> int:
        """Return the number of keys."""
        self.settle()
        return len(self._index)

    def keys(self, prefix: str = "", limit: int = 1000, after: str = "") -> list[str]:
        """Return up to `limit` keys that begin with `prefix` and come after `after`, in code point order.

        Looks at every key in the store: about 0.2 s for a million. For people and tools, not for the hot path; a server
        takes `all_keys` and looks through them in slices.
        """
        self.settle()
        return first_keys(self._index, prefix, limit, after)

    def all_keys(self) -> list[str]:
        """Return every key, coldest first: about 15 ms for a million."""
        self.settle()
        return list(self._index)

    def sample(self, limit: int) -> list[tuple[str, int]]:
        """Return up to `limit` keys with the lengths of their blocks: all of them, or the coldest and the warmest half
        and half.

        About 0.1 us a key, however many keys there are.
        """
        self.settle()
        if len(self._index) <= limit:
            keys = list(self._index)
        else:
            keys = [*islice(self._index, limit - limit // 2), *islice(reversed(self._index), limit // 2)]
        return list(zip(keys, map(_LENGTH, filter(None, self._index.get_many(keys))), strict=True))

    def verify(self, key: str) -> bool:
        """Hash a stored block again, and drop it if it is not what its writer hashed.

        False if it was dropped. True if it is sound, has no checksum, or is not there. Does not touch.
        """
        self.settle()
        entry = self._index.get(key)
        if entry is None or entry[3] == NO_CHECKSUM:
            return True
        if xxhash.xxh3_64_intdigest(self.pool.view(entry[:3])) == entry[3]:
            return True
        self._room.remove(self._index.remove_many([key]))
        self._counters["checksum_drops"] += 1
        return False

    def statistics(self) -> StoreStatistics:
        """Return a snapshot. Cheap: nothing is scanned but the clients."""
        self.catch_up()
        quarantined = [client for client in self._clients if client.state == "quarantined"]
        counters = self._counters
        evicted = self._room.evicted
        return StoreStatistics(
            capacity_bytes=self.pool.capacity_bytes,
            growable_bytes=self._room.growable_bytes,
            used_bytes=self.pool.used_bytes,
            reserved_bytes=self._room.reserved_bytes,
            pinned_bytes=self._pins.bytes,
            held_bytes=self._holds.bytes,
            condemned_bytes=self.pool.footprints(list(map(_LENGTH, self._room.condemned))),
            quarantined_bytes=sum(client.pinned_bytes for client in quarantined),
            keys=len(self._index),
            clients=len(self._clients),
            quarantined_clients=len(quarantined),
            reservations=sum(len(client.reservations) for client in self._clients),
            leases=sum(len(client.leases) + len({read[4] for read in client.reading}) for client in self._clients),
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

    @property
    def growable_bytes(self) -> int:
        """How much larger the pool may still become: as set, less what was added since."""
        return self._room.growable_bytes

    @growable_bytes.setter
    def growable_bytes(self, value: int) -> None:
        self._room.growable_bytes = value

    @property
    def on_growth_wanted(self) -> Callable[[], object] | None:
        """Called, without arguments, each time that `growth_wanted` becomes true."""
        return self._room.on_growth_wanted

    @on_growth_wanted.setter
    def on_growth_wanted(self, value: Callable[[], object] | None) -> None:
        self._room.on_growth_wanted = value

    @property
    def growth_wanted(self) -> bool:
        """A reservation had to evict, or was refused, while the pool could still grow. `add_arena` clears it."""
        return self._room.growth_wanted

    def add_arena(self, arena: Arena) -> None:
        """Make the pool larger by an arena: the first one, or one that was wanted. ValueError if it is out of turn."""
        self.pool.add_arena(arena)
        self._room.growable_bytes = max(0, self._room.growable_bytes - arena.length)
        self._room.growth_wanted = False

    def stop_growth(self) -> None:
        """Say that the pool stays as it is, because there is no memory for another arena."""
        self._room.growable_bytes = 0
        self._room.growth_wanted = False

    # Pins and room

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

    def _open_reservation(self, client: Client, extents: list[Extent], footprint_bytes: int) -> Reservation:
        reservation = Reservation(self.pool, client, extents, footprint_bytes)
        client.reserved_bytes += footprint_bytes
        client.reservations.add(reservation)
        return reservation

    def _close_reservation(self, reservation: Reservation, state: Literal["committed", "aborted"]) -> None:
        reservation.state = state
        self._room.reserved_bytes -= reservation.footprint_bytes
        reservation.client.reserved_bytes -= reservation.footprint_bytes
        reservation.client.reservations.discard(reservation)

    def _abort(self, reservation: Reservation) -> None:
        if reservation.state == "open":
            self._prepared.remove(reservation)
            self._close_reservation(reservation, "aborted")
            self.pool.free(reservation.extents)

    def _release(self, lease: Lease) -> None:
        if not lease.released:
            lease.released = True
            lease.client.leased_bytes -= lease.footprint_bytes
            lease.client.leases.discard(lease)
            self._room.unpin(lease.pinned, lease.footprint_bytes)

    # Checks

    def _check_open(self, client: Client) -> None:
        if client.state != "open":
            raise ValueError(f"client {client.name!r} is {client.state}")


def _present(keys: Sequence[str], entries: list[Entry | None]) -> tuple[Sequence[str], list[Entry]]:
    """Return the keys that are there, and their entries."""
    if all(entries):  # nearly always
        return keys, entries  # type: ignore[return-value]
    found = [key for key, entry in zip(keys, entries, strict=True) if entry is not None]
    return found, [entry for entry in entries if entry is not None]


def _duplicate(keys: Sequence[str]) -> str:
    return next(key for key, count in Counter(keys).items() if count > 1)
