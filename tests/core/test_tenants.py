"""Tenants that share a pool: what each of them sees, may take, and keeps."""

import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from infinistore.core import Client, CoreLimits, Pool, StoreCore, Watermarks, create_arena
from infinistore.core.clients import Hazard
from infinistore.core.index import Entry
from infinistore.core.tenants import Tenants, TenantStore
from infinistore.errors import ConfigError, LimitExceeded, OutOfMemory
from infinistore.tenant_limits import TenantLimits
from tests.core.conftest import UNIT_BYTES, FakeClock, make_allocator
from tests.simulation.buggify import BuggifiedTenantStore, Buggify, Point

UNITS = 64
ARENA_BYTES = UNITS * UNIT_BYTES
MakeTenants = Callable[..., Tenants]


def limits(tenant: str, *, reserved: int = 0, most: int | None = None, **others: Any) -> TenantLimits:
    """The limits of a tenant, with sizes in units."""
    most_bytes = None if most is None else most * UNIT_BYTES
    return TenantLimits(tenant, reserved_bytes=reserved * UNIT_BYTES, max_bytes=most_bytes, **others)


@pytest.fixture
def make_tenants(clock: FakeClock) -> Iterator[MakeTenants]:
    """Returns make_tenants(*limits, **options of Tenants): tenants that share 64
    units, which may all be used.
    """
    pools: list[Pool] = []

    def make(*tenants: TenantLimits, units: int = UNITS, **options: Any) -> Tenants:
        pool = Pool(make_allocator("bitmap"))
        pools.append(pool)
        pool.add_arena(create_arena(0, units * UNIT_BYTES))
        options = {"clock": clock, "watermarks": Watermarks(1.0, 1.0), "random": random.Random(1), **options}
        made = Tenants(pool, **options)
        made.apply(tenants)
        return made

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def tenants(make_tenants: MakeTenants) -> Tenants:
    """Two that may have all of it."""
    return make_tenants(limits("a"), limits("b"))


def put(store: StoreCore, *keys: str, client: Client | None = None, value: bytes = b"") -> None:
    """Put blocks of one unit."""
    writer = client or store.open_client("writer")
    reservation = store.reserve(writer, [UNIT_BYTES] * len(keys))
    for view in reservation.views:
        view[:] = value.ljust(UNIT_BYTES, b".")
    store.commit(reservation, keys, None)
    if client is None:
        store.close_client(writer)


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def read(store: StoreCore, key: str) -> bytes | None:
    client = store.open_client("reader")
    try:
        view = store.lease(client, [key]).views[0]
        return None if view is None else bytes(view).rstrip(b".")
    finally:
        store.close_client(client)


# What one sees of another


def test_a_key_of_another_tenant_is_missing_whatever_asks(tenants: Tenants) -> None:
    a, b = tenants.store("a"), tenants.store("b")
    put(a, "prompt", value=b"secret")
    client = b.open_client("curious")
    assert b.exists(["prompt"]) == b"\0"
    assert b.match_prefix(["prompt"]) == 0
    assert b.hold_prefix(client, ["prompt"], 5) == (0, 0)
    assert b.lease(client, ["prompt"]).entries == [None]
    assert not b.keys()
    assert not b.all_keys()
    assert not b.sample(10)
    assert b.delete(["prompt"]) == b.purge() == b.evict_keys(["prompt"]) == 0
    assert b.evict(0, 0) == 0
    assert b.verify("prompt")
    assert b.note_use(["prompt"], read=True) == 0
    assert len(b) == 0
    assert b.statistics().used_bytes == b.statistics().keys == b.statistics().allocator.extents == 0
    assert read(a, "prompt") == b"secret"


def test_the_same_key_has_a_block_for_each_tenant(tenants: Tenants) -> None:
    put(tenants.store("a"), "k", value=b"of a")
    put(tenants.store("b"), "k", value=b"of b")
    assert read(tenants.store("a"), "k") == b"of a"
    tenants.store("a").delete(["k"])
    assert read(tenants.store("b"), "k") == b"of b"


def test_a_hold_is_released_by_its_tenant_alone(tenants: Tenants) -> None:
    a, b = tenants.store("a"), tenants.store("b")
    put(a, "k")
    _, hold = a.hold_prefix(a.open_client("scheduler"), ["k"], 5)
    assert not b.release_hold(hold)
    assert a.release_hold(hold)


def test_statistics_are_those_of_the_tenant(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a", reserved=16), limits("b", most=8))
    put(tenants.store("a"), *names("a", 5))
    found = tenants.store("b").statistics()
    assert (found.capacity_bytes, found.used_bytes, found.puts, found.clients) == (8 * UNIT_BYTES, 0, 0, 0)
    assert found.allocator.largest_free_extent_bytes == found.allocator.capacity_bytes == 8 * UNIT_BYTES
    found = tenants.store("a").statistics()
    assert (found.capacity_bytes, found.used_bytes, found.keys) == (UNITS * UNIT_BYTES, 5 * UNIT_BYTES, 5)
    assert tenants.pool.used_bytes == found.used_bytes


def test_a_hazard_of_one_tenant_pins_no_block_of_another(tenants: Tenants) -> None:
    removed: list[Entry] = []
    tenants.on_removal = removed.extend
    a, b = tenants.store("a"), tenants.store("b")
    put(a, "k")
    reader = b.open_client("liar")
    entry = a.index.get("k")
    assert entry is not None
    hazards: list[Hazard] = [(*entry, 1)]
    b.accept_hazards(reader, lambda: hazards)
    b.catch_up()
    assert b.statistics().pinned_bytes == a.statistics().pinned_bytes == 0
    a.delete(["k"])
    assert removed == [entry]
    assert tenants.pool.used_bytes == 0


# What one may take


def test_at_max_bytes_a_tenant_evicts_its_own(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a", most=4), limits("b"))
    put(tenants.store("b"), *names("b", 10))
    put(tenants.store("a"), *names("a", 4))
    put(tenants.store("a"), "new", "newer")
    assert tenants.store("a").all_keys() == ["a1", "a0", "newer", "new"]
    assert len(tenants.store("b")) == 10


def test_at_max_keys_a_tenant_evicts_its_own(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a", max_keys=4))
    store = tenants.store("a")
    client = store.open_client("reader")
    put(store, *names("a", 4))
    store.lease(client, ["a3"])
    put(store, "new", "newer")
    assert sorted(store.all_keys()) == ["a0", "a3", "new", "newer"]
    store.lease(client, ["a0", "new"])
    with pytest.raises(LimitExceeded, match=r"tenant 'a' has 4 of max_keys=4 keys.*raise max_keys"):
        put(store, "x", "y")
    put(store, "x")
    assert sorted(store.all_keys()) == ["a0", "a3", "new", "x"]
    with pytest.raises(LimitExceeded, match="max_keys=4"):
        put(store, *names("b", 5))


def test_blocks_that_are_being_written_count_as_keys(make_tenants: MakeTenants) -> None:
    store = make_tenants(limits("a", max_keys=4)).store("a")
    client = store.open_client("writer")
    first = store.reserve(client, [UNIT_BYTES] * 3)
    with pytest.raises(LimitExceeded, match="max_keys=4"):
        store.reserve(client, [UNIT_BYTES] * 2)
    assert store.reserve_spare(client, [UNIT_BYTES] * 2) is None
    store.abort(first)
    store.reserve(client, [UNIT_BYTES] * 2)


@pytest.mark.parametrize("pin", ["lease", "hold", "reserve"])
def test_where_nothing_can_be_evicted_there_is_a_limit_and_nothing_is_lost(make_tenants: MakeTenants, pin: str) -> None:
    all_of_it = CoreLimits(max_pinned_ratio=1.0, max_held_ratio=1.0)
    store = make_tenants(limits("a", most=4), limits=all_of_it).store("a")
    client = store.open_client("c")
    if pin == "reserve":
        store.reserve(client, [UNIT_BYTES] * 3)
        put(store, "k0")
    else:
        put(store, *names("k", 4))
        if pin == "lease":
            store.lease(client, names("k", 3))
        else:
            store.hold_prefix(client, names("k", 3), 5)
    before = store.all_keys()
    other = store.open_client("other")
    with pytest.raises(LimitExceeded, match="tenant 'a'"):
        store.reserve(other, [UNIT_BYTES] * 2)
    assert store.all_keys() == before


def test_two_connections_cannot_pin_more_than_one(make_tenants: MakeTenants) -> None:
    store = make_tenants(limits("a"), limits=CoreLimits(max_pinned_ratio=0.5)).store("a")
    put(store, *names("k", 60))
    first, second = store.open_client("1"), store.open_client("2")
    store.lease(first, names("k", 30))
    with pytest.raises(LimitExceeded, match=r"the connections of tenant 'a' have 1.88 KiB.*all together"):
        store.lease(second, names("k", 30)[:20])
    with pytest.raises(LimitExceeded, match="the connections of tenant 'a'"):
        store.reserve(second, [UNIT_BYTES] * 20)
    with pytest.raises(LimitExceeded, match="the connections of tenant 'a'"):
        store.hold_prefix(second, names("k", 10), 5)
    store.close_client(first)
    store.lease(second, names("k", 20))


def test_tenants_together_pin_nothing_of_what_is_reserved(make_tenants: MakeTenants) -> None:
    """Two tenants with all they may have pinned, and a third gets what is its own."""
    tenants = make_tenants(limits("a"), limits("b"), limits("c", reserved=32), limits=CoreLimits(max_pinned_ratio=1.0))
    for name in "ab":
        put(tenants.store(name), *names(name, 32))
    held = []
    for name in "ab":
        store = tenants.store(name)
        client = store.open_client(name)
        held += [store.lease(client, [key]) for key in names(name, 16)]
        if name == "b":
            with pytest.raises(LimitExceeded, match=r"more than the 2 KiB .* nobody reserved"):
                store.lease(client, ["b16"])
    put(tenants.store("c"), *names("c", 32))
    assert len(tenants.store("c")) == 32
    c = tenants.store("c")
    c.lease(c.open_client("reader"), names("c", 32))
    with pytest.raises(LimitExceeded, match="tenant 'c' asks for 64 bytes"):
        put(c, "one more")
    tenants.store("a").release(held[0])
    put(tenants.store("c"), "one more")


# What one keeps


def test_what_was_pinned_within_an_earlier_reserve_counts_when_reserves_change(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a", reserved=32), limits("b"), limits=CoreLimits(max_pinned_ratio=1.0))
    a, b = tenants.store("a"), tenants.store("b")
    a.reserve(a.open_client("a"), [30 * UNIT_BYTES])
    tenants.apply([limits("a"), limits("b"), limits("c", reserved=32)])
    with pytest.raises(LimitExceeded, match="nobody reserved"):
        b.reserve(b.open_client("b"), [3 * UNIT_BYTES])
    b.reserve(b.open_client("b"), [2 * UNIT_BYTES])
    c = tenants.store("c")
    c.reserve(c.open_client("c"), [32 * UNIT_BYTES])


def test_whoever_is_at_its_reserved_size_loses_nothing_to_others(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a", reserved=20), limits("b"))
    put(tenants.store("a"), *names("a", 20))
    for batch in range(30):
        put(tenants.store("b"), *names(f"b{batch}/", 10))
    assert len(tenants.store("a")) == 20
    assert len(tenants.store("b")) == 44


class InPlace:
    """A client that reads without a request: `rows` is what it pins."""

    def __init__(self, store: TenantStore) -> None:
        self.store, self.rows = store, list[Hazard]()
        self.client = store.open_client("in place")
        store.accept_hazards(self.client, lambda: list(self.rows))

    def pin_everything(self) -> None:
        for key in self.store.all_keys():
            entry = self.store.index.get(key)
            assert entry is not None
            self.rows.append((*entry, 1))


@pytest.mark.parametrize("how", ["put", "spare", "single"])
def test_what_is_reserved_is_there_whatever_others_read_in_place(make_tenants: MakeTenants, how: str) -> None:
    """One tenant takes all that it can have, and pins all of that without a request."""
    shares = [limits("a", reserved=8), limits("b", reserved=24), limits("c", reserved=16), limits("d")]
    tenants = make_tenants(*shares, limits=CoreLimits(max_pinned_ratio=1))
    tenants.on_removal = lambda entries: None
    a, b, c, d = map(tenants.store, "abcd")
    put(c, *names("c", 8))
    put(d, *names("d", 10))
    reader = InPlace(a)
    for number in range(100):
        if how == "put":
            put(a, f"k{number}")
        elif how == "single":
            a.write_one(reader.client, f"k{number}", memoryview(bytes(UNIT_BYTES)), 0, replace=True)
        elif (spare := a.reserve_spare(reader.client, [UNIT_BYTES])) is not None:
            a.commit(spare, [f"k{number}"], None)
    assert len(a) + len(d) == 24  # what is its own, and what nobody reserved
    reader.pin_everything()
    InPlace(d).pin_everything()
    with pytest.raises((LimitExceeded, OutOfMemory)):
        put(a, "more")
    put(b, *names("b", 24))
    put(c, *names("d", 8))
    assert (len(b), len(c)) == (24, 16)


def test_what_is_pinned_just_before_it_is_evicted_takes_nothing_that_is_reserved(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a"), limits("b", reserved=32), limits=CoreLimits(max_pinned_ratio=1))
    a, reader = tenants.store("a"), InPlace(tenants.store("a"))
    tenants.on_removal = lambda entries: reader.rows.extend((*entry, 1) for entry in entries)
    put(a, *names("a", 32))
    for number in range(40):
        with suppress(LimitExceeded, OutOfMemory):
            put(a, f"more{number}")
    put(tenants.store("b"), *names("b", 32))
    assert len(tenants.store("b")) == 32


def test_new_limits_keep_what_is_reserved_free_as_soon_as_nobody_reads_it(tenants: Tenants) -> None:
    tenants.on_removal = lambda entries: None
    a, reader = tenants.store("a"), InPlace(tenants.store("a"))
    put(a, *names("a", 60))
    tenants.apply([limits("a"), limits("b", reserved=32)])
    put(a, "more")
    assert len(a) <= 60
    reader.pin_everything()
    put(tenants.store("b"), *names("b", 4))
    with pytest.raises(OutOfMemory):
        put(tenants.store("b"), *names("c", 28))
    reader.rows.clear()
    put(tenants.store("b"), *names("c", 28))
    assert (len(a), len(tenants.store("b"))) == (32, 32)


def test_what_is_free_may_be_used_until_its_owner_comes(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a", reserved=32), limits("b"))
    put(tenants.store("b"), *names("b", 32))
    put(tenants.store("b"), *names("c", 32))
    put(tenants.store("a"), *names("a", 32))
    assert len(tenants.store("a")) == len(tenants.store("b")) == 32
    put(tenants.store("a"), "more")
    assert len(tenants.store("a")) == 33
    assert len(tenants.store("b")) == 31


def test_what_nobody_reserved_is_shared_by_weight(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a", weight=3), limits("b"), limits("c", reserved=24, weight=9))
    rng = random.Random(7)
    for number in range(600):
        put(tenants.store(rng.choice("ab")), f"k{number}")
    put(tenants.store("c"), *names("c", 24))
    for number in range(600):
        put(tenants.store(rng.choice("ab")), f"l{number}")
    assert abs(len(tenants.store("a")) - 30) <= 1
    assert abs(len(tenants.store("b")) - 10) <= 1
    assert len(tenants.store("c")) == 24


def test_one_who_sends_ten_times_as_much_has_no_more(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("quiet"), limits("noisy"))
    for number in range(300):
        for loud in range(10):
            put(tenants.store("noisy"), f"{number}/{loud}")
        put(tenants.store("quiet"), str(number))
    assert len(tenants.store("quiet")) == 32
    assert tenants.store("quiet").exists([str(number) for number in range(268, 300)]) == b"\1" * 32


def test_pinned_blocks_of_a_victim_stay_and_the_next_one_gives(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a"), limits("b"), limits("c"), limits=CoreLimits(max_pinned_ratio=1.0))
    a = tenants.store("a")
    put(a, *names("a", 40))
    a.lease(a.open_client("reader"), names("a", 40))
    put(tenants.store("b"), *names("b", 24))
    put(tenants.store("c"), *names("c", 10))
    assert (len(a), len(tenants.store("b")), len(tenants.store("c"))) == (40, 14, 10)


def test_expired_holds_of_a_victim_protect_nothing(make_tenants: MakeTenants, clock: FakeClock) -> None:
    tenants = make_tenants(limits("a"), limits("b"), limits=CoreLimits(max_held_ratio=1.0, max_pinned_ratio=1.0))
    a = tenants.store("a")
    put(a, *names("a", 64))
    a.hold_prefix(a.open_client("scheduler"), names("a", 64), 5)
    with pytest.raises(LimitExceeded, match="with what other tenants have"):
        put(tenants.store("b"), "b")
    clock.now += 5
    put(tenants.store("b"), "b")
    assert len(a) == 63


def test_what_a_victim_wrote_without_a_request_is_seen_before_it_gives(tenants: Tenants) -> None:
    a = tenants.store("a")
    client = a.open_client("mapping")
    reservation = a.reserve(client, [UNIT_BYTES] * 64)
    written: list[Sequence[int] | None] = [None]
    assert a.prepare(reservation, names("a", 64), lambda: written[0])
    written[0] = []
    put(tenants.store("b"), "b")
    assert len(a) == 63


def test_a_refused_batch_evicts_nothing(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a", reserved=30), limits("b"))
    put(tenants.store("a"), *names("a", 30))
    put(tenants.store("b"), *names("b", 30))
    client = tenants.store("b").open_client("b")
    with pytest.raises(LimitExceeded, match="tenant 'b' asks for"):
        tenants.store("b").reserve(client, [UNIT_BYTES] * 35)
    assert len(tenants.store("a")) == len(tenants.store("b")) == 30


def test_eviction_goes_on_to_the_low_watermark_and_takes_nothing_reserved(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a", reserved=40), limits("b"), watermarks=Watermarks(0.5, 1.0))
    put(tenants.store("a"), *names("a", 40))
    put(tenants.store("b"), *names("b", 24))
    put(tenants.store("b"), "new")
    assert (len(tenants.store("a")), len(tenants.store("b"))) == (40, 1)
    assert tenants.evict(0, 0) == 1
    assert (len(tenants.store("a")), len(tenants.store("b"))) == (40, 0)


def test_eviction_of_the_pool_comes_from_those_most_above(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a", reserved=10), limits("b"))
    put(tenants.store("a"), *names("a", 30))
    put(tenants.store("b"), *names("b", 30))
    assert tenants.evict(0.5, 0.9, "periodic") == 28
    assert (len(tenants.store("a")), len(tenants.store("b"))) == (21, 11)
    assert tenants.store("b").statistics().evicted.periodic == 19
    assert tenants.evict(0.5, 0.6) == 0
    assert tenants.evict(0.0, 0.0, max_blocks=3) == 3
    with pytest.raises(ValueError, match="watermarks must be"):
        tenants.evict(0.9, 0.5)


# Limits that change


def test_limits_change_for_all_or_for_none(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a", most=8), limits("b"))
    put(tenants.store("a"), *names("a", 8))
    with pytest.raises(ConfigError, match=r"4\.06 KiB .* are reserved for tenants together.* has 4 KiB; reserve less"):
        tenants.apply([limits("a", most=2), limits("b", reserved=65)])
    with pytest.raises(ConfigError, match="tenant 'a' is there twice; give"):
        tenants.apply([limits("a"), limits("a")])
    assert tenants.limits("a").max_bytes == 8 * UNIT_BYTES
    tenants.apply([limits("a", most=2), limits("b", reserved=40)])
    assert tenants.store("a").statistics().capacity_bytes == 2 * UNIT_BYTES
    put(tenants.store("a"), "new")
    assert tenants.store("a").all_keys() == ["a0", "new"]


def test_a_tenant_whose_reservation_is_lowered_can_be_a_victim(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a", reserved=64), limits("b"))
    put(tenants.store("a"), *names("a", 64))
    tenants.apply([limits("a"), limits("b", reserved=32)])
    put(tenants.store("b"), *names("b", 32))
    assert len(tenants.store("a")) == 32


def test_the_blocks_of_a_tenant_that_has_left_go_when_nothing_pins_them(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a", reserved=30), limits("b"))
    a = tenants.store("a")
    client = a.open_client("still reading")
    put(a, *names("a", 10), value=b"read")
    lease = a.lease(client, ["a0"])
    a.hold_prefix(client, ["a1"], 5)
    tenants.apply([limits("b", reserved=40)])
    assert list(tenants) == ["b"]
    with pytest.raises(KeyError):
        tenants.store("a")
    assert tenants.remove_left(4)
    assert len(a) == 6
    assert not tenants.remove_left(100)
    assert tenants.pool.used_bytes == UNIT_BYTES
    view = lease.views[0]
    assert view is not None
    assert bytes(view).startswith(b"read")
    a.close_client(client)
    assert not tenants.remove_left(1)
    assert tenants.pool.used_bytes == 0
    tenants.apply([limits("a"), limits("b")])
    assert tenants.store("a") is not a


def test_a_tenant_that_comes_back_before_it_is_gone_is_the_same(tenants: Tenants) -> None:
    put(tenants.store("a"), "k", value=b"v")
    tenants.apply([limits("b")])
    tenants.apply([limits("a", most=9), limits("b")])
    assert not tenants.remove_left(100)
    assert read(tenants.store("a"), "k") == b"v"
    assert tenants.store("a").statistics().capacity_bytes == 9 * UNIT_BYTES


# What many cost


def test_a_thousand_idle_tenants_cost_little(make_tenants: MakeTenants) -> None:
    tenants = make_tenants()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tenants.apply([limits(f"tenant-{number}", reserved=0, most=3) for number in range(1000)])
        cost = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert cost / 1000 < 2048
    assert len(tenants) == 1000


def test_a_victim_is_chosen_among_many_without_looking_at_all(make_tenants: MakeTenants) -> None:
    count = 512
    tenants = make_tenants(*(limits(f"t{number}") for number in range(count)), units=4 * count)
    for number in range(count):
        put(tenants.store(f"t{number}"), *names("k", 3 + number % 2))
    for number in range(count // 2):
        put(tenants.store("t0"), f"more{number}")  # the pool is full now
    looked_at = tenants.sharing.victims.looked_at
    for number in range(200):
        put(tenants.store(f"t{number}"), "new")
    assert tenants.sharing.victims.looked_at - looked_at < 200 * 8


def test_parts_that_misbehave_within_their_bounds_take_nothing_that_is_reserved(make_tenants: MakeTenants) -> None:
    points = [Point.ALLOCATION_REFUSED, Point.SCATTERED_BATCH, Point.EARLY_EVICTION, Point.EARLY_RECLAIM]
    buggify = Buggify(random.Random(3), dict.fromkeys(points, 0.3))
    tenants = make_tenants(limits("a", reserved=20), limits("b"))
    make_store = partial(BuggifiedTenantStore, buggify)
    misbehaving = make_tenants(limits("a", reserved=20), limits("b"), make_store=make_store)
    for made in (tenants, misbehaving):
        put(made.store("a"), "a")
        for number in range(100):
            put(made.store("b"), f"b{number}", f"c{number}")
        assert len(made.store("a")) == 1
    assert set(buggify.fired) == set(points)
