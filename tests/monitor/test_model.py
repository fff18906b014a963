"""From samples to rates, history, percentiles and warnings, whatever the
samples are.
"""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.monitor.model import HISTORY_POINTS, Alarm, Model, Snapshot
from infinistore.monitor.rates import Quantile, is_restart, quantile
from infinistore.monitor.view import document
from infinistore.sizes import GIB, MIB
from infinistore.statistics import LATENCY_BOUNDS_S, MAX_CLIENTS, DrainStatistics, EvictionStatistics, Stats

from .made import (
    BUCKETS,
    NOON,
    bad_disks,
    loaded_stats,
    make_client,
    make_details,
    make_disk,
    make_disks,
    make_operation,
    make_stats,
    on_disks,
    states,
    watched,
    worried_stats,
)

counts = st.integers(0, 2**40)
histograms = st.lists(st.integers(0, 10_000), min_size=BUCKETS, max_size=BUCKETS)
STORE_COUNTERS = ("hits", "misses", "puts", "put_bytes", "hit_bytes", "deleted", "checksum_drops")
SERVER_COUNTERS = ("requests", "errors", "received_bytes", "sent_bytes", "connections_total", "connections_refused")

operations = st.builds(
    make_operation,
    st.sampled_from(["put", "get", "exists"]),
    outcome=st.sampled_from(["ok", "OutOfMemory"]),
    transport=st.sampled_from(["tcp", "unix"]),
    payload_bytes=counts,
    latency_counts=histograms,
)
clients = st.builds(
    make_client,
    st.sampled_from(["a", "b", ""]),
    connected_s=st.floats(0, 1e6),
    requests=counts,
    received_bytes=counts,
    sent_bytes=counts,
    pinned_bytes=counts,
)
disks = st.builds(
    make_disk,
    st.sampled_from(["/a", "/b"]),
    **dict.fromkeys(("read_blocks", "read_bytes", "written_bytes", "capacity_bytes", "used_bytes"), counts),
)
details = st.none() | st.builds(
    make_details, operations=st.lists(operations, max_size=4), clients=st.lists(clients, max_size=4)
)
stats = st.builds(
    make_stats,
    store=st.fixed_dictionaries(
        dict.fromkeys((*STORE_COUNTERS, "capacity_bytes", "used_bytes", "growable_bytes"), counts)
        | {"evicted": st.builds(EvictionStatistics, counts, counts, counts, counts)}
    ),
    server=st.fixed_dictionaries(
        dict.fromkeys(SERVER_COUNTERS, counts)
        | {"uptime_s": st.floats(0, 1e9), "instance": st.sampled_from(["a", "a", "a", "b"])}
    ),
    details=details,
    disk=st.none() | st.builds(make_disks, *[disks] * 2, skipped_blocks=counts, queued_bytes=counts),
)
steps = st.lists(st.tuples(st.floats(0, 100), st.none() | stats), max_size=12)


def numbers_by_second(snapshot: Snapshot) -> Iterator[float]:
    """Every number of a snapshot that is a rate or a part of a whole."""
    if snapshot.rates is not None:
        rates = snapshot.rates
        yield from (rates.received_bytes, rates.sent_bytes, rates.requests, rates.errors, rates.puts, rates.deleted)
        yield from (rates.elapsed_s, rates.hit_rate or 0.0, *rates.evicted.values())
    for point in snapshot.history:
        yield from (point.span_s, point.received_bytes or 0.0, point.sent_bytes or 0.0, point.hit_rate or 0.0)
    for disk in snapshot.disks:
        yield from (disk.read_bytes_per_s or 0.0, disk.written_bytes_per_s or 0.0, disk.hits_per_s or 0.0)
    for operation in snapshot.operations:
        yield from (operation.per_s or 0.0, operation.bytes_per_s or 0.0, operation.errors_per_s or 0.0)
    for client in snapshot.clients:
        yield from (client.requests_per_s or 0.0, client.recent_bytes_per_s, client.recent_requests_per_s)
        yield from (client.received_bytes_per_s or 0.0, client.sent_bytes_per_s or 0.0)


def snapshots(model: Model, taken: list[tuple[float, Stats | None]]) -> Iterator[Snapshot]:
    now_s = 0.0
    for pause_s, sample in taken:
        now_s += pause_s
        if sample is None:
            model.lose("gone", now_s=now_s, at=NOON + timedelta(seconds=now_s))
        else:
            model.observe(sample, now_s=now_s, at=NOON + timedelta(seconds=now_s))
        yield model.snapshot()


@given(steps)
def test_no_rate_is_ever_negative_whatever_the_server_says(taken: list[tuple[float, Stats | None]]) -> None:
    for snapshot in snapshots(Model("tcp://x"), taken):
        assert all(number >= 0 for number in numbers_by_second(snapshot))
        assert snapshot.rates is None or snapshot.rates.hit_rate is None or snapshot.rates.hit_rate <= 1


@given(steps)
def test_every_state_can_be_said_in_json(taken: list[tuple[float, Stats | None]]) -> None:
    for snapshot in snapshots(Model("tcp://x"), taken):
        assert json.loads(json.dumps(document(snapshot), allow_nan=False))["restarts"] == snapshot.restarts


def test_two_samples_with_hardly_any_time_between_them_have_no_rates() -> None:
    model = Model("tcp://x")
    model.observe(make_stats(server={"uptime_s": 0.0}), now_s=0.0, at=NOON)
    busy = {"uptime_s": 5e-324, "received_bytes": 1}
    model.observe(make_stats(server=busy, details=make_details()), now_s=0.0, at=NOON)
    assert model.snapshot().rates is None
    assert json.dumps(document(model.snapshot()), allow_nan=False)


@given(stats, st.sampled_from(SERVER_COUNTERS + STORE_COUNTERS), st.integers(1, 2**30))
def test_a_counter_that_went_back_means_a_restart(sample: Stats, counter: str, more: int) -> None:
    part = "server" if counter in SERVER_COUNTERS else "store"
    grown = attrs.evolve(getattr(sample, part), **{counter: getattr(getattr(sample, part), counter) + more})
    later = attrs.evolve(sample, **{part: grown})
    assert not is_restart(sample, later)
    assert is_restart(later, sample)


@pytest.mark.parametrize("change", [{"instance": "b"}, {"uptime_s": 99.0}])
def test_another_instance_and_a_shorter_uptime_mean_a_restart(change: dict[str, Any]) -> None:
    assert is_restart(make_stats(), make_stats(server=change))
    assert not is_restart(make_stats(), make_stats(server={"uptime_s": 101.0}))


def test_a_restart_keeps_the_history_and_leaves_a_gap() -> None:
    snapshot = states()["restarted"]
    assert (snapshot.restarts, snapshot.restarted_at, snapshot.lost) == (1, NOON + timedelta(seconds=6), None)
    assert [point.received_bytes is None for point in snapshot.history] == [False] * 4 + [True, True]
    assert snapshot.rates is None


def test_a_lost_server_keeps_its_figures_and_says_since_when() -> None:
    snapshot = states()["lost"]
    assert snapshot.lost is not None
    assert (snapshot.lost.since, snapshot.lost.attempts) == (NOON + timedelta(seconds=5), 3)
    assert snapshot.stats == loaded_stats(4)


def test_a_server_that_answers_again_without_a_restart_has_rates_over_the_gap() -> None:
    model = watched(loaded_stats(0))
    model.lose("late", now_s=1.0, at=NOON)
    model.observe(loaded_stats(10), now_s=10.0, at=NOON)
    rates = model.snapshot().rates
    assert rates is not None
    assert (rates.elapsed_s, rates.requests) == (10.0, 1500.0)


@given(st.integers(HISTORY_POINTS, HISTORY_POINTS + 50))
def test_the_history_is_bounded(samples: int) -> None:
    model = Model("tcp://x")
    for number in range(samples):
        model.lose("gone", now_s=float(number), at=NOON)
    assert len(model.snapshot().history) == min(samples - 1, HISTORY_POINTS)


def test_the_first_sample_has_no_rates_and_the_latencies_since_the_start() -> None:
    snapshot = states()["first"]
    assert (snapshot.rates, snapshot.latency_span_s) == (None, None)
    put = next(row for row in snapshot.operations if row.kind == "put")
    assert put.per_s is None and put.p50 is not None


@given(histograms, st.floats(0, 1))
def test_a_percentile_lies_in_the_bucket_that_holds_its_rank(histogram: list[int], part: float) -> None:
    found = quantile(histogram, part)
    if not sum(histogram):
        assert found is None
        return
    assert found is not None
    rank = part * sum(histogram)
    index = next(i for i in range(BUCKETS) if histogram[i] and sum(histogram[: i + 1]) >= rank)
    if index == 0:
        assert found == Quantile(LATENCY_BOUNDS_S[0], "<")
    elif index == BUCKETS - 1:
        assert found == Quantile(LATENCY_BOUNDS_S[-1], ">")
    else:
        assert found.bound == ""
        assert LATENCY_BOUNDS_S[index - 1] <= found.value_s <= LATENCY_BOUNDS_S[index]


@given(histograms.filter(any))
def test_a_higher_percentile_is_never_less(histogram: list[int]) -> None:
    found = [quantile(histogram, part) for part in (0.5, 0.9, 0.99)]
    values = [one.value_s for one in found if one is not None]
    assert values == sorted(values)


def test_latencies_are_of_the_requests_between_the_samples_only() -> None:
    slow, quick = [0] * BUCKETS, [0] * BUCKETS
    slow[-2], quick[2] = 1000, 10
    both = [a + b for a, b in zip(slow, quick, strict=True)]
    samples = [
        make_stats(
            server={"uptime_s": 100.0 + second},
            details=make_details(operations=[make_operation(latency_counts=counts)]),
        )
        for second, counts in enumerate((slow, both))
    ]
    (row,) = watched(*samples).snapshot().operations
    assert row.per_s == 10
    assert row.p99 is not None and row.p99.value_s <= LATENCY_BOUNDS_S[2]


def test_kinds_are_added_up_over_transports_and_outcomes_and_failures_are_counted() -> None:
    one = [1, *[0] * (BUCKETS - 1)]
    found = [make_operation("get", transport=transport, outcome=outcome, latency_counts=one)
             for transport in ("tcp", "unix") for outcome in ("ok", "KeyNotFound")]  # fmt: skip
    first = make_stats(details=make_details())
    second = make_stats(server={"uptime_s": 102.0}, details=make_details(operations=found))
    (row,) = watched(first, second).snapshot().operations
    assert (row.total, row.per_s, row.errors_per_s) == (4, 2.0, 1.0)


some_bytes = st.integers(0, 2**40)
connections = st.lists(
    st.tuples(st.none() | some_bytes, st.none() | some_bytes, st.sampled_from(["unix", "shm"]), st.floats(0, 1e4)),
    max_size=8,
)


@given(connections)
def test_what_a_client_moved_is_what_each_of_its_connections_did_since_the_sample_before(
    connections: list[tuple[int | None, int | None, str, float]],
) -> None:
    """Each connection: what it had moved, None if it was not open; what it moves then,
    None if it has closed; its transport then; and how long it says to be open.
    """
    before, now = [], []
    moved: dict[str, int] = {}
    for number, (had, more, transport, connected_s) in enumerate(connections):
        same: dict[str, Any] = {"connected_s": connected_s, "id": f"a-{number}"}
        if had is not None:
            before.append(make_client(transport="unix", requests=had, sent_bytes=2 * had, **same))
        if more is not None:
            sent = (had or 0) + more
            now.append(make_client(transport=transport, requests=sent, sent_bytes=2 * sent, **same))
            moved[transport] = moved.get(transport, 0) + more
    first, second = (
        make_stats(server={"uptime_s": uptime_s}, details=make_details(clients=clients))
        for uptime_s, clients in ((100.0, before), (102.0, now))
    )
    rows = watched(first, second).snapshot().clients
    assert {row.transport: (row.requests_per_s, row.sent_bytes_per_s) for row in rows} == {
        transport: (more / 2, more) for transport, more in moved.items()
    }


def test_a_client_whose_counters_went_back_has_no_rate_below_zero() -> None:
    samples = [
        make_stats(server={"uptime_s": 100.0 + second}, details=make_details(clients=[make_client(requests=requests)]))
        for second, requests in enumerate((5, 3))
    ]
    assert watched(*samples).snapshot().clients[0].requests_per_s == 0


def test_a_client_is_not_that_of_another_run_of_the_server() -> None:
    lives = [
        make_stats(
            server={"instance": instance, "uptime_s": 100.0 + second},
            details=make_details(clients=[make_client(requests=1000 + second, id=f"{instance}-1")]),
        )
        for second, instance in enumerate(("a", "b", "b"))
    ]
    assert [watched(*lives[:count]).snapshot().clients[0].requests_per_s for count in (2, 3)] == [None, 1.0]


def test_a_connection_that_was_too_quiet_to_be_listed_is_not_taken_for_new() -> None:
    quiet, listed = make_client("quiet"), [make_client(f"{number}") for number in range(MAX_CLIENTS)]
    busy = attrs.evolve(quiet, requests=10**6)
    samples = [
        make_stats(server={"uptime_s": 100.0 + second}, details=make_details(clients=clients))
        for second, clients in enumerate(
            (listed, [*listed[1:], busy], [*listed[1:], attrs.evolve(busy, requests=10**6 + 5)])
        )
    ]
    for count, expected in ((2, 0.0), (3, 5.0)):
        rows = {row.name: row for row in watched(*samples[:count]).snapshot().clients}
        assert rows["quiet"].requests_per_s == expected


def test_of_a_server_that_does_not_number_its_connections_their_rates_are_unknown() -> None:
    client = make_client(requests=1000, id="")
    samples = [
        make_stats(server={"uptime_s": uptime_s}, details=make_details(clients=[client])) for uptime_s in (100.0, 101.0)
    ]
    (row,) = watched(*samples).snapshot().clients
    assert (row.connections, row.requests_per_s) == (1, None)


def test_without_a_server_the_bytes_are_those_of_the_store() -> None:
    first, second = (
        Stats("embedded", "", make_stats(store={"put_bytes": moved, "hit_bytes": 2 * moved}).store)
        for moved in (0, 1000)
    )
    rates = watched(first, second).snapshot().rates
    assert rates is not None
    assert (rates.received_bytes, rates.sent_bytes) == (1000.0, 2000.0)


def kinds(alarms: "tuple[Alarm, ...] | Any") -> set[str]:
    return {alarm.kind for alarm in alarms}


def test_a_node_that_drains_says_how_far_it_is_and_how_long_the_rest_takes() -> None:
    calm = make_stats()
    drain = DrainStatistics(
        "draining", 9, 4, 1, 2, 4, 700, size_bytes=4 * MIB, done_bytes=MIB, elapsed_s=30, left_s=90.0
    )
    (alarm,) = watched(calm, attrs.evolve(calm, drain=drain)).snapshot().alarms
    told = "the node drains: 5 of 9 groups, 1.00 MiB of 4.00 MiB, 2 could not be moved, about 1 min 30 s left"
    assert (alarm.kind, alarm.severity, alarm.text) == ("drain", "notice", told)
    over = attrs.evolve(drain, state="drained", failed_groups=0, left_s=None)
    (alarm,) = watched(calm, attrs.evolve(calm, drain=over)).snapshot().alarms
    assert alarm.text == ("the node has drained, and stays out until it is added: 5 of 9 groups, 1.00 MiB of 4.00 MiB")


def test_every_worry_has_its_warning_and_the_worst_comes_first() -> None:
    alarms = watched(*map(worried_stats, range(3))).snapshot().alarms
    assert kinds(alarms) == {
        *("checksum_drops", "connections", "draining", "errors", "evicting", "fragmentation", "pinned", "quarantine"),
    }
    assert [alarm.severity for alarm in alarms] == sorted(
        (alarm.severity for alarm in alarms), key=["error", "warning", "notice"].index
    )
    text = {alarm.kind: alarm.text for alarm in alarms}
    assert "OutOfMemory 40" in text["errors"]
    assert "1,000 of 1,024 connections" in text["connections"]
    assert text["pinned"].startswith("greedy pins 1.90 GiB")


def test_a_calm_server_has_no_warning() -> None:
    snapshot = states()["loaded"]
    assert snapshot.alarms == ()


def test_refused_connections_are_an_error() -> None:
    samples = [make_stats(server={"uptime_s": 100.0 + n, "connections_refused": 5 * n}) for n in range(2)]
    assert kinds(watched(*samples).snapshot().alarms) == {"connections_refused"}


def test_a_pool_that_is_nearly_full_is_a_notice_until_it_evicts() -> None:
    def sample(second: int, evicted: int) -> Stats:
        full = {"used_bytes": 4 * GIB * 97 // 100, "evicted": EvictionStatistics(evicted, 0, 0, 0)}
        return make_stats(store=full, server={"uptime_s": 100.0 + second})

    (calm,) = watched(sample(0, 0), sample(1, 0)).snapshot().alarms
    (busy,) = watched(sample(0, 0), sample(1, 50)).snapshot().alarms
    assert (calm.kind, calm.severity) == ("nearly_full", "notice")
    assert (busy.kind, busy.severity) == ("evicting", "warning")


def test_a_checksum_drop_is_an_error_when_it_is_new_and_stays_a_warning() -> None:
    samples = [make_stats(store={"checksum_drops": drops}) for drops in (0, 1)]
    (fresh,) = watched(*samples).snapshot().alarms
    (old,) = watched(samples[1], attrs.evolve(samples[1])).snapshot().alarms
    assert (fresh.severity, old.severity) == ("error", "warning")


def test_rates_of_a_disk_are_those_between_two_samples() -> None:
    (first, second) = watched(*map(on_disks, range(3))).snapshot().disks
    assert (first.hits_per_s, first.read_bytes_per_s, first.written_bytes_per_s) == (200, 200 * MIB, 300 * MIB)
    assert (second.path, second.written_bytes_per_s, second.queue, second.errors) == ("/mnt/nvme1", 301 * MIB, 5, 0)


def test_what_is_wrong_with_a_disk_is_an_alarm_that_names_it() -> None:
    found = [alarm for alarm in watched(*map(bad_disks, range(3))).snapshot().alarms if alarm.kind.startswith("disk")]
    assert [(alarm.kind, alarm.severity) for alarm in found] == [
        *(("disk", "error"), ("disk", "error"), ("disk_deletions", "error")),
        *(("disk_hangs", "warning"), ("disk_errors", "warning"), ("disk_skips", "notice")),
    ]
    assert found[0].text.startswith("/mnt/locked: the disk is read-only")
    assert found[1].text.startswith("/mnt/gone: the disk is off: its device is gone")
    text = {alarm.kind: alarm.text for alarm in found}
    assert text["disk_hangs"].startswith("/mnt/late: 4 reads and writes are late")
    assert "/mnt/bad: 2 reads failed, 4 blocks did not match their checksum" in text["disk_errors"]
    assert text["disk_skips"].startswith("50 blocks/s are not written to disk: 512 MiB wait")


def test_a_disk_with_less_room_than_it_was_given_is_a_warning_and_hides_nothing() -> None:
    said = "the disk has less room than it was given: its file system is full (ENOSPC)"
    full = loaded_stats(0, disk=make_disks(make_disk("/mnt/full", alarm=said, hung_jobs=2)))
    found = [(one.kind, one.severity, one.text) for one in watched(full).snapshot().alarms if "/mnt" in one.text]
    assert found[0] == ("disk", "warning", f"/mnt/full: {said}")
    assert [kind for kind, _, _ in found] == ["disk", "disk_hangs"]


def test_disks_that_are_well_again_or_still_recover_are_no_alarm() -> None:
    assert watched(*map(on_disks, range(3))).snapshot().alarms == ()
    well = bad_disks(5)  # old errors, and blocks that were skipped long ago
    assert well.disk is not None
    well = attrs.evolve(well, disk=attrs.evolve(well.disk, disks=well.disk.disks[:2], unsafe_keys=0))
    assert watched(well, well).snapshot().alarms == ()


def test_a_document_of_a_store_without_disks_does_not_name_them() -> None:
    assert not [name for name in json_names(document(states()["loaded"])) if "disk" in name]
    with_disks = document(states()["disks"])
    assert [one["path"] for one in with_disks["disks"]] == ["/mnt/nvme0", "/mnt/nvme1"]
    assert with_disks["stats"]["disk"]["queued_bytes"] == 12 * MIB


def json_names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from json_names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from json_names(inner)
