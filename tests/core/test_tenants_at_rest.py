"""Tenants whose clients have left an empty store: it goes, and the figures stay."""

import gc
import tracemalloc

import pytest

from infinistore.core.journal import Journal
from infinistore.core.tenants import Tenants
from tests.core.test_tenants import MakeTenants, limits, make_tenants, put, tenants

__all__ = ["make_tenants", "tenants"]


def used_and_left(tenants: Tenants, name: str) -> None:
    """Everything that a store counts happens in the store of a tenant, and all goes."""
    store = tenants.store(name)
    client = store.open_client("reader")
    put(store, "a", "b", "c")
    put(store, "a")
    store.release(store.lease(client, ["a", "gone"]))
    store.delete(["a"])
    store.evict_keys(["b"])
    store.purge()
    store.close_client(client)


def test_a_thousand_tenants_that_clients_have_left_cost_little(make_tenants: MakeTenants) -> None:
    count = 1000
    tenants = make_tenants()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tenants.apply([limits(f"tenant-{number}", most=9) for number in range(count)])
        for name in tenants:
            used_and_left(tenants, name)
            assert tenants.rest(name)
        gc.collect()
        cost = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert cost / count < 2048


def test_a_store_that_comes_back_counts_on(tenants: Tenants) -> None:
    used_and_left(tenants, "a")
    before = tenants.store("a").statistics()
    assert before.hits == before.misses == before.evicted.manual == 1
    assert tenants.rest("a")
    assert tenants.past["a"] == before
    assert "a" not in tenants.used_stores()
    assert tenants.store("a").statistics() == before
    assert "a" not in tenants.past
    used_and_left(tenants, "a")
    assert tenants.store("a").statistics().puts == 2 * before.puts


def test_a_store_that_has_something_or_somebody_stays(make_tenants: MakeTenants) -> None:
    tenants = make_tenants(limits("a"), limits("b"), limits("c"), limits("d"), limits("unused"))
    a, b, c = (tenants.store(name) for name in "abc")
    put(a, "k")
    client = b.open_client("client")
    put(c, "k")
    held = c.open_client("holder")
    _, hold = c.hold_prefix(held, ["k"], 60)
    c.close_client(held)
    c.delete(["k"])
    assert tenants.add_store(limits("e"), Journal()) is not None
    for name in ("a", "b", "c", "e", "unused", "nobody"):
        assert not tenants.rest(name)
    assert tenants.store("a") is a
    a.delete(["k"])
    b.close_client(client)
    assert c.release_hold(hold)
    for name in "abc":
        assert tenants.rest(name)
    assert tenants.pool.used_bytes == 0


@pytest.mark.parametrize("comes_back", [False, True])
def test_the_figures_of_a_tenant_that_left_are_forgotten(tenants: Tenants, comes_back: bool) -> None:
    used_and_left(tenants, "a")
    assert tenants.rest("a")
    tenants.apply([limits("b")])
    assert not tenants.past
    if comes_back:
        tenants.apply([limits("a"), limits("b")])
        assert tenants.store("a").statistics().puts == 0


def test_a_tenant_that_comes_back_is_a_victim_again(tenants: Tenants) -> None:
    put(tenants.store("a"), *(f"{number}" for number in range(8)))
    tenants.store("a").purge()
    assert tenants.rest("a")
    put(tenants.store("a"), *(f"{number}" for number in range(40)))
    put(tenants.store("b"), *(f"{number}" for number in range(32)))
    assert (len(tenants.store("a")), len(tenants.store("b"))) == (32, 32)
