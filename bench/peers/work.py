"""What every store is asked to do: the shapes of batches, their keys, and their bytes;
and what came of it.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

KIB, MIB = 1024, 1024 * 1024
SOURCE_BYTES = 128 * MIB
"""What all clients write from: more than a last-level cache holds. They map one file."""
POOL_BYTES = 1024 * MIB
"""What each store may use."""
STORED_BYTES = 256 * MIB
STORED_SMALL_BYTES = 64 * MIB
WRITTEN_BYTES = 384 * MIB
"""The most that one run writes under new keys, so that no store has to evict."""
OPERATIONS = ("put", "get", "mix", "exists")


class Shape(NamedTuple):
    """A batch: how many blocks, of how many bytes each."""

    blocks: int
    size: int

    def __str__(self) -> str:
        size = f"{self.size // MIB} MiB" if self.size >= MIB else f"{self.size // KIB} KiB"
        return size if self.blocks == 1 else f"{self.blocks} x {size}"

    @property
    def batch_bytes(self) -> int:
        """Return the bytes of a batch."""
        return self.blocks * self.size

    @property
    def stored(self) -> int:
        """Return how many blocks there are to be read."""
        return (STORED_SMALL_BYTES if self.size < 64 * KIB else STORED_BYTES) // self.size


SHAPES = (
    Shape(1, 4 * KIB),
    Shape(64, 4 * KIB),
    Shape(1, 64 * KIB),
    Shape(64, 64 * KIB),
    Shape(1, MIB),
    Shape(16, MIB),
    Shape(1, 4 * MIB),
    Shape(1, 16 * MIB),
)


class Result(NamedTuple):
    """The medians of one cell for one store."""

    operation: str
    shape: Shape
    clients: int
    system: str
    ours: bool
    limit: bool
    figures: Mapping[str, float]

    @property
    def bytes_per_s(self) -> float:
        """Return the rate of payload of all clients together."""
        return self.figures["calls_per_s"] * self.shape.batch_bytes

    @property
    def cell(self) -> tuple[str, Shape, int]:
        """Return what was measured."""
        return self.operation, self.shape, self.clients


def read_results(rows: Iterable[Mapping[str, Any]]) -> list[Result]:
    """Return the results of rows, as a file has them."""
    return [Result(**{**one, "shape": Shape(*one["shape"])}) for row in rows for one in row["results"]]


def fill_source(memory: Any) -> None:
    """Write what clients put: the same bytes each time, and none of them compressible."""
    np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)


def stored_keys(shape: Shape) -> list[str]:
    """Return the keys that are there to be read, in the order in which they were put."""
    return [f"stored/{shape.size}/{number:08}" for number in range(shape.stored)]


def source_of(number: int, size: int) -> slice:
    """Return where in the source the bytes of a block lie."""
    start = number * size % SOURCE_BYTES
    return slice(start, start + size)


def batches_to_read(shape: Shape, client: int) -> Iterator[list[int]]:
    """Give the numbers of blocks that lie beside each other, as long as somebody asks;
    to each client in another order.
    """
    generator = random.Random(client)
    firsts = list(range(0, shape.stored - shape.blocks + 1, shape.blocks))
    while True:
        generator.shuffle(firsts)
        for first in firsts:
            yield list(range(first, first + shape.blocks))
