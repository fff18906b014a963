"""The statistics of several servers, as those of one store."""

import attrs
import pytest

from infinistore.statistics import (
    LATENCY_BOUNDS_S,
    ArenaStatistics,
    EvictionStatistics,
    PrefixStatistics,
    Stats,
    merged,
)

from .monitor.made import (
    make_client,
    make_details,
    make_disk,
    make_disks,
    make_operation,
    make_server,
    make_stats,
    make_store,
)

BUCKETS = len(LATENCY_BOUNDS_S) + 1


def test_those_of_one_server_are_its_own() -> None:
    details = make_details(
        operations=[make_operation("get", latency_counts=[1] * BUCKETS)],
        clients=[make_client()],
        arenas=[ArenaStatistics(0, 4096, 64, [0.5, 0.0])],
        prefixes=[PrefixStatistics("layer0/", 3, 300, 1, 100)],
        max_connections=1024,
        max_pinned_bytes=4096,
    )
    stats = make_stats(store={"keys": 7}, server={"requests": 9}, details=details, disk=make_disks(make_disk()))
    assert merged([stats]) == stats


def test_counts_and_sizes_are_added() -> None:
    store = {field.name: 10 for field in attrs.fields(type(make_store())) if field.type is int}
    stats = make_stats(store={**store, "evicted": EvictionStatistics(1, 2, 3, 4)}, server={"requests": 5})
    found = merged([stats, stats, stats])
    assert {name: getattr(found.store, name) for name in store} == dict.fromkeys(store, 30)
    assert found.store.evicted == EvictionStatistics(3, 6, 9, 12)
    assert found.server is not None
    assert found.server.requests == 15


def test_the_largest_free_extent_is_one_and_not_a_sum() -> None:
    small, large = make_stats(store={"used_bytes": 1 << 30}), make_stats()
    found = merged([small, large]).store.allocator
    assert found.largest_free_extent_bytes == large.store.allocator.largest_free_extent_bytes
    assert found.unit_bytes == small.store.allocator.unit_bytes
    assert found.free_bytes == small.store.allocator.free_bytes + large.store.allocator.free_bytes


@pytest.mark.parametrize("restarted", [0, 1])
def test_a_restart_of_any_server_is_another_instance(restarted: int) -> None:
    names = ["a", "b"]
    before = merged([make_stats(server={"instance": name}) for name in names]).server
    names[restarted] = "c"
    after = merged([make_stats(server={"instance": name}) for name in names]).server
    assert before is not None
    assert after is not None
    assert before.instance != after.instance


def test_the_uptime_is_that_of_the_youngest_server() -> None:
    found = merged([make_stats(server={"uptime_s": 90.0}), make_stats(server={"uptime_s": 3.0})]).server
    assert found is not None
    assert found.uptime_s == 3.0


def test_operations_of_a_kind_are_added_with_their_histograms() -> None:
    fast, slow = [0] * BUCKETS, [0] * BUCKETS
    fast[1], slow[-1] = 5, 2
    put, late, get = (
        make_operation("put", latency_counts=fast, latency_sum_s=1.0),
        make_operation("put", latency_counts=slow, latency_sum_s=2.0),
        make_operation("get", latency_counts=fast),
    )
    details = [make_details(operations=[put, get]), make_details(operations=[late])]
    found = merged([make_stats(details=one) for one in details]).details
    assert found is not None
    both = [quick + late for quick, late in zip(fast, slow, strict=True)]
    assert found.operations == [make_operation("put", latency_counts=both, latency_sum_s=3.0), get]


def test_arenas_have_numbers_of_their_own() -> None:
    details = make_details(arenas=[ArenaStatistics(0, 4096, 64, [0.5]), ArenaStatistics(1, 4096, 0, [0.0])])
    found = merged([make_stats(details=details), make_stats(details=details)]).details
    assert found is not None
    assert [(one.index, one.used_bytes) for one in found.arenas] == [(0, 64), (1, 0), (2, 64), (3, 0)]


def test_a_prefix_is_counted_over_all_servers_and_its_errors_add_as_squares() -> None:
    one, other = PrefixStatistics("a/", 3, 300, 3, 30), PrefixStatistics("a/", 4, 400, 4, 40)
    details = [make_details(prefixes=[one]), make_details(prefixes=[other, PrefixStatistics("b/", 1, 900)])]
    found = merged([make_stats(details=each) for each in details]).details
    assert found is not None
    assert found.prefixes == [PrefixStatistics("b/", 1, 900), PrefixStatistics("a/", 7, 700, 5, 50)]


def test_the_busiest_clients_come_first_and_are_bounded() -> None:
    many = [make_details(clients=[make_client(f"{n}-{m}", sent_bytes=m) for m in range(200)]) for n in range(2)]
    found = merged([make_stats(details=details) for details in many]).details
    assert found is not None
    assert len(found.clients) == 256
    assert [client.sent_bytes for client in found.clients[:3]] == [199, 199, 198]


def test_a_limit_that_one_server_does_not_tell_is_not_known() -> None:
    known = make_details(max_connections=100, max_pinned_bytes=50)
    found = merged([make_stats(details=known), make_stats(details=attrs.evolve(known, max_pinned_bytes=70))]).details
    assert found is not None
    assert (found.max_connections, found.max_pinned_bytes) == (200, 50)
    found = merged([make_stats(details=known), make_stats(details=make_details())]).details
    assert found is not None
    assert (found.max_connections, found.max_pinned_bytes) == (None, None)


def test_one_server_that_drains_makes_the_store_drain() -> None:
    found = merged([make_stats(details=make_details(state=state)) for state in ("serving", "draining")]).details
    assert found is not None
    assert found.state == "draining"


def test_disks_are_listed_and_their_sums_added() -> None:
    one, other = make_disks(make_disk("/a"), queued_bytes=5), make_disks(make_disk("/b"), queued_bytes=6)
    assert merged([make_stats(disk=one), make_stats(), make_stats(disk=other)]).disk == make_disks(
        make_disk("/a"), make_disk("/b"), queued_bytes=11
    )


def test_what_one_server_does_not_tell_is_not_told_of_all() -> None:
    embedded = Stats("embedded", "no URL", make_store())
    found = merged([make_stats(details=make_details()), embedded])
    assert (found.server, found.details) == (None, None)
    assert (found.transport, found.transport_reason) == ("tcp, embedded", "the URL asks for TCP; no URL")


def test_the_server_of_another_release_may_have_other_buckets() -> None:
    found = merged(
        [make_stats(details=make_details(operations=[make_operation(latency_counts=[1] * n)])) for n in (2, 3)]
    )
    assert found.details is not None
    assert found.details.operations[0].latency_counts == [2, 2, 1]
    assert make_server() == merged([make_stats()]).server
