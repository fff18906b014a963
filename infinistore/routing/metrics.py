"""What a router counts, as metrics for Prometheus."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from infinistore.routing.fleet import Member

MEDIA_TYPE: Final = CONTENT_TYPE_LATEST
_BOUNDS_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
_PREFIX: Final = "infinistore_router_"


class Metrics:
    """The metrics of one router, in a registry of their own."""

    def __init__(self, members: Iterable[Member], now: Callable[[], float]) -> None:
        self._prometheus = CollectorRegistry()
        self._members = members
        self._now = now
        self._prometheus.register(self)
        self.prompts = self._counter("prompts", "Prompts, by what was known of them.", "known")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, by where they were expected.", "source")
        self.refused = self._counter("refused_requests", "Requests that the router answered with an error.", "status")
        self.store_failures = self._counter("store_failures", "Prompts for which the store did not answer in time.")
        self.clients_gone = self._counter("clients_gone", "Requests whose client left before the end.")
        self.first_token = self._histogram("first_token_seconds", "Time to the first token of streamed answers.")
        self.predicted = self._histogram("predicted_first_token_seconds", "The same, as it was predicted.")

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, meaning, labels, registry=self._prometheus)

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(_PREFIX + name, meaning, buckets=_BOUNDS_S, registry=self._prometheus)

    def collect(self) -> Iterator[Metric]:
        """Yield what is read off the engines when somebody asks: an engine that is no
        more is not told of.
        """
        picks = CounterMetricFamily(
            f"{_PREFIX}picks", "Requests sent to an engine, by the reason.", labels=["engine", "reason"]
        )
        failed = CounterMetricFamily(
            f"{_PREFIX}engine_failures", "Requests that an engine did not answer.", labels=["engine"]
        )
        up = GaugeMetricFamily(f"{_PREFIX}engine_up", "Whether requests may go to an engine.", labels=["engine"])
        waiting = GaugeMetricFamily(f"{_PREFIX}waiting_requests", "Requests without a first token.", labels=["engine"])
        queued = GaugeMetricFamily(f"{_PREFIX}queue_seconds", "What they take, by guess.", labels=["engine"])
        for member in self._members:
            url = [member.address.url]
            up.add_metric(url, float(member.is_up))
            waiting.add_metric(url, member.engine.requests)
            queued.add_metric(url, member.engine.queued_s(self._now()))
            failed.add_metric(url, member.failed_requests)
            for reason, count in member.picked.items():
                picks.add_metric([*url, reason], count)
        yield from (up, waiting, queued, picks, failed)

    def text(self) -> bytes:
        """Return all of them, as Prometheus reads them."""
        return generate_latest(self._prometheus)
