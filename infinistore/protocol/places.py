"""How the protocol says where a block is: the number of its arena times 2**48, plus its offset there, in bytes."""

from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Any

__all__ = ["arena_of", "offset_of", "place_of", "places_of"]

_OFFSET_BITS = 48
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_ARENA = itemgetter(0)
_OFFSET = itemgetter(1)


def place_of(arena: int, offset: int) -> int:
    """Return the place of an offset in an arena."""
    return arena << _OFFSET_BITS | offset


def places_of(extents: Collection[Sequence[Any]]) -> list[int]:
    """Return the place of each extent, or whatever begins with an arena and an offset, without a call for each."""
    if any(map(_ARENA, extents)):
        return [extent[0] << _OFFSET_BITS | extent[1] for extent in extents]
    return list(map(_OFFSET, extents))  # nearly always: there is one arena


def arena_of(place: int) -> int:
    """Return in which arena a place is."""
    return place >> _OFFSET_BITS


def offset_of(place: int) -> int:
    """Return how many bytes from the beginning of its arena a place is."""
    return place & _OFFSET_MASK
