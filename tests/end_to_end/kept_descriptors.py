"""An imitation of the part of systemd that keeps descriptors of a service from one run
to the next (FileDescriptorStoreMax=), and starts its processes.
"""

import fcntl
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import attrs

from tests import warm

_START = """
import os, sys
names, numbers = sys.argv[1].split(":") if sys.argv[1] else [], [int(one) for one in sys.argv[2].split(",") if one]
for number, descriptor in enumerate(numbers):
    os.dup2(descriptor, 3 + number, inheritable=True)
os.closerange(3 + len(numbers), 1000)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(numbers)), "LISTEN_FDNAMES": ":".join(names)}
from infinistore.cli import main
main(["serve", *sys.argv[3:]])
"""


@attrs.define
class Manager:
    """Keeps descriptors, and starts a server with them. `most` is what the service may
    have kept; with `forgets` off, it forgets nothing but sockets."""

    folder: Path
    most: int = 100
    forgets: bool = True
    activated: Sequence[socket.socket] = ()
    kept: dict[str, int] = attrs.field(factory=dict)
    processes: list[subprocess.Popen[str]] = attrs.field(factory=list)
    refused: int = 0
    _socket: socket.socket = attrs.field(factory=lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    _thread: threading.Thread = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._socket.bind(str(self.folder / "notify"))
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 10)
            if data == b"over":
                break
            lines = dict(line.split("=", 1) for line in data.decode().splitlines())
            name = lines.get("FDNAME", "stored")
            if lines.get("FDSTORE") == "1" and len(self.kept) < self.most:
                assert name not in self.kept
                assert lines["FDPOLL"] == "0"
                (descriptor,) = descriptors
                self.kept[name] = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 200)
            elif lines.get("FDSTORE") == "1":
                self.refused += 1
            if lines.get("FDSTOREREMOVE") == "1" and (self.forgets or "-socket-" in name):
                os.close(self.kept.pop(name))
            for descriptor in descriptors:
                os.close(descriptor)

    def spawn(self, *flags: str) -> "subprocess.Popen[str]":
        """Start the next process of the service."""
        given = [*reversed(self.kept.items())]
        given += [("infinistore.socket", fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD, 500)) for sock in self.activated]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("INFINISTORE_")}
        command = [sys.executable, "-P", "-c", _START, ":".join(name for name, _ in given)]
        with (self.folder / "log").open("a") as log:
            process = warm.Popen(
                [*command, ",".join(str(descriptor) for _, descriptor in given), *flags],
                env=inherited | {"NOTIFY_SOCKET": str(self.folder / "notify"), "FDSTORE": str(self.most)},
                pass_fds=[descriptor for _, descriptor in given],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        for _, descriptor in given[len(self.kept) :]:
            os.close(descriptor)
        self.processes.append(process)
        return process

    def start(self, *flags: str) -> "subprocess.Popen[str]":
        """Start the next process, and wait until it serves."""
        process = self.spawn(*flags)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert re.match("listening on ", line), self.log
        return process

    @property
    def log(self) -> str:
        """What all processes have written."""
        return (self.folder / "log").read_text()

    def kill(self) -> None:
        """End the processes. What was kept stays."""
        for process in self.processes:
            process.kill()
            process.communicate()

    def close(self) -> None:
        self.kill()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"over", str(self.folder / "notify"))
        self._thread.join()
        self._socket.close()
        for descriptor in self.kept.values():
            os.close(descriptor)
