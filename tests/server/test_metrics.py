"""What Prometheus scrapes: exact counts of what was done, and every metric that is
named elsewhere.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from infinistore import open_store
from infinistore.disk_settings import DiskPlace
from infinistore.errors import ValueTooLarge
from infinistore.protocol.messages import REPLIES
from infinistore.server.management.api import OPERATIONS
from infinistore.server.management.metrics import METRICS, Snapshot, markdown_table, render, text_of
from infinistore.server.recorder import OK, Recorder
from infinistore.server.shards.management import OPERATIONS as OPERATIONS_OF_SHARDS
from infinistore.server.shards.management import SHARD_METRICS
from infinistore.statistics import LATENCY_BOUNDS_S
from tests.server.http_client import ask
from tests.server.running import KIB, MIB, POOL_BYTES, RunningServer, make_config, running_server

PROJECT = Path(__file__).parents[2]
OPERATIONS_FOLDER = PROJECT / "docs" / "operations"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(server: RunningServer) -> Samples:
    answer = await ask(server.server.addresses.management[0], "GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.body.decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples["infinistore_" + name, frozenset(labels.items())]


async def test_what_was_done_is_what_is_counted(tmp_path: Path) -> None:
    config = make_config(unix_socket=str(tmp_path / "s"), max_value_bytes=MIB, enable_periodic_evict=False)
    async with running_server(config) as server:  # noqa: SIM117
        async with open_store(server.url) as store, open_store(f"unix://{server.unix_path}") as local:
            for i in range(3):
                await store.put_many([(f"{i}/{j}", bytes(KIB)) for j in range(4)])
            await local.get_many(["0/0", "0/1", "nothing"])
            await local.get("0/0")
            await store.delete(["0/0", "nothing"])
            with pytest.raises(ValueTooLarge):
                await store.put("large", bytes(2 * MIB))
            await store.match_prefix(["1/0", "1/1"], hold_s=60)
            await store.evict(0.0, 0.0)
            found = await scrape(server)
    checksums = 12 * 8
    assert value(found, "operations_total", kind="put", transport="tcp", outcome="ok") == 3
    assert value(found, "operations_total", kind="get", transport="unix", outcome="ok") == 2
    assert value(found, "operation_payload_bytes_total", kind="get", transport="unix", outcome="ok") == 3 * KIB
    assert value(found, "operation_duration_seconds_count", kind="put", transport="tcp") == 3
    assert value(found, "operation_duration_seconds_bucket", kind="put", transport="tcp", le="+Inf") == 3
    assert value(found, "operation_duration_seconds_sum", kind="put", transport="tcp") > 0
    assert (value(found, "received_bytes_total"), value(found, "sent_bytes_total")) == (12 * KIB + checksums, 3 * KIB)
    assert (value(found, "key_hits_total"), value(found, "key_misses_total")) == (3, 1)
    assert (value(found, "put_blocks_total"), value(found, "put_bytes_total")) == (12, 12 * KIB)
    assert value(found, "deleted_keys_total") == 1
    assert {cause: value(found, "evicted_blocks_total", cause=cause) for cause in ("manual", "on_demand")} == {
        "manual": 9,
        "on_demand": 0,
    }
    assert (value(found, "keys"), value(found, "pool_extents"), value(found, "holds_open")) == (2, 2, 1)
    assert (value(found, "pool_used_bytes"), value(found, "pool_held_bytes")) == (2 * KIB, 2 * KIB)
    assert value(found, "pool_capacity_bytes") == POOL_BYTES
    assert (value(found, "reservations_open"), value(found, "leases_open")) == (0, 0)
    assert (value(found, "connections_total"), value(found, "connections_refused_total")) == (2, 0)
    assert (value(found, "serving"), value(found, "checksum_dropped_blocks_total")) == (1, 0)


async def test_fragmentation_is_what_lies_outside_the_largest_free_extent() -> None:
    async with running_server() as server, open_store(server.url) as store:
        assert value(await scrape(server), "pool_fragmentation_ratio") == 0
        await store.put_many([(str(i), bytes(KIB)) for i in range(POOL_BYTES // KIB)][:3000])
        await store.delete([str(i) for i in range(0, 1024, 2)])
        found = await scrape(server)
    free_bytes = value(found, "pool_capacity_bytes") - value(found, "pool_used_bytes")
    largest = value(found, "pool_largest_free_extent_bytes")
    assert largest == POOL_BYTES - 3000 * KIB
    assert value(found, "pool_fragmentation_ratio") == pytest.approx(1 - largest / free_bytes)


async def test_every_metric_is_scraped_with_its_kind_labels_and_buckets(tmp_path: Path) -> None:
    config = make_config(disks=(DiskPlace(tmp_path / "disk", 64 * KIB * KIB),), cluster="infinistore+static://a,b")
    async with running_server(config) as server, open_store(server.url) as store:
        await store.put("a", b"1")
        answer = await ask(server.server.addresses.management[0], "GET", "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    described = [metric for metric in METRICS if "tenant" not in metric.name]  # those: tests/server/test_tenant_figures
    assert set(families) == {metric.name.removesuffix("_total") for metric in described}
    for metric in described:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert family.samples
        assert {label for sample in family.samples for label in sample.labels} - {"le"} == set(metric.labels)
    latencies = families["infinistore_operation_duration_seconds"].samples
    bounds = [float(one.labels["le"]) for one in latencies if one.name.endswith("_bucket")]
    assert bounds == [*LATENCY_BOUNDS_S, float("inf")]


def test_the_names_of_metrics_say_their_units() -> None:
    plain = {"infinistore_" + name for name in ("server_info", "serving", "keys", "pool_arenas", "pool_extents")}
    plain |= {"infinistore_" + name for name in ("reservations_open", "leases_open", "holds_open", "connections_open")}
    plain |= {"infinistore_strangers_open", "infinistore_disk_state", "infinistore_disk_keys"}
    plain |= {"infinistore_disk_hung_jobs"}
    plain |= {"infinistore_quarantined_clients", "infinistore_cluster_nodes", "infinistore_cluster_registered"}
    plain |= {"infinistore_cluster_draining", "infinistore_protected_keys"}
    plain |= {"infinistore_tenants", "infinistore_tenant_keys", "infinistore_tenant_connections_open"}
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        if metric.kind != "counter" and metric.name not in plain:
            assert metric.name.endswith(("_bytes", "_seconds", "_ratio"))


# What is named elsewhere


def scraped_names() -> set[str]:
    """Every name that a query may use."""
    names = set()
    for metric in METRICS:
        names |= (
            {f"{metric.name}_{part}" for part in ("bucket", "count", "sum")}
            if metric.kind == "histogram"
            else {metric.name}
        )
    return names | {metric.name for metric in SHARD_METRICS}


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\binfinistore_\w+", query))


def strings(document: Any, key: str) -> Iterator[str]:
    """Every text under this key, however deep."""
    if isinstance(document, dict):
        for name, inner in document.items():
            if name == key and isinstance(inner, str):
                yield inner
            yield from strings(inner, key)
    elif isinstance(document, list):
        for inner in document:
            yield from strings(inner, key)


def test_every_metric_of_the_dashboard_exists() -> None:
    dashboard = json.loads((OPERATIONS_FOLDER / "grafana-dashboard.json").read_text())
    queries = [*strings(dashboard, "expr"), *strings(dashboard, "query")]
    named = set().union(*map(names_in, queries))
    assert named <= scraped_names()
    assert {"infinistore_key_hits_total", "infinistore_pool_used_bytes"} <= named


def test_every_metric_of_the_alerts_exists_and_every_alert_is_explained() -> None:
    alerts = yaml.safe_load((OPERATIONS_FOLDER / "prometheus-alerts.yml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    page = (PROJECT / "docs" / "operations.md").read_text()
    for rule in rules:
        assert names_in(rule["expr"]) <= scraped_names()
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert {"summary", "description"} <= set(rule["annotations"])
        assert f"`{rule['alert']}`" in page


def test_the_table_of_metrics_in_the_documentation_is_that_of_the_code() -> None:
    page = (PROJECT / "docs" / "reference" / "metrics.md").read_text()
    assert markdown_table() in page
    assert [metric.name for metric in SHARD_METRICS if f"`{metric.name}`" not in page] == []


def test_the_kind_of_a_metric_follows_from_its_name_as_the_documentation_says() -> None:
    metrics = [*METRICS, *SHARD_METRICS]
    assert [metric.name for metric in metrics if (metric.kind == "counter") != metric.name.endswith("_total")] == []
    histograms = [metric.name for metric in metrics if metric.kind == "histogram"]
    assert histograms == ["infinistore_operation_duration_seconds"]


def test_every_warning_of_the_log_is_explained() -> None:
    # The server's log. What clients, the drop-in API and the integrations log explains
    # itself, in the engine's log.
    page = "".join((PROJECT / "docs" / name).read_text() for name in ("operations.md", "fleet.md"))  # a router's, too
    logged = re.compile(r'_log\.(?:warning|error|exception)\(\s*"([^"]+)"|log\(\s*logging\.WARNING,\s*"([^"]+)"')
    folders = [
        path for path in (PROJECT / "infinistore").iterdir() if path.name not in ("client", "dropin", "integrations")
    ]
    files = [file for folder in folders for file in (folder.rglob("*.py") if folder.is_dir() else [folder])]
    sources = [file.read_text() for file in files if file.suffix == ".py"]
    events = {event for source in sources for found in logged.findall(source) for event in found if event}
    assert "internal error" in events
    assert [event for event in sorted(events) if f"`{event.replace('%s', '...')}`" not in page] == []


def test_every_path_of_the_management_api_is_documented() -> None:
    page = (PROJECT / "docs" / "operations.md").read_text()
    assert {one.path for one in OPERATIONS} < {one.path for one in OPERATIONS_OF_SHARDS}
    assert [one for one in OPERATIONS_OF_SHARDS if f"`{one.method} {one.path}`" not in page] == []


async def test_a_scrape_in_slices_is_what_the_library_makes_of_the_same_snapshot() -> None:
    recorder = Recorder(clock=lambda: 0.0)
    for kind in REPLIES:
        for transport in ("tcp", "unix"):
            recorder.record(kind, transport, OK, 7, 0.003)
            recorder.record(kind, transport, "OutOfMemory", 7, 30.0)
    async with running_server() as running:
        server, store = running.server.telemetry.statistics(), running.core.statistics()
    snapshot = Snapshot(server, store, recorder.statistics(), "draining")
    samples = {metric: list(metric.read(snapshot)) for metric in METRICS}
    assert await render(snapshot) == text_of([metric.family(found) for metric, found in samples.items() if found])
