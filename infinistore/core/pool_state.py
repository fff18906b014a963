"""What a store knows of its pool, as bytes: for a process that takes the pool over.

`state_formats` has the layout of the bytes, also that of earlier releases: their states
are read as well. Nothing in them is believed before it was checked: whatever is
malformed raises `ValueError`, and makes no other trouble.

Leaves to others: how the bytes travel, and whether the blocks are what the checksums
say.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Final

import attrs

from infinistore.core.index import Entry
from infinistore.core.state_formats import (
    FORMAT,
    READERS,
    Sections,
    cut,
    header_of,
    numbers_of,
    open_body,
    write_sections,
)

__all__ = ["HeldBlocks", "PoolState", "decode_state", "encode_state"]

_MAGIC: Final = b"INFPOOL\n"
_SECTIONS: Final = frozenset(
    [
        *("instance", "allocator", "keys"),  # texts
        *("unit_bytes", "arenas", "holds", "pins", "ends", "protected", "key_bytes"),  # numbers
        *("entries", "held", "pinned"),
    ]
)
_PROTECTED_ENDS: Final = "+protected_ends"
_COLUMNS = 4  # of an entry
_MOST_KEY_BYTES = 4096  # more than any store allows
_LONGEST_HOLD_S = 1e9  # the same
_LONGEST_TTL_S = 1e10


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
    protected_ends: list[tuple[int, float]] = attrs.field(factory=list)
    """The positions of those whose protection ends, and after how many seconds."""


def encode_state(state: PoolState) -> list[bytes]:
    """Return the bytes of a state, in pieces to be written one after the other."""
    keys = [key.encode() for key in state.keys]
    held = [(held.hold, max(0, round(held.left_s * 1e6)), len(held.entries)) for held in state.holds]
    ends = [(position, round(left_s * 1e6)) for position, left_s in state.ends]
    sections = {
        "instance": state.instance.encode(),
        "allocator": state.allocator.encode(),
        "unit_bytes": _numbers([state.unit_bytes]),
        "arenas": _numbers(state.arenas),
        "entries": _pack(state.entries),
        "holds": _numbers(chain.from_iterable(held)),
        "held": b"".join(_pack(held.entries) for held in state.holds),
        "pins": _numbers(map(len, state.pins)),
        "pinned": b"".join(map(_pack, state.pins)),
        "ends": _numbers(chain.from_iterable(ends)),
        "protected": _numbers(state.protected),
        "key_bytes": _numbers(map(len, keys)),
        "keys": b"".join(keys),
    }
    if state.protected_ends:
        left = ((position, round(left_s * 1e6)) for position, left_s in state.protected_ends)
        sections[_PROTECTED_ENDS] = _numbers(chain.from_iterable(left))
    body = write_sections(sections)
    return [header_of(_MAGIC, FORMAT, body), body]


def decode_state(data: bytes | memoryview) -> PoolState:
    """Return the state that these bytes describe, in any format that can be read.

    Raises:
        ValueError: they describe none, or not one that can be.
    """
    number, body, rest = open_body(data, _MAGIC, READERS, "the state of a pool")
    if len(rest):
        raise ValueError("it goes on beyond its end")
    state = _read(READERS[number](body))
    _check(state)
    return state


def _read(sections: Sections) -> PoolState:
    strange = [name for name in sections.keys() ^ _SECTIONS if not name.startswith("+")]
    if strange:
        raise ValueError(f"its sections are not those that this release reads: {', '.join(map(repr, sorted(strange)))}")
    units = numbers_of(sections["unit_bytes"])
    key_bytes = numbers_of(sections["key_bytes"])
    if len(units) != 1 or max(key_bytes, default=0) > _MOST_KEY_BYTES:
        raise ValueError("it has a unit or a key that no store has")
    held = _rows(sections["holds"], 3)
    held_entries = cut(sections["held"], [8 * _COLUMNS * count for _, _, count in held])
    pinned = cut(sections["pinned"], [8 * _COLUMNS * count for count in numbers_of(sections["pins"])])
    return PoolState(
        instance=str(sections["instance"], "utf-8"),
        allocator=str(sections["allocator"], "utf-8"),
        unit_bytes=units[0],
        arenas=numbers_of(sections["arenas"]),
        keys=[key.decode() for key in cut(bytes(sections["keys"]), key_bytes)],  # slices of a view cost more
        entries=_entries(sections["entries"]),
        holds=[
            HeldBlocks(hold, left_us / 1e6, _entries(entries))
            for (hold, left_us, _), entries in zip(held, held_entries, strict=True)
        ],
        pins=list(map(_entries, pinned)),
        ends=[(position, left_us / 1e6) for position, left_us in _rows(sections["ends"], 2)],
        protected=numbers_of(sections["protected"]),
        protected_ends=[
            (position, left_us / 1e6) for position, left_us in _rows(sections.get(_PROTECTED_ENDS, memoryview(b"")), 2)
        ],
    )


def _check(state: PoolState) -> None:
    """Raise ValueError unless a store can be like this."""
    keys, entries = state.keys, state.entries
    ids = [held.hold for held in state.holds]
    if not all(ids) or len(set(ids)) != len(ids) or any(held.left_s > _LONGEST_HOLD_S for held in state.holds):
        raise ValueError("its holds have no ids of their own, or no end")
    if len(entries) != len(keys) or len(set(keys)) != len(keys) or len(set(entries)) != len(keys):
        raise ValueError("it has a key or a block twice, or one without the other")
    ending = [position for position, _ in state.ends]
    if max([*ending, *state.protected], default=-1) >= len(keys) or any(s > _LONGEST_TTL_S for _, s in state.ends):
        raise ValueError("it ends or protects what it does not have, or ends it never")
    if len(set(ending)) != len(ending) or len(set(state.protected)) != len(state.protected):
        raise ValueError("it ends or protects a key twice")
    until = dict(state.protected_ends)
    if len(until) != len(state.protected_ends) or not until.keys() <= set(state.protected):
        raise ValueError("it ends protection twice, or where there is none")
    if max(until.values(), default=0) > _LONGEST_TTL_S:
        raise ValueError("it ends protection never")
    if not all(keys):
        raise ValueError("it has a key that no store has")
    for arena, offset, size, _ in chain(entries, *(held.entries for held in state.holds), *state.pins):
        if arena >= len(state.arenas) or not size or offset + size > state.arenas[arena]:
            raise ValueError("a block of it lies outside of the pool")


def _numbers(numbers: Iterable[int]) -> bytes:
    return array("Q", numbers).tobytes()


def _pack(entries: Sequence[Entry]) -> bytes:
    return _numbers(chain.from_iterable(zip(*entries, strict=True)) if entries else ())


def _rows(section: memoryview, columns: int) -> list[tuple[int, ...]]:
    numbers = numbers_of(section)
    if len(numbers) % columns:
        raise ValueError("it has a part of a row")
    return list(zip(*(numbers[at::columns] for at in range(columns)), strict=True))


def _entries(section: memoryview) -> list[Entry]:
    numbers = numbers_of(section)
    count, more = divmod(len(numbers), _COLUMNS)
    if more:
        raise ValueError("it has a part of a row")
    rows: Iterable[Any] = zip(*(numbers[at * count : (at + 1) * count] for at in range(_COLUMNS)), strict=True)
    return list(rows)
