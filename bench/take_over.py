"""How long a server is away while another process takes its place.

    python bench/take_over.py [--pool 512MiB] [--blocks 7500] [--block-size 64KiB] [--shards 1]

It fills a server, and asks it for one block after the other over TCP and by shared
memory while a successor with --take-over takes its place. The longest time between two
answers is what the take-over costs a client. Afterwards every key has to be there, and
one process must have missed none meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from infinistore import blocking
from infinistore.sizes import in_units, parse_size

BATCH = 64


class Prober:
    """Reads one block after the other; `longest_s` is the longest time that one took."""

    def __init__(self, url: str, keys: list[str]) -> None:
        self.longest_s = 0.0
        self.reads = self.misses = 0
        self._url, self._keys = url, keys
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with blocking.open_store(self._url, known_blocks=0) as store:
            last = time.perf_counter()
            while not self._stop.is_set():
                (found,) = store.get_many([self._keys[self.reads * 7919 % len(self._keys)]])
                now = time.perf_counter()
                self.longest_s, last = max(self.longest_s, now - last), now
                self.reads += 1
                self.misses += found is None

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def start(socket: Path, pool: str, *flags: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-P", "-m", "infinistore", "serve", "--service-port", "0", "--manage-port", "off"]
    command += ["--unix-socket", str(socket), "--prealloc-size", pool, "--minimal-allocate-size", "4"]
    process = subprocess.Popen(
        [*command, "--log-level", "warning", "--json", *flags], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["listening"][0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a take-over.")
    parser.add_argument("--pool", default="512MiB")
    parser.add_argument("--blocks", type=int, default=7500)
    parser.add_argument("--block-size", default="64KiB")
    parser.add_argument("--shards", default="1")
    given = parser.parse_args()
    shards = ("--shards", given.shards)
    size = parse_size(given.block_size)
    keys = [f"{number:032x}" for number in range(given.blocks)]
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "socket"
        old, tcp = start(socket, given.pool, *shards)
        new = None
        try:
            with blocking.open_store(f"shm://{socket}") as store:
                block = os.urandom(size)
                for first in range(0, len(keys), BATCH):
                    store.put_many(dict.fromkeys(keys[first : first + BATCH], block))
                before = store.stats().store.keys
            probers = [Prober(tcp, keys), Prober(f"shm://{socket}", keys)]
            while any(prober.reads < 20 for prober in probers):
                os.sched_yield()
            for prober in probers:
                prober.longest_s = 0.0
            began = time.perf_counter()
            new, _ = start(socket, given.pool, "--take-over", *shards)
            took_s = time.perf_counter() - began
            old.wait()
            for prober in probers:
                prober.stop()
            with blocking.open_store(tcp) as store:
                after = store.stats().store.keys
            filled = f"{before} blocks of {in_units(size)} in {given.pool}, --shards {given.shards}"
            print(f"{filled}; load average {os.getloadavg()[0]:.1f}")
            print(f"from the start of the successor until it served: {took_s:.2f} s")
            for name, prober in zip(("TCP", "shared memory"), probers, strict=True):
                print(f"longest time without an answer, {name}: {prober.longest_s * 1000:.0f} ms")
            print(f"afterwards: {after} keys, {sum(prober.misses for prober in probers)} misses")
            if after != before or (given.shards == "1" and any(prober.misses for prober in probers)):
                raise SystemExit("blocks are lost")
        finally:
            for process in (old, new):
                if process is not None:
                    process.kill()
                    process.communicate()


if __name__ == "__main__":
    main()
