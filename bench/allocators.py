"""What placing blocks costs, and how full a pool stays: every allocation strategy in
one run.

    python bench/allocators.py [--quick] [--json] [--plot PICTURE.png] [--reads SHARE ...] [--policies]

Three parts:

- Batches of 64 blocks of 64 KiB in a pool of 16 GiB that is 50 % or 95 % full, with
  holes at random: time per block to allocate and to free. Beside it, in the same
  rounds: a plain Python list of free offsets, which is the least that any allocator in
  Python can cost, and one memcpy of the same 4 MiB, which is what the store does with
  them.
- What a refusal costs: a value for which there is no hole, in the same pools. First as
  it comes, then again after each of the frees that follow, as when a store evicts until
  there is room.
- Ten pools full of mixed values (chunks of three models, single layers, short tails)
  through a pool that is always full, where the least recently used blocks are evicted,
  one by one, and no more than it takes: the share of the pool that holds stored bytes,
  after ten volumes. `--reads` is the share of operations that read a batch, any of
  those that are stored, and so make it the most recent: the more of them, the less does
  age say about place. `--policies` adds plain rules of placement to compare with, and
  takes minutes.

No memory is touched except by the memcpy.
"""

import argparse
import json
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infinistore.allocators import Extent, create_allocator, prepare_process
from infinistore.allocators.runs import UnitMap
from infinistore.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

POOL_BYTES = 16 * GIB
UNIT_BYTES = 64 * KIB
BATCH = 64
OCCUPANCIES = (0.50, 0.95)
WARM_UP_CALLS = 10  # in each turn, not counted: the others have emptied the caches
LARGE_VALUE_BYTES = 32 * MIB

TRACE_UNIT_BYTES = 16 * KIB
TRACE_BATCHES = (
    (14 * MIB, 1, 8),  # (bytes of a value, fewest and most values in a batch): 256-token chunks of three models
    (32 * MIB, 1, 8),
    (4 * MIB, 1, 8),
    (512 * KIB, 16, 64),  # single layers
    (16 * KIB, 16, 64),  # what is left at the end of a prompt
)


class ListAllocator:
    """The yardstick: a list of free offsets, used as a stack. It checks nothing and
    knows one size of block.
    """

    def __init__(self) -> None:
        self._free = list(range(POOL_BYTES - UNIT_BYTES, -1, -UNIT_BYTES))

    def allocate(self, sizes: list[int]) -> list[Extent]:
        free = self._free
        return [(0, free.pop(), size) for size in sizes]

    def free(self, extents: list[Extent]) -> None:
        self._free += [offset for _, offset, _ in extents]


class Holes:
    """A pool of equal blocks with holes at random, whose occupancy stays as it is while
    batches come and go.
    """

    def __init__(self, allocator: Any, occupancy: float) -> None:
        self.allocator = allocator
        self._random = random.Random(1)
        self._sizes = [UNIT_BYTES] * BATCH
        count = POOL_BYTES // UNIT_BYTES
        live = []
        for _ in range(count // BATCH):
            live += allocator.allocate(self._sizes)
        self._random.shuffle(live)
        kept = int(count * occupancy)
        for first in range(kept, count, BATCH):
            allocator.free(live[first : first + BATCH])
        self.live = live[:kept]

    def one_batch(self) -> tuple[float, float]:
        """Allocate a batch and free another that was chosen at random; seconds for
        each.
        """
        start = time.perf_counter()
        extents = self.allocator.allocate(self._sizes)
        allocated = time.perf_counter()
        chosen = self._random.sample(range(len(self.live)), BATCH)
        leaving = [self.live[index] for index in chosen]
        for index, extent in zip(chosen, extents, strict=True):
            self.live[index] = extent
        before = time.perf_counter()
        self.allocator.free(leaving)
        return allocated - start, time.perf_counter() - before


def copy_batch(source: memoryview, target: memoryview, place: int) -> float:
    """Copy one batch's bytes; seconds."""
    length = BATCH * UNIT_BYTES
    begin = place % (len(source) - length)
    start = time.perf_counter()
    target[begin : begin + length] = source[begin : begin + length]
    return time.perf_counter() - start


def batches(strategies: list[str], *, rounds: int, calls: int) -> Iterator[dict[str, Any]]:
    """Yield one row per occupancy and strategy; all are measured in turns."""
    source, target = memoryview(bytearray(b"\1" * 128 * MIB)), memoryview(bytearray(b"\2" * 128 * MIB))
    for occupancy in OCCUPANCIES:
        pools = {name: Holes(new_allocator(name), occupancy) for name in strategies}
        pools["python list"] = Holes(ListAllocator(), occupancy)
        allocations: dict[str, list[float]] = {name: [] for name in pools}
        frees: dict[str, list[float]] = {name: [] for name in pools}
        copies = []
        for number in range(rounds):
            for name, holes in pools.items():
                for _ in range(WARM_UP_CALLS):
                    holes.one_batch()
                for _ in range(calls):
                    allocated, freed = holes.one_batch()
                    allocations[name].append(allocated)
                    frees[name].append(freed)
            copies += [copy_batch(source, target, (number * 7 + call) * 5 * MIB) for call in range(5)]
        copy_us = statistics.median(copies) / BATCH * 1e6
        list_us = statistics.median(allocations["python list"]) / BATCH * 1e6
        for name, holes in pools.items():
            allocate_us = statistics.median(allocations[name]) / BATCH * 1e6
            yield {
                "occupancy": occupancy,
                "allocator": name,
                "allocate_us_per_block": allocate_us,
                "quietest_allocate_us_per_block": min(allocations[name]) / BATCH * 1e6,
                "free_us_per_block": statistics.median(frees[name]) / BATCH * 1e6,
                "batch_us_p99": statistics.quantiles(allocations[name], n=100)[98] * 1e6,
                "times_python_list": allocate_us / list_us,
                "share_of_memcpy": allocate_us / copy_us,
            }
            if name != "python list":
                yield from refusals(holes, name, occupancy)


def refusals(holes: Holes, name: str, occupancy: float) -> Iterator[dict[str, Any]]:
    """Yield what it costs to be told that a large value has no place: at first, and
    after each free that follows.
    """
    allocator = holes.allocator
    times = []
    for _ in range(20):
        allocator.free(holes.live[:BATCH])  # many frees: what the allocator remembers of its last search is gone
        holes.live[:BATCH] = allocator.allocate([UNIT_BYTES] * BATCH)
        start = time.perf_counter()
        assert allocator.allocate([LARGE_VALUE_BYTES]) is None
        times.append(time.perf_counter() - start)
    again = []
    for _ in range(50):
        allocator.free([holes.live.pop()])
        start = time.perf_counter()
        assert allocator.allocate([LARGE_VALUE_BYTES]) is None
        again.append(time.perf_counter() - start)
    yield {
        "occupancy": occupancy,
        "allocator": name,
        "refusal_us": statistics.median(times) * 1e6,
        "refusal_again_us": statistics.median(again) * 1e6,
    }


class Trace:
    """A store that is always full, reduced to its extents and their order of use."""

    def __init__(self, allocator: Any, reads: float, seed: int) -> None:
        self._allocator = allocator
        self._reads = reads
        self._random = random.Random(seed)
        self._live: OrderedDict[int, Extent] = OrderedDict()
        self._batches: list[list[int]] = []
        self._next = 0
        self.put_bytes = 0
        self.stored_bytes = 0
        self.refusals = 0

    def step(self) -> None:
        if self._batches and self._random.random() < self._reads:
            self._read()
        else:
            self._put()

    def _read(self) -> None:
        """Touch a batch as the store does, from last to first."""
        index = self._random.randrange(len(self._batches))
        present = [block for block in self._batches[index] if block in self._live]
        if not present:
            self._batches[index] = self._batches[-1]
            self._batches.pop()
        for block in reversed(present):
            self._live.move_to_end(block)

    def _put(self) -> None:
        size, fewest, most = self._random.choice(TRACE_BATCHES)
        sizes = [size] * self._random.randint(fewest, most)
        while (extents := self._allocator.allocate(sizes)) is None:
            self.refusals += 1
            _, coldest = self._live.popitem(last=False)
            self._allocator.free([coldest])
            self.stored_bytes -= coldest[2]
        blocks = list(range(self._next, self._next + len(sizes)))
        self._next += len(sizes)
        for block, extent in zip(reversed(blocks), reversed(extents), strict=True):
            self._live[block] = extent
        self._batches.append(blocks)
        self.put_bytes += sum(sizes)
        self.stored_bytes += sum(sizes)


def trace(name: str, reads: float, seed: int, *, volumes: float, pool_bytes: int) -> dict[str, Any]:
    """Return the share of the pool that is stored bytes: along the way, and on average
    over one more volume.
    """
    allocator = new_allocator(name, TRACE_UNIT_BYTES, pool_bytes)
    run = Trace(allocator, reads, seed)
    course = []
    settled = []
    while run.put_bytes < (volumes + 1) * pool_bytes:
        run.step()
        course.append((run.put_bytes / pool_bytes, run.stored_bytes / pool_bytes))
        if run.put_bytes >= volumes * pool_bytes:
            settled.append(run.stored_bytes / pool_bytes)
    return {"mean": statistics.mean(settled), "lowest": min(settled), "course": course}


def traces(strategies: list[str], reads: list[float], *, quick: bool) -> Iterator[dict[str, Any]]:
    for share in reads:
        for name in strategies:
            runs = [
                trace(name, share, seed, volumes=3 if quick else 10, pool_bytes=POOL_BYTES)
                for seed in range(1, 2 if quick else 6)
            ]
            yield {
                "allocator": name,
                "reads": share,
                "stored_share": statistics.mean(run["mean"] for run in runs),
                "seeds": [run["mean"] for run in runs],
                "lowest": min(run["lowest"] for run in runs),
                "course": runs[0]["course"],
            }


class Policy:
    """One rule for every block: where the bitmap strategy's own choice stands. Slow and
    plain; for the trace only.
    """

    def __init__(self, rule: str) -> None:
        self._rule = rule
        self._map = UnitMap()
        self._map.add_arena(POOL_BYTES // TRACE_UNIT_BYTES)
        self._next = 0

    def allocate(self, sizes: list[int]) -> list[Extent] | None:
        units = -(-sizes[0] // TRACE_UNIT_BYTES)
        if self._rule == "one piece first, then best fit":
            whole = self._take(units * len(sizes))
            if whole is not None:
                return [(0, (whole + index * units) * TRACE_UNIT_BYTES, size) for index, size in enumerate(sizes)]
        if not self._map.has_room(units, len(sizes)):
            return None
        starts = [self._take(units) or 0 for _ in sizes]
        return [(0, start * TRACE_UNIT_BYTES, size) for start, size in zip(starts, sizes, strict=True)]

    def _take(self, units: int) -> int | None:
        holes = list(self._map.holes(units))
        if not holes:
            return None
        if self._rule == "next fit":
            first, _ = min(holes, key=lambda hole: (hole[1] <= self._next, hole[0]))
        elif self._rule == "first fit":
            first, _ = min(holes)
        else:
            first, _ = min(holes, key=lambda hole: (hole[1] - hole[0], hole[0]))
        self._map.take_run(first, units)
        self._next = first + units
        return first

    def free(self, extents: list[Extent]) -> None:
        for _, offset, length in extents:
            self._map.give_back_run(offset // TRACE_UNIT_BYTES, -(-length // TRACE_UNIT_BYTES))


POLICIES = ("next fit", "first fit", "best fit", "one piece first, then best fit")


def new_allocator(name: str, unit_bytes: int = UNIT_BYTES, pool_bytes: int = POOL_BYTES) -> Any:
    if name in POLICIES:
        return Policy(name)
    allocator = create_allocator(name, unit_bytes)
    allocator.add_arena(0, pool_bytes)
    return allocator


def show(console: Console, speed: list[dict[str, Any]], stored: list[dict[str, Any]]) -> None:
    table = Table(title=f"Batches of {BATCH} x 64 KiB in 16 GiB, holes at random (medians)")
    columns = ("occupancy", "allocator", "allocate us/block", "quietest", "free us/block", "p99 of a batch, us")
    for column in (*columns, "x python list", "of memcpy"):
        table.add_column(column, justify="left" if column == "allocator" else "right")
    for row in speed:
        if "allocate_us_per_block" in row:
            table.add_row(
                f"{row['occupancy']:.0%}",
                row["allocator"],
                f"{row['allocate_us_per_block']:.2f}",
                f"{row['quietest_allocate_us_per_block']:.2f}",
                f"{row['free_us_per_block']:.2f}",
                f"{row['batch_us_p99']:.0f}",
                f"{row['times_python_list']:.1f}",
                f"{row['share_of_memcpy']:.1%}",
            )
    console.print(table)
    table = Table(title="A value of 32 MiB that cannot be placed, us")
    for column in ("occupancy", "allocator", "refused at first", "again, after one free"):
        table.add_column(column, justify="left" if column == "allocator" else "right")
    for row in speed:
        if "refusal_us" in row:
            name, again = row["allocator"], f"{row['refusal_again_us']:.0f}"
            table.add_row(f"{row['occupancy']:.0%}", name, f"{row['refusal_us']:.0f}", again)
    console.print(table)
    table = Table(title="Stored bytes / pool of 16 GiB, full, mixed values, eviction in order of use")
    for column in ("reads", "allocator", "mean", "lowest moment", "by seed"):
        table.add_column(column, justify="left" if column == "allocator" else "right")
    for row in stored:
        seeds = " ".join(f"{value:.3f}" for value in row["seeds"])
        table.add_row(
            f"{row['reads']:.0%}", row["allocator"], f"{row['stored_share']:.3f}", f"{row['lowest']:.3f}", seeds
        )
    console.print(table)


def plot(stored: list[dict[str, Any]], path: Path) -> None:
    """Draw the share of the pool that is stored bytes over the volumes written. Needs
    the extra `plot`.
    """
    import matplotlib as mpl  # type: ignore[import-not-found, unused-ignore]

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # type: ignore[import-not-found, unused-ignore]

    shares = sorted({row["reads"] for row in stored})
    figure, panels = plt.subplots(1, len(shares), figsize=(5 * len(shares), 3.6), sharey=True, squeeze=False)
    for panel, share in zip(panels[0], shares, strict=True):
        for row in stored:
            if row["reads"] == share:
                volumes, part = zip(*row["course"], strict=True)
                panel.plot(volumes, part, linewidth=0.8, label=row["allocator"])
        panel.set_title(f"{share:.0%} of operations are reads")
        panel.set_xlabel("pool volumes written")
        panel.set_ylim(0.75, 1.0)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("stored bytes / pool")
    panels[0][0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def usable_strategies(console: Console) -> list[str]:
    try:
        prepare_process("jemalloc")  # may start this program again, with the environment that the library needs
    except ConfigError as error:
        console.print(f"without jemalloc: {error}")
        return ["bitmap", "slab"]
    return ["bitmap", "slab", "jemalloc"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, one seed and three volumes: a look, no figures"
    )
    parser.add_argument("--json", action="store_true", help="print JSON and no tables")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the third part (pip install '.[plot]')")
    parser.add_argument("--reads", type=float, nargs="*", default=[0.0, 0.3], help="shares of reads in the third part")
    parser.add_argument(
        "--policies", action="store_true", help="compare with plain rules of placement in the third part"
    )
    options = parser.parse_args()
    console = Console(stderr=options.json)
    strategies = usable_strategies(console)
    rounds, calls = (5, 20) if options.quick else (20, 50)
    speed = list(batches(strategies, rounds=rounds, calls=calls))
    stored = list(traces([*strategies, *(POLICIES if options.policies else ())], options.reads, quick=options.quick))
    if options.plot:
        plot(stored, options.plot)
    if options.json:
        for row in stored:
            del row["course"]
        print(json.dumps({"speed": speed, "stored": stored}, indent=2))
    else:
        show(console, speed, stored)


if __name__ == "__main__":
    main()
