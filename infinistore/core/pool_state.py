"""What a store knows of its pool, as bytes: for a process that takes the pool over.

The bytes begin with a header: what they are, the version of the format, and the length
and the xxh3-64 of what follows. That is columns of numbers (unsigned, 64 bits, in the
byte order of the machine: the bytes never leave it) and, at the end, all texts, joined.
Nothing in them is believed before it was checked: whatever is malformed raises
`ValueError`, and makes no other trouble.

Leaves to others: how the bytes travel, and whether the blocks are what the checksums
say.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import attrs
import xxhash

from infinistore.core.entry import Entry

__all__ = ["HeldBlocks", "PoolState", "decode_state", "encode_state", "header_of", "open_body"]

_MAGIC = b"INFPOOL\n"
_VERSION = 2
_HEADER = struct.Struct("=8sQQQ")
_COLUMNS = 4  # of an entry
_MOST_KEY_BYTES = 4096  # more than any store allows
_LONGEST_HOLD_US = 10**15  # the same
_LONGEST_TTL_US = 10**16


@attrs.frozen
class HeldBlocks:
    """A hold: its id, for how long it goes on, in seconds, and its blocks."""

    hold: int
    left_s: float
    entries: list[Entry]


@attrs.frozen
class PoolState:
    """The blocks of a pool, and what is pinned there.

    `arenas` has their lengths in bytes. `pins` has, for each client that may still
    touch the pool, what it may touch: blocks, with or without a key, and room that was
    reserved.
    """

    instance: str
    """The run of the server that had the pool."""
    allocator: str
    unit_bytes: int
    arenas: list[int]
    keys: list[str]
    """Coldest first."""
    entries: list[Entry]
    """One for each key."""
    holds: list[HeldBlocks]
    pins: list[list[Entry]]
    ends: list[tuple[int, float]] = attrs.field(factory=list)
    """The positions of keys that end, and after how many seconds."""
    protected: list[int] = attrs.field(factory=list)
    """The positions of keys that are protected from eviction."""


def encode_state(state: PoolState) -> list[bytes]:
    """Return the bytes of a state, in pieces to be written one after the other."""
    keys = [key.encode() for key in state.keys]
    names = [state.instance.encode(), state.allocator.encode()]
    counts = (len(state.arenas), len(keys), len(state.holds), len(state.pins), len(state.ends), len(state.protected))
    held = [(held.hold, max(0, round(held.left_s * 1e6)), len(held.entries)) for held in state.holds]
    columns = [
        array("Q", [state.unit_bytes, *map(len, names), *counts]),
        array("Q", state.arenas),
        array("Q", chain.from_iterable(held)),
        array("Q", map(len, state.pins)),
        _pack(state.entries),
        *(_pack(held.entries) for held in state.holds),
        *map(_pack, state.pins),
        array("Q", chain.from_iterable((position, round(left_s * 1e6)) for position, left_s in state.ends)),
        array("Q", state.protected),
        array("Q", map(len, keys)),
    ]
    body = b"".join([*(column.tobytes() for column in columns), *names, *keys])
    return [header_of(_MAGIC, _VERSION, body), body]


def decode_state(data: bytes | memoryview) -> PoolState:
    """Return the state that these bytes describe.

    Raises:
        ValueError: they describe none, or not one that can be.
    """
    body, rest = open_body(data, _MAGIC, _VERSION, "the state of a pool")
    if len(rest):
        raise ValueError("it goes on beyond its end")
    return _read(_Reader(body))


def header_of(magic: bytes, version: int, body: bytes) -> bytes:
    """Return the header of a body: what it is, its format, its length and its
    xxh3-64."""
    return _HEADER.pack(magic, version, len(body), xxhash.xxh3_64_intdigest(body))


def open_body(data: bytes | memoryview, magic: bytes, version: int, what: str) -> tuple[memoryview, memoryview]:
    """Return the body behind a header, and what follows it.

    Raises:
        ValueError: the header is not one of `what`, or the body is not what it says.
    """
    data = memoryview(data)
    if len(data) < _HEADER.size:
        raise ValueError("it is too short")
    found, its_version, length, checksum = _HEADER.unpack_from(data)
    if found != magic:
        raise ValueError(f"it is not {what}")
    if its_version != version:
        raise ValueError(f"it has format {its_version}, and this release reads format {version}")
    rest = data[_HEADER.size :]
    body = rest[:length]
    if len(body) != length or xxhash.xxh3_64_intdigest(body) != checksum:
        raise ValueError("it was cut or changed on its way")
    return body, rest[length:]


def _read(reader: "_Reader") -> PoolState:
    unit_bytes, instance_bytes, allocator_bytes, *counts = reader.numbers(9)
    arenas = reader.numbers(counts[0])
    held = reader.numbers(3 * counts[2])
    pinned = reader.numbers(counts[3])
    entries = reader.entries(counts[1])
    holds = [
        HeldBlocks(hold, left_us / 1e6, reader.entries(count))
        for hold, left_us, count in zip(held[::3], held[1::3], held[2::3], strict=True)
    ]
    pins = [reader.entries(count) for count in pinned]
    ending = reader.numbers(2 * counts[4])
    protected = reader.numbers(counts[5])
    lengths = reader.numbers(counts[1])
    instance, allocator = reader.text(instance_bytes), reader.text(allocator_bytes)
    keys = reader.texts(lengths)
    reader.check_end()
    if not all(held[::3]) or len(set(held[::3])) != len(holds) or max(held[1::3], default=0) > _LONGEST_HOLD_US:
        raise ValueError("its holds have no ids of their own, or no end")
    if len(set(keys)) != len(keys) or len(set(entries)) != len(keys):
        raise ValueError("it has a key or a block twice")
    positions = [*ending[::2], *protected]
    if max(positions, default=-1) >= len(keys) or max(ending[1::2], default=0) > _LONGEST_TTL_US:
        raise ValueError("it ends or protects what it does not have, or ends it never")
    if len(set(ending[::2])) != counts[4] or len(set(protected)) != counts[5]:
        raise ValueError("it ends or protects a key twice")
    if not all(keys) or max(lengths, default=0) > _MOST_KEY_BYTES:
        raise ValueError("it has a key that no store has")
    for arena, offset, size, _ in chain(entries, *(held.entries for held in holds), *pins):
        if arena >= len(arenas) or not size or offset + size > arenas[arena]:
            raise ValueError("a block of it lies outside of the pool")
    ends = [(position, left_us / 1e6) for position, left_us in zip(ending[::2], ending[1::2], strict=True)]
    return PoolState(instance, allocator, unit_bytes, arenas, keys, entries, holds, pins, ends, protected)


def _pack(entries: Sequence[Entry]) -> "array[int]":
    return array("Q", chain.from_iterable(zip(*entries, strict=True)) if entries else ())


class _Reader:
    """Reads one thing after the other, and nothing beyond the end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._place = 0

    def _take(self, count: int) -> memoryview:
        if count > len(self._data) - self._place:
            raise ValueError("it ends too soon")
        start, self._place = self._place, self._place + count
        return self._data[start : self._place]

    def numbers(self, count: int) -> list[int]:
        """Read so many numbers."""
        numbers: array[int] = array("Q")
        numbers.frombytes(self._take(8 * count))
        return numbers.tolist()

    def entries(self, count: int) -> list[Entry]:
        """Read so many entries."""
        columns = self.numbers(_COLUMNS * count)
        rows: Iterable[Any] = zip(*(columns[i * count : (i + 1) * count] for i in range(_COLUMNS)), strict=True)
        return list(rows)

    def text(self, length: int) -> str:
        """Read a text of so many bytes."""
        return str(self._take(length), "utf-8")

    def texts(self, lengths: Sequence[int]) -> list[str]:
        """Read texts of these lengths."""
        joined = bytes(self._take(sum(lengths)))
        return [joined[start:end].decode() for start, end in pairwise(accumulate(lengths, initial=0))]

    def check_end(self) -> None:
        """Raise ValueError unless all has been read."""
        if self._place != len(self._data):
            raise ValueError("it goes on beyond its end")
