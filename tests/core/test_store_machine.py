"""The store against the reference model: any sequence of calls, by any number of
clients.

Every block is written with bytes that no other block has, through the views of its
reservation. After every step, all bytes that anyone may read (stored, leased, being
written) are compared, so that a block placed over another one, moved or re-used too
early shows at once, whichever call did it. Recency is compared exactly, and so is every
count of bytes.

Two of the clients also read by themselves, and say what when they are asked. Often the
core has not asked yet when the next call comes. No room may go back before `on_removal`
was told that its block has lost its key.
"""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import pytest
import xxhash
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from examples.cold_first_eviction import ColdFirst
from infinistore.allocators import Extent
from infinistore.core import Client, CoreLimits, Journal, Lease, Pool, Reservation, StoreCore, Watermarks, create_arena
from infinistore.core.index import NO_CHECKSUM, Entry
from infinistore.core.journal import JournalItem
from infinistore.core.space import EXTRA_STEPS
from infinistore.errors import (
    InfiniStoreException,
    LimitExceeded,
    OutOfMemory,
    UnknownReservation,
    ValueTooLarge,
)
from infinistore.eviction import Eviction, eviction_class
from tests.core.conftest import make_allocator
from tests.core.model import Block, NoRoom, ReferenceStore
from tests.core.test_journal import replay
from tests.eviction.strategies import Passing

ARENA_BYTES = 4096  # one page: 64 units
KEYS = [f"prefix/{i}" for i in range(14)] + ["a", "ключ", "鍵/1"]
SIZES = [1, 63, 64, 65, 128, 200, 320, 640]
LIMITS = CoreLimits(
    max_value_bytes=3000,
    max_batch_keys=8,
    max_pinned_ratio=0.4,
    max_hold_s=10,
    max_held_ratio=0.25,
    max_protected_ratio=0.2,
)

READERS = (1, 3)
"""The slots of clients that read by themselves, too."""
NOT_THERE = [(7, 0, 64, 1), (0, 0, 0, 0), (0, 0, 2 * ARENA_BYTES + 1, 5), (2**16 - 1, 2**48 - 1, 2**64 - 1, 2**64 - 1)]

slots = st.sampled_from([0, 0, 1, 1, 2, 3])
sizes = st.lists(st.sampled_from(SIZES), max_size=6)
odd_sizes = st.lists(st.sampled_from([0, -1, 64, 2000, 3000, 3001, 5000]), min_size=1, max_size=9)
some_keys = st.lists(st.sampled_from(KEYS), max_size=8)
ratios = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])


@attrs.define(eq=False)
class ClientState:
    real: Client
    name: str
    state: str = "open"
    reserved: int = 0
    leased: int = 0
    reservations: "list[ReservationState]" = attrs.field(factory=list)
    leases: "list[LeaseState]" = attrs.field(factory=list)
    own_reads: "list[OwnReadState]" = attrs.field(factory=list)

    @property
    def pinned(self) -> int:
        return self.reserved + self.leased

    def look(self) -> list[tuple[int, int, int, int, int]]:
        """What it reads by itself, with something else in between that cannot be."""
        rows = [(*entry, read.number) for read in self.own_reads for entry in read.entries]
        return [row for own in rows for row in (own, *((*wrong, own[4]) for wrong in NOT_THERE))]


@attrs.define(eq=False)
class ReservationState:
    real: Reservation
    client: ClientState
    contents: list[bytes]
    room: int
    state: str = "open"
    skipped: list[int] = attrs.field(factory=list)
    names: list[str] | None = None
    checksums: list[int] | None = None

    def look(self) -> list[int] | None:
        """The checksums, when its client has written it by itself."""
        return self.checksums


@attrs.define(eq=False)
class LeaseState:
    real: Lease
    client: ClientState
    blocks: list[Block | None]
    views: list[memoryview | None]
    footprint: int
    open: bool = True


@attrs.define(eq=False)
class OwnReadState:
    client: ClientState
    number: int
    entries: list[Entry]
    blocks: list[Block]

    @property
    def footprint(self) -> int:
        return sum(block.footprint for block in self.blocks)


class WatchedPool(Pool):
    """Takes no room back before it was told that the block there has lost its key."""

    untold: frozenset[Extent] | set[Extent] = frozenset()

    def free(self, extents: Sequence[Extent]) -> None:
        assert self.untold.isdisjoint(extents)
        super().free(extents)

    def told(self, entries: Sequence[Entry]) -> None:
        assert entries
        self.untold -= {entry[:3] for entry in entries}


THEN: list[tuple[str, list[Any]]] = [
    ("abort_what_is_not_open", []),
    ("close_client", [2]),
    ("delete", [KEYS[:7]]),
    ("evict", [[0.25, 0.5]]),
    ("exists", [KEYS[:8]]),
    ("hold_prefix", [0, KEYS[:3], 0.5]),
    ("lease", [0, KEYS[:8], 400]),
    ("list_keys", ["", 20, ""]),
    ("match_prefix", [KEYS[:8]]),
    ("purge", [2]),
    ("put", [1, {KEYS[0]: 64, KEYS[2]: 128}, True]),
    ("put", [1, {KEYS[0]: 64, KEYS[2]: 128}, False]),
    ("put_single", [1, KEYS[0], 64, True, True]),
    ("put_single", [1, KEYS[0], 64, True, False]),
    ("get_single", [1, KEYS[0], True]),
    ("reserve", [0, [640]]),
    ("reserve_and_prepare", [1, {KEYS[0]: 64, KEYS[1]: 1}]),
    ("statistics_agree", []),
]
"""What may come first after something was written, or has ended."""


class StoreMachine(RuleBasedStateMachine):
    """Drives a `StoreCore` and the model side by side. The test sets `allocator_name`.

    With another strategy of eviction than the least recently used, the model takes over
    the order of the keys before any of them may leave. So it does not know why a key is
    where it is, but the blocks that leave have to be the first ones of that order.
    """

    allocator_name: str
    eviction: type[Eviction] = eviction_class("lru")

    reservations = Bundle("reservations")
    leases = Bundle("leases")
    holds = Bundle("holds")
    own_reads = Bundle("own_reads")

    @initialize(watermarks=st.sampled_from([(0.8, 0.95), (0.5, 0.5), (1.0, 1.0), (0.25, 0.75)]))
    def start(self, watermarks: tuple[float, float]) -> None:
        self.now = 100.0
        self.pool = WatchedPool(make_allocator(self.allocator_name))
        self.core = StoreCore(
            self.pool,
            clock=lambda: self.now,
            limits=LIMITS,
            watermarks=Watermarks(*watermarks),
            random=random.Random(1),
            journal=Journal(),
            eviction=self.eviction,
        )
        self.journaled: list[JournalItem] = []
        self.core.on_removal = self.pool.told
        self.core.add_arena(create_arena(0, ARENA_BYTES))
        self.model = ReferenceStore(ARENA_BYTES, self.pool.allocator.footprint, *watermarks, EXTRA_STEPS)
        self.model.most_protected = LIMITS.max_protected_ratio
        self.written = 0
        self.preparing: list[ReservationState] = []
        self.checksums: dict[Block, int] = {}
        self.reads = 0
        self.is_unseen = False
        self.clients: dict[int, ClientState] = {}
        self.all_clients: list[ClientState] = []
        for slot in range(4):
            self.open_client(slot)
        self.open_holds: dict[int, tuple[float, list[Block]]] = {}
        self.counts = dict.fromkeys(
            ["hits", "misses", "puts", "put_bytes", "hit_bytes", "deleted", "checksum_drops", "expired"], 0
        )
        self.evicted = 0

    def teardown(self) -> None:
        """Whatever happened: when all is given back, all room is there again, in one
        piece.
        """
        if not hasattr(self, "pool"):
            return
        for client in self.all_clients:
            self.core.close_client(client.real)
        for hold_id in self.open_holds:
            self.core.release_hold(hold_id)
        self.core.purge()
        assert self.pool.used_bytes == 0
        assert self.pool.statistics().extents == 0
        for arena in self.pool.arenas:
            assert self.pool.allocate([arena.length]) is not None
        self.pool.close()

    # Clients: four places that are always taken. The first two stay; who leaves another
    # makes room for somebody new.

    @rule(slot=st.sampled_from([2, 3]))
    def close_client(self, slot: int) -> None:
        client = self.clients[slot]
        self.core.close_client(client.real)
        client.state = "closed"
        for reservation in client.reservations:
            self.model_abort(reservation)
        for lease in list(client.leases):
            self.model_release(lease)
        for read in list(client.own_reads):
            self.model_end(read)
        self.core.close_client(client.real)  # again: nothing
        for refused in (self.core.reserve, self.core.lease):
            self.expect(ValueError, refused, client.real, [])
        self.open_client(slot)

    @rule(slot=st.sampled_from([2, 3]))
    def quarantine(self, slot: int) -> None:
        self.core.quarantine(self.clients[slot].real)
        self.clients[slot].state = "quarantined"

    def open_client(self, slot: int) -> None:
        name = f"client {len(self.all_clients)}"
        self.clients[slot] = ClientState(self.core.open_client(name), name)
        self.all_clients.append(self.clients[slot])
        if slot in READERS:
            self.core.accept_hazards(self.clients[slot].real, self.clients[slot].look)

    # Writing

    @rule(target=reservations, slot=slots, sizes=st.one_of(sizes, sizes, sizes, odd_sizes))
    def reserve(self, slot: int, sizes: list[int]) -> Any:
        self.take_over_order()
        client = self.clients[slot]
        if client.state == "open":
            self.model_expire()
        error = self.reserve_error(client, sizes)
        fragmented = self.fragmented()
        if error is not None:
            self.expect(error, self.core.reserve, client.real, sizes)
            return multiple()
        before = self.model.used
        try:
            room = self.model.reserve(sizes)
        except NoRoom:
            self.expect(OutOfMemory, self.core.reserve, client.real, sizes)
            assert self.model.used == before
            return multiple()
        try:
            real = self.core.reserve(client.real, sizes)
        except OutOfMemory:
            event("refused by fragmentation")
            assert self.pool.allocate(sizes) is None
            self.model.abort(room)
            self.model_fragmentation(fragmented)
            return multiple()
        self.model_fragmentation(fragmented)
        reservation = ReservationState(real, client, [self.unique_bytes(size) for size in sizes], room)
        client.reserved += room
        client.reservations.append(reservation)
        views = real.views
        assert [len(view) for view in views] == sizes
        for view, content in zip(views, reservation.contents, strict=True):
            view[:] = content
        assert b"".join(real.merged_views) == b"".join(reservation.contents)
        return reservation

    @rule(
        reservation=consumes(reservations) | reservations,
        keys=st.permutations(KEYS),
        more=st.sampled_from([0, 0, 0, 0, 1, -1]),
        duplicate=st.sampled_from([False, False, False, True]),
        hashed=st.booleans(),
        replace=st.booleans(),
        ttl_s=st.sampled_from([0, 0, 0.5, 3.0]),
    )
    def commit(  # noqa: PLR0917
        self,
        reservation: ReservationState,
        keys: list[str],
        more: int,
        duplicate: bool,
        hashed: bool,
        replace: bool,
        ttl_s: float = 0,
    ) -> None:
        keys = keys[: max(0, len(reservation.contents) + more)]
        if duplicate and len(keys) > 1:
            keys[-1] = keys[0]
        checksums = [xxhash.xxh3_64_intdigest(content) for content in reservation.contents] if hashed else None
        commit = partial(self.core.commit, ttl_s=ttl_s)
        if reservation.state == "committed":
            assert commit(reservation.real, keys, checksums, replace=replace) == reservation.skipped
        elif reservation.state == "aborted":
            self.expect(UnknownReservation, commit, reservation.real, keys, checksums, replace=replace)
        elif not self.can_be_named(reservation, keys):
            self.expect(ValueError, commit, reservation.real, keys, checksums, replace=replace)
        else:
            self.model_commit(reservation, keys, replace=replace, ttl_s=ttl_s)
            assert commit(reservation.real, keys, checksums, replace=replace) == reservation.skipped

    @rule(
        reservation=reservations,
        keys=st.permutations(KEYS),
        more=st.sampled_from([0, 0, 0, 0, 1, -1]),
        duplicate=st.sampled_from([False, False, False, True]),
    )
    def prepare(self, reservation: ReservationState, keys: list[str], more: int, duplicate: bool) -> None:
        keys = keys[: max(0, len(reservation.contents) + more)]
        if duplicate and len(keys) > 1:
            keys[-1] = keys[0]
        prepare = self.core.prepare
        if reservation.state != "open":
            self.expect(UnknownReservation, prepare, reservation.real, keys, reservation.look)
        elif not self.can_be_named(reservation, keys):
            self.expect(ValueError, prepare, reservation.real, keys, reservation.look)
        else:
            is_free = not self.is_being_written(keys)
            assert prepare(reservation.real, keys, reservation.look) == is_free
            if is_free:
                reservation.names = keys
                self.preparing.append(reservation)

    @rule(slot=slots, pairs=st.dictionaries(st.sampled_from(KEYS), st.sampled_from(SIZES), min_size=1, max_size=4))
    def reserve_and_prepare(self, slot: int, pairs: dict[str, int]) -> None:
        reservation = self.reserve(slot, list(pairs.values()))
        if isinstance(reservation, ReservationState):
            self.prepare(reservation, list(pairs), 0, duplicate=False)

    @rule(most=st.integers(1, 3), first=st.booleans(), hashed=st.booleans(), then=st.sampled_from(THEN))
    @precondition(lambda self: self.prepared())
    def write_what_was_prepared(self, most: int, first: bool, hashed: bool, then: tuple[str, list[Any]]) -> None:
        """Write what was prepared first, or last, and then do something that looks, or
        removes, or writes.
        """
        prepared = self.prepared()
        for reservation in prepared[:most] if first else prepared[-most:]:
            assert reservation.names is not None
            checksums = [xxhash.xxh3_64_intdigest(content) for content in reservation.contents]
            reservation.checksums = checksums if hashed else []
            self.model_commit(reservation, reservation.names, replace=True)
        name, arguments = then
        getattr(self, name)(*arguments)

    @rule(
        slot=slots,
        pairs=st.dictionaries(st.sampled_from(KEYS[:8]), st.sampled_from(SIZES), min_size=1, max_size=4),
        then=st.sampled_from(THEN),
    )
    def put_alone(self, slot: int, pairs: dict[str, int], then: tuple[str, list[Any]]) -> None:
        """What is written as soon as it is prepared: what most is."""
        self.reserve_and_prepare(slot, pairs)
        if self.prepared():
            self.write_what_was_prepared(1, False, hashed=True, then=then)

    @rule(keys=some_keys)
    def is_written(self, keys: list[str]) -> None:
        assert self.core.is_being_written(keys) == self.is_being_written(keys)

    @rule(
        slot=slots,
        pairs=st.dictionaries(st.sampled_from(KEYS), st.sampled_from(SIZES), min_size=1, max_size=8),
        replace=st.booleans(),
        ttl_s=st.sampled_from([0, 0, 0.25, 0.5, 3.0]),
    )
    def put(self, slot: int, pairs: dict[str, int], replace: bool, ttl_s: float = 0) -> None:
        """A reservation that is committed at once: what most are."""
        reservation = self.reserve(slot, list(pairs.values()))
        if isinstance(reservation, ReservationState):
            self.commit(reservation, list(pairs), 0, False, hashed=True, replace=replace, ttl_s=ttl_s)

    @rule(
        slot=slots,
        key=st.sampled_from(KEYS),
        size=st.sampled_from([*SIZES, 0, 2000, 3000, 3001]),
        hashed=st.booleans(),
        replace=st.booleans(),
    )
    def put_single(self, slot: int, key: str, size: int, hashed: bool, replace: bool) -> None:
        """What has come whole is written in one step."""
        self.take_over_order()
        client, content = self.clients[slot], self.unique_bytes(size)
        checksum = xxhash.xxh3_64_intdigest(content) if hashed else NO_CHECKSUM
        write = partial(self.core.write_one, client.real, key, memoryview(content), checksum, replace=replace)
        if client.state == "open":
            self.model_expire()
        error = self.reserve_error(client, [size])
        if error is not None:
            self.expect(error, write)
            return
        fragmented = self.fragmented()
        try:
            room = self.model.reserve([size])
        except NoRoom:
            self.expect(OutOfMemory, write)
            return
        try:
            stored = write()
        except OutOfMemory:
            assert self.pool.allocate([size]) is None
            self.model.abort(room)
            self.model_fragmentation(fragmented)
            return
        self.model_fragmentation(fragmented)
        self.core.free_replaced()
        skipped = self.model.commit(room, [(key, content)], replace=replace)
        assert stored == (not skipped)
        self.counts["puts"] += stored
        self.counts["put_bytes"] += size * stored

    @rule(
        slot=slots,
        key=st.sampled_from(KEYS),
        ttl_s=st.sampled_from([0, 0.25, 0.5]),
        protected=st.booleans(),
        seconds=st.sampled_from([0, 0.25]),
        then=st.sampled_from(["get", "put", "put_missing"]),
    )
    def single_of_what_ends_or_is_protected(  # noqa: PLR0917
        self, slot: int, key: str, ttl_s: float, protected: bool, seconds: float, then: str
    ) -> None:
        self.put(slot, {key: 64}, True, ttl_s)
        if protected:
            self.protect([key])
        self.let_time_pass(seconds)
        if then == "get":
            self.get_single(slot, key, used=True)
        else:
            self.put_single(slot, key, 128, True, then == "put")

    @rule(slot=slots, first=st.integers(0, len(KEYS) - 8), size=st.sampled_from(SIZES))
    def put_run(self, slot: int, first: int, size: int) -> None:
        """Eight neighbours of one size."""
        self.put(slot, dict.fromkeys(KEYS[first : first + 8], size), replace=True)

    def abort_what_is_not_open(self) -> None:
        """What was written is committed, whoever has looked: to abort it changes
        nothing.
        """
        for client in self.all_clients:
            for reservation in client.reservations:
                if reservation.state == "committed":
                    self.core.abort(reservation.real)

    @rule(reservation=consumes(reservations))
    def abort(self, reservation: ReservationState) -> None:
        self.core.abort(reservation.real)
        if reservation.client.state == "open":
            self.model_abort(reservation)

    # Reading

    @rule(target=leases, slot=slots, keys=some_keys, max_bytes=st.none() | st.integers(0, 400))
    def lease(self, slot: int, keys: list[str], max_bytes: int | None) -> Any:
        client = self.clients[slot]
        asked, keys = keys, keys if max_bytes is None else self.leading_within(keys, max_bytes)
        wanted = sum(self.model.blocks[key].footprint for key in keys if key in self.model.blocks)
        if client.state != "open":
            self.expect(ValueError, self.core.lease, client.real, asked, max_bytes=max_bytes)
            return multiple()
        if client.pinned and wanted and client.pinned + wanted > LIMITS.max_pinned_ratio * self.model.capacity:
            self.expect(LimitExceeded, self.core.lease, client.real, asked, max_bytes=max_bytes)
            return multiple()
        blocks = self.model.find(keys)
        real = self.core.lease(client.real, asked, max_bytes=max_bytes)
        lease = LeaseState(real, client, blocks, real.views, wanted)
        for block in blocks:
            if block is not None:
                block.leases += 1
        client.leased += wanted
        client.leases.append(lease)
        present = [block.data for block in blocks if block is not None]
        assert real.lengths == [0 if block is None else len(block.data) for block in blocks]
        assert b"".join(real.merged_views) == b"".join(present)
        assert all(view.readonly for view in [*real.merged_views, *lease.views] if view is not None)
        self.counts["hits"] += len(present)
        self.counts["hit_bytes"] += sum(map(len, present))
        self.counts["misses"] += len(blocks) - len(present)
        return lease

    @rule(slot=slots, key=st.sampled_from(KEYS), used=st.booleans())
    def get_single(self, slot: int, key: str, used: bool) -> None:
        """What is copied at once is not pinned, and does not count against a share."""
        client, core = self.clients[slot], self.core
        if client.state != "open":
            self.expect(ValueError, core.find_one, client.real, key)
            return
        entry, block = core.find_one(client.real, key), self.model.blocks.get(key)
        assert (None if entry is None else bytes(self.pool.view(entry))) == (None if block is None else block.data)
        if used:
            core.use_one(client.real, key, entry)
            self.model.find([key])
            self.counts["hits"] += block is not None
            self.counts["hit_bytes"] += 0 if block is None else len(block.data)
            self.counts["misses"] += block is None

    @rule(lease=consumes(leases) | leases)
    def release(self, lease: LeaseState) -> None:
        self.core.release(lease.real)
        if lease.client.state == "open":
            self.model_release(lease)

    @rule(target=own_reads, slot=st.sampled_from(READERS), keys=some_keys, unseen=st.booleans())
    def read_without_asking(self, slot: int, keys: list[str], unseen: bool) -> Any:
        client = self.clients[slot]
        keys = [key for key in keys if key in self.model.blocks]
        if client.state != "open" or not keys:
            return multiple()
        self.reads += 1
        entries = [entry for entry in map(self.core.index.get, keys) if entry is not None]
        read = OwnReadState(client, self.reads, entries, [self.model.blocks[key] for key in keys])
        client.own_reads.append(read)
        client.leased += read.footprint
        for block in read.blocks:
            block.leases += 1
        self.is_unseen = unseen
        return read

    @rule(read=consumes(own_reads), unseen=st.booleans())
    def end_read_without_asking(self, read: OwnReadState, unseen: bool) -> None:
        self.model_end(read)
        self.is_unseen = unseen

    @rule(keys=some_keys, read=st.booleans())
    def note_use(self, keys: list[str], read: bool) -> None:
        present = [block.data for block in self.model.find(keys) if block is not None]
        used = sum(map(len, present)) if read else 0
        assert self.core.note_use(keys, read=read) == used
        self.counts["hits"] += len(present) * read
        self.counts["hit_bytes"] += used

    @rule(keys=some_keys)
    def exists(self, keys: list[str]) -> None:
        assert list(map(bool, self.core.exists(keys))) == self.model.exists(keys)

    @rule(keys=some_keys)
    def match_prefix(self, keys: list[str]) -> None:
        assert self.core.match_prefix(keys) == self.model.match_prefix(keys)

    @rule(
        target=holds,
        slot=slots,
        keys=st.integers(1, 5).map(lambda count: KEYS[:count]) | some_keys,
        hold_s=st.sampled_from([0.5, 3.0, 10.0, 10.5, 0.0, -1.0]),
    )
    def hold_prefix(self, slot: int, keys: list[str], hold_s: float) -> Any:
        client = self.clients[slot]
        if client.state != "open" or hold_s <= 0:
            self.expect(ValueError, self.core.hold_prefix, client.real, keys, hold_s)
            return multiple()
        if hold_s > LIMITS.max_hold_s:
            self.expect(LimitExceeded, self.core.hold_prefix, client.real, keys, hold_s)
            return multiple()
        self.model_expire()
        count = self.model.count_prefix(keys)
        blocks = [self.model.blocks[key] for key in keys[:count]]
        new = {block for block in blocks if not block.holds}
        if count and self.model.held + sum(block.footprint for block in new) > (
            LIMITS.max_held_ratio * self.model.capacity
        ):
            self.expect(LimitExceeded, self.core.hold_prefix, client.real, keys, hold_s)
            return multiple()
        found, hold_id = self.core.hold_prefix(client.real, keys, hold_s)
        assert found == self.model.match_prefix(keys)
        assert bool(hold_id) == bool(found)
        if not found:
            return multiple()
        assert hold_id not in self.open_holds
        for block in blocks:
            block.holds += 1
        self.open_holds[hold_id] = (self.now + hold_s, blocks)
        return hold_id

    @rule(hold_id=consumes(holds) | st.sampled_from([0, 1]))
    def release_hold(self, hold_id: int) -> None:
        self.model_expire()
        assert self.core.release_hold(hold_id) == (hold_id in self.open_holds)
        self.model_unhold(hold_id)

    @rule(seconds=st.sampled_from([0.25, 0.5, 2.5, 10.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        self.counts["expired"] += self.model.expire(self.now)

    # How long keys stay

    @rule(seconds=st.sampled_from([0.25, 0.5, 2.5]), then=st.sampled_from(THEN))
    def let_time_pass_before_anything_looks(self, seconds: float, then: tuple[str, list[Any]]) -> None:
        self.let_time_pass(seconds)
        name, arguments = then
        getattr(self, name)(*arguments)

    @rule(keys=some_keys, ttl_s=st.sampled_from([0, 0, 0.25, 0.5, 3.0]))
    def protect(self, keys: list[str], ttl_s: float = 0) -> None:
        try:
            expected = self.model.protect(keys, self.now + ttl_s if ttl_s else float("inf"))
        except NoRoom:
            self.expect(LimitExceeded, self.core.retention.protect, keys, ttl_s)
        else:
            assert list(map(bool, self.core.retention.protect(keys, ttl_s))) == expected

    @rule(keys=some_keys)
    def unprotect(self, keys: list[str]) -> None:
        expected = self.model.unprotect(keys)
        assert list(map(bool, self.core.retention.unprotect(keys))) == expected

    @rule(keys=some_keys)
    def times_left(self, keys: list[str]) -> None:
        ends = [self.model.blocks[key].end if key in self.model.blocks else self.now for key in keys]
        expected = [None if end == float("inf") else end - self.now for end in ends]
        assert self.core.retention.times_left(keys) == expected

    @rule(keys=some_keys)
    def evict_keys(self, keys: list[str]) -> None:
        present = {key for key in keys if key in self.model.blocks and not self.model.blocks[key].protected}
        assert self.core.evict_keys(keys) == self.model.delete(list(present))

    @rule()
    def expire_holds(self) -> None:
        self.model_expire()
        assert self.core.expire_holds() == min((end for end, _ in self.open_holds.values()), default=None)

    # Removing

    @rule(keys=some_keys)
    def delete(self, keys: list[str]) -> None:
        deleted = self.model.delete(keys)
        assert self.core.delete(keys) == deleted
        self.counts["deleted"] += deleted

    @rule(max_keys=st.sampled_from([0, 1, 1, 2, 2, 3, 3, None]))
    @precondition(lambda self: len(self.model.blocks) > 4)
    def purge(self, max_keys: int | None) -> None:
        self.take_over_order()
        purged = self.model.purge(max_keys)
        assert self.core.purge(max_keys) == purged
        self.counts["deleted"] += purged

    @rule(ratios=st.tuples(ratios, ratios).map(sorted))
    def evict(self, ratios: list[float]) -> None:
        self.take_over_order()
        low, high = ratios
        if self.model.used > high * self.model.capacity:
            self.model_expire()
        evicted = self.model.evict(low, high)
        assert self.core.evict(low, high) == evicted

    @rule(key=st.sampled_from(KEYS), damage=st.booleans())
    def verify(self, key: str, damage: bool) -> None:
        block = self.model.blocks.get(key)
        entry = self.core.index.get(key)
        sound = True
        if block is not None and entry is not None and entry[3] and damage and not block.pinned:
            self.pool.view(entry[:3])[0] ^= 1
            self.model.unlink(key)
            self.counts["checksum_drops"] += 1
            sound = False
        assert self.core.verify(key) == sound

    @rule(
        prefix=st.sampled_from(["", "prefix/", "prefix/1", "к"]),
        limit=st.integers(0, 20),
        after=st.sampled_from(["", *KEYS]),
    )
    def list_keys(self, prefix: str, limit: int, after: str) -> None:
        assert self.core.keys(prefix, limit, after) == self.model.keys(prefix, limit, after)

    @rule()
    @precondition(lambda self: len(self.pool.arenas) < 2)
    def add_arena(self) -> None:
        self.core.add_arena(create_arena(len(self.pool.arenas), ARENA_BYTES))
        self.model.capacity += ARENA_BYTES

    # What must hold after every step

    @invariant()
    def keys_and_recency_agree(self) -> None:
        keys = list(self.core.index)
        if self.eviction.name == "lru":
            assert keys == list(self.model.blocks)
        else:
            assert sorted(keys) == sorted(self.model.blocks)
            self.model.blocks = {key: self.model.blocks[key] for key in keys}

    @invariant()
    def the_journal_knows_every_block(self) -> None:
        assert self.core.journal is not None
        self.journaled += self.core.journal.take()
        known = replay(self.journaled)
        assert [known.get(key) for key in self.core.index] == list(self.core.index.entries())
        self.journaled = [("put", list(known), list(known.values()))]

    @invariant()
    def stored_bytes_are_those_written(self) -> None:
        for key, block in self.model.blocks.items():
            entry = self.core.index.get(key)
            assert entry is not None
            assert self.pool.view(entry[:3]) == block.data

    @invariant()
    def leased_bytes_never_change(self) -> None:
        for client in self.all_clients:
            for lease in client.leases:
                for view, block in zip(lease.views, lease.blocks, strict=True):
                    assert (view is None) == (block is None)
                    if view is not None and block is not None:
                        assert view == block.data

    @invariant()
    def bytes_that_a_client_reads_by_itself_never_change(self) -> None:
        for client in self.all_clients:
            for read in client.own_reads:
                for entry, block in zip(read.entries, read.blocks, strict=True):
                    assert self.pool.view(entry[:3]) == block.data

    @invariant()
    def every_removal_was_told(self) -> None:
        stored = {entry[:3] for entry in map(self.core.index.get, self.model.blocks) if entry is not None}
        assert self.pool.untold <= stored
        self.pool.untold = stored

    @invariant()
    def held_and_reserved_bytes_never_change(self) -> None:
        for client in self.all_clients:
            for reservation in client.reservations:
                if reservation.state == "open":
                    assert reservation.real.views == reservation.contents

    @invariant()
    def statistics_agree(self) -> None:
        if self.is_unseen:  # to ask for statistics is to ask what clients read by themselves
            self.is_unseen = False
            return
        statistics = self.core.statistics()
        model = self.model
        open_clients = [client for client in self.all_clients if client.state != "closed"]
        quarantined = [client for client in open_clients if client.state == "quarantined"]
        expected = {
            "capacity_bytes": model.capacity,
            "used_bytes": model.used,
            "reserved_bytes": model.reserved,
            "pinned_bytes": model.pinned,
            "held_bytes": model.held,
            "protected_bytes": model.protected,
            "protected_keys": sum(block.protected for block in model.blocks.values()),
            "condemned_bytes": sum(block.footprint for block in model.condemned),
            "quarantined_bytes": sum(client.pinned for client in quarantined),
            "keys": len(model.blocks),
            "clients": len(open_clients),
            "quarantined_clients": len(quarantined),
            "reservations": sum(r.state == "open" for client in open_clients for r in client.reservations),
            "leases": sum(len(client.leases) + len(client.own_reads) for client in open_clients),
            "holds": len(self.open_holds),
            "arenas": len(self.pool.arenas),
            **self.counts,
        }
        assert {name: getattr(statistics, name) for name in expected} == expected
        assert statistics.used_bytes == statistics.allocator.used_bytes
        for client in self.all_clients:
            assert client.real.pinned_bytes == client.pinned

    # The model's side of what takes more than a line

    def prepared(self) -> list[ReservationState]:
        """What has names and may be written, in the order in which it becomes visible
        if all of it is.
        """
        return [reservation for reservation in self.preparing if reservation.state == "open"]

    def is_being_written(self, keys: list[str]) -> bool:
        return any(not set(keys).isdisjoint(one.names or ()) for one in self.prepared())

    def can_be_named(self, reservation: ReservationState, keys: list[str]) -> bool:
        fits = len(keys) == len(reservation.contents) and len(set(keys)) == len(keys)
        return fits and reservation.client.state == "open" and reservation.names is None

    def fragmented(self) -> int:
        return self.core.space.evicted["fragmentation"]

    def model_commit(self, reservation: ReservationState, keys: list[str], *, replace: bool, ttl_s: float = 0) -> None:
        items = list(zip(keys, reservation.contents, strict=True))
        skipped = self.model.commit(reservation.room, items, replace=replace)
        for key in set(keys).difference(skipped) if ttl_s else ():
            self.model.blocks[key].end = self.now + ttl_s
        reservation.state = "committed"
        reservation.client.reserved -= reservation.room
        reservation.skipped = [keys.index(key) for key in skipped]
        new = [content for key, content in items if key not in skipped]
        self.counts["puts"] += len(new)
        self.counts["put_bytes"] += sum(map(len, new))

    def reserve_error(self, client: ClientState, sizes: list[int]) -> type[Exception] | None:
        wanted = self.model.footprints(sizes)
        if client.state != "open":
            return ValueError
        if len(sizes) > LIMITS.max_batch_keys:
            return LimitExceeded
        if any(size <= 0 for size in sizes):
            return ValueError
        if any(size > 3000 for size in sizes):
            return ValueTooLarge
        if client.pinned and wanted and client.pinned + wanted > LIMITS.max_pinned_ratio * self.model.capacity:
            return LimitExceeded
        return None

    def leading_within(self, keys: list[str], max_bytes: int) -> list[str]:
        """The batch is cut before the first block, other than its very first key's,
        that makes it too long.
        """
        total = 0
        for position, key in enumerate(keys):
            if key in self.model.blocks:
                total += len(self.model.blocks[key].data)
                if position and total > max_bytes:
                    return keys[:position]
        return keys

    def take_over_order(self) -> None:
        """With any strategy but the least recently used, the core has to look before
        anyone knows what leaves first."""
        if self.eviction.name != "lru":
            self.core.exists([])
            self.keys_and_recency_agree()

    def model_fragmentation(self, before: int) -> None:
        """Let the model evict what the allocator's geometry cost: only the real one can
        know how much that is.
        """
        self.model.evict_blocks(self.core.space.evicted["fragmentation"] - before)

    def model_abort(self, reservation: ReservationState) -> None:
        if reservation.state == "open":
            reservation.state = "aborted"
            self.model.abort(reservation.room)
            reservation.client.reserved -= reservation.room

    def model_release(self, lease: LeaseState) -> None:
        if lease.open:
            lease.open = False
            lease.client.leased -= lease.footprint
            lease.client.leases = [other for other in lease.client.leases if other is not lease]
            for block in lease.blocks:
                if block is not None:
                    block.leases -= 1
            self.model.unpinned()

    def model_end(self, read: OwnReadState) -> None:
        if read in read.client.own_reads:  # not after its client was closed
            read.client.own_reads.remove(read)
            read.client.leased -= read.footprint
            for block in read.blocks:
                block.leases -= 1
            self.model.unpinned()

    def model_unhold(self, hold_id: int) -> None:
        _, blocks = self.open_holds.pop(hold_id, (0.0, []))
        for block in blocks:
            block.holds -= 1
        self.model.unpinned()

    def model_expire(self) -> None:
        for hold_id, (end, _) in list(self.open_holds.items()):
            if end <= self.now:
                self.model_unhold(hold_id)

    def unique_bytes(self, size: int) -> bytes:
        self.written += 1
        return (self.written.to_bytes(4, "little") * size)[:size]

    def expect(self, error: type[Exception], call: Any, *arguments: Any, **options: Any) -> None:
        """The call is refused with exactly this class."""
        with pytest.raises(error) as raised:
            call(*arguments, **options)
        assert type(raised.value) is error
        assert error is ValueError or issubclass(error, InfiniStoreException)


@pytest.mark.parametrize("eviction", [eviction_class("adaptive"), Passing, ColdFirst])
def test_a_store_does_what_the_model_does_with_any_eviction(eviction: type[Eviction]) -> None:
    machine = type("Machine", (StoreMachine,), {"allocator_name": "bitmap", "eviction": eviction})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=60, report_multiple_bugs=False))


@pytest.mark.parametrize("allocator", ["bitmap", "slab", pytest.param("first-fit", marks=pytest.mark.nightly)])
def test_the_store_does_what_the_model_does(allocator: str) -> None:
    machine = type("Machine", (StoreMachine,), {"allocator_name": allocator})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=60, report_multiple_bugs=False))
