"""A server in a process of its own, and the command line run against it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests import warm
from tests.cluster_io.etcd import etcd

__all__ = ["etcd"]

INFINISTORE = (sys.executable, "-W", "error", "-m", "infinistore")


@attrs.frozen
class RunningServer:
    """A server that has said that it listens."""

    process: "subprocess.Popen[bytes]"
    url: str
    ready_line: str

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, bytes]:
        """Tell it to stop; return its exit code and what it wrote to standard error."""
        self.process.send_signal(number)
        _, errors = self.process.communicate()
        return self.process.returncode, errors


@contextmanager
def running_server(environment: Mapping[str, str], *flags: str) -> Iterator[RunningServer]:
    """Start a server on a free port and wait for the line that says where it
    listens.
    """
    arguments = [*INFINISTORE, "--service-port", "0", "--manage-port", "0", *flags]
    with warm.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline().decode()
            if not line:
                pytest.fail(f"the server did not start: {process.communicate()[1].decode()}")
            address = line.split()[2].rstrip(",")
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


@pytest.fixture(scope="module")
def server(environment: dict[str, str]) -> Iterator[RunningServer]:
    """One server for the tests of a module, which keep to keys of their own."""
    with running_server(environment, "--prealloc-size", "64MiB", "--minimal-allocate-size", "4") as started:
        yield started


Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def command(environment: dict[str, str], tmp_path: Path) -> Run:
    """Run `infinistore` with the arguments given, to its end."""

    def run(*arguments: str, url: str | None = None, **more: Any) -> "subprocess.CompletedProcess[bytes]":
        more.setdefault("stdin", subprocess.DEVNULL if "input" not in more else None)
        variables = environment | ({} if url is None else {"INFINISTORE_URL": url}) | more.pop("env", {})
        return warm.run(
            [*INFINISTORE, *arguments], env=variables, cwd=tmp_path, capture_output=True, check=False, **more
        )

    return run


@pytest.fixture
def store(command: Run, server: RunningServer) -> Run:
    """Run `infinistore` against the server."""

    def run(*arguments: str, **more: Any) -> "subprocess.CompletedProcess[bytes]":
        return command(*arguments, url=server.url, **more)

    return run


@pytest.fixture(name="running_server")
def _running_server(environment: dict[str, str]) -> Callable[..., Any]:
    """What starts a server with flags of its own."""

    def start(*flags: str) -> Any:
        return running_server(environment, *flags)

    return start
