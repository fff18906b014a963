"""What callers give, checked and brought into one form before anything is sent.

Raises `ValueError` and `TypeError`, as Python does for wrong arguments.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from infinistore.client.buffers import BufferLike, readable, writable
from infinistore.client.operations import Items
from infinistore.keys import check_distinct, check_keys

__all__ = ["Pairs", "check_hold", "items_to_get", "items_to_put", "key_list"]

Pairs: TypeAlias = Mapping[str, BufferLike] | Iterable[tuple[str, BufferLike]]
"""Keys with data or buffers: a mapping, or pairs."""


def key_list(keys: Iterable[str]) -> list[str]:
    """Return the keys as a list. A key may stand in it twice."""
    if isinstance(keys, str):
        raise TypeError(f"give a list of keys, not the one text {keys[:60]!r}")
    checked = keys if isinstance(keys, list) else list(keys)
    check_keys(checked)
    return checked


def items_to_put(items: Pairs) -> Items:
    """Return keys with the bytes of their data. No key may stand there twice."""
    pairs = [(key, readable(data)) for key, data in _pairs(items)]
    keys = [key for key, _ in pairs]
    check_keys(keys)
    check_distinct(keys)
    return pairs


def items_to_get(items: Pairs) -> Items:
    """Return keys with the bytes of their buffers, which can be written."""
    pairs = [(key, writable(buffer)) for key, buffer in _pairs(items)]
    check_keys([key for key, _ in pairs])
    return pairs


def check_hold(hold_s: float) -> None:
    """Raise `ValueError` unless this is a time to hold for: 0 for none."""
    if not 0 <= hold_s < math.inf:
        raise ValueError(f"hold_s must be a number of seconds, 0 for no hold, not {hold_s!r}")


def _pairs(items: Pairs) -> Sequence[tuple[str, BufferLike]]:
    pairs = list(items.items()) if isinstance(items, Mapping) else list(items)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError("give a mapping, or pairs (key, buffer)")
    return pairs
