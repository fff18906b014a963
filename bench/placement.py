"""Who owns which key: what it costs to know, and how much of a prefix outlives a node.

`python bench/placement.py` prints three tables: routing and the making of tables;
usable prefixes, balance and nodes asked in a simulation of conversations; and the keys
that move when a node joins. With `--trace FILE`, requests in Mooncake's format, it
prints one: how evenly nodes are read, with and without caches of the engines' own. The
simulations are the same in every run.
"""

import argparse
import platform
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from infinistore.cluster.membership import Node, View
from infinistore.cluster.placement import Placement
from infinistore.cluster.reading import Reader, ReadOrder
from infinistore.traces import TRACE_BLOCK_TOKENS, read_trace

CONVERSATIONS = 2_000
MOST_BLOCKS = 4_096
BLOCKS_A_PROMPT = 128
"""Of a beginning that conversations share, such as a system prompt."""


ENGINES = 16
GROUP_TOKENS = 1_024


def view_of(nodes: int, copies: int = 1) -> View:
    named = (Node(f"node-{number:05}", f"infinistore://h{number}:22345") for number in range(nodes))
    return View(0, tuple(named), copies)


def best_ms(call: Callable[[], object], *, times: int = 200) -> float:
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return min(found) * 1e3


def header(columns: Sequence[str]) -> None:
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))


def routing() -> None:
    columns = ["nodes", "1,000 keys, each its own tag", "in groups of 64", "first 1,000 keys of a view"]
    header([*columns, "after a join", "without numpy"])
    single = [f"model/{{{number:032x}}}/{number:032x}" for number in range(1_000)]
    groups = [f"model/{{{number // 64:032x}}}/{number:032x}" for number in range(1_000)]
    Placement(view_of(2)).owners(single)  # numpy is imported
    for nodes in (8, 100, 1_000):
        view, more = view_of(nodes), view_of(nodes + 1)
        placement = Placement(view)
        placement.split(single)
        placement.split(groups)
        costs = (
            best_ms(partial(placement.split, single)),
            best_ms(partial(placement.split, groups)),
            best_ms(partial(fill, view, single), times=5),
            best_ms(partial(fill, more, single, placement), times=5),
            best_ms(partial(fill, view, single, with_numpy=False), times=1),
        )
        print(f"| {nodes:,} | " + " | ".join(f"{cost:.2f} ms" for cost in costs) + " |")


def fill(view: View, keys: list[str], older: Placement | None = None, *, with_numpy: bool = True) -> None:
    Placement(view, older, with_numpy=with_numpy).owners(keys)


def conversations() -> list[list[str]]:
    """The chain hashes of each conversation: Zipf over 200 beginnings, lengths as
    unequal as a log-normal distribution, 454 blocks on average.
    """
    dice = random.Random(1)
    weights = [1 / rank for rank in range(1, 201)]
    found = []
    for number in range(CONVERSATIONS):
        prompt = dice.choices(range(200), weights)[0]
        length = min(MOST_BLOCKS, max(16, round(dice.lognormvariate(5.75, 0.85))))
        shared = min(length, BLOCKS_A_PROMPT)
        chain = [named(f"prompt {prompt} block {block}") for block in range(shared)]
        chain += [named(f"conversation {number} block {block}") for block in range(shared, length)]
        found.append(chain)
    return found


def named(text: str) -> str:
    return xxh3_64_hexdigest(text.encode())


def tagged(chain: Sequence[str], group: int) -> list[str]:
    """The keys of a chain, in groups of so many blocks; 0 for one group."""
    return [f"{{{chain[block // group * group if group else 0]}}}{one}" for block, one in enumerate(chain)]


def holes(chain: Sequence[int]) -> dict[int, int]:
    """For each node of a chain, the blocks before its first: what is left without
    it.
    """
    found: dict[int, int] = {}
    for block, owner in enumerate(chain):
        if owner not in found:
            found[owner] = block
    return found


def prefixes() -> None:
    chains = conversations()
    mean = sum(map(len, chains)) / len(chains)
    print(f"\n{len(chains):,} conversations, {mean:.0f} blocks on average")
    columns = ["nodes", "blocks a group", "usable after a loss", "after a cold join"]
    header([*columns, "bytes, max/mean", "load, max/mean", "nodes a look-up"])
    for nodes in (8, 100):
        before, after = Placement(view_of(nodes)), Placement(view_of(nodes + 1))
        for group in (1, 16, 64, 128, 0):
            keys = [tagged(chain, group) for chain in chains]
            owners = [before.owners(chain) for chain in keys]
            joined = [after.owners(chain) for chain in keys]
            total = sum(map(len, owners))
            left = 0
            for chain in owners:
                before_holes = holes(chain)
                left += sum(before_holes.values()) + (nodes - len(before_holes)) * len(chain)
            cold = sum(holes(chain).get(nodes, len(chain)) for chain in joined)
            owner_of = {
                key: owner
                for chain, its in zip(keys, owners, strict=True)
                for key, owner in zip(chain, its, strict=True)
            }
            stored = Counter(owner_of.values())
            load = Counter(owner for chain in owners for owner in chain)
            asked = sum(len(set(chain)) for chain in owners) / len(owners)
            ratios = (max(count.values()) / (sum(count.values()) / nodes) for count in (stored, load))
            print(
                f"| {nodes} | {group or 'all'} | {left / nodes / total:.3f} | {cold / total:.3f} | "
                + " | ".join(f"{ratio:.2f}" for ratio in ratios)
                + f" | {asked:.1f} |"
            )


def movement() -> None:
    print()
    header(["nodes", "200,000 keys, max/mean", "in groups of 64", "moved by a join", "of them to the newcomer"])
    single = [f"{number:x}" for number in range(200_000)]
    groups = [f"{{{number // 64:x}}}{number:x}" for number in range(200_000)]
    for nodes in (8, 100, 1_000):
        before, after = Placement(view_of(nodes)), Placement(view_of(nodes + 1))
        old, new = before.owners(single), after.owners(single)
        moved = [to for was, to in zip(old, new, strict=True) if was != to]
        balance = [max(Counter(owners).values()) * nodes / 200_000 for owners in (old, before.owners(groups))]
        print(
            f"| {nodes:,} | {balance[0]:.3f} | {balance[1]:.3f} | {len(moved) / 200_000:.4f} | "
            f"{moved.count(nodes) / len(moved):.0%} |"
        )


def reads(requests: Sequence[Sequence[str]], own_groups: int) -> Iterator[tuple[int, list[str]]]:
    """The engine of each request, chosen at random, and the groups that it reads from
    the store: those after what its own cache has of the beginning, as far as any
    engine had them before.
    """
    dice = random.Random(2)
    own: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(ENGINES)]
    stored: set[str] = set()
    for groups in requests:
        engine = dice.randrange(ENGINES)
        cache = own[engine]
        had = next((place for place, one in enumerate(groups) if one not in cache), len(groups))
        there = next((place for place, one in enumerate(groups) if one not in stored), len(groups))
        yield engine, list(groups[had:there])
        for one in reversed(groups):
            cache[one] = None
            cache.move_to_end(one)
        while len(cache) > own_groups:
            cache.popitem(last=False)
        stored.update(groups)


def hot_groups(trace: Path) -> None:
    requests = [
        [f"{{{one}}}" for one in request.blocks[:: GROUP_TOKENS // TRACE_BLOCK_TOKENS]]
        for request in read_trace(trace.open())
    ]
    print(f"{trace.name}: {len(requests):,} requests to {ENGINES} engines; reads, max/mean over the nodes")
    header(["own cache of an engine", "hottest group", "nodes", "owners only", "2 copies, in turns"])
    for own_groups in (0, 300):
        read = list(reads(requests, own_groups))
        count = Counter(group for _, groups in read for group in groups)
        hottest = max(count.values()) / count.total()
        for nodes in (8, 100):
            ratios = []
            for copies in (1, 2):
                placement = Placement(view_of(nodes, copies))
                orders = [ReadOrder(placement, Reader(f"engine {engine}")) for engine in range(ENGINES)]
                turns = [0] * ENGINES
                load: Counter[int] = Counter()
                for engine, groups in read:
                    turns[engine] += 1
                    load.update(places[0] for places in orders[engine].places(groups, turns[engine]))
                ratios.append(max(load.values()) * nodes / load.total())
            print(
                f"| {own_groups * GROUP_TOKENS:,} tokens | {hottest:.2%} | {nodes} | "
                + " | ".join(f"{ratio:.2f}" for ratio in ratios)
                + " |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests in Mooncake's format")
    trace: Path | None = parser.parse_args().trace
    if trace is not None:
        hot_groups(trace)
        return
    print(f"CPython {platform.python_version()}")
    routing()
    prefixes()
    movement()


if __name__ == "__main__":
    main()
