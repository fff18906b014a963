"""How the protocol says where a block is: the number of its arena times 2**48, plus its offset there, in bytes."""

__all__ = ["arena_of", "offset_of", "place_of"]

_OFFSET_BITS = 48
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1


def place_of(arena: int, offset: int) -> int:
    """Return the place of an offset in an arena."""
    return arena << _OFFSET_BITS | offset


def arena_of(place: int) -> int:
    """Return in which arena a place is."""
    return place >> _OFFSET_BITS


def offset_of(place: int) -> int:
    """Return how many bytes from the beginning of its arena a place is."""
    return place & _OFFSET_MASK
