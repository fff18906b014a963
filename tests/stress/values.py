"""Values that tell whose they are: each stretch of some bytes says key, version, length
and where it stands.

So a reader needs to know nothing to see that a value is not what its key had, and what
it is instead.
"""

import re

__all__ = ["LEAST_BYTES", "WrongValue", "value_of", "version_in"]

LEAST_BYTES = 64
_STRETCH_BYTES = 4096
_WORD = re.compile(r"(\S+) v(\d+) of (\d+) at \d+")


class WrongValue(Exception):
    """What was read is not what anybody wrote under that key."""


def value_of(key: str, version: int, size: int) -> bytes:
    """The value of this version of a key; `size` is at least LEAST_BYTES."""
    stretches = []
    for start in range(0, size, _STRETCH_BYTES):
        word = f"{key} v{version} of {size} at {start};".encode()
        stretches.append((word * (_STRETCH_BYTES // len(word) + 1))[:_STRETCH_BYTES])
    return b"".join(stretches)[:size]


def version_in(key: str, value: bytes | bytearray | memoryview) -> int:
    """Return the version of a value that was read under this key.

    Raises:
        WrongValue: it is none, or not all of it is of one version.
    """
    data = bytes(value)
    word = data.split(b";", 1)[0].decode("ascii", "replace")
    parsed = _WORD.fullmatch(word)
    if parsed is None:
        raise WrongValue(f"{key}: {len(data)} bytes that nobody wrote, {data[:80]!r}")
    found, version, size = parsed[1], int(parsed[2]), int(parsed[3])
    if found != key:
        raise WrongValue(f"{key}: the value of {word}")
    if size != len(data):
        raise WrongValue(f"{key}: {len(data)} bytes of {word}")
    expected = value_of(key, version, size)
    if data != expected:
        first = next(place for place, (a, b) in enumerate(zip(data, expected, strict=True)) if a != b)
        raise WrongValue(f"{key} v{version}: byte {first} of {size} begins {data[first : first + 80]!r}")
    return version
