"""Arguments of callers, checked and brought into one form before anything is sent.

Wrong arguments raise `ValueError` and `TypeError`, as usual in Python.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final, TypeAlias

from infinistore.client.memory.buffers import (
    BufferLike,
    DeviceBatch,
    OnDevice,
    device_batch,
    plain_bytes,
    readable,
    writable,
)
from infinistore.client.requests import Batch
from infinistore.keys import CheckedKeys, check_distinct, check_keys
from infinistore.protocol.messages import Keys

_new = tuple.__new__  # makes a named tuple without the call of a Python function
_LONGEST_TTL_S = 1e9  # 31 years
_READONLY = attrgetter("readonly")
REQUIRED: Final[Any] = object()
"""The default of `get` that says that the key must exist."""
Pairs: TypeAlias = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Keys with data or buffers, each a `BufferLike`: a mapping, or pairs. Type checkers
would refuse a mapping of several types of buffer."""


def key_list(keys: Iterable[str]) -> Keys:
    """Return the keys as a list, which may contain duplicates."""
    if isinstance(keys, str):
        raise TypeError(f"give a list of keys, not the one text {keys[:60]!r}")
    checked: Any = CheckedKeys(keys)  # Keys(...) would be a call of a Python function
    return checked  # type: ignore[no-any-return]


def batch_to_put(items: Pairs) -> Batch | DeviceBatch:
    """Return keys and the bytes of their data.

    No key may occur twice. Either all data is on GPUs, or none.
    """
    names, data = _columns(items)
    keys = CheckedKeys(names)
    check_distinct(keys)
    try:
        return Batch(keys, plain_bytes(data) or list(map(readable, data)))
    except OnDevice:
        return device_batch(keys, data)


def block_to_put(key: str, data: BufferLike) -> Batch | DeviceBatch:
    """Return the batch of one block, as `batch_to_put` does."""
    keys = CheckedKeys((key,))
    try:
        return _new(Batch, (keys, [readable(data)]))
    except OnDevice:
        return device_batch(keys, (data,))


def batch_to_get(items: Pairs) -> Batch | DeviceBatch:
    """Return keys and the bytes of their buffers, which must be writable.

    Either all buffers are on GPUs, or none.
    """
    names, buffers = _columns(items)
    keys = CheckedKeys(names)
    views = plain_bytes(buffers)
    if not views or any(map(_READONLY, views)):
        try:
            views = list(map(writable, buffers))
        except OnDevice:
            return device_batch(keys, buffers)
    return Batch(keys, views)


def block_to_get(key: str, buffer: BufferLike) -> Batch | DeviceBatch:
    """Return the batch of one block, as `batch_to_get` does."""
    keys = CheckedKeys((key,))
    try:
        return _new(Batch, (keys, [writable(buffer)]))
    except OnDevice:
        return device_batch(keys, (buffer,))


def sizes_to_reserve(sizes: Mapping[str, int]) -> tuple[list[str], list[int]]:
    """Return keys and the sizes of their blocks, in bytes."""
    if not isinstance(sizes, Mapping):
        raise TypeError(f"give a mapping of keys to sizes in bytes, not {type(sizes).__name__}")
    keys = list(sizes)
    check_keys(keys)
    for key, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"the size of {key[:60]!r} is a whole number of bytes, not {type(size).__name__}")
        if size < 1:
            raise ValueError(f"a value has at least one byte; {key[:60]!r} was given {size}")
    return keys, list(sizes.values())


def hold_in_us(hold_s: float) -> int:
    """Return the duration of a hold in whole microseconds, 0 for no hold.

    Raises:
        ValueError: it is negative, or not finite.
    """
    if not 0 <= hold_s < math.inf:
        raise ValueError(f"hold_s must be a number of seconds, 0 for no hold, not {hold_s!r}")
    return math.ceil(hold_s * 1e6)


def check_hold_token(hold: str) -> None:
    """Raise `TypeError` unless this can be the `hold` of a prefix match."""
    if not isinstance(hold, str):
        raise TypeError(f"give the hold of a match, a text, not {type(hold).__name__}")


def ttl_in_us(ttl_s: float | None) -> int:
    """Return a time to live in whole microseconds, 0 for None.

    Raises:
        ValueError: it is not positive, or not finite.
    """
    if ttl_s is None:
        return 0
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float):
        raise TypeError(f"ttl_s is a number of seconds, or None, not {type(ttl_s).__name__}")
    if not 0 < ttl_s <= _LONGEST_TTL_S:
        raise ValueError(
            f"ttl_s is a number of seconds from now on, more than 0 and at most {_LONGEST_TTL_S:.0f}, not {ttl_s!r};"
            " None for no end"
        )
    return math.ceil(ttl_s * 1e6)


def check_page(prefix: str, limit: int, after: str) -> None:
    """Raise `TypeError` or `ValueError` unless these select keys to list."""
    check_keys([text for text in (prefix, after) if text != ""])
    if not isinstance(limit, int):
        raise TypeError(f"limit is a whole number of keys, not {type(limit).__name__}")
    if limit < 0:
        raise ValueError(f"limit must be 0 or more, not {limit}")


def check_ratios(low: float, high: float) -> tuple[float, float]:
    """Return the limits of an eviction as floats.

    Raises:
        ValueError: not 0 <= low <= high <= 1.
    """
    if not 0 <= low <= high <= 1:
        raise ValueError(f"give two ratios with 0 <= min_ratio <= max_ratio <= 1, not {low!r} and {high!r}")
    return float(low), float(high)


def _columns(items: Pairs) -> tuple[Collection[str], Collection[BufferLike]]:
    if type(items) is not list and isinstance(items, Mapping):
        return items.keys(), items.values()
    pairs = items if type(items) is list else list(items)
    try:
        columns = list(zip(*pairs, strict=True))
    except (TypeError, ValueError):
        columns = []
    if len(columns) != 2:
        if not pairs:
            return [], []
        raise TypeError("give a mapping, or pairs (key, buffer)")
    return columns[0], columns[1]
