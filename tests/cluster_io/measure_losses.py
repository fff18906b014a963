"""Measures what a reader notices of a server that is lost, in a cluster of three.

`python -m tests.cluster_io.measure_losses` reads under load while one server is killed
(SIGKILL), and again while one is stopped (SIGSTOP), which is how a machine looks that
has vanished. It says what failed, what was found, and how long look-ups took. Nothing
is left behind.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs

from infinistore import blocking
from infinistore.cluster.placement import Placement

from .etcd import Etcd
from .measure import Watcher, serve, serving

_NAMES: Final = ("a", "b", "c")
_KEYS: Final = [f"{{{number // 8}}}{number}" for number in range(1200)]
_BLOCK: Final = bytes(64 * 1024)
_BATCH: Final = 16
_SINGLE: Final = 2000
_WINDOW_S: Final = 0.1
_GONE_S: Final = 13.0
"""Longer than a lease."""
_SILENT_S: Final = 6.0


@attrs.define
class Load:
    """What two readers and one that looks keys up have seen, each with its time."""

    homes: dict[str, str]
    over: threading.Event = attrs.field(factory=threading.Event)
    errors: list[str] = attrs.field(factory=list)
    reads: list[tuple[float, float, int, int, int]] = attrs.field(factory=list)
    """Begin and end, keys of the others, how many of these were found, and how many of
    the victim's were missing."""
    lookups: list[tuple[float, float]] = attrs.field(factory=list)

    def read(self, store: blocking.BlockingStore, victim: str) -> None:
        keys = random.sample(_KEYS, _BATCH)
        began = time.monotonic()
        found = store.get_many(keys)
        ended = time.monotonic()
        there = [value is not None for value in found]
        others = [one for key, one in zip(keys, there, strict=True) if self.homes[key] != victim]
        self.reads.append((began, ended, len(others), sum(others), _BATCH - len(others) - (sum(there) - sum(others))))

    def look(self, store: blocking.BlockingStore, victim: str) -> None:
        began = time.monotonic()
        store.match_prefix(random.sample(_KEYS, _BATCH))
        self.lookups.append((began, time.monotonic()))

    def repeat(self, work: Callable[[blocking.BlockingStore, str], None], *given: object) -> None:
        while not self.over.wait(0.001):
            try:
                work(*given)  # type: ignore[arg-type]
            except Exception as error:  # noqa: BLE001 - each is counted
                self.errors.append(repr(error))


@contextmanager
def load(store: blocking.BlockingStore, homes: dict[str, str], victim: str) -> Iterator[Load]:
    """Read and look up until the block is left."""
    seen = Load(homes)
    work = (seen.read, seen.read, seen.look)
    threads = [threading.Thread(target=seen.repeat, args=(one, store, victim)) for one in work]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1.0)
        yield seen
    finally:
        seen.over.set()
        for thread in threads:
            thread.join()


def report(seen: Load, lost_at: float) -> None:
    """Print what was seen."""
    after = [one for one in seen.reads if one[1] > lost_at]
    asked, found = sum(one[2] for one in after), sum(one[3] for one in after)
    windows: dict[int, list[int]] = {}
    for _, ended, others, there, _ in after:
        window = windows.setdefault(int((ended - lost_at) / _WINDOW_S), [0, 0])
        window[0] += others
        window[1] += there
    least = min(there / others for others, there in windows.values() if others)
    missed = [ended for _, ended, _, _, missing in after if missing]
    print(f"  {len(seen.errors)} errors in {len(after)} reads of {_BATCH} blocks; the first miss after", end=" ")
    print(f"{min(missed) - lost_at:.3f} s" if missed else "never")
    print(f"  {found} of {asked} keys of the other nodes found; the worst {_WINDOW_S:g} s found {least:.4f} of them")
    lookups = [ended - began for began, ended in seen.lookups if ended > lost_at]
    gets = [one[1] - one[0] for one in after]
    print(f"  the longest of {len(lookups)} look-ups of {_BATCH} keys took {max(lookups):.3f} s, of the reads", end=" ")
    print(f"{max(gets):.3f} s")
    for error in seen.errors[:3]:
        print(f"  {error}")


def measure(url: str, servers: dict[str, "subprocess.Popen[bytes]"]) -> None:
    """Kill one server, then stop another one."""
    watcher = Watcher(url)
    watcher.until(set(servers), serving=True)
    view = watcher.membership.view
    owners = Placement(view).owners(_KEYS)
    homes = {key: view.nodes[owner].id for key, owner in zip(_KEYS, owners, strict=True)}
    with blocking.open_store(f"{url}?transport=inline") as store:
        store.put_many(dict.fromkeys(_KEYS, _BLOCK))
        with load(store, homes, "c") as seen:
            killed = time.monotonic()
            servers["c"].send_signal(signal.SIGKILL)
            servers["c"].wait()
            right = watcher.until({"a", "b"}) - killed
            time.sleep(max(0.0, _GONE_S - right))
        print(f"a server killed, load average {os.getloadavg()[0]:.1f}; the view was right after {right:.1f} s")
        report(seen, killed)
        servers["c"] = serve(url, "c")
        watcher.until(set(servers), serving=True)
        store.put_many(dict.fromkeys(_KEYS, _BLOCK))

        with load(store, homes, "b") as seen:
            stopped = time.monotonic()
            servers["b"].send_signal(signal.SIGSTOP)
            time.sleep(_SILENT_S)
        print(f"a server stopped, load average {os.getloadavg()[0]:.1f}")
        report(seen, stopped)
        print(f"  with its breaker open: {open_breaker(store, [key for key in _KEYS if homes[key] == 'b'])}")
        servers["b"].send_signal(signal.SIGCONT)
    watcher.membership.close()


def open_breaker(store: blocking.BlockingStore, keys: Sequence[str]) -> str:
    """Look up what only the lost node has; say how long that took."""
    took = []
    for _ in range(_SINGLE):
        began = time.perf_counter()
        assert store.match_prefix([random.choice(keys)]) == 0
        took.append(time.perf_counter() - began)
    took.sort()
    p99 = took[int(0.99 * len(took))]
    return (
        f"{_SINGLE} look-ups of its keys took {statistics.median(took) * 1e3:.3f} ms in the median, "
        f"{p99 * 1e3:.3f} ms at the 99th percentile, {took[-1] * 1e3:.3f} ms at most"
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        etcd = Etcd(Path(folder))
        with serving(etcd, _NAMES) as servers:
            measure(etcd.url, servers)


if __name__ == "__main__":
    main()
