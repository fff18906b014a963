"""Whether a server's memory grows under load: 100,000 puts, gets and deletes of a
working set twice the pool.

    python bench/soak.py [--quick] [--json]

The server is a process of its own with a pool of 64 MiB. What is compared is its
private memory (RssAnon: the pool is shared memory and does not count) after the first
tenth of the operations, when every code path has run, and at the end.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.progress import track

from infinistore.blocking import open_store

POOL_BYTES = 64 * 1024 * 1024
BLOCK_BYTES = 64 * 1024
KEYS = 2 * POOL_BYTES // BLOCK_BYTES


def private_bytes(pid: int) -> int:
    """Return the private memory of a process."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    """Run, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tenth of the operations")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    operations = 10_000 if arguments.quick else 100_000
    server = [sys.executable, "-m", "infinistore", "--service-port", "0", "--manage-port", "0", "--unix-socket", "off"]
    server += ["--prealloc-size", "64MiB", "--log-level", "warning"]
    generator = random.Random(1)
    block = generator.randbytes(BLOCK_BYTES)
    buffer = bytearray(BLOCK_BYTES)
    counts = dict.fromkeys(("put", "hit", "miss", "deleted"), 0)
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "tcp://" in line)
        with open_store("tcp://" + line.split("tcp://")[1].split()[0].rstrip(",;")) as store:
            start = time.perf_counter()
            early_bytes = 0
            for number in track(range(operations), "operations", disable=arguments.json):
                key = f"soak/{generator.randrange(KEYS)}"
                chance = generator.random()
                if chance < 0.45:
                    store.put(key, block)
                    counts["put"] += 1
                elif chance < 0.9:
                    counts["miss" if store.get_many_into([(key, buffer)])[0] is None else "hit"] += 1
                else:
                    counts["deleted"] += store.delete([key])
                if number == operations // 10:
                    early_bytes = private_bytes(process.pid)
            seconds = time.perf_counter() - start
            late_bytes = private_bytes(process.pid)
            evicted = store.stats().store.evicted.on_demand
        process.terminate()
    results = {
        "operations": operations,
        **counts,
        "evicted": evicted,
        "operations per second": round(operations / seconds),
        "private MiB after a tenth": round(early_bytes / 2**20, 2),
        "private MiB at the end": round(late_bytes / 2**20, 2),
        "end / after a tenth": round(late_bytes / early_bytes, 4),
    }
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        for name, value in results.items():
            print(f"{name:28} {value:>12,}")


if __name__ == "__main__":
    main()
