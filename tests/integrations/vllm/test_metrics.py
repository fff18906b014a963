"""What vLLM's log and its metrics tell of the connector."""

from types import SimpleNamespace
from typing import Any

from .marks import NEEDS_VLLM

pytestmark = NEEDS_VLLM

OBSERVED = {"counters": {"hit_tokens": 64, "read_bytes": 4096}, "times": {"look_up": [0.001, 0.003]}}


def test_the_log_has_counters_and_mean_times() -> None:
    from infinistore.integrations.vllm.connector import ConnectorStats, InfiniStoreConnector

    stats = InfiniStoreConnector.build_kv_connector_stats(OBSERVED)
    stats.aggregate(ConnectorStats(OBSERVED))

    assert stats.reduce() == {"hit_tokens": 128, "read_bytes": 8192, "mean look_up (ms)": 2.0}
    stats.reset()
    assert stats.is_empty()
    assert stats.reduce() == {}


def test_prometheus_gets_counters_and_histograms_of_each_engine() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    from infinistore.integrations.vllm.connector import ConnectorMetrics, InfiniStoreConnector

    registry = CollectorRegistry()

    def of(kind: Any) -> Any:
        return lambda *args, **options: kind(*args, registry=registry, **options)

    kinds: dict[Any, Any] = {kind: of(kind) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = InfiniStoreConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]})
    assert isinstance(metrics, ConnectorMetrics)

    metrics.observe(OBSERVED)
    metrics.observe(OBSERVED, engine_idx=1)
    metrics.observe({})

    text = generate_latest(registry).decode()
    assert 'vllm:infinistore_hit_tokens_total{engine="0"} 64.0' in text
    assert 'vllm:infinistore_look_up_seconds_count{engine="1"} 2.0' in text


def test_a_multi_connector_finds_the_class_of_statistics_that_come_from_another_process() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats

    import infinistore.integrations.vllm.connector
    from infinistore.integrations.vllm.connector import ConnectorStats

    assert infinistore.integrations.vllm.connector.__name__
    stats = MultiConnector.build_kv_connector_stats({"InfiniStoreConnector": OBSERVED})

    assert isinstance(stats, MultiKVConnectorStats)
    assert stats.reduce() == {"InfiniStoreConnector": ConnectorStats(OBSERVED).reduce()}
