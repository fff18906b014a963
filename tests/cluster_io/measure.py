"""Measures how soon a view is right, with three members of etcd and three servers.

`python -m tests.cluster_io.measure` kills a server, then etcd's leader, then all of
etcd for a minute, and says what a client's view made of each. Nothing is left behind.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from infinistore.cluster.locate import parse_cluster_url
from infinistore.cluster.membership import View
from infinistore.cluster.placement import Placement
from infinistore.cluster_io.thread import open_membership

from .etcd import Etcd

KEYS = [f"{{{number // 64}}}{number}" for number in range(20_000)]


class Watcher:
    """The views of a client, and when they came."""

    def __init__(self, url: str) -> None:
        self.membership = open_membership(parse_cluster_url(url))
        self.views: list[tuple[float, View]] = []
        self._news = threading.Condition()
        self.membership.add_listener(self._note)
        self.membership.wait_known(30)

    def _note(self, view: View) -> None:
        with self._news:
            self.views.append((time.monotonic(), view))
            self._news.notify_all()

    def until(self, names: set[str], *, serving: bool = False, within_s: float = 60) -> float:
        """Wait for a view of these nodes; return when it came."""

        def there() -> bool:
            view = self.membership.view
            return {node.id for node in view.nodes} == names and not (
                serving and any(node.weight < 100 for node in view.nodes)
            )

        with self._news:
            assert self._news.wait_for(there, within_s), self.membership.view
            return self.views[-1][0] if self.views else time.monotonic()


def serve(url: str, name: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "infinistore", "--cluster", url, "--node-id", name, "--service-port", "0"]
    command += ["--manage-port", "off", "--prealloc-size", "64MB", "--node-warm-up", "1", "--log-level", "error"]
    return subprocess.Popen(command)


@contextmanager
def serving(etcd: Etcd, names: Sequence[str]) -> "Iterator[dict[str, subprocess.Popen[bytes]]]":
    """Nodes of one cluster, by their names, until the block is left, and then `etcd`
    ends, too."""
    servers: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in names:
            servers[name] = serve(etcd.url, name)
        yield servers
    finally:
        for process in servers.values():
            process.kill()
            process.wait()
        etcd.close()


def leader_of(etcd: Etcd) -> int:
    for member, port in enumerate(etcd.ports):
        found = json.loads(etcd.control("endpoint", "status", "-w", "json", "--endpoints", f"127.0.0.1:{port}"))
        status = found[0]["Status"]
        if status["leader"] == status["header"]["member_id"]:
            return member
    raise AssertionError("no leader")


def measure(etcd: Etcd, servers: dict[str, "subprocess.Popen[bytes]"], away_s: float) -> None:
    watcher = Watcher(etcd.url)
    watcher.until(set(servers), serving=True)

    victim = servers["c"]
    killed = time.monotonic()
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    print(f"a server killed: gone from the view after {watcher.until({'a', 'b'}) - killed:.1f} s (lease 10 s)")
    servers["c"] = serve(etcd.url, "c")
    watcher.until(set(servers), serving=True)

    owners = Placement(watcher.membership.view).owners(KEYS)
    seen = len(watcher.views)
    leader = leader_of(etcd)
    etcd.kill(leader)
    time.sleep(30)
    print(f"etcd's leader killed, 30 s: {len(watcher.views) - seen} changes of the view")
    etcd.start(leader)

    for member in range(3):
        etcd.kill(member)
    time.sleep(away_s)
    age_s = watcher.membership.age_s
    moved = sum(a != b for a, b in zip(owners, Placement(watcher.membership.view).owners(KEYS), strict=True))
    print(
        f"etcd away for {away_s:g} s: {len(watcher.views) - seen} changes of the view, {moved} of {len(KEYS)} keys "
        f"moved, age of the view {age_s:.0f} s"
    )
    back = time.monotonic()
    for member in range(3):
        etcd.start(member, wait=False)
    for member in range(3):
        etcd.wait_ready(member)
    healthy = time.monotonic()
    while watcher.membership.age_s > healthy - back:
        time.sleep(0.05)
    confirmed = time.monotonic()
    time.sleep(25)
    print(
        f"etcd back: it answered after {healthy - back:.1f} s, the view was confirmed {confirmed - healthy:.1f} s later"
    )
    print(f"25 s after that: {len(watcher.views) - seen} changes of the view")
    watcher.membership.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--away", type=float, default=60, help="how long etcd is away, in seconds")
    away_s = parser.parse_args().away
    with tempfile.TemporaryDirectory() as folder:
        etcd = Etcd(Path(folder), members=3)
        with serving(etcd, ("a", "b", "c")) as servers:
            measure(etcd, servers, away_s)


if __name__ == "__main__":
    main()
