"""An entry: what the index keeps of a block, and its fields by name."""

from collections.abc import Callable
from operator import itemgetter
from typing import TypeAlias

from infinistore.allocators.base import Extent

__all__ = ["NO_CHECKSUM", "Entry", "arena_of", "checksum_of", "extent_of", "length_of", "offset_of"]

# An exact tuple, because both kinds of named fields cost too much. The garbage
# collector stops tracking exact tuples of integers, and only these: with a million
# entries, a full collection takes 1 ms, but 180 ms with a NamedTuple and 140 ms with a
# class that has slots. And `extent + (checksum,)` makes an exact tuple in one step:
# with a NamedTuple, a put of 64 blocks took 24 % more instructions (bench/guard.py). So
# the names are functions, which also run in `map` at the speed of C.
Entry: TypeAlias = tuple[int, int, int, int]
"""A block that has a key: (arena index, offset in bytes, length in bytes, xxh3-64
checksum or NO_CHECKSUM). The first three are its extent."""

NO_CHECKSUM = 0
"""Stands for the checksum of a block whose writer made none. (One in 2**64 blocks has
this as its checksum; nobody checks those.)"""

arena_of: Callable[[Entry | Extent], int] = itemgetter(0)
offset_of: Callable[[Entry | Extent], int] = itemgetter(1)
length_of: Callable[[Entry | Extent], int] = itemgetter(2)
checksum_of: Callable[[Entry], int] = itemgetter(3)
extent_of: Callable[[Entry], Extent] = itemgetter(0, 1, 2)
