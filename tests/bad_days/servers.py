"""A server in a process of its own that can be killed, stopped and started again where
it was.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import warm
from tests.ports import own_ports

__all__ = ["ServerProcess", "running_server_process"]


class ServerProcess:
    """`infinistore` on a port of its own, the same one after each restart."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
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
def running_server_process(*flags: str) -> Iterator[ServerProcess]:
    """A server until the block is left."""
    server = ServerProcess(*flags)
    try:
        server.start()
        yield server
    finally:
        server.kill()
