"""Hosts that are network namespaces, at one bridge in a namespace of its own. Nothing
of the machine's own network is touched.

Packets are lost one way by a neighbour entry with an address that no host has: they
leave, and nobody takes them, as with a cable that is cut in one direction. A slow
cable is the queueing discipline tbf of tc, and one that loses packets a rule of nft.
"""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

__all__ = ["Host", "Network", "network", "why_not"]

_PROJECT = Path(__file__).resolve().parents[2]
_NOBODY = "02:00:00:00:00:99"


def why_not() -> str:
    """Why there can be no network here; empty if there can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None:
        return "ip is not installed; on Debian: apt-get install iproute2"
    if shutil.which("nft") is None:
        return "nft is not installed; on Debian: apt-get install nftables"
    if shutil.which("etcd") is None or shutil.which("etcdctl") is None:
        return "etcd is not installed; on Debian: apt-get install etcd-server etcd-client"
    probe = f"infinistore-probe-{os.getpid()}"
    refused = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if refused.returncode:
        return f"this system lets nobody make network namespaces: {refused.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@attrs.frozen
class Host:
    """A namespace with one address."""

    namespace: str
    address: str
    port: str
    """The end of its cable at the bridge."""

    def start(
        self, command: Sequence[str], *, stdin: int | None = None, stdout: int | None = None, stderr: int | None = None
    ) -> "subprocess.Popen[str]":
        """Start a program there; its process id is that of the program."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *command],
            env={name: value for name, value in os.environ.items() if not name.startswith("INFINISTORE_")},
            cwd=_PROJECT,
            text=True,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
        )


class Network:
    """Hosts by their names. All reach each other."""

    def __init__(self, names: Sequence[str]) -> None:
        self._bridge = f"infinistore-{os.getpid()}-bridge"
        self.hosts = {
            name: Host(f"infinistore-{os.getpid()}-{name}", f"10.78.0.{number}", f"port{number}")
            for number, name in enumerate(names, 1)
        }
        self._made: list[str] = []
        self._cuts: Counter[tuple[str, str]] = Counter()

    def make(self) -> None:
        """Make all of it."""
        self._add(self._bridge)
        _ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "bridge", "up")
        for host in self.hosts.values():
            self._add(host.namespace)
            port = host.port
            _ip("-n", self._bridge, "link", "add", port, "type", "veth", "peer", "eth0", "netns", host.namespace)
            _ip("-n", self._bridge, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")

    def _add(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._made.append(namespace)

    def remove(self) -> None:
        """Remove it. Its programs must have ended."""
        while self._made:
            _ip("netns", "del", self._made.pop())

    @contextmanager
    def cut(self, *ways: tuple[str, str]) -> Iterator[None]:
        """Until the block is left, lose all that the first host of each pair sends to
        the second. What is cut twice is whole again when both blocks are left.
        """
        for way in ways:
            self._cuts[way] += 1
            self._neighbour("replace", *way, "lladdr", _NOBODY, "nud", "permanent")
        try:
            yield
        finally:
            for way in ways:
                self._cuts[way] -= 1
                if not self._cuts[way]:
                    self._neighbour("del", *way)

    @contextmanager
    def slow(self, name: str, rate: str) -> Iterator[None]:
        """Until the block is left, a host has a cable of this rate, such as 10mbit."""
        host = self.hosts[name]
        ends = ((host.namespace, "eth0"), (self._bridge, host.port))
        for namespace, device in ends:
            add = ("qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "32kb", "latency", "50ms")
            _run("tc", "-n", namespace, *add)
        try:
            yield
        finally:
            for namespace, device in ends:
                _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")

    @contextmanager
    def lossy(self, name: str, per_mille: int) -> Iterator[None]:
        """Until the block is left, of 1,000 packets to a host so many are lost, and
        as many of those from it.
        """
        inside = ("ip", "netns", "exec", self.hosts[name].namespace, "nft")
        _run(*inside, "add table ip lossy")
        for hook, device in (("input", "iifname"), ("output", "oifname")):
            _run(*inside, f"add chain ip lossy {hook} {{ type filter hook {hook} priority 0; }}")
            _run(*inside, f"add rule ip lossy {hook} {device} eth0 numgen random mod 1000 < {per_mille} drop")
        try:
            yield
        finally:
            _run(*inside, "delete table ip lossy")

    def _neighbour(self, verb: str, source: str, target: str, *more: str) -> None:
        host = self.hosts[source]
        _ip("-n", host.namespace, "neigh", verb, self.hosts[target].address, "dev", "eth0", *more)


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """A network of these hosts, until the block is left."""
    made = Network(names)
    try:
        made.make()
        yield made
    finally:
        made.remove()
