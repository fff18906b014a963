"""What writing behind costs a put: a server with a disk beside one without, interleaved.

    python bench/disk_puts.py [--folder PATH] [--rounds N] [--seconds S] [--rate MIB]

In each round each of the two servers gets the same puts for some seconds, at a rate that
its disk can take, by shared memory and over TCP: batches of 4 MiB, in blocks of 256 KiB.
The one with a disk writes them at once (`--disk-admission eager`), while the next ones
come. Beside that, another thread asks whether a key exists, over the Unix socket, every
millisecond or two: how late the answers are is how long the server's loop was busy.

Reported are the medians of the rounds, and of their ratios. Files lie in a temporary
folder below PATH, and are removed at the end.
"""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

from infinistore import blocking
from infinistore.blocking import BlockingStore
from infinistore.sizes import KIB, MIB

BLOCK_BYTES = 256 * KIB
BATCH_BLOCKS = 16
POOL_BYTES = 512 * MIB
DISK_BYTES = 4096 * MIB
KEYS = 4096
PAUSE_S = 1e-3

Times: TypeAlias = dict[str, list[float]]


class Load:
    """One server, and its clients."""

    def __init__(self, stores: dict[str, BlockingStore], asking: BlockingStore, rate: float) -> None:
        self.stores = stores
        self._asking = asking
        self._period_s = BLOCK_BYTES * BATCH_BLOCKS / rate
        self._blocks = [random.Random(number).randbytes(BLOCK_BYTES) for number in range(BATCH_BLOCKS)]
        self._number = 0

    def run(self, store: BlockingStore, seconds: float) -> Times:
        """Put batches for a while; return how long each put and each answer took, in
        seconds.
        """
        times: Times = {"put": [], "answer": []}
        done = threading.Event()
        asking = threading.Thread(target=self._ask, args=(times["answer"], done))
        asking.start()
        begin = due = time.perf_counter()
        while due < begin + seconds:
            time.sleep(max(0.0, due - time.perf_counter()))
            batch = {f"{(self._number + i) % KEYS}/{self._number}": block for i, block in enumerate(self._blocks)}
            self._number += BATCH_BLOCKS
            start = time.perf_counter()
            store.put_many(batch)
            times["put"].append(time.perf_counter() - start)
            due = max(due + self._period_s, start)
        done.set()
        asking.join()
        return times

    def _ask(self, answers: list[float], done: threading.Event) -> None:
        while not done.wait(PAUSE_S):
            start = time.perf_counter()
            self._asking.exists("missing")
            answers.append(time.perf_counter() - start)

    def until_written(self) -> None:
        """Wait until nothing is being written."""
        while (disk := self._asking.stats().disk) is not None and disk.queued_bytes + disk.pinned_bytes:
            time.sleep(0.01)

    def written_bytes(self) -> int:
        """Return how much was written so far."""
        disk = self._asking.stats().disk
        return 0 if disk is None else sum(one.written_bytes for one in disk.disks)


@contextmanager
def serving(folder: Path, rate: float, *options: str) -> Iterator[Load]:
    """Run a server, and clients of it."""
    folder.mkdir()
    socket = folder / "socket"
    command = [sys.executable, "-m", "infinistore", "--service-port", "0", "--manage-port", "off"]
    command += ["--unix-socket", str(socket), "--prealloc-size", f"{POOL_BYTES // MIB}MiB", "--log-level", "error"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as server, ExitStack() as open_:
        try:
            assert server.stdout is not None
            line = next(line for line in server.stdout if "tcp://" in line)
            url = "tcp://" + line.split("tcp://")[1].split()[0].rstrip(",;")
            urls = {"shared memory": f"shm://{socket}", "TCP": url}
            stores = {name: open_.enter_context(blocking.open_store(url)) for name, url in urls.items()}
            yield Load(stores, open_.enter_context(blocking.open_store(f"unix://{socket}")), rate)
            open_.close()
        finally:
            server.terminate()


def percentile(values: list[float], part: float) -> float:
    """Return the value below which this part of them is."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def main() -> None:
    """Measure, and print a table."""
    arguments = parse()
    found: dict[tuple[str, str, float], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="infinistore-bench-", dir=arguments.folder) as name, ExitStack() as open_:
        folder = Path(name)
        rate = arguments.rate * MIB
        plain = open_.enter_context(serving(folder / "plain", rate))
        disk_options = ("--disk", f"{folder / 'disk'}:{DISK_BYTES // MIB}MiB", "--disk-admission", "eager")
        disk = open_.enter_context(serving(folder / "with", rate, *disk_options))
        before = 0
        for number in range(-1, arguments.rounds):  # the first one warms up
            for transport in plain.stores:
                times: dict[Load, Times] = {}
                for load in (plain, disk) if number % 2 else (disk, plain):
                    times[load] = load.run(load.stores[transport], arguments.seconds)
                    load.until_written()
                for what in ("put", "answer") if number >= 0 else ():
                    for part in (0.5, 0.99):
                        pair = (percentile(times[plain][what], part), percentile(times[disk][what], part))
                        found.setdefault((transport, what, part), []).append(pair)
            before = before or disk.written_bytes()
        written = (disk.written_bytes() - before) / (2 * arguments.rounds * arguments.seconds)
    print(
        f"written behind: {written / MIB:.0f} MiB/s of {arguments.rate} MiB/s put; medians of {arguments.rounds} rounds"
    )
    print(f"{'':<34}{'without':>10}{'with':>10}{'ratio':>8}{'from':>7}{'to':>7}")
    for (transport, what, part), pairs in found.items():
        ratios = [other / one for one, other in pairs]
        without, beside = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
        row = f"{transport}: {what}, p{part * 100:.0f}, ms"
        print(f"{row:<34}{without:>10.2f}{beside:>10.2f}", end="")
        print(f"{statistics.median(ratios):>8.2f}{min(ratios):>7.2f}{max(ratios):>7.2f}")


def parse() -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one server in one round")
    parser.add_argument("--rate", type=int, default=200, help="MiB put per second; default: 200")
    return parser.parse_args()


if __name__ == "__main__":
    main()
