"""The types of the fields of messages, and the validators of those that are not
packed.
"""

from array import array
from typing import NewType

import attrs
from attrs import validators

from infinistore.keys import MAX_KEY_BYTES

Keys = NewType("Keys", list[str])
"""Keys in request order.

On the wire they are one text, joined by NUL (`infinistore.keys`).
"""
Numbers = NewType("Numbers", "array[int]")
"""Unsigned 64-bit numbers, packed little-endian on the wire; `array('Q')` in memory."""
Tree = NewType("Tree", dict[str, object])
"""Nested maps and lists of plain values."""


def count(_: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    """Raise `ValueError` unless this is an unsigned 64-bit number."""
    if not isinstance(value, int) or not 0 <= value < 2**64:  # attrs' own validators take four calls
        raise ValueError(f"{attribute.name} is a whole number from 0 to 2**64 - 1, not {value!r}")


text = validators.and_(validators.instance_of(str), validators.max_len(MAX_KEY_BYTES))
ratio = validators.and_(validators.instance_of(float), validators.ge(0.0), validators.le(1.0))
