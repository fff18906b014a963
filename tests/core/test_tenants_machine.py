"""Tenants that share a pool, against a model of their quotas: any sequence of calls.

All blocks have one size, so that space is never in too small pieces, and what is said
of a quota can be exact. After every step: each tenant reads its own bytes and no
others; nobody has lost a block to others while at or below what is reserved for it;
nobody is above its limits; what is pinned is there; and all that tenants take is what
the pool has lost.
"""

import os
import random
from typing import Any

import attrs
import xxhash
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from infinistore.core import Client, CoreLimits, Lease, Pool, Reservation, Watermarks, create_arena
from infinistore.core.arena import adopt_arena
from infinistore.core.clients import Hazard
from infinistore.core.hand_over import export, verify_some
from infinistore.core.pool_state import decode_state, encode_state
from infinistore.core.tenants import Tenants, TenantStore
from infinistore.errors import ConfigError, LimitExceeded, OutOfMemory
from infinistore.tenant_limits import TenantLimits
from tests.core.conftest import UNIT_BYTES, FakeClock, make_allocator
from tests.examples import examples

UNITS = 64  # a page
NAMES = ["a", "b", "c"]
KEYS = [f"k{number}" for number in range(40)]

some_names = st.sampled_from(NAMES)
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=12, unique=True)
runs = st.builds(
    lambda first, count: KEYS[first : first + count],
    st.integers(min_value=0, max_value=39),
    st.integers(min_value=1, max_value=24),
)
most = st.one_of(st.none(), st.none(), st.integers(min_value=4, max_value=60))
quotas = st.builds(
    lambda reserved, more, most_keys, weight: {
        "reserved_bytes": reserved * UNIT_BYTES,
        "max_bytes": None if more is None else (reserved + more) * UNIT_BYTES,
        "max_keys": most_keys,
        "weight": weight,
    },
    reserved=st.integers(min_value=0, max_value=24),
    more=most,
    most_keys=most,
    weight=st.integers(min_value=1, max_value=4),
)


@attrs.define(eq=False)
class Model:
    """What one tenant has: `contents` may lose keys by eviction, and only so."""

    client: Client
    contents: dict[str, bytes] = attrs.field(factory=dict)
    leases: list[tuple[Lease, list[bytes]]] = attrs.field(factory=list)
    reservations: list[Reservation] = attrs.field(factory=list)
    read_in_place: list[Hazard] = attrs.field(factory=list)


class TenantsMachine(RuleBasedStateMachine):
    """Three tenants, each with one client."""

    @initialize(
        limits=st.fixed_dictionaries(dict.fromkeys(NAMES, quotas)),
        low=st.sampled_from([0.5, 1.0]),
        in_place=st.booleans(),
    )
    def begin(self, limits: dict[str, dict[str, Any]], low: float, in_place: bool) -> None:
        self.in_place = in_place
        self.pool = Pool(make_allocator("bitmap"))
        self.pool.add_arena(create_arena(0, UNITS * UNIT_BYTES))
        self.clock = FakeClock()
        self.quotas = {name: TenantLimits(name) for name in NAMES}
        self.lowered: set[str] = set()
        self.old_pools: list[Pool] = []
        self.leased: list[tuple[Lease, list[bytes]]] = []  # of clients of an earlier process
        self.make_tenants(Watermarks(low, 1.0))
        self.models = {name: self.model(name) for name in NAMES}
        self.written = 0
        self.stand_ins: list[tuple[TenantStore, Client]] = []
        for name, quota in limits.items():
            self.set_limits(name, quota)
        self.lowered.clear()

    def make_tenants(self, watermarks: Watermarks) -> None:
        self.tenants = Tenants(
            self.pool,
            clock=self.clock,
            limits=CoreLimits(max_pinned_ratio=1.0, max_held_ratio=0.5),
            watermarks=watermarks,
            random=random.Random(5),
        )
        if self.in_place:
            self.tenants.on_removal = lambda entries: None
        self.tenants.apply(self.quotas.values())

    def model(self, name: str, contents: dict[str, bytes] | None = None) -> Model:
        store = self.store(name)
        model = Model(store.open_client(name), contents or {})
        if self.in_place:
            store.accept_hazards(model.client, lambda: list(model.read_in_place))
        return model

    def store(self, name: str) -> TenantStore:
        return self.tenants.store(name)

    def taken(self, name: str) -> int:
        return self.store(name).pool.used_bytes

    def pinned(self, name: str) -> int:
        return self.store(name).space.pinned_bytes

    @rule(name=some_names, first=st.sampled_from([0, 20]))
    def fill(self, name: str, first: int) -> None:
        for start in (first, first + 10):
            self.write_batch(name, KEYS[start : start + 10], "commit")

    @rule(name=some_names, keys=runs, finish=st.sampled_from(["commit", "commit", "commit", "abort", "keep"]))
    def write(self, name: str, keys: list[str], finish: str) -> None:
        self.write_batch(name, keys, finish)

    def write_batch(self, name: str, keys: list[str], finish: str) -> None:
        store, model, quota = self.store(name), self.models[name], self.quotas[name]
        before = self.standings()
        claimed, within = self.claimed(), self.is_promised(name, len(keys) * UNIT_BYTES)
        try:
            reservation = store.reserve(model.client, [UNIT_BYTES] * len(keys))
        except (LimitExceeded, OutOfMemory):
            assert not within, "what is reserved for a tenant is there for it"
            event("refused write")
            self.check_losses(name, before)
            return
        self.check_losses(name, before)
        assert not self.in_place or self.claimed() <= max(self.pool.capacity_bytes, claimed)
        if quota.max_keys is not None and name not in self.lowered:
            assert len(store) + len(keys) <= quota.max_keys
        if finish == "keep":
            model.reservations.append(reservation)
        elif finish == "abort":
            store.abort(reservation)
        else:
            values = [f"{name}/{key}/{self.written + i}".encode().ljust(UNIT_BYTES) for i, key in enumerate(keys)]
            self.written += len(keys)
            for view, value in zip(reservation.views, values, strict=True):
                view[:] = value
            store.commit(reservation, keys, list(map(xxhash.xxh3_64_intdigest, values)))
            model.contents.update(zip(keys, values, strict=True))

    @rule(name=some_names, key=st.sampled_from(KEYS), replace=st.booleans())
    def write_single(self, name: str, key: str, replace: bool) -> None:
        store, model, quota = self.store(name), self.models[name], self.quotas[name]
        before = self.standings()
        value = f"{name}/{key}/{self.written}".encode().ljust(UNIT_BYTES)
        self.written += 1
        claimed, within = self.claimed(), self.is_promised(name, UNIT_BYTES)
        try:
            stored = store.write_one(
                model.client, key, memoryview(value), xxhash.xxh3_64_intdigest(value), replace=replace
            )
        except (LimitExceeded, OutOfMemory):
            assert not within, "what is reserved for a tenant is there for it"
            event("refused write")
            self.check_losses(name, before)
            return
        if stored:
            model.contents[key] = value
        else:
            assert not replace
            assert key in before[name][1]
        if quota.max_keys is not None and name not in self.lowered:
            assert len(store) <= quota.max_keys
        store.free_replaced()
        self.check_losses(name, before)
        assert not self.in_place or self.claimed() <= max(self.pool.capacity_bytes, claimed)

    def is_promised(self, name: str, wanted: int) -> bool:
        """Whether so many bytes are there for a tenant, whatever others have."""
        quota = self.quotas[name]
        if self.pinned(name) + wanted > quota.reserved_bytes or quota.max_keys is not None:
            return False
        if self.in_place:
            return self.claimed() <= self.pool.capacity_bytes
        return self.pinned_above() <= self.pool.capacity_bytes - self.tenants.sharing.reserved_bytes

    def standings(self) -> dict[str, tuple[int, set[str]]]:
        return {name: (self.taken(name), set(self.store(name).all_keys())) for name in NAMES}

    def claimed(self) -> int:
        """What all have or may still have of what is reserved for them."""
        return sum(max(self.taken(name), self.quotas[name].reserved_bytes) for name in NAMES)

    def pinned_above(self) -> int:
        return sum(max(0, self.pinned(name) - self.quotas[name].reserved_bytes) for name in NAMES)

    def check_losses(self, asking: str, before: dict[str, tuple[int, set[str]]]) -> None:
        """Whoever was at or below its reserved size has lost nothing, and nobody has
        lost more than whoever is now further above."""
        lost = {name: keys - set(self.store(name).all_keys()) for name, (_, keys) in before.items()}
        for name in NAMES:
            reserved = self.quotas[name].reserved_bytes
            if name != asking:
                assert before[name][0] > reserved or not lost[name], f"{name} lost {lost[name]} to {asking}"
                assert self.taken(name) > reserved - UNIT_BYTES or not lost[name]
        if not self.quotas[asking].max_bytes and self.quotas[asking].max_keys is None:
            levels = {name: self.level(name) for name in NAMES}
            for name in NAMES:
                for other in NAMES:
                    if lost[name] and self.store(other).space.evictable_bytes() and other != name:
                        slack = 2 * UNIT_BYTES / self.quotas[name].weight
                        assert levels[name] + slack >= levels[other]
        if any(lost[name] for name in NAMES if name != asking):
            event("others lost blocks")

    def level(self, name: str) -> float:
        return max(0.0, (self.taken(name) - self.quotas[name].reserved_bytes) / self.quotas[name].weight)

    @rule(name=some_names, keep=st.booleans())
    def finish_a_write(self, name: str, keep: bool) -> None:
        if self.models[name].reservations:
            self.store(name).abort(self.models[name].reservations.pop(0 if keep else -1))

    @rule(name=some_names, keys=some_keys)
    def lease(self, name: str, keys: list[str]) -> None:
        store, model = self.store(name), self.models[name]
        try:
            lease = store.lease(model.client, keys)
        except LimitExceeded:
            event("refused lease")
            return
        for key, view in zip(keys, lease.views, strict=True):
            assert (view is not None) == (key in store.all_keys())
        model.leases.append((lease, [model.contents[key] for key in keys if key in store.all_keys()]))

    @rule(name=some_names, key=st.sampled_from(KEYS))
    def find_single(self, name: str, key: str) -> None:
        store, model = self.store(name), self.models[name]
        entry = store.find_one(model.client, key)
        assert (entry is not None) == (key in store.all_keys())
        if entry is not None:
            assert bytes(self.pool.view(entry)) == model.contents[key]
        store.use_one(model.client, key, entry)

    @rule(name=some_names, keys=st.lists(st.sampled_from(KEYS), max_size=30), scanned=st.booleans())
    def read_in_place(self, name: str, keys: list[str], scanned: bool) -> None:
        store, model = self.store(name), self.models[name]
        model.read_in_place = [(*entry, 1) for entry in store.index.get_many(keys) if entry is not None]
        if scanned:
            store.catch_up()

    @rule(name=some_names, keys=some_keys)
    def hold(self, name: str, keys: list[str]) -> None:
        try:
            self.store(name).hold_prefix(self.models[name].client, keys, 5)
        except LimitExceeded:
            event("refused hold")

    @rule(seconds=st.integers(min_value=1, max_value=5))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(name=some_names)
    def release(self, name: str) -> None:
        if self.models[name].leases:
            self.store(name).release(self.models[name].leases.pop()[0])

    @rule(name=some_names, keys=some_keys)
    def delete(self, name: str, keys: list[str]) -> None:
        there = sum(key in self.store(name).all_keys() for key in keys)
        assert self.store(name).delete(keys) == there
        for key in keys:
            self.models[name].contents.pop(key, None)

    @rule(name=some_names)
    def lose_the_connection(self, name: str) -> None:
        store, model = self.store(name), self.models[name]
        store.close_client(model.client)
        self.models[name] = self.model(name, model.contents)

    @rule(low=st.sampled_from([0.0, 0.5]))
    def evict_periodically(self, low: float) -> None:
        before = self.standings()
        self.tenants.evict(low, max(low, 0.5), "periodic")
        for name in NAMES:
            if before[name][0] <= self.quotas[name].reserved_bytes:
                assert before[name][1] == set(self.store(name).all_keys())

    @rule(name=some_names, quota=quotas)
    def set_limits(self, name: str, quota: dict[str, Any]) -> None:
        changed = {**self.quotas, name: TenantLimits(name, **quota)}
        try:
            self.tenants.apply(changed.values())
        except ConfigError:
            assert sum(one.reserved_bytes for one in changed.values()) > self.pool.capacity_bytes
            return
        self.quotas = changed
        self.lowered.add(name)  # it may be above its new limits until it writes

    @rule(name=some_names, chance=st.integers(min_value=0, max_value=3))
    def leave_and_come_back(self, name: str, chance: int) -> None:
        if chance:
            return
        store, model = self.store(name), self.models[name]
        store.close_client(model.client)
        self.tenants.apply(quota for other, quota in self.quotas.items() if other != name)
        while self.tenants.remove_left(3):
            pass
        assert len(store) == 0
        if not any(one is store for one, _ in self.stand_ins):
            assert store.pool.used_bytes == 0
        self.tenants.apply(self.quotas.values())
        self.models[name] = self.model(name)

    @rule(chance=st.integers(min_value=0, max_value=3))
    def another_process_takes_over(self, chance: int) -> None:
        """Everything is there afterwards. What clients lease or write is in quarantine
        until they have ended."""
        if chance:
            return
        stores = {name: self.store(name) for name in NAMES}
        before = {name: (store.all_keys(), store.pool.used_bytes) for name, store in stores.items()}
        states = {}
        for name, store in stores.items():
            pins = [[client] for client in store.clients]
            states[name] = decode_state(b"".join(encode_state(export(store, "run", [*pins, []]))))
        old, self.pool = self.pool, Pool(make_allocator("bitmap"))
        for arena in old.arenas:
            self.pool.add_arena(adopt_arena(arena.index, os.dup(arena.fd), arena.length))
        self.old_pools.append(old)  # for what clients have mapped
        self.make_tenants(self.tenants.sharing.watermarks)
        adopted = self.tenants.adopt(states, lambda limits: None)
        for name in NAMES:
            store, model = self.store(name), self.models[name]
            assert (store.all_keys(), store.pool.used_bytes) == before[name]
            assert adopted[name].dropped == 0
            while verify_some(store, 4 * UNIT_BYTES):
                pass
            assert store.all_keys() == before[name][0]
            self.stand_ins += [(store, client) for client in adopted[name].stand_ins]
            self.leased += model.leases
            self.models[name] = self.model(name, model.contents)

    @rule()
    def clients_of_the_earlier_process_end(self) -> None:
        for store, client in self.stand_ins:
            store.close_client(client)
        self.stand_ins, self.leased = [], []

    @invariant()
    def each_has_its_own_bytes(self) -> None:
        for name, model in getattr(self, "models", {}).items():
            store = self.store(name)
            there = store.exists(KEYS)
            for key, found in zip(KEYS, there, strict=True):
                if not found:
                    model.contents.pop(key, None)
                else:
                    entry = store.index.get(key)
                    assert entry is not None
                    assert bytes(self.pool.view(entry[:3])) == model.contents[key]
            for lease, values in [*model.leases, *self.leased]:
                assert [bytes(view) for view in lease.views if view is not None] == values

    @invariant()
    def what_all_take_is_what_the_pool_has_lost(self) -> None:
        if not hasattr(self, "models"):
            return
        statistics = {name: self.store(name).statistics() for name in NAMES}
        assert sum(one.used_bytes for one in statistics.values()) == self.pool.used_bytes
        assert sum(one.allocator.extents for one in statistics.values()) == self.pool.statistics().extents
        for name, one in statistics.items():
            quota = self.quotas[name]
            assert one.used_bytes >= one.pinned_bytes + one.reserved_bytes
            if name not in self.lowered:
                assert one.used_bytes <= (quota.max_bytes or self.pool.capacity_bytes)
        if not self.lowered:
            assert self.pinned_above() <= self.pool.capacity_bytes - self.tenants.sharing.reserved_bytes

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for pool in (self.pool, *self.old_pools):
                pool.close()


def test_tenants_against_a_model_of_quotas() -> None:
    run_state_machine_as_test(TenantsMachine, settings=settings(max_examples=examples(100), stateful_step_count=40))
