"""What the store's own bookkeeping costs, without any transport: time per batch, memory
per block, and eviction.

    python bench/core.py [--quick] [--json]

Three parts, each against something measured in the same run:

- A batch of 64 blocks: reserve and commit, lease and release, against one memcpy of 64
  x 64 KiB into the pool. Lookups of 1,000 keys against the same lookups in a plain
  dict.
- Memory per stored block, beside its bytes: growth of the resident set with a million
  blocks, against a plain dict from the same keys to the same tuples. Each is measured
  in a process of its own.
- Eviction per block: early against late, in a store of a million blocks that is
  emptied; after a million evictions; after nearly a million deletions. And the same for
  a plain dict walked from the front, which is why it is not used.
"""

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

from infinistore.allocators import create_allocator
from infinistore.core import Client, Pool, StoreCore, Watermarks, create_arena
from infinistore.keys import check_keys
from rounds import interleaved

KIB, MIB = 1024, 1024 * 1024
UNIT_BYTES = 64
BATCH = 50


def open_core(blocks: int, block_bytes: int, **options: Watermarks) -> tuple[StoreCore, Client]:
    pool = Pool(create_allocator("bitmap", max(UNIT_BYTES, block_bytes)))
    core = StoreCore(pool, clock=time.monotonic, **options)  # type: ignore[arg-type]
    core.add_arena(create_arena(0, blocks * block_bytes))
    return core, core.open_client("bench")


def key_batches(count: int, batch: int, start: int = 0) -> Iterator[list[str]]:
    """Yield keys as engines make them: a model's name and a hash."""
    for first in range(start, start + count, batch):
        yield [f"llama-70b/tp0/{number * 0x9E3779B97F4A7C15 % 2**128:032x}" for number in range(first, first + batch)]


def put(core: StoreCore, client: Client, sizes: Sequence[int], sums: Sequence[int], keys: Sequence[str]) -> None:
    core.commit(core.reserve(client, sizes), keys, sums)


def fill(core: StoreCore, client: Client, blocks: int, start: int = 0) -> None:
    generator = random.Random(start)
    for keys in key_batches(blocks, BATCH, start):
        put(core, client, [UNIT_BYTES] * BATCH, [generator.getrandbits(64) for _ in range(BATCH)], keys)


def batches(quick: bool) -> dict[str, float]:
    """Time the calls of the hot path in a pool that is full, so that puts evict."""
    rounds = 5 if quick else 25
    core, client = open_core(4096, 64 * KIB)
    sizes, sums = [64 * KIB] * 64, [2**63 + i for i in range(64)]
    puts = 64 + (rounds + 2) * 20
    fresh = iter(list(key_batches(puts * 64, 64)))  # made beforehand: not what is measured
    for _ in range(64):
        put(core, client, sizes, sums, next(fresh))
    stays = [f"stays/{i:050}" for i in range(1000)]
    for start in range(0, 1000, 50):
        put(core, client, [1] * 50, sums[:50], stays[start : start + 50])
    plain = dict.fromkeys(stays)
    roomy, roomy_client = open_core(puts * 64 * 2, UNIT_BYTES)
    more = list(key_batches(puts * 64, 64))
    for keys in more:  # once before, so that the process does not ask for memory while it is measured
        put(roomy, roomy_client, [UNIT_BYTES] * 64, sums, keys)
    roomy.purge()
    again = iter(more)
    source = bytearray(4 * MIB)
    targets = cycle([core.pool.view((0, start, 4 * MIB)) for start in range(0, 256 * MIB, 4 * MIB)])

    def copy() -> None:
        next(targets)[:] = source

    def put_next() -> None:
        put(core, client, sizes, sums, next(fresh))

    def put_with_room() -> None:
        put(roomy, roomy_client, [UNIT_BYTES] * 64, sums, next(again))

    def read() -> None:
        core.release(core.lease(client, stays[:64]))

    def views() -> None:
        lease = core.lease(client, stays[:64])
        assert lease.merged_views
        core.release(lease)

    things: dict[str, Callable[[], object]] = {
        "memcpy": copy,
        "reserve + commit with room": put_with_room,
        "reserve + commit that evicts": put_next,
        "lease + release": read,
        "lease + merged views + release": views,
        "exists": partial(core.exists, stays),
        "match_prefix": partial(core.match_prefix, stays),
        "check_keys": partial(check_keys, stays),
        "dict": lambda: [key in plain for key in stays],
    }
    median = interleaved(things, rounds=rounds, calls=20)
    core.pool.close()
    roomy.pool.close()
    results: dict[str, float] = {"memcpy of 4 MiB, us": median["memcpy"] * 1e6}
    for name in (
        "reserve + commit with room",
        "reserve + commit that evicts",
        "lease + release",
        "lease + merged views + release",
    ):
        results[f"{name}, 64 blocks, us"] = median[name] * 1e6
        results[f"{name}, 64 blocks / memcpy"] = median[name] / median["memcpy"]
    for name in ("exists", "match_prefix", "check_keys"):
        results[f"{name} of 1,000 keys, us"] = median[name] * 1e6
        results[f"{name} of 1,000 keys / [key in dict]"] = median[name] / median["dict"]
    return results


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure_memory(kind: str, blocks: int) -> None:
    """Print {bytes of the resident set, of the keys' characters, of the key objects}
    for so many blocks.
    """
    generator = random.Random(1)
    core, client = open_core(blocks, UNIT_BYTES, watermarks=Watermarks(1.0, 1.0))
    plain: dict[str, tuple[int, int, int, int]] = {}
    gc.collect()
    before = resident_bytes()
    characters = objects = 0
    for keys in key_batches(blocks, BATCH):
        characters += sum(map(len, keys))
        objects += sum(map(sys.getsizeof, keys))
        sums = [generator.getrandbits(64) for _ in keys]
        if kind == "store":
            put(core, client, [int("64")] * BATCH, sums, keys)
        else:
            plain.update((key, (0, len(plain) * UNIT_BYTES, UNIT_BYTES, sums[i])) for i, key in enumerate(keys))
    gc.collect()
    print(json.dumps([resident_bytes() - before, characters, objects]))


def memory(quick: bool) -> dict[str, float]:
    """Measure the memory of a store's bookkeeping, and of a plain dict."""
    blocks = 100_000 if quick else 1_000_000
    measured = {}
    for kind in ("store", "dict"):
        command = [sys.executable, __file__, "--measure", kind, str(blocks)]
        measured[kind] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    total, characters, objects = measured["store"]
    return {
        f"memory of {blocks:,} blocks, bytes a block, less the keys' characters": (total - characters) / blocks,
        f"memory of {blocks:,} blocks, bytes a block, less the keys": (total - objects) / blocks,
        f"memory of {blocks:,} blocks / plain dict": total / measured["dict"][0],
    }


def eviction_times(core: StoreCore, count: int, batch: int = 500) -> list[float]:
    """Evict `count` blocks, and return the seconds per block of each slice."""
    times = []
    for _ in range(count // batch):
        start = time.perf_counter()
        evicted = core.evict(0.0, 0.0, max_blocks=batch)
        times.append((time.perf_counter() - start) / evicted)
    return times


def eviction(quick: bool) -> dict[str, float]:
    """Compare eviction early and late. Medians of slices of 500 blocks, so that one
    pause does not decide.
    """
    blocks = 100_000 if quick else 1_000_000
    part = blocks // 10
    core, client = open_core(blocks, UNIT_BYTES, watermarks=Watermarks(0.98, 1.0))
    fill(core, client, blocks)
    times = eviction_times(core, blocks)
    early, late = statistics.median(times[: len(times) // 10]), statistics.median(times[-len(times) // 10 :])
    fill(core, client, blocks)
    worst = 0.0
    for keys in key_batches(blocks, BATCH, blocks):  # every put evicts: a million more have gone when this is done
        start = time.perf_counter()
        put(core, client, [UNIT_BYTES] * BATCH, [1] * BATCH, keys)
        worst = max(worst, time.perf_counter() - start)
    after = statistics.median(eviction_times(core, part))
    core.purge()
    fill(core, client, blocks)
    for keys in key_batches(blocks - part, BATCH):
        core.delete(keys)
    deleted = statistics.median(eviction_times(core, part))
    core.pool.close()
    plain = dict.fromkeys(range(blocks))
    plain_early = walk_from_the_front(plain, 100)
    for number in range(100, blocks - part):
        del plain[number]
    plain_late = walk_from_the_front(plain, 100)
    return {
        "eviction early, us a block": early * 1e6,
        "eviction late / early, a store emptied from full": late / early,
        f"eviction after {blocks:,} evictions / early": after / early,
        f"eviction after {blocks - part:,} deletions / early": deleted / early,
        f"the same for a plain dict walked from the front, after {blocks - part:,} deletions": plain_late / plain_early,
        f"slowest put of {BATCH} blocks that evicts (the index is resized), ms": worst * 1e3,
    }


def walk_from_the_front(plain: dict[int, None], count: int) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        del plain[next(iter(plain))]
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Run, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tenth of the blocks, fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure_memory(arguments.measure[0], int(arguments.measure[1]))
        return
    results = {**batches(arguments.quick), **memory(arguments.quick), **eviction(arguments.quick)}
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        for name, value in results.items():
            print(f"{name:90} {value:10.2f}")


if __name__ == "__main__":
    main()
