"""Servers for bad days: one in a thread of this process; and one in a process of its
own that can be killed, stopped and started again where it was.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import attrs

from tests import warm
from tests.clients.event_loops import TrioThread
from tests.ports import own_ports
from tests.server.running import make_config, running_server

__all__ = ["ServerProcess", "ServerUrl", "running_server_here", "running_server_process"]


class ServerUrl(Protocol):
    """Where a server is, wherever it runs."""

    @property
    def port(self) -> int: ...

    @property
    def url(self) -> str: ...


@attrs.frozen
class ServerHere:
    """A server in this process."""

    port: int

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"


@contextmanager
def running_server_here(**settings: Any) -> Iterator[ServerHere]:
    """A server in a thread, until the block is left, set up as `ServerProcess` is."""
    config = make_config(**{"prealloc_bytes": 16 << 20, "minimal_allocate_bytes": 4096, **settings})
    with TrioThread() as loop, loop.entered(lambda: running_server(config)) as server:
        yield ServerHere(server.server.addresses.port)


class ServerProcess:
    """`infinistore` on a port of its own, the same one after each restart."""

    def __init__(self, *flags: str, unix_socket: Path | None = None) -> None:
        self._flags = flags if unix_socket is None else (*flags, "--unix-socket", str(unix_socket))
        self.unix_socket = unix_socket
        self.port = own_ports(1)[0]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-P", "-W", "error", "-m", "infinistore", "--host", "127.0.0.1"]
        command += ["--service-port", str(self.port), "--manage-port", "0", "--prealloc-size", "16MiB"]
        command += ["--minimal-allocate-size", "4", "--log-level", "error"]
        unix = [] if "--unix-socket" in self._flags else ["--unix-socket", "off"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("INFINISTORE_")}
        self.process = warm.Popen([*command, *unix, *self._flags], stdout=subprocess.PIPE, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        found = re.search(r"(?:tcp|infinistores)://127\.0\.0\.1:(\d+)", line)
        assert found is not None, f"the server did not start: {line!r}"

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number is signal.SIGSTOP:
            # The signal is on its way until the kernel says so.
            status = Path(f"/proc/{self.process.pid}/status")
            while "State:\tT" not in status.read_text():
                os.sched_yield()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def restart(self) -> None:
        self.kill()
        self.start()


@contextmanager
def running_server_process(*flags: str, unix_socket: Path | None = None) -> Iterator[ServerProcess]:
    """A server until the block is left."""
    server = ServerProcess(*flags, unix_socket=unix_socket)
    try:
        server.start()
        yield server
    finally:
        server.kill()
