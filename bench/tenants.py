"""What tenants cost, and what a neighbour's keys do to the time of a lookup.

    python bench/tenants.py [--quick] [--json]

- Memory of an idle tenant: what a thousand tenants take that nobody has used yet, that
  have an empty store and no client, and that have an empty store and a client.
- The choice of a victim: what a reservation takes that has to evict a block of another
  tenant, in pools that 10 to 10,000 tenants fill.
- `exists` and `match_prefix` for keys that nobody has, against keys that another tenant
  has: in turns, with the 95 % interval of the difference.
"""

import argparse
import gc
import json
import math
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from itertools import chain

import xxhash

from infinistore.allocators import create_allocator
from infinistore.core import Pool, create_arena
from infinistore.core.limits import Watermarks
from infinistore.core.tenants import Tenants, TenantStore
from infinistore.sizes import MIB
from infinistore.tenant_limits import TenantLimits

UNIT_BYTES = 64
TENANTS = 1000
BATCH = 64
"""Keys of a lookup."""


def tenants_of(count: int, pool_bytes: int = MIB, watermarks: Watermarks | None = None) -> Tenants:
    """Return so many tenants, which have used nothing yet."""
    pool = Pool(create_allocator("bitmap", UNIT_BYTES))
    pool.add_arena(create_arena(0, pool_bytes))
    made = Tenants(pool, clock=time.monotonic, watermarks=watermarks)
    made.apply(TenantLimits(f"tenant-{number}") for number in range(count))
    return made


def put(store: TenantStore, keys: list[str]) -> None:
    """Put blocks of a unit each."""
    client = store.open_client("bench")
    reservation = store.reserve(client, [UNIT_BYTES] * len(keys))
    store.commit(reservation, keys, [xxhash.xxh3_64_intdigest(view) for view in reservation.views])
    store.close_client(client)


def idle_bytes(count: int = TENANTS) -> dict[str, float]:
    """Return what a tenant takes: `unused`, `idle` with an empty store that clients
    have left, and `connected` with one that a client uses."""
    found: dict[str, float] = {}
    tenants = tenants_of(0)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]

        def note(what: str) -> None:
            gc.collect()
            found[what] = (tracemalloc.get_traced_memory()[0] - before) / count

        tenants.apply(TenantLimits(f"tenant-{number}") for number in range(count))
        note("unused")
        clients = [(name, tenants.store(name).open_client("bench")) for name in tenants]
        note("connected")
        for name, client in clients:
            put(tenants.store(name), ["key"])
            tenants.store(name).lease(client, ["key", "missing"])
            tenants.store(name).close_client(client)
            tenants.store(name).delete(["key"])
            tenants.rest(name)
        del client
        clients.clear()
        note("idle")
    finally:
        tracemalloc.stop()
        tenants.pool.close()
    return found


def eviction_us(count: int, puts: int) -> tuple[float, float]:
    """Return the microseconds of a reservation of a tenant that has nothing, in a pool
    that so many others fill, and how many of them it looks at."""
    blocks_each = 4
    tenants = tenants_of(count, count * blocks_each * UNIT_BYTES, Watermarks(1.0, 1.0))
    number = 0
    while tenants.pool.used_bytes < tenants.pool.capacity_bytes:  # arenas are whole pages
        put(tenants.store(f"tenant-{number % count}"), [f"first {number}"])
        number += 1
    tenants.apply(TenantLimits(f"tenant-{number}") for number in range(count + 1))
    newcomer = tenants.store(f"tenant-{count}")
    client = newcomer.open_client("bench")
    looked_at = tenants.sharing.victims.looked_at
    taken: list[float] = []
    choose = random.Random(3).randrange
    for number in range(puts):
        start = time.perf_counter()
        reservation = newcomer.reserve(client, [UNIT_BYTES])
        taken.append(time.perf_counter() - start)
        newcomer.abort(reservation)
        put(tenants.store(f"tenant-{choose(count)}"), [f"{number}"])
    tenants.pool.close()
    return 1e6 * statistics.median(taken), (tenants.sharing.victims.looked_at - looked_at) / puts


def difference_ns(
    look: Callable[[list[str]], object], absent: list[list[str]], present: list[list[str]], rounds: int
) -> tuple[float, float, float]:
    """Return the mean time of a lookup of absent keys, in nanoseconds, what one of
    present keys takes more, and half of the 95 % interval of that.

    Keys differ: each has another place in the table. So there are many pairs of
    batches, and the interval is that of the differences between their medians. The two
    of a pair take turns, and take turns at being first.
    """
    bases: list[float] = []
    differences: list[float] = []
    clock = time.perf_counter_ns
    for pair in zip(absent, present, strict=True):
        times: tuple[list[int], list[int]] = ([], [])
        for number in range(rounds):
            first = number % 2
            for which in (first, 1 - first):
                begun = clock()
                look(pair[which])
                times[which].append(clock() - begun)
        medians = [statistics.median_low(one) for one in times]
        bases.append(medians[0])
        differences.append(medians[1] - medians[0])
    half = 1.96 * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(bases), statistics.fmean(differences), half


def neighbours(pairs: int, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Return for each lookup what `difference_ns` does, for keys that nobody has
    against keys that another tenant has."""
    tenants = tenants_of(2, 64 * MIB)
    mine, theirs = (tenants.store(name) for name in tenants)
    for store in (mine, theirs):
        put(store, [f"more {number}" for number in range(8000)])
    keys = [[f"block {number:08}" for number in range(BATCH * i, BATCH * (i + 1))] for i in range(2 * pairs)]
    random.Random(5).shuffle(keys)
    absent, present = keys[:pairs], keys[pairs:]
    for batch in present:
        put(theirs, batch)
    mine.exists(list(chain.from_iterable(keys)))  # so that all are hashed, as a decoder leaves none
    found = {
        "exists, 1 key": difference_ns(
            mine.exists, [batch[:1] for batch in absent], [batch[:1] for batch in present], rounds
        ),
        f"exists, {BATCH} keys": difference_ns(mine.exists, absent, present, rounds),
        f"match_prefix, {BATCH} keys": difference_ns(mine.match_prefix, absent, present, rounds),
    }
    tenants.pool.close()
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it works")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    counts = (10, 100, 1000) if arguments.quick else (10, 100, 1000, 10_000)
    sizes = idle_bytes(100 if arguments.quick else TENANTS)
    evictions = {count: eviction_us(count, 200 if arguments.quick else 2000) for count in counts}
    lookups = neighbours(20, 40) if arguments.quick else neighbours(60, 1000)
    if arguments.json:
        print(json.dumps({"bytes": sizes, "eviction": evictions, "lookups": lookups}))
        return
    for what, size in sizes.items():
        print(f"memory of a tenant, {what}: {size:,.0f} bytes")
    for count, (taken_us, looked_at) in evictions.items():
        print(f"a reservation that evicts, {count:,} tenants: {taken_us:.1f} us, {looked_at:.2f} tenants looked at")
    for what, (base_ns, mean_ns, half_ns) in lookups.items():
        print(f"{what}: {base_ns:,.0f} ns; of another tenant's {mean_ns:+.2f} ns (95 %: +-{half_ns:.2f})")


if __name__ == "__main__":
    main()
