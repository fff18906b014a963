"""Servers that a command talks to, and the command line, all in the process of the
tests; and servers in processes of their own, for tests of processes.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from infinistore.cli import raw_peer
from tests import warm
from tests.cli.in_process import FREE_PORTS, ServerHere, run_here, server_here
from tests.cluster_io.etcd import etcd

__all__ = ["etcd"]

INFINISTORE = (sys.executable, "-W", "error", "-m", "infinistore")


@attrs.frozen
class RunningServer:
    """A server in a process of its own that has said that it listens."""

    process: "subprocess.Popen[bytes]"
    url: str
    ready_line: str

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, bytes]:
        """Tell it to stop; return its exit code and what it wrote to standard error."""
        self.process.send_signal(number)
        _, errors = self.process.communicate()
        return self.process.returncode, errors


@contextmanager
def server_process(environment: Mapping[str, str], *flags: str) -> Iterator[RunningServer]:
    """Start a server on free ports and wait for the line that says where it listens."""
    arguments = [*INFINISTORE, *FREE_PORTS, *flags]
    with warm.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline().decode()
            if not line:
                pytest.fail(f"the server did not start: {process.communicate()[1].decode()}")
            (address,) = re.findall(r"tcp://[\d.:]+\d", line)
            yield RunningServer(process, address, line)
        finally:
            if process.poll() is None:
                process.terminate()
                process.communicate()


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of every command: without settings of the person who runs the
    tests, and without colour.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INFINISTORE_")}
    runtime_folder = tmp_path_factory.mktemp("run")
    return inherited | {"XDG_RUNTIME_DIR": str(runtime_folder), "TERM": "dumb", "NO_COLOR": "1"}


@pytest.fixture(scope="session")
def server(environment: dict[str, str]) -> Iterator[ServerHere]:
    """One server for all tests, which keep to keys of their own."""
    with server_here(environment, "--prealloc-size", "64MiB", "--minimal-allocate-size", "4") as started:
        yield started


Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
StartServer = Callable[..., AbstractContextManager[ServerHere]]
StartProcess = Callable[..., AbstractContextManager[RunningServer]]


@pytest.fixture
def command(environment: dict[str, str], tmp_path: Path) -> Run:
    """Run `infinistore` with the arguments given, to its end, in this process."""

    def run(
        *arguments: str | bytes, url: str | None = None, env: Mapping[str, str] | None = None, **more: Any
    ) -> "subprocess.CompletedProcess[bytes]":
        variables = environment | ({} if url is None else {"INFINISTORE_URL": url}) | dict(env or {})
        return run_here(*arguments, environment=variables, cwd=tmp_path, **more)

    return run


@pytest.fixture
def store(command: Run, server: ServerHere) -> Run:
    """Run `infinistore` against the server."""

    def run(*arguments: str, **more: Any) -> "subprocess.CompletedProcess[bytes]":
        return command(*arguments, url=server.url, **more)

    return run


@pytest.fixture
def jemalloc_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell the doctor so, who tries it in a process."""
    works = subprocess.CompletedProcess[str]([], 0, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: works)


@pytest.fixture
def warm_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the other process of a benchmark forked."""
    monkeypatch.setattr(raw_peer, "subprocess", SimpleNamespace(Popen=warm.Popen, PIPE=subprocess.PIPE))


@pytest.fixture
def running_server(environment: dict[str, str]) -> StartServer:
    """What starts a server with flags of its own, in this process."""
    return lambda *flags: server_here(environment, *flags)


@pytest.fixture
def running_process(environment: dict[str, str]) -> StartProcess:
    """What starts a server with flags of its own, in a process of its own."""
    return lambda *flags: server_process(environment, *flags)
