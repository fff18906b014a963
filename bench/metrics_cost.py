"""What counting and being scraped costs a server: batches of 64 x 64 KiB over TCP.

    python bench/metrics_cost.py [--quick] [--json]

Servers in processes of their own serve the same client in turn. One counts as always,
and its metrics are scraped once a second. The others' recorders do nothing, and nobody
asks them for metrics. The ratio is time: counted / not, 1.02 would be 2 % slower; two
servers that do not count show how much of that is the machine. Besides, the recorder
alone, in this process: microseconds for one request, and the part that it is of the
time of a batch. And a scrape.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from infinistore.blocking import BlockingStore, open_store
from infinistore.protocol.messages import Put
from infinistore.server.recorder import OK, Recorder
from rounds import interleaved
from tcp import KIB, MIB, blocks

POOL_BYTES = 256 * MIB
BATCH, BLOCK_BYTES = 64, 64 * KIB
_SILENT_SERVER = """
import sys
from infinistore.server.recorder import Recorder
Recorder.record = lambda *_: None
Recorder.clock = lambda *_: 0.0
Recorder.__init__ = lambda self: None
Recorder.statistics = lambda self: []
from infinistore.cli import main
sys.exit(main())
"""


@contextmanager
def server(*program: str) -> Iterator[tuple[str, str]]:
    """Start a server; give the URLs of its data and of its management API."""
    flags = ["--service-port", "0", "--unix-socket", "off", "--prealloc-size", f"{POOL_BYTES // MIB}MiB", "--json"]
    flags += ["--log-level", "warning"]
    with subprocess.Popen([sys.executable, *program, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            yield said["listening"][0], (said["management"] or [""])[0]
        finally:
            process.terminate()


@contextmanager
def scraped(url: str, every_s: float) -> Iterator[list[float]]:
    """Scrape a server from a thread; give how long each scrape took, in seconds."""
    stop = threading.Event()
    times: list[float] = []

    def scrape() -> None:
        while not stop.wait(every_s):
            start = time.perf_counter()
            with urllib.request.urlopen(f"{url}/metrics") as answer:
                answer.read()
            times.append(time.perf_counter() - start)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield times
    finally:
        stop.set()
        thread.join()


class Batches:
    """Puts and gets batches, over and over, of as many as fill half of the pool."""

    def __init__(self, store: BlockingStore) -> None:
        self._store = store
        self._source, self._target = blocks(BATCH, BLOCK_BYTES), blocks(BATCH, BLOCK_BYTES)
        self._number = 0

    def __call__(self) -> None:
        self._number = (self._number + 1) % (POOL_BYTES // 2 // (BATCH * BLOCK_BYTES))
        keys = [f"bench/{self._number}/{i}" for i in range(BATCH)]
        self._store.put_many(list(zip(keys, self._source, strict=True)))
        self._store.get_many_into(list(zip(keys, self._target, strict=True)))


def recorder_us() -> float:
    """Microseconds that the recorder takes for one request: two looks at the clock and
    one record.
    """
    recorder = Recorder()
    count = 100_000
    start = time.perf_counter()
    for _ in range(count):
        begun = recorder.clock()
        recorder.record(Put, "tcp", OK, 4_194_816, recorder.clock() - begun)
    return (time.perf_counter() - start) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with (
        server("-m", "infinistore", "--manage-port", "0") as (counting_url, management_url),
        server("-c", _SILENT_SERVER, "--manage-port", "off") as (silent_url, _),
        server("-c", _SILENT_SERVER, "--manage-port", "off") as (other_url, _),
        open_store(f"{counting_url}?verify=never") as counting,
        open_store(f"{silent_url}?verify=never") as silent,
        open_store(f"{other_url}?verify=never") as other,
    ):
        things = {"counted": Batches(counting), "not": Batches(silent), "not either": Batches(other)}
        with scraped(management_url, every_s=1.0) as scrapes:
            medians = interleaved(things, rounds=20 if arguments.quick else 200, calls=10)
        with scraped(management_url, every_s=0.01) as idle_scrapes:
            time.sleep(1)
    one_us = recorder_us()
    results = {
        "put and get of a batch: counted and scraped / not": medians["counted"] / medians["not"],
        "the same of two servers that do not count": medians["not either"] / medians["not"],
        "put and get of a batch, not counted, us": medians["not"] * 1e6,
        "recorder, us a request": one_us,
        "recorder / batch (two requests)": 2 * one_us / 1e6 / medians["not"],
        "scrapes meanwhile": len(scrapes),
        "a scrape of an idle server, ms": sorted(idle_scrapes)[len(idle_scrapes) // 2] * 1e3,
    }
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        for name, value in results.items():
            print(f"{name:55} {value:8.4f}")


if __name__ == "__main__":
    main()
