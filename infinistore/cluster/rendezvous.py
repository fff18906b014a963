"""Weighted rendezvous hashing (Thaler and Ravishankar 1998): each slot ranks the nodes.

A node's cost in a slot is -ln(u) / weight, where u in (0, 1) is a hash of both; the
node with the least cost comes first. So a node comes first in a share of the slots
that is its share of all weights, and the others keep their order whoever comes, goes or
changes weight.

numpy ranks many slots at a time and is not needed: the arithmetic is on integers, and
on floats only by operations that IEEE 754 defines to the last bit. Both ways therefore
give the same order, on every machine.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from xxhash import xxh3_64_intdigest

__all__ = ["Rendezvous"]

_WORD: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15  # this and the next two are splitmix64's
_FIRST_FACTOR: Final = 0xBF58476D1CE4E5B9
_SECOND_FACTOR: Final = 0x94D049BB133111EB
_HALF_ROOT: Final = 0.7071067811865476
_LN_2: Final = 0.6931471805599453
_ODD_RECIPROCALS: Final = tuple(1.0 / odd for odd in range(19, 0, -2))
_WORTH_AN_ARRAY: Final = 256
"""From so many hashes on, numpy is faster than Python."""
_HASHES_AT_A_TIME: Final = 1 << 18


class Rendezvous:
    """The ranks of nodes, which are named by their indices. `shares` are their weights;
    a node with a share of 0 must not be asked for.
    """

    def __init__(self, ids: Sequence[str], shares: Sequence[int], arrays: Any | None) -> None:
        """`arrays` is numpy, or None to do without it."""
        self._seeds = [xxh3_64_intdigest(one.encode()) for one in ids]
        self._shares = shares
        self._equal = len({share for share in shares if share}) <= 1
        self._arrays = arrays

    def first(self, slots: Sequence[int], nodes: Sequence[int], count: int) -> list[tuple[int, ...]]:
        """Return the first `count` of these nodes in each of these slots. `nodes`
        ascend: of two that are equal to the last bit, the lower one comes first.
        """
        if len(nodes) == 1:
            return [tuple(nodes)] * len(slots)
        if self._arrays is None or len(slots) * len(nodes) < _WORTH_AN_ARRAY:
            return [self._first_in_one(slot, nodes, count) for slot in slots]
        step = max(1, _HASHES_AT_A_TIME // len(nodes))
        found: list[tuple[int, ...]] = []
        for start in range(0, len(slots), step):
            found += self._first_in_many(self._arrays, slots[start : start + step], nodes, count)
        return found

    def better(self, slots: Sequence[int], owners: Sequence[int], others: Sequence[int]) -> list[int]:
        """Return the first of each slot, of its owner so far and these others."""
        if self._arrays is None or len(slots) * (1 + len(others)) < _WORTH_AN_ARRAY:
            among = (sorted({owner, *others}) for owner in owners)
            return [self._first_in_one(slot, nodes, 1)[0] for slot, nodes in zip(slots, among, strict=True)]
        numpy = self._arrays
        nodes = numpy.empty((len(slots), 1 + len(others)), numpy.int64)
        nodes[:, 0] = owners
        nodes[:, 1:] = others
        costs = self._costs_of_many(numpy, slots, nodes)
        least = costs.min(axis=1, keepdims=True)
        found: list[int] = numpy.where(costs == least, nodes, len(self._seeds)).min(axis=1).tolist()
        return found

    def _first_in_one(self, slot: int, nodes: Sequence[int], count: int) -> tuple[int, ...]:
        offset = (slot + 1) * _STEP
        costs: list[float] = []
        for node in nodes:
            mixed = (self._seeds[node] + offset) & _WORD
            mixed = (mixed ^ (mixed >> 30)) * _FIRST_FACTOR & _WORD
            mixed = (mixed ^ (mixed >> 27)) * _SECOND_FACTOR & _WORD
            drawn = (mixed ^ (mixed >> 31)) >> 32
            # -ln(u) falls as u rises, so that equal shares need no logarithm.
            costs.append(-drawn if self._equal else _minus_ln(*math.frexp(drawn + 0.5)) / self._shares[node])
        if count == 1:
            return (nodes[costs.index(min(costs))],)
        return tuple(nodes[position] for position in sorted(range(len(nodes)), key=costs.__getitem__)[:count])

    def _first_in_many(
        self, numpy: Any, slots: Sequence[int], nodes: Sequence[int], count: int
    ) -> list[tuple[int, ...]]:
        among = numpy.array(nodes)
        costs = self._costs_of_many(numpy, slots, among)
        best = costs.argmin(axis=1)[:, None] if count == 1 else costs.argsort(axis=1, kind="stable")[:, :count]
        return [tuple(row) for row in among[best].tolist()]

    def _costs_of_many(self, numpy: Any, slots: Sequence[int], nodes: Any) -> Any:
        """Return the costs in each slot, a row each, of the same or of its own
        nodes.
        """
        offsets = (numpy.array(slots, numpy.uint64) + numpy.uint64(1)) * numpy.uint64(_STEP)
        mixed = offsets[:, None] + numpy.array(self._seeds, numpy.uint64)[nodes]
        for shift, factor in ((30, _FIRST_FACTOR), (27, _SECOND_FACTOR)):
            mixed ^= mixed >> numpy.uint64(shift)
            mixed *= numpy.uint64(factor)
        mixed ^= mixed >> numpy.uint64(31)
        costs = -(mixed >> numpy.uint64(32)).astype(numpy.int64)
        if self._equal:
            return costs
        fractions, exponents = numpy.frexp(0.5 - costs)
        return self._minus_ln_of_many(numpy, fractions, exponents) / numpy.array(self._shares)[nodes]

    @staticmethod
    def _minus_ln_of_many(numpy: Any, fractions: Any, exponents: Any) -> Any:
        low = fractions < _HALF_ROOT
        return _minus_ln_near_1(numpy.where(low, 2 * fractions, fractions), exponents - low)


def _minus_ln(fraction: float, exponent: int) -> float:
    """Return -ln(fraction * 2 ** (exponent - 32)). The platform's logarithm may differ
    in the last bit from another's.
    """
    low = fraction < _HALF_ROOT
    cost: float = _minus_ln_near_1(2 * fraction if low else fraction, exponent - low)
    return cost


def _minus_ln_near_1(fraction: Any, exponent: Any) -> Any:
    """The same for a fraction between the roots of 1/2 and of 2; also of arrays.

    ln(f) is twice the inverse hyperbolic tangent of (f - 1) / (f + 1), whose square is
    at most 0.03: ten terms of its series are enough.
    """
    ratio = (fraction - 1.0) / (fraction + 1.0)
    square = ratio * ratio
    total = 0.0
    for reciprocal in _ODD_RECIPROCALS:
        total = total * square + reciprocal
    return (32 - exponent) * _LN_2 - 2.0 * ratio * total
