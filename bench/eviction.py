"""How many tokens of prompts a pool has, by the strategy that evicts, beside the optimum.

    python bench/eviction.py                          loops, scans, Zipf, agents' trees
    python bench/eviction.py --trace FILE             requests in Mooncake's format
    python bench/eviction.py --pools 0.05,0.5         sizes, as parts of all blocks that are asked for
    python bench/eviction.py --trace FILE --disks 0.1,0.2,0.5
                                                      stores with a disk of these sizes below the first pool

The strategies are the product's own classes, with the index of its core, one key for
each block. A block counts as a hit if all blocks before it in the prompt are hits. The
optimum is that of Belady (IBM Systems Journal 5(2), 1966): evict what is asked for last.
It need not keep what is put. Three strategies that the product does not have are there
for comparison: S3-FIFO (Yang et al., SOSP 2023), SIEVE (Zhang et al., NSDI 2024) and ARC
(Megiddo and Modha, FAST 2003).

With --disks, a whole embedded store with a disk in a temporary folder (TMPDIR) is asked,
and every block is durable before the next request. What it has in memory is on disk,
too, so it is compared with pools as large as the disk.

Nothing is timed: the figures do not depend on the machine.
"""

import argparse
import heapq
import math
import random
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from infinistore.blocking import open_store
from infinistore.core.index import Entry, Index
from infinistore.eviction import eviction_class, eviction_names
from infinistore.traces import TRACE_BLOCK_TOKENS, read_trace

__all__ = ["Request", "hit_tokens", "optimum"]

Request = tuple[list[str], int]
"""Keys, one for each block of a prompt; and its length in tokens."""
BLOCK: Entry = (0, 0, 1 << 20, 0)
POOLS = "0.05,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.83,0.95,1"
BLOCK_KIB = 16
"""The length of a block in a store with a disk."""


class Cache(Protocol):
    """A pool of blocks of one size."""

    def __contains__(self, key: str) -> bool: ...

    def __len__(self) -> int: ...

    def use(self, keys: Sequence[str]) -> None:
        """Note that blocks were used."""

    def evict(self, count: int) -> None:
        """Evict so many."""

    def put(self, keys: Sequence[str]) -> None:
        """Add blocks; they are not there."""


class Store:
    """A strategy of the product."""

    def __init__(self, strategy: str) -> None:
        self._index = Index(eviction_class(strategy))

    def __contains__(self, key: str) -> bool:
        return self._index.get(key) is not None

    def __len__(self) -> int:
        return len(self._index)

    def use(self, keys: Sequence[str]) -> None:
        self._index.touch(keys)

    def evict(self, count: int) -> None:
        self._index.remove(self._index.coldest(count))

    def put(self, keys: Sequence[str]) -> None:
        self._index.insert(keys, [BLOCK] * len(keys))


class S3Fifo:
    """A small queue, a main one, and a ghost of the keys that left the small one."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._small: deque[str] = deque()
        self._main: deque[str] = deque()
        self._uses: dict[str, int] = {}
        self._ghost: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def use(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._uses[key] = min(3, self._uses[key] + 1)

    def put(self, keys: Sequence[str]) -> None:
        for key in reversed(keys):
            self._uses[key] = 0
            queue = self._small
            if key in self._ghost:
                del self._ghost[key]
                queue = self._main
            queue.append(key)

    def evict(self, count: int) -> None:
        while count:
            if len(self._small) >= max(1, self._blocks // 10) or not self._main:
                key = self._small.popleft()
                if self._uses[key]:
                    self._uses[key] = 0
                    self._main.append(key)
                    continue
                self._ghost[key] = None
                if len(self._ghost) > self._blocks:
                    self._ghost.popitem(last=False)
            else:
                key = self._main.popleft()
                if self._uses[key]:
                    self._uses[key] -= 1
                    self._main.append(key)
                    continue
            del self._uses[key]
            count -= 1


class Sieve:
    """One queue, and a hand that passes over what was used since it came by."""

    def __init__(self, blocks: int) -> None:
        self._used: set[str] = set()
        self._newer: OrderedDict[str, None] = OrderedDict()  # what the hand has not passed, oldest first
        self._passed: OrderedDict[str, None] = OrderedDict()  # the rest, oldest first

    def __contains__(self, key: str) -> bool:
        return key in self._newer or key in self._passed

    def __len__(self) -> int:
        return len(self._newer) + len(self._passed)

    def use(self, keys: Sequence[str]) -> None:
        self._used.update(keys)

    def put(self, keys: Sequence[str]) -> None:
        self._newer.update(dict.fromkeys(reversed(keys)))

    def evict(self, count: int) -> None:
        while count:
            if not self._newer:
                self._newer, self._passed = self._passed, self._newer
            key, _ = self._newer.popitem(last=False)
            if key in self._used:
                self._used.discard(key)
                self._passed[key] = None
            else:
                count -= 1


class Arc:
    """Keys used once and keys used again, and a ghost of each."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._once: OrderedDict[str, None] = OrderedDict()
        self._again: OrderedDict[str, None] = OrderedDict()
        self._once_ghost: OrderedDict[str, None] = OrderedDict()
        self._again_ghost: OrderedDict[str, None] = OrderedDict()
        self._wanted = 0.0

    def __contains__(self, key: str) -> bool:
        return key in self._once or key in self._again

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def use(self, keys: Sequence[str]) -> None:
        for key in reversed(keys):
            self._once.pop(key, None)
            self._again[key] = None
            self._again.move_to_end(key)

    def put(self, keys: Sequence[str]) -> None:
        once, again = self._once_ghost, self._again_ghost
        for key in reversed(keys):
            if key in once:
                self._wanted = min(self._blocks, self._wanted + max(1, len(again) / len(once)))
            elif key in again:
                self._wanted = max(0, self._wanted - max(1, len(once) / len(again)))
            seen = once.pop(key, key) is None or again.pop(key, key) is None
            (self._again if seen else self._once)[key] = None
        while once and len(self._once) + len(once) > self._blocks:
            once.popitem(last=False)
        while again and len(once) + len(again) > self._blocks:
            again.popitem(last=False)

    def evict(self, count: int) -> None:
        for _ in range(count):
            from_once = self._once and (len(self._once) > self._wanted or not self._again)
            key, _ = (self._once if from_once else self._again).popitem(last=False)
            (self._once_ghost if from_once else self._again_ghost)[key] = None


OTHERS: dict[str, Callable[[int], Cache]] = {"s3-fifo": S3Fifo, "sieve": Sieve, "arc": Arc}


def hit_tokens(requests: Iterable[Request], strategy: str, blocks: int) -> int:
    """Return how many tokens a pool of so many blocks has, when they are asked for."""
    cache: Cache = OTHERS[strategy](blocks) if strategy in OTHERS else Store(strategy)
    total = 0
    for keys, tokens in requests:
        found = 0
        while found < len(keys) and keys[found] in cache:
            found += 1
        total += min(found * TRACE_BLOCK_TOKENS, tokens)
        cache.use(keys[:found])
        missing = [key for key in keys if key not in cache]
        if len(missing) > blocks - found:
            continue
        if (excess := len(cache) + len(missing) - blocks) > 0:
            cache.evict(excess)
        rest = keys[found:]
        there = [key for key in rest if key in cache]
        missing = [key for key in rest if key not in cache]
        if missing:
            cache.put(missing)
        if there:
            cache.use(there)
    return total


def hit_tokens_over_disk(
    requests: Iterable[Request], strategy: str, blocks: int, disk_blocks: int, folder: Path
) -> tuple[int, int]:
    """Return how many tokens a store with a pool and a disk of so many blocks has in
    memory and on disk together, and how many of them in memory.
    """
    block_bytes = BLOCK_KIB * 1024
    value, target = bytes(block_bytes), bytearray(block_bytes)
    total = in_memory = 0
    with open_store(
        pool_bytes=blocks * block_bytes,
        minimal_allocate_bytes=block_bytes,
        eviction=strategy,
        disk=f"{folder}:{disk_blocks * BLOCK_KIB}KiB",
        disk_admission="eager",
        disk_wait_s=60,
    ) as store:
        for keys, tokens in requests:
            found = store.match_prefix(keys)
            total += min(found * TRACE_BLOCK_TOKENS, tokens)
            in_memory += min(found.in_memory * TRACE_BLOCK_TOKENS, tokens)
            if found:
                store.get_many_into([(key, target) for key in keys[:found]])
            if missing := keys[found:]:
                store.put_many([(key, value) for key in missing])
                store.flush(missing)
    return total, in_memory


def optimum(requests: Sequence[Request], blocks: int) -> int:
    """Return how many tokens a pool has that knows the future."""
    next_use: dict[str, float] = {}
    next_uses: list[list[float]] = []
    for number in range(len(requests) - 1, -1, -1):
        keys, _ = requests[number]
        next_uses.append([next_use.get(key, math.inf) for key in keys])
        next_use.update(dict.fromkeys(keys, number))
    stored: dict[str, float] = {}
    furthest: list[tuple[float, int, str]] = []
    total = 0
    for (keys, tokens), uses in zip(requests, reversed(next_uses), strict=True):
        found = 0
        while found < len(keys) and keys[found] in stored:
            found += 1
        total += min(found * TRACE_BLOCK_TOKENS, tokens)
        for depth, (key, use) in enumerate(zip(keys, uses, strict=True)):
            stored.pop(key, None)
            if use < math.inf:
                stored[key] = use
                heapq.heappush(furthest, (-use, -depth, key))
        while len(stored) > blocks:
            use, _, key = heapq.heappop(furthest)
            if stored.get(key) == -use:
                del stored[key]
    return total


def prompt(name: object, blocks: int = 20) -> Request:
    return [f"{name}/{number}" for number in range(blocks)], blocks * TRACE_BLOCK_TOKENS


def loop() -> list[Request]:
    """60 prompts, each asked for in its turn, 30 times."""
    return [prompt(number) for _ in range(30) for number in range(60)]


def zipf() -> list[Request]:
    """1,000 prompts, the n-th of which is asked for as often as n to the power -0.9."""
    chance = random.Random(3)
    return [prompt(one) for one in chance.choices(range(1000), [(n + 1) ** -0.9 for n in range(1000)], k=8000)]


def scans() -> list[Request]:
    """150 popular prompts, and 100 that are asked for once after every 100 requests."""
    chance, requests = random.Random(3), []
    for round_ in range(40):
        requests += [prompt(one) for one in chance.choices(range(150), [(n + 1) ** -0.6 for n in range(150)], k=100)]
        requests += [prompt(f"once {round_}.{number}") for number in range(100)]
    return requests


def trees() -> list[Request]:
    """40 agents with 5 system prompts; each goes on from where it is, until it ends."""
    chance = random.Random(3)
    agents: list[list[str]] = []
    requests = []
    for step in range(5000):
        if len(agents) < 40:
            agents.append([*prompt(f"system {chance.randrange(5)}", 6)[0], f"agent {step}"])
        one = chance.randrange(len(agents))
        agents[one] = agents[one] + prompt(step, chance.randrange(1, 6))[0]
        requests.append((agents[one], len(agents[one]) * TRACE_BLOCK_TOKENS))
        if chance.random() < 0.08:
            agents.pop(one)
    return requests


GENERATED = {"loop": loop, "zipf": zipf, "scans": scans, "trees": trees}


def show(name: str, requests: Sequence[Request], pools: Sequence[float], strategies: Sequence[str]) -> None:
    """Print a table: the optimum and each strategy as parts of all tokens."""
    blocks = len({key for keys, _ in requests for key in keys})
    asked = sum(tokens for _, tokens in requests)
    print(f"\n{name}: {len(requests):,} requests, {asked:,} tokens, {blocks:,} different blocks")
    print("pool      ", *(f"{part:6.0%}" for part in pools))
    sizes = [max(1, int(part * blocks)) for part in pools]
    print("optimum   ", *(f"{optimum(requests, size) / asked:6.1%}" for size in sizes), flush=True)
    for strategy in strategies:
        found = [hit_tokens(requests, strategy, size) / asked for size in sizes]
        print(f"{strategy:10}", *(f"{part:6.1%}" for part in found), flush=True)


def show_over_disk(
    name: str, requests: Sequence[Request], pool: float, disks: Sequence[float], strategies: Sequence[str]
) -> None:
    """Print a table: a pool over disks, beside pools as large as those."""
    blocks = len({key for keys, _ in requests for key in keys})
    asked = sum(tokens for _, tokens in requests)
    print(f"\n{name}: {len(requests):,} requests; a pool of {pool:.0%} of {blocks:,} blocks over a disk")
    print("disk                    ", *(f"{part:13.0%}" for part in disks), flush=True)
    for strategy in strategies:
        cells, pools = [], []
        for part in disks:
            size = int(part * blocks)
            with tempfile.TemporaryDirectory() as folder:
                got = hit_tokens_over_disk(requests, strategy, int(pool * blocks), size, Path(folder, "disk"))
            cells.append("{:6.1%} {:6.1%}".format(*(one / asked for one in got)))
            pools.append(f"{hit_tokens(requests, strategy, size) / asked:13.1%}")
        print(f"{strategy:10} all, memory  ", *cells, flush=True)
        print(f"{'':10} as large pool", *pools, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="requests in Mooncake's format")
    parser.add_argument("--pools", default=POOLS, help=f"sizes of the pool (default: {POOLS})")
    parser.add_argument("--disks", help="sizes of disks below the first of these pools, for the product's strategies")
    parser.add_argument("--strategies", default=",".join([*eviction_names(), *OTHERS]), help="default: all")
    arguments = parser.parse_args()
    if arguments.disks is not None and not arguments.trace:
        parser.error("--disks needs --trace: all blocks of the generated requests are less than the smallest disk")
    pools = [float(part) for part in arguments.pools.split(",")]
    strategies = arguments.strategies.split(",")

    def show_one(name: str, requests: Sequence[Request]) -> None:
        if arguments.disks is None:
            show(name, requests, pools, strategies)
        else:
            disks = [float(part) for part in arguments.disks.split(",")]
            show_over_disk(name, requests, pools[0], disks, [one for one in strategies if one not in OTHERS])

    for file in arguments.trace:
        with file.open() as lines:
            show_one(file.name, [(list(map(str, one.blocks)), one.tokens) for one in read_trace(lines)])
    for name, generate in () if arguments.trace else GENERATED.items():
        show_one(name, generate())


if __name__ == "__main__":
    main()
