"""Statistics made by hand, and samples of a server that is made up."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
from rich.text import Text

from infinistore.monitor.model import Model, Snapshot
from infinistore.monitor.tenants import TenantsModel
from infinistore.sizes import GIB, MIB
from infinistore.statistics import (
    LATENCY_BOUNDS_S,
    AllocatorStatistics,
    ArenaStatistics,
    ClientStatistics,
    DiskStatistics,
    DiskTierStatistics,
    EvictionStatistics,
    OperationStatistics,
    PrefixStatistics,
    ServerDetails,
    ServerStatistics,
    SpinStatistics,
    Stats,
    StoreStatistics,
    TenantStatistics,
)

NOON = datetime(2026, 7, 1, 12, 0, 0, tzinfo=UTC)
BUCKETS = len(LATENCY_BOUNDS_S) + 1


def spin() -> SpinStatistics:
    """Nothing was waited for awake."""
    return SpinStatistics(**{field.name: 0 for field in attrs.fields(SpinStatistics)})


def make_store(**given: Any) -> StoreStatistics:
    values: dict[str, Any] = {field.name: 0 for field in attrs.fields(StoreStatistics)}
    values |= {"capacity_bytes": 4 * GIB, "arenas": 1, "evicted": EvictionStatistics(0, 0, 0, 0)}
    values |= given
    values.setdefault("allocator", None)
    if not values["allocator"]:
        free = max(0, values["capacity_bytes"] - values["used_bytes"])
        values["allocator"] = AllocatorStatistics(
            name="bitmap",
            unit_bytes=65536,
            arenas=values["arenas"],
            capacity_bytes=values["capacity_bytes"],
            used_bytes=values["used_bytes"],
            extents=values["keys"],
            largest_free_extent_bytes=free // 2,
        )
    return StoreStatistics(**values)


def make_server(**given: Any) -> ServerStatistics:
    values: dict[str, Any] = {field.name: 0 for field in attrs.fields(ServerStatistics)}
    values |= {"instance": "a", "version": "0.1.0", "uptime_s": 100.0, "connections_open": 1, "spin": spin()}
    return ServerStatistics(**(values | given))


def make_details(**given: Any) -> ServerDetails:
    values: dict[str, Any] = {"operations": [], "clients": [], "arenas": [], "prefixes": [], "state": "serving"}
    return ServerDetails(**(values | given))


def make_operation(kind: str = "put", **given: Any) -> OperationStatistics:
    counts: Sequence[int] = given.pop("latency_counts", [0] * BUCKETS)
    values: dict[str, Any] = {"transport": "tcp", "outcome": "ok", "payload_bytes": 0, "latency_sum_s": 0.0}
    values |= {"count": sum(counts), "latency_counts": list(counts)}
    return OperationStatistics(kind, **(values | given))


def make_client(name: str = "decode-0", **given: Any) -> ClientStatistics:
    values: dict[str, Any] = {field.name: 0 for field in attrs.fields(ClientStatistics)}
    values |= {"name": name, "transport": "tcp", "connected_s": 50.0, "id": f"a-{name}"}
    return ClientStatistics(**(values | given))


def make_disk(path: str = "/mnt/nvme0", **given: Any) -> DiskStatistics:
    values: dict[str, Any] = {field.name: 0 for field in attrs.fields(DiskStatistics)}
    values |= {"state": "healthy", "alarm": "", "direct": True, "capacity_bytes": 64 * GIB}
    return DiskStatistics(**(values | {"path": path} | given))


def make_disks(*disks: DiskStatistics, **given: Any) -> DiskTierStatistics:
    values: dict[str, Any] = {field.name: 0 for field in attrs.fields(DiskTierStatistics)}
    return DiskTierStatistics(**(values | {"disks": list(disks)} | given))


def make_stats(
    *,
    store: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    details: ServerDetails | None = None,
    disk: DiskTierStatistics | None = None,
) -> Stats:
    reason = "the URL asks for TCP"
    return Stats("tcp", reason, make_store(**(store or {})), make_server(**(server or {})), details, disk)


def plain(lines: Sequence[Text], width: int, height: int) -> list[str]:
    """The lines of a screen, which has this size exactly."""
    assert len(lines) == height
    assert all(one.cell_len <= width for one in lines)
    return [one.plain for one in lines]


def told(**tenants: Mapping[str, Any]) -> dict[str, Any]:
    """What `GET /tenants` answers."""
    values: dict[str, Any] = {field.name: 0 for field in attrs.fields(TenantStatistics)}
    values |= {"group": "default", "max_bytes": None}
    return {
        "tenants": [
            attrs.asdict(TenantStatistics(**{**values, "tenant": name, **made})) for name, made in tenants.items()
        ]
    }


def watched(*samples: Stats, url: str = "tcp://127.0.0.1:22345") -> Model:
    """A model that was shown these samples, a second apart by its own clock."""
    model = Model(url)
    for number, stats in enumerate(samples):
        model.observe(stats, now_s=float(number), at=NOON + timedelta(seconds=number))
    return model


def _histogram(centre: int, count: int) -> list[int]:
    """Most requests in one bucket, some in its neighbours."""
    counts = [0] * BUCKETS
    for offset, share in ((-1, 0.2), (0, 0.6), (1, 0.15), (2, 0.05)):
        counts[centre + offset] += round(count * share)
    return counts


def loaded_stats(second: int, *, with_details: bool = True, **more: Any) -> Stats:
    """A server under load, `second` seconds after it was first looked at."""
    done = second + 1
    store = {
        "used_bytes": 3 * GIB,
        "keys": 12_345,
        "hits": 900 * done,
        "misses": 100 * done,
        "puts": 500 * done,
        "leases": 3,
        "pinned_bytes": 20 * MIB,
        "reservations": 2,
        "reserved_bytes": 4 * MIB,
        "holds": 1,
        "evicted": EvictionStatistics(0, 0, 0, 0),
    }
    server = {
        "uptime_s": 100.0 + second,
        "requests": 1500 * done,
        "received_bytes": (300 * done + 20 * (second % 5)) * MIB,
        "sent_bytes": 900 * MIB * done,
        "connections_open": 5,
    }
    details = make_details(
        operations=[
            make_operation("get", latency_counts=_histogram(5, 900 * done), payload_bytes=900 * MIB * done),
            make_operation("match_prefix", latency_counts=_histogram(2, 300 * done)),
            make_operation("put", latency_counts=_histogram(6, 500 * done), payload_bytes=300 * MIB * done),
            make_operation("statistics", latency_counts=_histogram(8, 20 * done)),
        ],
        clients=[
            make_client(
                f"prefill-{number}",
                connected_s=90.0 + second,
                requests=250 * done,
                received_bytes=(150 + number) * MIB * done,
            )
            for number in range(2)
        ]
        + [
            make_client(
                f"decode-{number}",
                connected_s=80.0 + second,
                transport="unix",
                requests=450 * done,
                sent_bytes=450 * MIB * done,
                pinned_bytes=10 * MIB,
            )
            for number in range(3)
        ],
        arenas=[
            ArenaStatistics(index, 2 * GIB, 2 * GIB * (2 - index) // 2, [1.0 - index * part / 64 for part in range(64)])
            for index in range(2)
        ],
        prefixes=[PrefixStatistics("qwen2.5-7b/tp0/", 8000, 2 * GIB), PrefixStatistics("llama-3.1-8b/tp0/", 4345, GIB)],
        max_connections=1024,
        max_pinned_bytes=2 * GIB,
    )
    store |= more.get("store", {})
    server |= more.get("server", {})
    details = attrs.evolve(details, **more.get("details", {}))
    return make_stats(store=store, server=server, details=details if with_details else None, disk=more.get("disk"))


def worried_stats(second: int) -> Stats:
    """A server with everything to worry about."""
    done = second + 1
    failed = [0] * BUCKETS
    failed[4] = 40 * done
    return loaded_stats(
        second,
        store={
            "used_bytes": 39 * GIB // 10,
            "checksum_drops": 2 * done,
            "quarantined_bytes": MIB,
            "quarantined_clients": 1,
            "evicted": EvictionStatistics(on_demand=120 * done, fragmentation=7 * done, periodic=0, manual=0),
        },
        server={"errors": 40 * done, "connections_open": 1000},
        details={
            "state": "draining",
            "operations": [
                make_operation("put", latency_counts=_histogram(6, 500 * done)),
                make_operation("put", outcome="OutOfMemory", latency_counts=failed),
            ],
            "clients": [make_client("greedy", connected_s=90.0 + second, pinned_bytes=19 * GIB // 10)],
        },
    )


def on_disks(second: int, disks: int = 2) -> Stats:
    """A server under load that has disks, as many as given."""
    done = second + 1
    made = [
        make_disk(
            f"/mnt/nvme{number}",
            used_bytes=(16 + number) * GIB,
            keys=9000,
            read_blocks=200 * done,
            read_bytes=200 * MIB * done,
            written_blocks=300 * done,
            written_bytes=(300 + number) * MIB * done,
            stored_bytes=(300 + number) * MIB * done,
            queued_reads=3,
            queued_writes=2,
        )
        for number in range(disks)
    ]
    return loaded_stats(second, disk=make_disks(*made, queued_bytes=12 * MIB))


def bad_disks(second: int) -> Stats:
    """A server that has something to say of each of its disks."""
    done = second + 1
    look = "check it, replace it if need be, and start the store again"
    off = f"the disk is off: its device is gone (ENODEV); {look}"
    read_only = f"the disk is read-only: its file system is read-only; {look}"
    disks = make_disks(
        make_disk("/mnt/well"),
        make_disk("/mnt/new", state="recovering"),
        make_disk("/mnt/late", hung_jobs=4),
        make_disk("/mnt/bad", read_errors=done, damaged_blocks=2 * done, write_errors=7),
        make_disk("/mnt/locked", state="read-only", alarm=read_only),
        make_disk("/mnt/gone", state="off", alarm=off),
        queued_bytes=512 * MIB,
        skipped_blocks=50 * done,
        unsafe_keys=3,
    )
    return loaded_stats(second, disk=disks)


def states() -> dict[str, Snapshot]:
    """Every state that a screen can be in, by name."""
    idle = [
        make_stats(server={"uptime_s": 3600.0 + second, "requests": second}, details=make_details())
        for second in range(3)
    ]
    lost = watched(*map(loaded_stats, range(5)))
    for attempt in range(3):
        at = NOON + timedelta(seconds=5 + attempt)
        lost.lose("cannot connect to 127.0.0.1:22345: Connection refused", now_s=5.0 + attempt, at=at)
    restarted = watched(*map(loaded_stats, range(5)))
    restarted.lose("the server closed the connection", now_s=5.0, at=NOON + timedelta(seconds=5))
    fresh = make_stats(server={"instance": "b", "uptime_s": 1.0}, details=make_details())
    restarted.observe(fresh, now_s=6.0, at=NOON + timedelta(seconds=6))
    without = [loaded_stats(second, with_details=False) for second in range(5)]
    tenants = watched(loaded_stats(1), loaded_stats(2))
    tenants.tenants = TenantsModel()
    many = {f"tenant-{number:04}": {"keys": 10**12, "used_bytes": 2**60, "refused": 10**9} for number in range(300)}
    for now_s in (0.0, 2.0):
        tenants.tenants.observe(told(**many), now_s)
    return {
        "tenants": tenants.snapshot(),
        "empty": Model("tcp://127.0.0.1:22345").snapshot(),
        "first": watched(loaded_stats(0)).snapshot(),
        "idle": watched(*idle).snapshot(),
        "loaded": watched(*map(loaded_stats, range(30))).snapshot(),
        "warnings": watched(*map(worried_stats, range(5))).snapshot(),
        "lost": lost.snapshot(),
        "restarted": restarted.snapshot(),
        "without details": watched(*without).snapshot(),
        "disks": watched(*map(on_disks, range(5))).snapshot(),
        "bad disks": watched(*map(bad_disks, range(5))).snapshot(),
    }
