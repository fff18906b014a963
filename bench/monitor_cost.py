"""What `infinistore monitor` costs: the part of one core that it takes, and what it
makes the server do.

A server and a load (`monitor_load.py`) run on this machine, and the monitor in a
pseudo-terminal that is read all the time. Once it draws, the processor time of the
monitor and of the server is taken from /proc and compared with the wall time of the
same stretch. The server's share is measured again over as long without a monitor.
"""

import argparse
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl

from monitor_load import load

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
INFINISTORE = (sys.executable, "-m", "infinistore")


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has taken, all threads, user and
    system.
    """
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@contextmanager
def server(pool: str, *more: str) -> Iterator[tuple[int, str]]:
    """Run a server with these flags, too; yield its process and its address."""
    flags = ["--service-port", "0", "--manage-port", "0", "--unix-socket", "off", "--prealloc-size", pool, *more]
    with subprocess.Popen([*INFINISTORE, *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            found = re.search(rb"tcp://[\d.]+:\d+", process.stdout.readline())
            assert found is not None, "the server did not start"
            yield process.pid, found[0].decode()
        finally:
            process.terminate()


class WatchedMonitor:
    """A monitor in a pseudo-terminal, whose output is read and counted."""

    def __init__(self, url: str, interval_s: float, width: int, height: int) -> None:
        self._ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        arguments = [*INFINISTORE, "monitor", url, "--interval", str(interval_s)]
        environment = os.environ | {"TERM": "xterm-256color"}
        self.process = subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.written_bytes = 0
        while b"q " not in (data := os.read(self._ours, 65536)):  # the last line of its first screen
            self.written_bytes += len(data)

    def read_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._ours], [], [], left)[0]:
                self.written_bytes += len(os.read(self._ours, 65536))

    def quit(self) -> None:
        os.write(self._ours, b"q")
        self.process.wait()
        os.close(self._ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--size", default="80x24")
    given = parser.parse_args()
    width, height = map(int, given.size.split("x"))
    with server("256MiB") as (server_pid, url), load(url):
        time.sleep(5)  # until the pool is full and evicts
        before, began = processor_s(server_pid), time.monotonic()
        time.sleep(given.seconds)
        alone = (processor_s(server_pid) - before) / (time.monotonic() - began)
        monitor = WatchedMonitor(url, given.interval, width, height)
        monitor.written_bytes = 0
        started = processor_s(monitor.process.pid)
        before, began, used = processor_s(server_pid), time.monotonic(), started
        monitor.read_for(given.seconds)
        wall_s = time.monotonic() - began
        taken = processor_s(monitor.process.pid) - used
        watched = (processor_s(server_pid) - before) / wall_s
        monitor.quit()
    print(f"{given.size}, one sample every {given.interval:g} s, server under load, wall time {wall_s:.1f} s")
    print(f"monitor: {taken:.2f} s of processor time, {100 * taken / wall_s:.2f} % of a core"
          f" (and {started:.2f} s to start)")  # fmt: skip
    print(f"monitor: {monitor.written_bytes / wall_s:.0f} bytes a second to the terminal")
    print(f"server: {100 * watched:.2f} % of a core while watched, {100 * alone:.2f} % before")


if __name__ == "__main__":
    main()
