"""What a store knows of its pool, and a server of those of its tenants, as bytes: for
a process that takes the pools over.

The bytes begin with a header: what they are, the number of the format, and the length
and the xxh3-64 of what follows. In the present format of a pool that is *sections*: how
many there are, the name and the length of each, and then their bytes. Whoever does not
know a section may skip it if its name begins with `+`, as an ancillary chunk of PNG. So
what is only added needs no new format, and an older release can read it. All else is a
new format: then `READERS` keeps the reader of the old one, which returns what it finds
as sections of the new one; `tests/core/golden` keeps what the old code wrote; and a new
`Capability` of the protocol says who reads the new one.

With tenants, a description in JSON follows the header, and then the state of each
store.

Nothing is believed before it was checked: whatever is malformed raises `ValueError`,
and makes no other trouble. Leaves to others: how the bytes travel, who may have which
pool, and whether the blocks are what the checksums say.
"""

import json
import struct
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, Final, TypeAlias, TypeVar

import attrs
import xxhash

from infinistore.core.index import Entry
from infinistore.tenant_limits import check_tenant_name

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


_GROUPS_MAGIC = b"INFGRPS\n"
_GROUPS_FORMAT = 1
_SIZE = struct.Struct("=Q")


@attrs.frozen
class GroupLayout:
    """The memory of one trust group, and who may have it mapped."""

    name: str
    arenas: list[int]
    """Their lengths in bytes."""
    mapped: bool
    """Whether clients may map it at all."""
    writers: list[str] | None
    """The tenants whose clients may have mapped it to write; None: those of anybody."""

    def why_not(self, members: Iterable[str], *, mapped: bool, writable: bool) -> str:
        """Return why the memory cannot become that of a group with these members, which
        can be `mapped`, and be `writable` for all of them; empty if it can."""
        if self.mapped and not mapped:
            return "clients may have mapped its memory, and now nobody may"
        if writable or self.writers == []:
            return ""
        if self.writers is None:
            return "clients may write to its memory, and now not all of them may (--shm-writes)"
        if len({*self.writers, *members}) > 1:
            return f"clients of tenant {self.writers[0]!r} may write to its memory, which is not theirs alone any more"
        return ""


@attrs.frozen
class TenantState:
    """What one tenant has in the pool of a group."""

    group: str
    tenant: str
    state: PoolState


@attrs.frozen
class GroupStates:
    """All that a server with tenants has in memory.

    The watched connections are numbered: first those of each of `tenants`, one for each
    of its `PoolState.pins` but the last, then `quiet` others, whose clients can touch
    nothing.
    """

    groups: list[GroupLayout]
    tenants: list[TenantState]
    quiet: int = 0


def is_of_groups(data: bytes | memoryview) -> bool:
    """Whether these bytes are about groups, and not the state of one pool."""
    return bytes(data[: len(_GROUPS_MAGIC)]) == _GROUPS_MAGIC


def encode_groups(states: GroupStates) -> list[bytes]:
    """Return the bytes of all, in pieces to be written one after the other."""
    described = {
        "groups": [attrs.asdict(group) for group in states.groups],
        "tenants": [[one.group, one.tenant] for one in states.tenants],
        "quiet": states.quiet,
    }
    text = json.dumps(described).encode()
    pieces = [header_of(_GROUPS_MAGIC, _GROUPS_FORMAT, text), text]
    for one in states.tenants:
        encoded = encode_state(one.state)
        pieces += [_SIZE.pack(sum(map(len, encoded))), *encoded]
    return pieces


def decode_groups(data: bytes | memoryview) -> GroupStates:
    """Return what these bytes describe.

    Raises:
        ValueError: they describe none, or not one that can be.
    """
    _, text, rest = open_body(data, _GROUPS_MAGIC, [_GROUPS_FORMAT], "about groups of tenants")
    described = json.loads(bytes(text))
    groups = [_layout(one) for one in _list(described, "groups")]
    if len({group.name for group in groups}) != len(groups):
        raise ValueError("it has a group twice")
    quiet = described.get("quiet")
    if type(quiet) is not int or quiet < 0:
        raise ValueError("it does not count its connections")
    return GroupStates(groups, _tenants(_list(described, "tenants"), rest, groups), quiet)


def _tenants(pairs: Iterable[Any], rest: memoryview, groups: Iterable[GroupLayout]) -> list[TenantState]:
    """Return the states that `rest` has, of these groups and tenants."""
    arenas = {group.name: group.arenas for group in groups}
    tenants: list[TenantState] = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("it has a store of nobody")
        group, tenant = map(_name, pair)
        size_bytes = _SIZE.unpack_from(rest)[0] if len(rest) >= _SIZE.size else 0
        if not size_bytes or len(rest) - _SIZE.size < size_bytes:
            raise ValueError("it ends too soon")
        state = decode_state(rest[_SIZE.size :][:size_bytes])
        rest = rest[_SIZE.size + size_bytes :]
        if arenas.get(group) != state.arenas or not state.pins:
            raise ValueError("a store of it has another pool than its group")
        tenants.append(TenantState(group, tenant, state))
    if len(rest):
        raise ValueError("it goes on beyond its end")
    if len({(one.group, one.tenant) for one in tenants}) < len(tenants):
        raise ValueError("it has a store twice")
    return tenants


def _layout(described: Any) -> GroupLayout:
    arenas, writers = _list(described, "arenas"), described.get("writers")
    if not arenas or not all(type(length) is int and 0 < length < 1 << 63 for length in arenas):
        raise ValueError("it has a group without memory")
    if writers is not None:
        writers = [_name(one) for one in _list(described, "writers")]
    return GroupLayout(_name(described.get("name")), arenas, described.get("mapped") is not False, writers)


def _list(described: Any, key: str) -> list[Any]:
    found = described.get(key) if isinstance(described, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"it has no {key}")
    return found


def _name(found: Any) -> str:
    check_tenant_name(found)
    return str(found)
