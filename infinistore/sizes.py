"""Sizes in bytes in human-readable form: `512MiB`, `2GiB`, `0.5`.

Every unit is a power of 1024, with or without the `i`: `2G`, `2GB` and `2GiB` are the
same, as in the original InfiniStore. The arithmetic is exact: `parse_size` reads back
what `format_size` writes, to the byte.
"""

import re
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

_UNITS: Final = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB, "p": 1 << 50}
_NAMES: Final = ((1 << 50, "PiB"), (TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_PATTERN: Final = re.compile(
    r"\s*([0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})\s*(?:([kmgtp]?)(i?)(b?))\s*", re.IGNORECASE
)


class DefaultSize(int):
    """A size that the user left to the program."""


def parse_size(text: str | float, bare_unit_bytes: int = 1) -> int:
    """Return the number of bytes of `text`.

    A number without a unit counts in `bare_unit_bytes` (1 means bytes). The result is
    rounded down to whole bytes.

    Raises:
        ValueError: a negative number, an unknown unit, or not a size. The message gives
            a remedy.
    """
    from fractions import Fraction

    match = _PATTERN.fullmatch(str(text)) if not isinstance(text, bool) else None
    if match is None:
        raise ValueError("is not a size; write a number with a unit, such as 512MiB or 2GiB")
    number, prefix, binary, byte = match.groups()
    if binary and not prefix:
        raise ValueError("has an unknown unit; the units are B, KiB, MiB, GiB, TiB and PiB")
    unit_bytes = _UNITS[prefix.lower()] if prefix or byte else bare_unit_bytes
    return int(Fraction(number if not number.startswith(".") else f"0{number}") * unit_bytes)


def format_size(size_bytes: int) -> str:
    """Return the shortest exact form: `512MiB`, `1536KiB`, `1000B`."""
    for unit_bytes, name in _NAMES:
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{name}"
    return f"{size_bytes}B"


def describe_size(size_bytes: int) -> str:
    """Return the size rounded to about three digits: `15.9 GiB`, `64 KiB`, `17 B`."""
    for unit_bytes, name in _NAMES:
        if size_bytes >= unit_bytes:
            number = size_bytes / unit_bytes
            digits = 2 if number < 10 else 1 if number < 100 else 0
            text = f"{number:.{digits}f}"
            return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {name}"
    return f"{size_bytes} B"


def in_units(size_bytes: int) -> str:
    """Return the size as `describe_size`, with the bytes if it is rounded. For errors.

    `64 GiB`, `17 bytes`, `1 MiB (1,048,577 bytes)`: different sizes never look equal.
    """
    if size_bytes < KIB:
        return f"{size_bytes} bytes"
    text = describe_size(size_bytes)
    return text if parse_size(text) == size_bytes else f"{text} ({size_bytes:,} bytes)"
