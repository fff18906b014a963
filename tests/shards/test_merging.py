"""The answers of shards, as one."""

import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from infinistore.protocol.codec import statistics_from_tree, statistics_to_tree
from infinistore.protocol.messages import Tree
from infinistore.server.management.metrics import METRICS, Snapshot, render
from infinistore.server.shards.management import merge_metrics, merge_selftests, merge_statistics, merge_tenants
from infinistore.sizes import KIB
from infinistore.statistics import DrainStatistics, MembershipStatistics, TenantStatistics
from tests.monitor.made import (
    make_client,
    make_details,
    make_disk,
    make_disks,
    make_operation,
    make_server,
    make_store,
    told,
)


async def scrape(path: str, **store: Any) -> bytes:
    operation = make_operation("put", latency_counts=[1] * 19)
    drain = DrainStatistics("none", 0, 0, 0, 0, 0, 0)
    cluster = MembershipStatistics("infinistore+static://a", "a", "listed", 0, "", 0.0, 0, 1, 0, [], [], drain)
    disks = make_disks(make_disk(path))
    tenants = [TenantStatistics(**one) for one in told(ann={"keys": 5})["tenants"]]
    return await render(Snapshot(make_server(), make_store(**store), [operation], "serving", disks, cluster, tenants))


async def test_metrics_of_all_shards_are_there_once_described_and_with_their_shard() -> None:
    texts = {0: await scrape("/a", keys=3), 7: await scrape('/"b"} {', keys=4)}
    merged = merge_metrics(texts).decode()
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    assert set(families) == {metric.name.removesuffix("_total") for metric in METRICS}
    assert merged.count("# HELP") == merged.count("# TYPE") == len(METRICS)
    for shard, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            assert families[family.name].documentation == family.documentation
            found = {
                (one.name, frozenset(one.labels.items())): one.value
                for one in families[family.name].samples
                if one.labels["shard"] == str(shard)
            }
            assert found == {
                (one.name, frozenset([*one.labels.items(), ("shard", str(shard))])): one.value for one in family.samples
            }
    assert 'infinistore_keys{shard="7"} 4.0' in merged


def test_statistics_are_summed_and_told_for_each_shard() -> None:
    details = make_details(clients=[make_client()])
    trees = {n: statistics_to_tree(make_server(requests=n), make_store(keys=10 * n), details) for n in (1, 2)}
    merged = merge_statistics({n: Tree({**tree, "settings": {"service_port": n}}) for n, tree in trees.items()})
    summed = statistics_from_tree(merged)
    assert (summed.server.requests, summed.store.keys) == (3, 30)
    assert summed.details is not None
    assert len(summed.details.clients) == 2
    shards: Any = merged["shards"]
    assert [(one["shard"], one["store"]["keys"], one["settings"], len(one)) for one in shards] == [
        (1, 10, {"service_port": 1}, 4),
        (2, 20, {"service_port": 2}, 4),
    ]
    json.dumps(merged)


def test_the_figures_of_a_tenant_are_added_up() -> None:
    limits = {"reserved_bytes": KIB, "max_bytes": 2 * KIB}
    answers = {0: told(ann={"keys": 2, **limits}, ben={}), 2: told(ann={"keys": 3, **limits}, ben={})}
    both = {"keys": 5, "reserved_bytes": 2 * KIB, "max_bytes": 4 * KIB}
    assert merge_tenants(answers) == told(ann=both, ben={})["tenants"]


def check(*, ok: bool = True) -> dict[str, Any]:
    return {"transport": "tcp", "address": "a", "ok": ok, "error": "" if ok else "bad", "elapsed_s": 0.1}


def disk(error: str = "", elapsed_s: float = 0.1) -> dict[str, Any]:
    return {"ok": not error, "error": error, "elapsed_s": elapsed_s}


def test_a_selftest_is_as_good_as_the_worst_shard() -> None:
    good, bad = {"status": "ok", "transports": [check()]}, {"status": "failed", "transports": [check(ok=False)]}
    assert merge_selftests({0: good, 1: good}, 2) == {"status": "ok", "transports": [check(), check()]}
    assert merge_selftests({0: good, 1: bad}, 2)["status"] == "failed"


def test_a_shard_that_does_not_answer_has_failed_its_selftest() -> None:
    merged = merge_selftests({0: {"status": "ok", "transports": [check()]}}, 2)
    assert merged["status"] == "failed"
    assert merged["transports"][1] == {
        "transport": "shard",
        "address": "1",
        "ok": False,
        "error": "it does not answer",
        "elapsed_s": 0.0,
    }


def test_the_disks_of_all_shards_are_one_check() -> None:
    answers = {0: {"transports": [check()], "disks": disk()}, 1: {"transports": [check()], "disks": disk("full", 0.3)}}
    merged = merge_selftests(answers, 2)
    assert (merged["status"], merged["disks"]) == ("failed", {"ok": False, "error": "shard 1: full", "elapsed_s": 0.3})
