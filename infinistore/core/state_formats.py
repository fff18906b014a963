"""The formats in which the state of a pool is written, or was, each by its number.

The bytes begin with a header: what they are, the number of the format, and the length
and the xxh3-64 of what follows. In the present format that is *sections*: how many
there are, the name and the length of each, and then their bytes. Whoever does not know
a section may skip it if its name begins with `+`, as an ancillary chunk of PNG. So what
is only added needs no new format, and an older release can read it. All else is a new
format: then `READERS` keeps the reader of the old one, which returns what it finds as
sections of the new one; `tests/core/golden` keeps what the old code wrote; and a new
`Capability` of the protocol says who reads the new one.

Whatever is malformed raises `ValueError`. Leaves to others: what is in the sections.
"""

import struct
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final, TypeAlias, TypeVar

import xxhash

__all__ = ["FORMAT", "READERS", "Sections", "cut", "header_of", "numbers_of", "open_body", "write_sections"]

Sections: TypeAlias = dict[str, memoryview]
_Bytes = TypeVar("_Bytes", bytes, memoryview)
FORMAT: Final = 3
_HEADER: Final = struct.Struct("=8sQQQ")
_COUNT: Final = struct.Struct("=Q")
_SECTION: Final = struct.Struct("=16sQ")


def header_of(magic: bytes, number: int, body: bytes) -> bytes:
    """Return the header of a body: what it is, its format, its length and its
    xxh3-64."""
    return _HEADER.pack(magic, number, len(body), xxhash.xxh3_64_intdigest(body))


def open_body(
    data: bytes | memoryview, magic: bytes, formats: Collection[int], what: str
) -> tuple[int, memoryview, memoryview]:
    """Return the format of a body, the body, and what follows it.

    Raises:
        ValueError: the header is not one of `what` in one of these formats, or the body
            is not what it says.
    """
    data = memoryview(data)
    if len(data) < _HEADER.size:
        raise ValueError("it is too short")
    found, number, length, checksum = _HEADER.unpack_from(data)
    if found != magic:
        raise ValueError(f"it is not {what}")
    if number not in formats:
        raise ValueError(f"it has format {number}, and this release reads format {' or '.join(map(str, formats))}")
    rest = data[_HEADER.size :]
    body = rest[:length]
    if len(body) != length or xxhash.xxh3_64_intdigest(body) != checksum:
        raise ValueError("it was cut or changed on its way")
    return number, body, rest[length:]


def write_sections(sections: Mapping[str, bytes]) -> bytes:
    """Return a body of these sections, whose names have at most 16 letters of ASCII."""
    table = [_SECTION.pack(name.encode("ascii"), len(data)) for name, data in sections.items()]
    return b"".join([_COUNT.pack(len(sections)), *table, *sections.values()])


def cut(data: _Bytes, lengths: Sequence[int]) -> list[_Bytes]:
    """Cut bytes into pieces of these lengths.

    Raises:
        ValueError: they are more, or fewer.
    """
    if sum(lengths) != len(data):
        raise ValueError("it ends too soon" if sum(lengths) > len(data) else "it goes on beyond its end")
    return [data[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def numbers_of(section: memoryview) -> list[int]:
    """Return the numbers of a section: unsigned, 64 bits, in the byte order of the
    machine, which the bytes never leave."""
    if len(section) % 8:
        raise ValueError("it has a part of a number")
    numbers = array("Q")
    numbers.frombytes(section)
    return numbers.tolist()


def _read_sections(body: memoryview) -> Sections:
    count = _COUNT.unpack_from(body)[0] if len(body) >= _COUNT.size else 0
    end = _COUNT.size + count * _SECTION.size
    if not count or len(body) < end:
        raise ValueError("it ends too soon")
    names, lengths = zip(*_SECTION.iter_unpack(body[_COUNT.size : end]), strict=True)
    if len(set(names)) != count:
        raise ValueError("it has a section twice")
    return dict(zip((str(name.rstrip(b"\0"), "ascii") for name in names), cut(body[end:], lengths), strict=True))


def _read_format_2(body: memoryview) -> Sections:
    """Columns in a fixed order, with their counts at the beginning."""
    counts = numbers_of(body[: 9 * 8])
    if len(counts) != 9:
        raise ValueError("it ends too soon")
    _, instance, allocator, arenas, keys, holds, pins, ends, protected = counts
    first = {"unit_bytes": 8, "": 8 * 8, "arenas": 8 * arenas, "holds": 24 * holds, "pins": 8 * pins}
    start = sum(first.values())
    sections = dict(zip(first, cut(body[:start], [*first.values()]), strict=True))
    del sections[""]
    held, pinned = sum(numbers_of(sections["holds"])[2::3]), sum(numbers_of(sections["pins"]))
    others = {"entries": 32 * keys, "held": 32 * held, "pinned": 32 * pinned, "ends": 16 * ends}
    others |= {"protected": 8 * protected, "key_bytes": 8 * keys, "instance": instance, "allocator": allocator}
    others["keys"] = max(0, len(body) - start - sum(others.values()))
    return sections | dict(zip(others, cut(body[start:], [*others.values()]), strict=True))


READERS: Final[Mapping[int, Callable[[memoryview], Sections]]] = {2: _read_format_2, FORMAT: _read_sections}
"""For each format that can be read, what returns the sections of a body. There was no
format 1 in any release."""
