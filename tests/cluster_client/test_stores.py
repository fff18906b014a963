"""A cluster of three is a store, for every client: the same answers as a dictionary."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinistore import blocking
from infinistore.core import StoreCore
from infinistore.errors import LimitExceeded, StoreUnavailable
from tests.bad_days.clients import KINDS, run_with_store
from tests.cluster_client.clusters import Cluster, Member
from tests.examples import examples

CALM = {"lookup_deadline_s": 60.0}
"""However busy the machine is, no node counts as lost."""
KEYS = [f"key {number}" for number in range(12)]
keys = st.lists(st.sampled_from(KEYS), unique=True, max_size=12)
blocks = st.dictionaries(st.sampled_from(KEYS), st.binary(min_size=1, max_size=300), max_size=12)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), blocks, st.booleans()),
        st.tuples(st.just("list"), st.integers(0, 12), st.sampled_from(["", *KEYS])),
        st.tuples(st.sampled_from(["get", "exists", "delete", "match", "hold", "get_into", "lease"]), keys),
    ),
    max_size=12,
)


async def check(store: Any, script: list[Any], copies: int) -> None:
    """Do the same to a store and to a dictionary."""
    model: dict[str, bytes] = {}
    for step in script:
        match step:
            case ("put", items, replace):
                skipped = await store.put_many(items, replace=replace)
                assert skipped == ([] if replace else [key for key in items if key in model])
                model = model | items if replace else items | model
            case ("get", wanted):
                found = await store.get_many(wanted)
                assert [value and bytes(value) for value in found] == [model.get(key) for key in wanted]
            case ("get_into", wanted):
                buffers = [bytearray(300) for _ in wanted]
                lengths = await store.get_many_into(list(zip(wanted, buffers, strict=True)))
                for key, buffer, length in zip(wanted, buffers, lengths, strict=True):
                    assert model.get(key) == (None if length is None else bytes(buffer[:length]))
            case ("lease", wanted):
                async with store.lease(wanted) as views:
                    assert [view and bytes(view) for view in views] == [model.get(key) for key in wanted]
            case ("exists", wanted):
                assert await store.exists_many(wanted) == [key in model for key in wanted]
            case ("match", wanted):
                assert await store.match_prefix(wanted) == leading(wanted, model)
            case ("hold", wanted):
                match = await store.match_prefix(wanted, hold_s=50)
                assert match == leading(wanted, model)
                assert bool(match.hold) == bool(match)
                assert await store.release_hold(match.hold) == bool(match)
            case ("delete", wanted):
                assert await store.delete(wanted) == len(model.keys() & set(wanted))
                model = {key: value for key, value in model.items() if key not in wanted}
            case ("list", limit, after):
                assert (
                    await store.keys(limit=limit, after=after) == [one for one in sorted(model) if one > after][:limit]
                )
    assert await store.purge() == copies * len(model)


def leading(wanted: Sequence[str], model: dict[str, bytes]) -> int:
    return [*(key in model for key in wanted), False].index(False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copies", [1, 2])
@given(script=steps)
@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_cluster_is_a_store(kind: str, copies: int, three: Cluster, script: list[Any]) -> None:
    three.clear()
    run_with_store(kind, three.url(f"copies={copies}"), lambda store: check(store, script, copies), **CALM)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hold_on_several_nodes_ends_at_the_first_hole(kind: str, three: Cluster) -> None:
    names = [f"key {number}" for number in range(60)]

    async def body(store: Any) -> None:
        await store.put_many({name: b"x" for name in names if name != "key 30"})
        match = await store.match_prefix(names, hold_s=50)
        assert match == 30
        assert (await store.stats()).store.pinned_bytes == 30 * 1024
        assert await store.release_hold(match.hold) is True
        assert await store.release_hold(match.hold) is False
        assert (await store.stats()).store.pinned_bytes == 0
        assert (await store.stats()).store.holds == 0

    run_with_store(kind, three.url(), body, **CALM)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copies", [1, 2])
def test_a_reservation_is_for_keys_of_one_node(kind: str, copies: int, three: Cluster) -> None:
    async def body(store: Any) -> None:
        with pytest.raises(LimitExceeded, match="same hash tag"):
            async with store.reserve({f"key {number}": 3 for number in range(40)}):
                pass
        together = {f"{{prompt 7}}/layer {number}": 3 for number in range(20)}
        async with store.reserve(together) as views:
            for view in views:
                view[:] = b"abc"
        assert await store.get_many(together) == [b"abc"] * 20

    run_with_store(kind, three.url(f"copies={copies}"), body, **CALM)
    assert sorted(len(member.keys()) for member in three.members) == [0] * (3 - copies) + [20] * copies


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_spread_over_all_nodes_whose_statistics_are_added_up(kind: str, three: Cluster) -> None:
    async def body(store: Any) -> Any:
        await store.put_many({f"key {number}": b"x" for number in range(60)})
        stats = await store.stats()
        assert stats.store.keys == 60
        assert stats.server is not None
        assert stats.transport == "tcp"
        return {node.address: node.stats.store.keys for node in stats.cluster.nodes}

    counts = run_with_store(kind, three.url(), body, **CALM)
    assert counts == {f"infinistore://{member.address}": len(member.keys()) for member in three.members}
    assert all(counts.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copies", [1, 2])
def test_times_and_pins_reach_all_copies(kind: str, copies: int, three: Cluster) -> None:
    async def check(store: Any) -> None:
        await store.put_many(dict.fromkeys(KEYS, b"x" * 100), ttl_s=500.0)
        assert await store.pin([*KEYS, "missing"]) == len(KEYS)
        stats = (await store.stats()).store
        assert (stats.protected_keys, stats.keys) == (copies * len(KEYS), copies * len(KEYS))
        assert await store.evict(0.0, 0.0) == 0
        async with store.reserve({"{one}1": 5, "{one}2": 5}, ttl_s=500.0) as views:
            for view in views:
                view[:] = b"later"
        assert await store.unpin(KEYS) == len(KEYS)
        assert await store.unpin(KEYS) == 0

    run_with_store(kind, three.url(f"copies={copies}"), check, **CALM)
    for member in three.members:
        assert None not in member.look(partial(times_left, member.core))
        let_pass(member, 500.0)
        assert member.keys() == set()
        let_pass(member, -500.0)


@pytest.mark.parametrize("kind", KINDS)
def test_pins_with_a_time_end_on_all_copies(kind: str, three: Cluster) -> None:
    async def pin(store: Any) -> None:
        await store.put_many(dict.fromkeys(KEYS, b"x" * 100))
        assert await store.pin(KEYS, ttl_s=500.0) == len(KEYS)
        assert (await store.stats()).store.protected_keys == 2 * len(KEYS)

    run_with_store(kind, three.url("copies=2"), pin, **CALM)
    for member in three.members:
        let_pass(member, 500.0)
        assert member.look(member.core.statistics).protected_keys == 0
        let_pass(member, -500.0)


def times_left(core: StoreCore) -> list[float | None]:
    return core.retention.times_left(list(core.index))


def let_pass(member: Member, seconds: float) -> None:
    retention = member.core.retention
    clock = retention.clock
    member.look(lambda: setattr(retention, "clock", lambda: clock() + seconds))


def test_a_pin_that_misses_a_node_says_so_and_holds_elsewhere(three: Cluster) -> None:
    names = [f"key {number}" for number in range(60)]  # of which each node owns some, wherever it listens
    with blocking.open_store(three.url(), lookup_deadline_s=60.0) as store:
        store.put_many(dict.fromkeys(names, b"x" * 100))
        lost = three.members[0].keys()
        three.members[0].stop()
        with pytest.raises(StoreUnavailable, match="not everything was pinned"):
            store.pin(names)
        assert store.stats().store.protected_keys == len(names) - len(lost) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_unpinning_reaches_nodes_that_had_a_key_before_it_moved(kind: str, three: Cluster) -> None:
    for member in three.members:
        with blocking.open_store(f"tcp://{member.address}") as once:
            once.put_many(dict.fromkeys(KEYS, b"x" * 100))
            assert once.pin(KEYS) == len(KEYS)

    async def unpin(store: Any) -> None:
        assert await store.unpin([*KEYS, "missing"]) == len(KEYS)
        assert (await store.stats()).store.protected_keys == 0

    run_with_store(kind, three.url(), unpin, **CALM)
