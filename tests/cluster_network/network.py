"""Hosts that are network namespaces, at one bridge in a namespace of its own. Nothing
of the machine's own network is touched.

Packets are lost one way by a neighbour entry with an address that no host has: they
leave, and nobody takes them, as with a cable that is cut in one direction.
"""

import os
import shutil
import subprocess
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
    if shutil.which("etcd") is None:
        return "etcd is not installed; on Debian: apt-get install etcd-server"
    probe = f"infinistore-probe-{os.getpid()}"
    refused = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if refused.returncode:
        return f"this system lets nobody make network namespaces: {refused.stderr.strip()}"
    _ip("netns", "del", probe)
    return ""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@attrs.frozen
class Host:
    """A namespace with one address."""

    namespace: str
    address: str

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
            name: Host(f"infinistore-{os.getpid()}-{name}", f"10.78.0.{number}") for number, name in enumerate(names, 1)
        }
        self._made: list[str] = []

    def make(self) -> None:
        """Make all of it."""
        self._add(self._bridge)
        _ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "bridge", "up")
        for number, host in enumerate(self.hosts.values()):
            self._add(host.namespace)
            port = f"port{number}"
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
        the second.
        """
        for source, target in ways:
            self._neighbour("replace", source, target, "lladdr", _NOBODY, "nud", "permanent")
        try:
            yield
        finally:
            for source, target in ways:
                self._neighbour("del", source, target)

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
