"""Checks and normalises the arguments of a connection before anything is sent.

Misuse is `InvalidRequest` here, and not `ValueError` or `TypeError` as elsewhere in
this package: programs of the original know one tree of errors.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from infinistore.errors import InvalidRequest
from infinistore.keys import check_keys

__all__ = [
    "Desc",
    "block_size_bytes",
    "checked_descriptors",
    "checked_key",
    "key_list",
    "keys_and_offsets",
    "whole_number",
]


class Desc(NamedTuple):
    """A block of its own size: its key, an address in registered memory, and its size
    in bytes.
    """

    key: str
    ptr: int
    size: int


def checked_key(key: str) -> str:
    """Return the key if it is valid."""
    _check([key])
    return key


def key_list(keys: Iterable[str]) -> list[str]:
    """Return the keys as a list."""
    if isinstance(keys, str):
        raise InvalidRequest(f"give a list of keys, not the one text {keys[:60]!r}")
    try:
        listed = list(keys)
    except TypeError:
        raise InvalidRequest(f"give a list of keys, not {type(keys).__name__}") from None
    _check(listed)
    return listed


def keys_and_offsets(blocks: Iterable[tuple[str, int]]) -> tuple[list[str], list[int]]:
    """Return the keys of blocks and their offsets in bytes."""
    try:
        pairs = [(key, offset) for key, offset in blocks]
    except (TypeError, ValueError):
        raise InvalidRequest("blocks must be pairs of a key and an offset in bytes, such as [('key', 0)]") from None
    if not pairs:
        raise InvalidRequest("there are no blocks; give at least one pair of a key and an offset")
    keys = [key for key, _ in pairs]
    _check(keys)
    offsets = [whole_number("an offset", offset) for _, offset in pairs]
    if min(offsets) < 0:
        raise InvalidRequest(f"an offset must be 0 or more bytes, not {min(offsets)}")
    return keys, offsets


def checked_descriptors(descriptors: Iterable[Desc | tuple[str, int, int]]) -> list[Desc]:
    """Return the blocks if they are valid."""
    try:
        given = [Desc(*descriptor) for descriptor in descriptors]
    except TypeError:
        raise InvalidRequest("blocks must be a list of Desc(key, ptr, size)") from None
    if not given:
        raise InvalidRequest("there are no blocks; give at least one Desc(key, ptr, size)")
    _check([descriptor.key for descriptor in given])
    return [Desc(key, whole_number("ptr", ptr), _size_bytes("the size of a block", size)) for key, ptr, size in given]


def block_size_bytes(block_size: int) -> int:
    """Return the size of a block."""
    return _size_bytes("block_size", block_size)


def _size_bytes(name: str, value: object) -> int:
    size = whole_number(name, value)
    if size <= 0:
        raise InvalidRequest(f"{name} must be at least 1 byte, not {size}")
    return size


def whole_number(name: str, value: object) -> int:
    """Return an integer, also from integer types such as numpy's, as an int."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequest(f"{name} must be a whole number, not {type(value).__name__}") from None


def _check(keys: Sequence[str]) -> None:
    try:
        check_keys(keys)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(str(error)) from None
