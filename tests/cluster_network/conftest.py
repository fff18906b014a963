"""A cluster of three stores, with etcd and a client, each on a host of its own.

It takes a minute and root, so it is a target of its own: `make test-cluster`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_network.network import Network, network, why_not

NODES = ("a", "b", "c")
PYTHON = (sys.executable, "-W", "error", "-m")
URL = "infinistore+etcd://{}:2379/test?deadline_s=2"


class Cluster:
    """The hosts `etcd`, `a`, `b`, `c` and `client`, and what runs there."""

    def __init__(self, hosts: Network, folder: Path) -> None:
        self.network = hosts
        self._folder = folder
        self.stores: dict[str, subprocess.Popen[str]] = {}
        self._url = URL.format(hosts.hosts["etcd"].address)
        self._processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        self._start_etcd()
        for node in NODES:
            self.start_store(node)
        self.client = self.network.hosts["client"].start(
            [*PYTHON, "tests.cluster_network.client", self._url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._processes.append(self.client)
        assert self.ask("view", NODES, 30), self.ask("report")
        assert self.ask("start") is None

    def _start_etcd(self) -> None:
        host = self.network.hosts["etcd"]
        here, peer = f"http://{host.address}:2379", f"http://{host.address}:2380"
        command = [shutil.which("etcd") or "", "--name", "m0", "--data-dir", str(self._folder / "etcd")]
        command += ["--listen-client-urls", here, "--advertise-client-urls", here, "--listen-peer-urls", peer]
        command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"m0={peer}"]
        with (self._folder / "etcd.log").open("w") as log:
            self._processes.append(host.start([*command, "--log-level", "error"], stderr=log.fileno()))

    def start_store(self, node: str) -> None:
        """Start a store, and wait until it listens."""
        host = self.network.hosts[node]
        command = [*PYTHON, "infinistore", "--insecure", "--host", host.address]
        command += ["--cluster", self._url.partition("?")[0]]
        command += ["--node-id", node, "--node-warm-up", "1", "--manage-port", "off", "--unix-socket", "off"]
        command += ["--prealloc-size", "64MiB", "--log-level", "error"]
        process = host.start(command, stdout=subprocess.PIPE)
        self.stores[node] = process
        self._processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert re.match("listening on", line), f"store {node} did not start: {line!r}"

    @contextmanager
    def registrations(self, node: str) -> Iterator[Callable[[str], None]]:
        """What waits until etcd says `DELETE` or `PUT` of a node."""
        command = ["etcdctl", "watch", f"/infinistore/test/nodes/{node}", "--endpoints"]
        command += [f"{self.network.hosts['etcd'].address}:2379"]
        watch = self.network.hosts["etcd"].start(["env", "ETCDCTL_API=3", *command], stdout=subprocess.PIPE)
        self._processes.append(watch)
        assert watch.stdout is not None
        lines = watch.stdout

        def wait(event: str) -> None:
            assert any(line.strip() == event for line in lines), f"etcd never said {event} of {node}"

        yield wait
        watch.kill()

    def kill(self, node: str) -> None:
        """End a store at once, without a word."""
        self.stores[node].send_signal(signal.SIGKILL)
        self.stores[node].wait()

    def ask(self, *words: Any) -> Any:
        """Send a command to the client, and return its answer."""
        assert self.client.stdin is not None
        assert self.client.stdout is not None
        self.client.stdin.write(json.dumps(words) + "\n")
        self.client.stdin.flush()
        line = self.client.stdout.readline()
        assert line, "the client has ended"
        return json.loads(line)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.environ.get("INFINISTORE_TEST_NETWORK") != "1":
        pytest.skip("`make test-cluster` runs this")
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        hosts = stack.enter_context(network("etcd", *NODES, "client"))
        cluster = Cluster(hosts, tmp_path_factory.mktemp("network"))
        stack.callback(cluster.close)
        cluster.start()
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    """All of it, as it should be."""
    assert running.ask("view", NODES, 30)
    for node in NODES:
        assert running.ask("hits", node, 30), f"{node} lacks what it should have"
    return running
