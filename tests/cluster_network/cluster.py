"""A cluster of three stores and three members of etcd, with two clients, each on a host
of its own.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.cluster_network.client import CLIENTS
from tests.cluster_network.network import Network

__all__ = ["CLIENTS", "HOSTS", "MEMBERS", "NODES", "Cluster", "kill", "without"]

NODES: Final = ("a", "b", "c")
MEMBERS: Final = ("etcd0", "etcd1", "etcd2")
HOSTS: Final = (*MEMBERS, *NODES, *CLIENTS)
_PYTHON: Final = (sys.executable, "-W", "error", "-m")
_NO_ENVIRONMENT: Final[Mapping[str, str]] = {}
_HEALTHY_S: Final = 30.0


def without(victim: str) -> list[str]:
    return [node for node in NODES if node != victim]


class Cluster:
    """The hosts `etcd0` to `etcd2`, `a`, `b`, `c`, `x` and `y`, and what runs there."""

    def __init__(self, hosts: Network, folder: Path) -> None:
        self.network = hosts
        self._folder = folder
        self.stores: dict[str, subprocess.Popen[str]] = {}
        self.members: dict[str, subprocess.Popen[str]] = {}
        self.clients: dict[str, subprocess.Popen[str]] = {}
        self._endpoints = [f"{hosts.hosts[member].address}:2379" for member in MEMBERS]
        self._url = f"infinistore+etcd://{','.join(self._endpoints)}/test"
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, environments: Mapping[str, Mapping[str, str]]) -> None:
        """Start all of it. `environments` are variables for the programs of hosts."""
        for member in MEMBERS:
            self.start_member(member)
        self.wait_for_etcd()
        for node in NODES:
            self.start_store(node, environments.get(node, _NO_ENVIRONMENT))
        for name in CLIENTS:
            command = [*_PYTHON, "tests.cluster_network.client", f"{self._url}?deadline_s=2", name]
            self.clients[name] = self._run(
                name, command, environments.get(name, _NO_ENVIRONMENT), stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert self.viewed(NODES), self.ask("report")
        self.ask("start")

    def start_member(self, name: str, *, new: bool = False) -> None:
        """Start a member of etcd; a new one has forgotten everything."""
        folder = self._folder / name
        if new:
            shutil.rmtree(folder)
        address = self.network.hosts[name].address
        here, peer = f"http://{address}:2379", f"http://{address}:2380"
        all_of_them = ",".join(f"{one}=http://{self.network.hosts[one].address}:2380" for one in MEMBERS)
        command = [shutil.which("etcd") or "", "--name", name, "--data-dir", str(folder), "--unsafe-no-fsync"]
        command += ["--listen-client-urls", here, "--advertise-client-urls", here, "--listen-peer-urls", peer]
        command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", all_of_them, "--log-level", "error"]
        with (self._folder / f"{name}.log").open("a") as log:
            self.members[name] = self._run(name, command, stderr=log.fileno())

    def start_store(
        self, node: str, environment: Mapping[str, str] = _NO_ENVIRONMENT, *, host: str = "", wait: bool = True
    ) -> "subprocess.Popen[str]":
        """Start a store, on the host of its name or another, and wait until it listens
        unless told not to.
        """
        host = host or node
        command = [*_PYTHON, "infinistore", "--insecure", "--host", self.network.hosts[host].address]
        command += ["--cluster", self._url, "--node-id", node, "--node-warm-up", "1"]
        command += ["--manage-port", "off", "--unix-socket", "off", "--prealloc-size", "64MiB", "--log-level", "error"]
        stderr = None if wait else subprocess.PIPE
        process = self._run(host, command, environment, stdout=subprocess.PIPE, stderr=stderr)
        if wait:
            self.stores[node] = process
            assert process.stdout is not None
            line = process.stdout.readline()
            assert re.match("listening on", line), f"store {node} did not start: {line!r}"
        return process

    def _run(
        self, host: str, command: Sequence[str], environment: Mapping[str, str] = _NO_ENVIRONMENT, **pipes: int | None
    ) -> "subprocess.Popen[str]":
        process = self.network.hosts[host].start([*_with(environment), *command], **pipes)
        self._processes.append(process)
        return process

    def control(self, *words: str) -> str:
        """Run etcdctl, on the host of the first member that runs; return what it
        prints.
        """
        endpoints = () if "--endpoints" in words else ("--endpoints", ",".join(self._endpoints))
        command = [*_with({"ETCDCTL_API": "3"}), "etcdctl", *words, *endpoints]
        process = self.network.hosts["x"].start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        printed, complaint = process.communicate(timeout=_HEALTHY_S)
        assert process.returncode == 0, complaint
        return printed

    def wait_for_etcd(self) -> None:
        """Wait until etcd has a leader again, and takes a write."""
        until = time.monotonic() + _HEALTHY_S
        while True:
            try:
                self.control("put", "healthy", "yes")
            except AssertionError:
                assert time.monotonic() < until, "etcd has no quorum"
            else:
                return

    def leader(self) -> str:
        """The member of etcd that leads."""
        for name, endpoint in zip(MEMBERS, self._endpoints, strict=True):
            (found,) = json.loads(self.control("endpoint", "status", "-w", "json", "--endpoints", endpoint))
            if found["Status"]["leader"] == found["Status"]["header"]["member_id"]:
                return name
        raise AssertionError("etcd has no leader")

    def registered(self) -> list[str]:
        """The stores that etcd knows."""
        prefix = "/infinistore/test/nodes/"
        return [key.removeprefix(prefix) for key in self.control("get", prefix, "--prefix", "--keys-only").split()]

    def compact(self) -> None:
        """Have etcd forget what was."""
        (found,) = json.loads(self.control("endpoint", "status", "-w", "json", "--endpoints", self._endpoints[0]))
        self.control("compact", str(found["Status"]["header"]["revision"]))

    @contextmanager
    def registrations(self, node: str) -> Iterator[Callable[[str], None]]:
        """What waits until etcd says `DELETE` or `PUT` of a node."""
        command = ["etcdctl", "watch", f"/infinistore/test/nodes/{node}", "--endpoints", self._endpoints[0]]
        watch = self._run("x", command, {"ETCDCTL_API": "3"}, stdout=subprocess.PIPE)
        assert watch.stdout is not None
        lines = watch.stdout

        def wait(event: str) -> None:
            assert any(line.strip() == event for line in lines), f"etcd never said {event} of {node}"

        yield wait
        watch.kill()

    @contextmanager
    def stopped(self, process: "subprocess.Popen[str]") -> Iterator[None]:
        """Until the block is left, a program gets no time."""
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def ask(self, *words: Any, of: Sequence[str] = CLIENTS) -> dict[str, Any]:
        """Send a command to clients at the same time; return their answers."""
        for name in of:
            pipe = self.clients[name].stdin
            assert pipe is not None
            pipe.write(json.dumps(words) + "\n")
            pipe.flush()
        return {name: self._answer(name) for name in of}

    def reports(self) -> dict[str, Any]:
        """What clients have seen. What they have begun to put is asked for when all
        have said what they have read: nothing can be read that is not begun by then.
        """
        reports = self.ask("report")
        for name, begun in self.ask("begun").items():
            reports[name]["begun"] = begun
        return reports

    def _answer(self, name: str) -> Any:
        pipe = self.clients[name].stdout
        assert pipe is not None
        line = pipe.readline()
        assert line, f"the client {name} has ended"
        return json.loads(line)

    def viewed(self, nodes: Sequence[str], within_s: float = 30, *, of: Sequence[str] = CLIENTS) -> float:
        """Wait for a view of these nodes. Return when the last client had it, 0 if one
        had not.
        """
        seen = self.ask("view", nodes, within_s, of=of).values()
        return 0.0 if None in seen else max(seen)

    def found(self, node: str, within_s: float = 30, *, of: Sequence[str] = CLIENTS) -> bool:
        """Whether, in time, clients find nearly all of a node's keys."""
        return all(self.ask("hits", node, within_s, of=of).values())

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def _with(environment: Mapping[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in environment.items())] if environment else []


def kill(process: "subprocess.Popen[str]") -> None:
    """End a program at once, without a word."""
    process.send_signal(signal.SIGKILL)
    process.wait()
