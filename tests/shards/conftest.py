"""Servers with shards, as people start them."""

import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

from tests import warm
from tests.asking import until

INFINISTORE = (sys.executable, "-W", "error", "-m", "infinistore")
POOL = ("--prealloc-size", "8MiB", "--minimal-allocate-size", "1")
HOST: Final = str(IPv4Address("127.1.0.0") + os.getpid())
"""Where the shards listen that this process starts. Nobody else asks for a port there,
and so a shard that is started again gets its own again.
"""
NAMES: Final = ("127.0.0.1", HOST)
"""Of the certificates of servers: the management API is at the first."""


@attrs.define
class RunningShards:
    """A server with shards that has said that it listens."""

    process: "subprocess.Popen[str]"
    port: int
    management: str

    token: str = ""
    """What its management API is asked with, if it wants one."""
    ca: Path | None = None
    """The authority of its certificate, if it has one."""

    def ask(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        """The status and the body that the management API answers."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        request = urllib.request.Request(self.management + path, method=method, headers=headers)
        trust = None if self.ca is None else ssl.create_default_context(cafile=str(self.ca))
        try:
            with urllib.request.urlopen(request, timeout=60, context=trust) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def told(self, path: str, method: str = "GET") -> Any:
        """What it answers, which must be a success."""
        status, body = self.ask(path, method)
        assert status == 200, body
        return json.loads(body)

    def shards(self) -> list[dict[str, Any]]:
        """Its shards."""
        found: list[dict[str, Any]] = self.told("/shards")["shards"]
        return found

    def wait_for_restart(self, index: int, restarts: int) -> None:
        """Wait until a shard serves again."""

        def serves() -> bool:
            shard = self.shards()[index]
            return bool(shard["state"] == "serving" and shard["restarts"] >= restarts)

        until(serves)


@contextmanager
def running_shards(environment: Mapping[str, str], *flags: str, cores: Sequence[int] = ()) -> Iterator[RunningShards]:
    """Start a server with two shards on free ports, which may use these cores, or
    all.
    """
    arguments = [*INFINISTORE, "--shards", "2", "--host", HOST, "--service-port", "0", "--manage-port", "0", "--json"]
    arguments += [*POOL, *flags]
    pipe = subprocess.PIPE
    if cores:
        arguments = ["taskset", "--cpu-list", ",".join(map(str, cores)), *arguments]
    with warm.Popen(arguments, stdout=pipe, stderr=pipe, env=environment, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                pytest.fail(f"the server did not start: {process.communicate()[1]}")
            said = json.loads(line)
            assert said["shards"] == 2
            yield RunningShards(process, int(said["listening"][0].rpartition(":")[2]), said["management"][0])
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.communicate()


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of servers: without settings of the person who runs the tests."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INFINISTORE_")}
    return inherited | {"XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("run"))}


@pytest.fixture(scope="session")
def two_shards(environment: dict[str, str]) -> Iterator[RunningShards]:
    """One server with two shards for all tests that leave it running."""
    with running_shards(environment) as started:
        yield started
