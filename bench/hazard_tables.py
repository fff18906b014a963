"""What the hazard tables of other clients cost a put: 20 of them, full, that change all
the time, against none.

    python bench/hazard_tables.py [--puts N]

One blocking client puts blocks of 4 KiB one at a time: new keys while there is room,
keys that are there already, and new keys into a full pool, where others have to go.
Each kind is done beside 20 clients that read nothing, and beside 20 that change all
2046 slots of their tables between any two puts, in turns. The slots name blocks that
are there. What it takes to write them is not counted.

The figures are means, because most puts look at no table and a few look at all; so
there have to be enough of them, and in a full pool they are as many as it takes to come
from the high watermark to the low one and back.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

from infinistore.blocking import BlockingStore, open_store
from infinistore.client.movers.shm.known_blocks import Places
from infinistore.protocol.shared_tables import HAZARD_SLOTS, HazardTable
from local import KIB, POOL_BYTES, server

BLOCK_BYTES = 4 * KIB
TABLES = 20
BLOCKS = POOL_BYTES // BLOCK_BYTES
TURN = 250
"""How many puts of one way come in a row."""


class Reader:
    """A client that says that it reads other blocks again and again."""

    def __init__(self, store: BlockingStore, keys: list[list[str]]) -> None:
        for part in keys:
            for _ in range(2):
                store.get_many(part)
        calls: Any = store.calls  # type: ignore[attr-defined]
        self._known: list[Places] = [calls.mapped_pool.known.find(part) for part in keys]
        self._hazards: HazardTable = next(
            link.pins.hazards for link in calls.pool.idle if link.pins.hazards is not None
        )
        self._slots: int | None = None
        self._next = 0

    def change(self) -> None:
        """Read the other blocks from now on."""
        self.end()
        known = self._known[self._next]
        self._slots = self._hazards.add(known.places, known.sizes, known.checksums)
        assert self._slots is not None
        self._next = 1 - self._next

    def end(self) -> None:
        """Read nothing."""
        if self._slots is not None:
            self._hazards.remove(self._slots)
            self._slots = None


def means_s(store: BlockingStore, readers: list[Reader], keys: Iterator[str], puts: int) -> tuple[float, float]:
    """Return what a put takes on average beside clients that read nothing, and beside
    those that change tables.
    """
    spent_s = {False: 0.0, True: 0.0}
    value = bytes(BLOCK_BYTES)
    for turn in range(2 * puts // TURN):
        busy = turn % 2 == 1
        for _ in range(TURN):
            if busy:
                for reader in readers:
                    reader.change()
            key = next(keys)
            start = time.perf_counter()
            store.put(key, value)
            spent_s[busy] += time.perf_counter() - start
        for reader in readers:
            reader.end()
        store.stats()  # which looks at all tables: what the next turn takes is its own
    return spent_s[False] / (puts // TURN * TURN), spent_s[True] / (puts // TURN * TURN)


def main() -> None:
    """Run, and print a line for each kind of put."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--puts", type=int, default=4000, help="how many of each kind, each way")
    puts = parser.parse_args().puts
    with server("--minimal-allocate-size", "4") as url, ExitStack() as stack:
        store = stack.enter_context(open_store(url))
        read = [[f"read {part} {i}" for i in range(HAZARD_SLOTS)] for part in range(2)]
        for part in read:
            store.put_many(dict.fromkeys(part, bytes(BLOCK_BYTES)))
        readers = [Reader(stack.enter_context(open_store(url, inline_bytes=0)), read) for _ in range(TABLES)]
        print(f"{'put of 4 KiB':<14}{'idle tables':>14}{f'{TABLES} that change':>18}{'ratio':>8}")
        new = (f"new {number}" for number in count())
        old = (f"old {number % 1000}" for number in count())
        for _ in range(1000):
            store.put(next(old), bytes(BLOCK_BYTES))
        for kind, keys in (("new", new), ("replaced", old), ("evicting", new)):
            if kind == "evicting":
                while not store.stats().store.evicted.on_demand:
                    store.put_many({next(new): bytes(BLOCK_BYTES) for _ in range(500)})
            idle_s, busy_s = means_s(store, readers, keys, puts)
            print(f"{kind:<14}{idle_s * 1e6:>11.0f} us{busy_s * 1e6:>15.0f} us{busy_s / idle_s:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
