"""A cluster on hosts of its own, with a fault every few seconds: root runs

    python -m tests.cluster_network.soak --minutes 10 [--seed SEED]

Stores and members of etcd are killed, stopped and drained, cables are cut one way or
both, made slow and spoilt, and etcd is compacted and comes back empty; up to three at a
time. The clients check every value, as in `make test-cluster`, except for order, which
a change of view ends. It ends with 0 if no byte was wrong, no lookup took longer than
it may there, no call raised an error that it should not, and everything is found again
at the end. Calls with a view in which no node serves do raise one; they are counted.
What is done to whom, and for how long, follows from the seed, which is printed; what
meets what does not.
"""

import argparse
import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.cluster_network.checks import check_lookups, check_values
from tests.cluster_network.client import ANY
from tests.cluster_network.cluster import CLIENTS, HOSTS, MEMBERS, NODES, Cluster, kill
from tests.cluster_network.network import network, why_not

_LONGEST_FAULT_S: Final = 14.0
"""Longer than a lease."""
_PAUSE_S: Final = (1.0, 4.0)
"""Between two faults."""
_MOST_AT_ONCE: Final = 3
_STEADY_S: Final = 60.0
_NO_NODE: Final = "no node of the cluster takes blocks"


class Soak:
    """A run: each fault is a context, which is left after a while."""

    def __init__(self, cluster: Cluster, seed: str) -> None:
        self.faults: Counter[str] = Counter()
        self._cluster = cluster
        self._random = random.Random(seed)
        self._under_way: list[tuple[float, frozenset[str], ExitStack]] = []

    def run(self, seconds: float) -> None:
        """Do what the seed says for so long; then end all faults."""
        over = time.monotonic() + seconds
        while (now := time.monotonic()) < over:
            self._end(now)
            if len(self._under_way) < _MOST_AT_ONCE:
                self._begin(now)
            time.sleep(min(self._random.uniform(*_PAUSE_S), max(0.0, over - now)))
        self._end(float("inf"))

    def _begin(self, now: float) -> None:
        kinds: list[tuple[Callable[..., Any], tuple[tuple[str, ...], ...]]] = [
            (self._kill_store, (NODES,)),
            (self._stop_store, (NODES,)),
            (self._drain_store, (NODES,)),
            (self._kill_member, (MEMBERS,)),
            (self._stop_member, (MEMBERS,)),
            (self._cut_one_way, (NODES, CLIENTS)),
            (self._cut_one_way, (CLIENTS, NODES)),
            (self._cut_both_ways, (NODES, CLIENTS)),
            (self._cut_both_ways, (NODES, MEMBERS)),
            (self._cut_off, (NODES,)),
            (self._cut_off, (MEMBERS,)),
            (self._cut_off_from_etcd, (NODES,)),
            (self._cut_off_from_etcd, (CLIENTS,)),
            (self._slow, (HOSTS,)),
            (self._lossy, (HOSTS,)),
            (self._compact, ()),
            (self._empty_etcd, tuple((member,) for member in MEMBERS)),
        ]
        fault, groups = self._random.choice(kinds)
        hosts = [self._random.choice(group) for group in groups]
        lasts_s = self._random.uniform(0.5, _LONGEST_FAULT_S)
        if any(used & set(hosts) for _, used, _ in self._under_way):
            return
        stack = ExitStack()
        stack.enter_context(fault(*hosts))
        self._under_way.append((now + lasts_s, frozenset(hosts), stack))
        self.faults[fault.__name__.strip("_").replace("_", " ")] += 1

    def _end(self, now: float) -> None:
        for fault in [one for one in self._under_way if one[0] <= now]:
            self._under_way.remove(fault)
            fault[2].close()

    @contextmanager
    def _kill_store(self, node: str) -> Any:
        kill(self._cluster.stores[node])
        yield
        self._cluster.start_store(node)

    @contextmanager
    def _stop_store(self, node: str) -> Any:
        with self._cluster.stopped(self._cluster.stores[node]):
            yield

    @contextmanager
    def _drain_store(self, node: str) -> Any:
        process = self._cluster.stores[node]
        process.terminate()
        yield
        kill(process)  # it has ended, unless it cannot reach etcd
        self._cluster.start_store(node)

    @contextmanager
    def _kill_member(self, member: str) -> Any:
        kill(self._cluster.members[member])
        yield
        self._cluster.start_member(member)

    @contextmanager
    def _stop_member(self, member: str) -> Any:
        with self._cluster.stopped(self._cluster.members[member]):
            yield

    @contextmanager
    def _cut_one_way(self, source: str, target: str) -> Any:
        with self._cluster.network.cut((source, target)):
            yield

    @contextmanager
    def _cut_both_ways(self, one: str, other: str) -> Any:
        with self._cluster.network.cut((one, other), (other, one)):
            yield

    @contextmanager
    def _cut_off(self, host: str) -> Any:
        with self._cut_off_from(host, [other for other in HOSTS if other != host]):
            yield

    @contextmanager
    def _cut_off_from_etcd(self, host: str) -> Any:
        with self._cut_off_from(host, [*MEMBERS]):
            yield

    @contextmanager
    def _cut_off_from(self, host: str, others: list[str]) -> Any:
        ways = [(host, other) for other in others] + [(other, host) for other in others]
        with self._cluster.network.cut(*ways):
            yield

    @contextmanager
    def _slow(self, host: str) -> Any:
        with self._cluster.network.slow(host, self._random.choice(["2mbit", "10mbit", "50mbit"])):
            yield

    @contextmanager
    def _lossy(self, host: str) -> Any:
        with self._cluster.network.lossy(host, self._random.choice([5, 10, 50])):
            yield

    @contextmanager
    def _compact(self) -> Any:
        with suppress(AssertionError):  # etcd may not be there
            self._cluster.compact()
        yield

    @contextmanager
    def _empty_etcd(self, *members: str) -> Any:
        for member in members:
            kill(self._cluster.members[member])
        yield
        for member in members:
            self._cluster.start_member(member, new=True)


def soak(seconds: float, seed: str, folder: Path) -> int:
    """Run, and print what came of it. Returns the exit status."""
    with ExitStack() as stack:
        cluster = Cluster(stack.enter_context(network(*HOSTS)), folder)
        stack.callback(cluster.close)
        cluster.start({})
        cluster.ask("begin", ANY)
        run = Soak(cluster, seed)
        began = time.monotonic()
        run.run(seconds)
        took_s = time.monotonic() - began
        reports = cluster.reports()
        steady = bool(cluster.viewed(NODES, _STEADY_S)) and all(cluster.found(node, _STEADY_S) for node in NODES)
        last = cluster.reports()
    print(f"seed {seed}, {took_s:.0f} s, faults: {json.dumps(dict(run.faults.most_common()))}")
    for name, report in reports.items():
        asked, hits = sum(report["asked"].values()), sum(report["hits"].values())
        longest = ", ".join(f"{call} {report[f'longest_{call}_s']:.2f} s" for call in ("lookup", "get", "put"))
        print(
            f"client {name}: {asked} blocks read, {hits} hits, {asked - hits} misses; {report['lookups']} lookups;"
            f" {report['puts']} puts, {report['failed_puts']} of them failed in part;"
            f" {len(report['views'])} views; longest {longest}"
        )
    return verdict(last, steady=steady)


def verdict(reports: dict[str, Any], *, steady: bool) -> int:
    """Print what is wrong with what clients report. Returns the exit status."""
    errors = [error for report in reports.values() for error in report["errors"]]
    no_node = [error for error in errors if _NO_NODE in error]
    print(f"{len(no_node)} calls had a view in which no node serves")
    problems = [
        f"{count} times: {error}" for error, count in Counter(e for e in errors if _NO_NODE not in e).most_common(5)
    ]
    for look in (check_values, check_lookups):
        try:
            look(reports)
        except AssertionError as error:
            problems.append(str(error))
    if not steady:
        problems.append("not everything is found again")
    print("\n".join(problems) or "no wrong byte, no error, no long lookup, and everything is found again")
    return int(bool(problems))


def main() -> None:
    parser = argparse.ArgumentParser(description="a cluster with a fault every few seconds")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", default="")
    given = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    seed = given.seed or secrets.token_hex(4)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(soak(given.minutes * 60, seed, Path(folder)))


if __name__ == "__main__":
    main()
