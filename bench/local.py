"""The blocking client by shared memory, against numpy's memcpy of the same blocks; and
single calls against memcached.

    python bench/local.py [--quick] [--json]

The server is a process of its own on this machine. Blocks are page-aligned. Each batch
comes from, and goes to, other memory than the one before: the pool, the memory that the
yardstick copies to (as long as the pool) and the caller's buffers are each larger than
the last-level cache. Ratios are rates, store / memcpy: 1.0 is as fast. A lease is
against the copying get, and against one that copies with a single thread, as memcpy
does.

A client knows where blocks lie that it has read or written, and reads them again
without asking the server. Asking (known_blocks=0) is what reading a block for the first
time takes.

Warm is what a long-lived client sees. Cold is a store that was opened a moment ago: its
mapping is populated by a thread in the background meanwhile, and every page that it has
not come to yet is a page fault.

Single calls are against pymemcache (apt-get install memcached; pip install pymemcache)
over a Unix socket, in a closed loop and with 2 ms of thinking between two calls. Its
cheapest call, getting one byte, stands against exists. Where the two ends run decides
much of that: on one core a server need not be woken across cores, which on a virtual
machine takes longer than all that memcached does. So they are measured with a core for
each end, and once more wherever the kernel puts them.
"""

import argparse
import getpass
import importlib
import json
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from infinistore.blocking import BlockingStore, open_store
from rounds import interleaved, taking_turns

KIB, MIB = 1024, 1024 * 1024
POOL_BYTES = 512 * MIB
STORED_BYTES = 256 * MIB  # half of the pool, so that nothing is evicted
BUFFER_BYTES = 128 * MIB
SHAPES = {"64 x 64 KiB": (64, 64 * KIB), "16 x 1 MiB": (16, MIB)}
LEASES = 8  # one after the other count as one call: else a round of them would be over in a moment
THINKING_S = 0.002


class Blocks:
    """Page-aligned, touched memory, cut into blocks; as memory views and as arrays."""

    def __init__(self, length: int, size: int) -> None:
        memory = memoryview(mmap.mmap(-1, length))
        memory[:] = bytes(range(256)) * (length // 256)
        self.views = [memory[start : start + size] for start in range(0, length, size)]
        self.arrays = [np.frombuffer(view, dtype=np.uint8) for view in self.views]


class Batches:
    """Batches of one shape that take turns, made beforehand: what is measured begins
    with a list of pairs.
    """

    def __init__(self, count: int, size: int) -> None:
        source, target, room = (Blocks(n, size) for n in (BUFFER_BYTES, BUFFER_BYTES, POOL_BYTES))
        firsts = range(0, STORED_BYTES // size, count)
        self.keys = [[f"model/{size}/block/{first + i:06d}" for i in range(count)] for first in firsts]
        self.puts = [self._pairs(keys, source.views, first) for keys, first in zip(self.keys, firsts, strict=True)]
        self.gets = [self._pairs(keys, target.views, first) for keys, first in zip(self.keys, firsts, strict=True)]
        rooms = range(0, len(room.views), count)
        self.copies_in = [self._pairs(room.arrays[f : f + count], source.arrays, f) for f in rooms]
        self.copies_out = [
            [(t, r) for r, t in self._pairs(room.arrays[f : f + count], target.arrays, f)] for f in rooms
        ]

    @staticmethod
    def _pairs(one: list[Any], other: list[Any], first: int) -> list[tuple[Any, Any]]:
        return [(thing, other[(first + i) % len(other)]) for i, thing in enumerate(one)]


def copy(pairs: list[tuple[Any, Any]]) -> None:
    """The yardstick: copy block by block."""
    for target, source in pairs:
        np.copyto(target, source)


@contextmanager
def server(*flags: str) -> Iterator[str]:
    """Start a server on a private socket, with more flags if there are; give
    its URL.
    """
    with tempfile.TemporaryDirectory(prefix="infinistore-bench-") as folder:
        path = f"{folder}/store.sock"
        command = [sys.executable, "-m", "infinistore", "--service-port", "0", "--manage-port", "0"]
        command += [
            "--unix-socket",
            path,
            "--prealloc-size",
            f"{POOL_BYTES // MIB}MiB",
            "--log-level",
            "warning",
            *flags,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                next(line for line in process.stdout if "tcp://" in line)
                yield f"shm://{path}"
            finally:
                process.terminate()


def lease(store: BlockingStore, batches: list[list[str]]) -> None:
    """Have views of each batch where it lies in the pool, and let go of them. Nobody
    reads or copies a byte.
    """
    for keys in batches:
        with store.lease(keys) as views:
            assert len(views) == len(keys)


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Run on this core, and what is started inside, too; None: wherever the kernel
    likes.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def measure_cold(url: str, verify: str, batches: Batches, calls: int) -> dict[str, float]:
    """Put, and get, the first few batches in a store that was opened a moment ago;
    returns medians in seconds.
    """
    medians = {}
    for kind in ("put", "get"):
        times = []
        with open_store(f"{url}?verify={verify}") as store:
            call = store.put_many if kind == "put" else store.get_many_into
            for batch in (batches.puts if kind == "put" else batches.gets)[:calls]:
                start = time.perf_counter()
                call(batch)
                times.append(time.perf_counter() - start)
        medians[kind] = statistics.median(times)
    return medians


@contextmanager
def stores(url: str) -> Iterator[tuple[BlockingStore, BlockingStore, BlockingStore]]:
    """Open a store, one that copies with a single thread, and one that asks the server
    each time.
    """
    with (
        open_store(url) as store,
        open_store(f"{url}&copy_threads=1") as single,
        open_store(f"{url}&known_blocks=0") as asking,
    ):
        yield store, single, asking


def measure_warm(
    opened: tuple[BlockingStore, BlockingStore, BlockingStore], batches: Batches, rounds: int, calls: int
) -> dict[str, float]:
    """Measure batches in `stores` whose mapping has been walked through; returns
    medians in seconds.
    """
    store, single, asking = opened
    for put, get in zip(batches.puts, batches.gets, strict=True):
        store.put_many(put)
        for other in (store, single, asking):
            other.get_many_into(get)
    for thread in threading.enumerate():
        if thread.name == "infinistore-populate":
            thread.join()
    firsts = range(0, len(batches.keys), LEASES)
    things = {
        "memcpy in": taking_turns(copy, batches.copies_in),
        "put": taking_turns(store.put_many, batches.puts),
        "memcpy out": taking_turns(copy, batches.copies_out),
        "get": taking_turns(store.get_many_into, batches.gets),
        "get, one thread": taking_turns(single.get_many_into, batches.gets),
        "get, asking": taking_turns(asking.get_many_into, batches.gets),
    }
    for name, leasing in (("lease", store), ("lease, asking", asking)):
        things[name] = taking_turns(partial(lease, leasing), [batches.keys[i : i + LEASES] for i in firsts])
    medians = interleaved(things, rounds=rounds, calls=calls)
    return {name: seconds / LEASES if name.startswith("lease") else seconds for name, seconds in medians.items()}


def measure_batches(url: str, rounds: int) -> dict[str, float]:
    """Measure batches of each shape, without and with checksums."""
    results: dict[str, float] = {}
    for shape, (count, size) in SHAPES.items():
        batches = Batches(count, size)
        calls = BUFFER_BYTES // (count * size)
        for verify, checked in (("never", "unchecked"), ("always", "checked")):
            options = f"{url}?verify={verify}"
            with stores(options) as opened:
                warm = measure_warm(opened, batches, rounds, calls)
            cold = measure_cold(url, verify, batches, calls)
            for kind, yardstick in (("put", "memcpy in"), ("get", "memcpy out")):
                name = f"{kind} {shape} {checked}"
                results[f"{name} / memcpy"] = warm[yardstick] / warm[kind]
                results[f"{name} / memcpy, cold"] = warm[yardstick] / cold[kind]
                results[f"{name} GB/s"] = count * size / warm[kind] / 1e9
            results[f"get {shape} {checked}, asking / memcpy"] = warm["memcpy out"] / warm["get, asking"]
            if verify == "never":  # a lease in place checks nothing unless it is asked to
                results[f"lease in place {shape} / get"] = warm["get"] / warm["lease"]
                results[f"lease in place {shape} / get, one thread"] = warm["get, one thread"] / warm["lease"]
                results[f"lease in place {shape}, us"] = warm["lease"] * 1e6
                results[f"lease in place {shape}, asking, us"] = warm["lease, asking"] * 1e6
        with open_store(url) as store:
            store.purge()
    return results


@contextmanager
def memcached() -> Iterator[Any]:
    """Start memcached on a private socket, and give a client of it. `LookupError`: why
    that cannot be.
    """
    program = shutil.which("memcached")
    try:
        client_module = importlib.import_module("pymemcache.client.base")
    except ImportError:
        raise LookupError("pymemcache is not installed") from None
    if program is None:
        raise LookupError("memcached is not installed")
    with tempfile.TemporaryDirectory(prefix="infinistore-bench-") as folder:
        path = f"{folder}/memcached.sock"
        with subprocess.Popen([program, "-s", path, "-m", "64", "-u", getpass.getuser()]) as process:
            try:
                wait_for(path)
                client = client_module.Client(path)
                yield client
                client.close()
            finally:
                process.terminate()


def wait_for(path: str) -> None:
    """Wait until somebody listens on a Unix socket."""
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up:
        with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
            probe.connect(path)
            return
        time.sleep(0.01)
    raise LookupError("memcached did not start")


def p50_s(call: Callable[[], object], calls: int, thinking_s: float) -> float:
    """Return the median time of a call, with so much time between two of them."""
    times = []
    for _ in range(calls):
        if thinking_s:
            time.sleep(thinking_s)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_single_calls(rounds: int) -> dict[str, float]:
    """Measure single calls with a core for each end, if there are two, and wherever the
    kernel runs them.
    """
    results: dict[str, float] = {}
    cores = sorted(os.sched_getaffinity(0))
    placements: list[tuple[str, int | None, int | None]] = [("anywhere", None, None)]
    if len(cores) > 1:
        placements.insert(0, ("a core each", cores[0], cores[1]))
    for where, ours, theirs in placements:
        with on_core(theirs), server() as url, memcached() as other, on_core(ours):
            results |= compare_single_calls(url, other, where, rounds)
    return results


def compare_single_calls(url: str, other: Any, where: str, rounds: int) -> dict[str, float]:
    """Measure single calls, in a closed loop and with time to think; returns ratios,
    and p50s in microseconds.
    """
    results: dict[str, float] = {}
    with open_store(url) as store, open_store(f"{url}?known_blocks=0") as asking:
        value = bytes(range(256)) * 16
        store.put("one", value)
        other.set("one", value)
        other.set("byte", b"1")
        assert store.get("one") == asking.get("one") == other.get("one") == value
        for name, measured, thinking_s, calls in (
            (f"closed loop, {where}", store, 0.0, 500),
            (f"closed loop, asking, {where}", asking, 0.0, 500),
            (f"2 ms of thinking, {where}", store, THINKING_S, 50),
            (f"2 ms of thinking, asking, {where}", asking, THINKING_S, 50),
        ):
            things: dict[str, Callable[[], object]] = {
                "pymemcache get": partial(other.get, "one"),
                "get": partial(measured.get, "one"),
                "pymemcache exists": partial(other.get, "byte"),
                "exists": partial(measured.exists, "one"),
            }
            p50s: dict[str, list[float]] = {thing: [] for thing in things}
            for _ in range(rounds):
                for thing, call in things.items():
                    p50s[thing].append(p50_s(call, calls, thinking_s))
            medians = {thing: statistics.median(times) for thing, times in p50s.items()}
            for thing in ("get", "exists"):
                results[f"{thing} 4 KiB, {name} / pymemcache, time"] = medians[thing] / medians[f"pymemcache {thing}"]
            results.update({f"{thing} 4 KiB, {name}, us": seconds * 1e6 for thing, seconds in medians.items()})
    return results


def main() -> None:
    """Run, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rounds = 5 if arguments.quick else 25
    with server() as url:
        results = measure_batches(url, rounds)
    try:
        results |= measure_single_calls(rounds)
    except LookupError as reason:
        print(f"single calls are left out: {reason}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        for name, value in results.items():
            print(f"{name:80} {value:8.2f}")


if __name__ == "__main__":
    main()
