"""The connector's statistics in vLLM's log and among its Prometheus metrics."""

from statistics import fmean
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from infinistore.integrations.vllm.observations import COUNTERS, TIMES, merged

__all__ = ["ConnectorMetrics", "ConnectorStats"]

_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class ConnectorStats(KVConnectorStats):
    """What `Observations.take` returned, added up over workers and time."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's."""
        self.data = merged(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counters, and the mean of each time in milliseconds."""
        if self.is_empty():
            return {}
        means = {f"mean {name} (ms)": round(1e3 * fmean(times), 3) for name, times in self.data["times"].items()}
        return {**self.data["counters"], **means}

    def is_empty(self) -> bool:
        """Whether nothing was observed."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """Counters `vllm:infinistore_NAME` and histograms `vllm:infinistore_NAME_seconds`,
    for each engine.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        make_counter: Any = self._counter_cls
        make_histogram: Any = self._histogram_cls
        self._counters = {
            name: self._each(make_counter(f"vllm:infinistore_{name}", meaning, labelnames=self._labelnames))
            for name, meaning in COUNTERS.items()
        }
        self._histograms = {
            name: self._each(
                make_histogram(
                    f"vllm:infinistore_{name}_seconds", meaning, labelnames=self._labelnames, buckets=_BUCKETS_S
                )
            )
            for name, meaning in TIMES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine observed."""
        for name, amount in transfer_stats_data.get("counters", {}).items():
            self._counters[name][engine_idx].inc(amount)
        for name, times in transfer_stats_data.get("times", {}).items():
            for seconds in times:
                self._histograms[name][engine_idx].observe(seconds)

    def _each(self, metric: Any) -> dict[int, Any]:
        engines: dict[int, Any] = create_metric_per_engine(metric, self.per_engine_labelvalues)
        return engines
