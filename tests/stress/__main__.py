"""Shared memory under stress: several clients of a server with a tiny pool, all of
which are stopped and killed.

    python -m tests.stress --seconds 180 [--rounds N] [--seed SEED] [--clients N] [--disk] [--plant FAULT]

Ends with 0 when the time or the rounds are over and nothing was found, with 1 at once
when something was. What is done to whom, and what each client calls, follows from the
seed, which it prints; when the kernel lets whom run does not. So the same seed goes the
same way but may need several runs to meet the same moment.
"""

import argparse
import json
import os
import random
import secrets
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from infinistore import blocking
from infinistore.config import ServerConfig
from infinistore.disk_settings import DiskPlace
from infinistore.server import serve
from tests.ports import own_ports
from tests.stress.board import Board
from tests.stress.client import CLIENTS, PLANTS, run_client

_POOL_BYTES = 4 * 1024 * 1024
_DISK_BYTES = 16 * _POOL_BYTES
_PLANTED = 1  # one that makes and checks no checksums, so that the values have to tell
_LONGEST_ROUND_S = 0.4
_LONGEST_STOP_S = 0.3
_PATIENCE_S = 30.0
"""How long something may take that should take moments, on a busy machine."""


class Found(Exception):
    """Something is wrong."""


class Stress:
    """A run: a server, clients, and who stops and kills them."""

    def __init__(self, seed: str, clients: int, plant: str, folder: str, *, disk: bool = False) -> None:
        self.board = Board(clients)
        self.done: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._seed = seed
        self._plant = plant
        self._folder = folder
        self._disks = (DiskPlace(Path(folder, "disk"), _DISK_BYTES),) if disk else ()
        self._port = own_ports(1)[0]
        self._reports, self._report = os.pipe2(os.O_NONBLOCK)
        self._alive: set[int] = set()
        self._server = 0
        self._clients = [0] * clients
        self._generation = 0

    # Processes

    def run(self, seconds: float, rounds: int) -> None:
        """Raise Found as soon as something is."""
        try:
            self._start_server()
            for writer in range(len(self._clients)):
                self._start_client(writer)
            until = time.monotonic() + seconds
            for _ in range(rounds):
                left_s = until - time.monotonic()
                if left_s <= 0:
                    break
                self._do_harm()
                self._wait(min(left_s, self._random.uniform(0, _LONGEST_ROUND_S)))
            self._end()
        finally:
            for pid in list(self._alive):
                self._kill(pid)

    def _fork(self, work: Callable[[], None]) -> int:
        pid = os.fork()
        if pid:
            self._alive.add(pid)
            return pid
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked for the run ends it
            work()
            code = 0
        except BaseException:  # noqa: BLE001
            text = json.dumps({"pid": os.getpid(), "what": traceback.format_exc()[-1500:]})
            os.write(self._report, text.encode() + b"\n")
        finally:
            os._exit(code)

    def _start_client(self, writer: int) -> None:
        self._generation += 1
        url, seed = f"infinistore://127.0.0.1:{self._port}", f"{self._seed}/{self._generation}"
        plant = self._plant if writer == _PLANTED else ""
        self._clients[writer] = self._fork(partial(run_client, self.board, writer, url, seed, plant))

    def _start_server(self) -> None:
        ready, tell = os.pipe()
        config = ServerConfig(
            service_port=self._port,
            manage_port=None,
            unix_socket=f"{self._folder}/socket",
            prealloc_bytes=_POOL_BYTES,
            minimal_allocate_bytes=4096,
            drain_timeout_s=5,
            disks=self._disks,
            disk_admission="eager",
        )

        async def run() -> None:
            async with trio.open_nursery() as nursery:
                await nursery.start(partial(serve, config, handle_signals=True))
                os.write(tell, b"serving\n")

        self._server = self._fork(partial(trio.run, run))
        os.close(tell)
        with open(ready, encoding="ascii") as told:
            if not told.readline():
                self._look()
                raise Found("the server did not start")

    # Harm

    def _do_harm(self) -> None:
        writer = self._random.randrange(len(self._clients))
        what = self._random.choices(
            [self._kill_client, self._stop_client, self._stop_server, self._kill_server, self._drain_server],
            weights=[8, 8, 3, 1, 1],
        )[0]
        what(writer)

    def _kill_client(self, writer: int) -> None:
        self.done["clients killed"] += 1
        self._kill(self._clients[writer])
        self._start_client(writer)

    def _stop_client(self, writer: int) -> None:
        self.done["clients stopped"] += 1
        self._stop(self._clients[writer])

    def _stop_server(self, _: int) -> None:
        self.done["servers stopped"] += 1
        self._stop(self._server)

    def _kill_server(self, _: int) -> None:
        self.done["servers killed"] += 1
        self.board.next_life()
        self._kill(self._server)
        self.board.next_life()  # what was written while it was dying is not in the next one either
        self._start_server()

    def _drain_server(self, _: int) -> None:
        self.done["servers drained"] += 1
        os.kill(self._server, signal.SIGTERM)
        if self._ended(self._server):
            raise Found("a server that was told to drain failed")
        self._start_server()

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self._alive.discard(os.waitpid(pid, 0)[0])

    def _stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self._wait(self._random.uniform(0, _LONGEST_STOP_S))
        os.kill(pid, signal.SIGCONT)

    # What is found

    def _wait(self, seconds: float) -> None:
        """Wait, unless something is found before."""
        if select.select([self._reports], [], [], seconds)[0]:
            self._look()
        for pid in list(self._alive):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._alive.discard(pid)
                self._look()
                raise Found(f"{'the server' if pid == self._server else 'a client'} has ended by itself")

    def _look(self) -> None:
        try:
            reports = os.read(self._reports, 1 << 16)
        except BlockingIOError:
            return
        raise Found("\n".join(json.loads(line)["what"] for line in reports.splitlines()))

    def _ended(self, pid: int) -> int:
        """Wait for the end of a process; return its status."""
        descriptor = os.pidfd_open(pid)
        try:
            if not select.select([descriptor], [], [], _PATIENCE_S)[0]:
                raise Found(f"process {pid} does not end")
        finally:
            os.close(descriptor)
        self._alive.discard(pid)
        return os.waitpid(pid, 0)[1]

    def _end(self) -> None:
        """Have the clients end, and see that they leave nothing behind."""
        self.board.end()
        while self._clients:
            self._ended(self._clients.pop())
        self._look()
        until = time.monotonic() + _PATIENCE_S
        with blocking.open_store(f"infinistore://127.0.0.1:{self._port}") as store:
            while True:
                found = store.stats()
                assert found.server is not None
                held = found.store.pinned_bytes + found.store.reserved_bytes + found.store.quarantined_bytes
                if not held and found.server.connections_open == 1:
                    break
                if time.monotonic() > until:
                    raise Found(f"clients that are gone have left something behind: {found}")
        counts = self.board.counts()
        if not counts["checked"]:
            raise Found("no value was read: this run says nothing")


def main() -> int:
    """Run, say what was found, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="how long; 180 unless given")
    parser.add_argument("--rounds", type=int, default=100_000, help="how often somebody is stopped or killed, at most")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="what decides; a new one unless given")
    parser.add_argument("--clients", type=int, default=len(CLIENTS), help=f"how many; {len(CLIENTS)} unless given")
    parser.add_argument("--disk", action="store_true", help="give the server a disk, which outlives it")
    parser.add_argument("--plant", choices=sorted(PLANTS), default="", help="a fault in one client, to be found")
    given = parser.parse_args()
    replay = f"python -m tests.stress --seconds {given.seconds:g} --seed {given.seed} --clients {given.clients}"
    replay += f"{' --disk' if given.disk else ''}{' --plant ' + given.plant if given.plant else ''}"
    sys.stdout.write(f"seed {given.seed}; again: {replay}\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        stress = Stress(given.seed, given.clients, given.plant, folder, disk=given.disk)
        found = ""
        try:
            stress.run(given.seconds, given.rounds)
        except Found as error:
            found = f"FOUND: {error}\n"
    figures = {**stress.board.counts(), **stress.done}
    sys.stdout.write(f"{found}{', '.join(f'{count} {name}' for name, count in figures.items())}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
