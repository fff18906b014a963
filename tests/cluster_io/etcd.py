"""Runs etcd on loopback, with fresh folders and ports of its own, by its process id."""

import copy
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import pytest

from tests.ports import own_ports

ETCD = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(
    ETCD is None or shutil.which("etcdctl") is None,
    reason="etcd is not installed; on Debian: apt-get install etcd-server etcd-client",
)


class Etcd:
    """Members of one etcd. `kill`, `freeze` and `start` take the index of one. With
    `tls`, each makes itself a certificate.
    """

    def __init__(self, folder: Path, members: int = 1, *, tls: bool = False) -> None:
        self._tls = tls
        self.cluster = "test"
        ports = own_ports(2 * members)
        self.folder = folder
        self.ports = ports[:members]
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members
        self._told: list[socket.socket | None] = [None] * members
        for member in range(members):
            self.start(member, wait=False)
        for member in range(members):
            self.wait_ready(member)

    @property
    def url(self) -> str:
        return self.url_of(self.cluster)

    def of(self, cluster: str) -> Self:
        """The same etcd, whose `url` is that of another cluster in it."""
        other = copy.copy(self)
        other.cluster = cluster
        return other

    def url_of(self, cluster: str) -> str:
        """The URL of one of the clusters in it."""
        return "infinistore+etcd://" + ",".join(f"127.0.0.1:{port}" for port in self.ports) + f"/{cluster}"

    def start(self, member: int = 0, *, wait: bool = True) -> None:
        assert ETCD is not None
        address = f"{'https' if self._tls else 'http'}://127.0.0.1:{self.ports[member]}"
        cluster = ",".join(f"m{number}={peer}" for number, peer in enumerate(self._peers))
        command = [ETCD, "--name", f"m{member}", "--data-dir", str(self.folder / f"m{member}")]
        command += ["--listen-client-urls", address, "--advertise-client-urls", address]
        command += ["--listen-peer-urls", self._peers[member], "--initial-advertise-peer-urls", self._peers[member]]
        command += ["--initial-cluster", cluster, "--log-level", "error", "--unsafe-no-fsync"]
        command += ["--auto-tls"] if self._tls else []
        told = self._told[member] = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        told.bind("")  # the kernel gives it a name that is no file
        environment = {**os.environ, "NOTIFY_SOCKET": "@" + os.fsdecode(told.getsockname()[1:])}
        with (self.folder / f"m{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        if wait:
            self.wait_ready(member)

    def wait_ready(self, member: int) -> None:
        """Wait until it says that it serves, as it does to a service manager."""
        process, told = self._processes[member], self._told[member]
        assert process is not None and told is not None
        with closing(told), os.fdopen(os.pidfd_open(process.pid)) as end:
            found = select.select([told.fileno(), end.fileno()], [], [])[0]
            assert told.fileno() in found, (self.folder / f"m{member}.log").read_text()
            assert told.recv(1024) == b"READY=1"

    def certificate(self, member: int = 0) -> str:
        return str(self.folder / f"m{member}" / "fixtures" / "client" / "cert.pem")

    def kill(self, member: int = 0) -> None:
        process, self._processes[member] = self._processes[member], None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def forget(self, member: int = 0) -> None:
        """Lose what a member that was killed had on disk."""
        shutil.rmtree(self.folder / f"m{member}")

    def freeze(self, member: int) -> None:
        process = self._processes[member]
        assert process is not None
        process.send_signal(signal.SIGSTOP)

    def ask(self, what: str, **fields: Any) -> Any:
        """Call etcd's gateway for JSON, without a process."""
        encoded = {name: b64encode(one).decode() if isinstance(one, bytes) else one for name, one in fields.items()}
        url = f"http://127.0.0.1:{self.ports[0]}/v3/{what}"
        with urllib.request.urlopen(url, json.dumps(encoded).encode(), timeout=100) as answer:
            return json.load(answer)

    def put(self, key: str, value: str) -> None:
        self.ask("kv/put", key=key.encode(), value=value.encode())

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin like this."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        found = self.ask("kv/range", key=prefix.encode(), range_end=end.encode(), keys_only=True)
        return [b64decode(one["key"]).decode() for one in found.get("kvs", [])]

    def control(self, *words: str) -> bytes:
        """Run etcdctl, and return what it prints."""
        command = ["etcdctl", *words]
        if "--endpoints" not in words:
            command += ["--endpoints", f"127.0.0.1:{self.ports[0]}"]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.run(command, env=environment, check=True, capture_output=True, timeout=100).stdout

    def revive(self) -> None:
        """Start what was killed."""
        for member, process in enumerate(self._processes):
            if process is None:
                self.start(member)

    def close(self) -> None:
        for member in range(len(self._processes)):
            self.kill(member)


_numbers = itertools.count()


@pytest.fixture(scope="session")
def etcd_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """The one etcd of all tests in this process: `own_cluster`."""
    running = Etcd(tmp_path_factory.mktemp("etcd"))
    yield running
    running.close()


def own_cluster(shared: Etcd) -> Etcd:
    """The etcd of all, with a cluster that no other one has. It runs, and may be killed
    and started again: what it has stays.
    """
    shared.revive()
    return shared.of(f"test-{next(_numbers)}")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One for all tests of a module, which take clusters of their own."""
    running = Etcd(tmp_path_factory.mktemp("etcd"))
    yield running
    running.close()
