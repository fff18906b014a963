"""Packed offsets: an arena and an offset in it as one number.

The number is that of the arena times 2**48, plus the offset in bytes.
"""

from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Any

_OFFSET_BITS = 48
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_ARENA = itemgetter(0)
_OFFSET = itemgetter(1)


def pack_offset(arena: int, offset: int) -> int:
    """Pack an offset in an arena."""
    return arena << _OFFSET_BITS | offset


def pack_offsets(extents: Collection[Sequence[Any]]) -> list[int]:
    """Pack the offset of each extent, or of any sequence that starts with arena and
    offset.

    This makes no Python call for each of them.
    """
    if any(map(_ARENA, extents)):
        return [extent[0] << _OFFSET_BITS | extent[1] for extent in extents]
    return list(map(_OFFSET, extents))  # usual: there is one arena


def arena_of(packed: int) -> int:
    """Return the number of the arena."""
    return packed >> _OFFSET_BITS


def offset_of(packed: int) -> int:
    """Return the offset in the arena, in bytes."""
    return packed & _OFFSET_MASK
