"""What the tenants of a server have in the pools of its trust groups, as bytes: for a
process that takes these pools over.

The bytes begin with a header: what they are, the number of the format, and the length
and the xxh3-64 of a description in JSON. After that follows the state of each store
(`pool_state`). Nothing is believed before it was checked: whatever is malformed raises
`ValueError`.

Leaves to others: how the bytes travel, and who may have which pool.
"""

import json
import struct
from collections.abc import Iterable
from typing import Any

import attrs

from infinistore.core.pool_state import PoolState, decode_state, encode_state
from infinistore.core.state_formats import header_of, open_body
from infinistore.tenant_limits import check_tenant_name

__all__ = ["GroupLayout", "GroupStates", "TenantState", "decode_groups", "encode_groups", "is_of_groups"]

_MAGIC = b"INFGRPS\n"
_FORMAT = 1
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
    return bytes(data[: len(_MAGIC)]) == _MAGIC


def encode_groups(states: GroupStates) -> list[bytes]:
    """Return the bytes of all, in pieces to be written one after the other."""
    described = {
        "groups": [attrs.asdict(group) for group in states.groups],
        "tenants": [[one.group, one.tenant] for one in states.tenants],
        "quiet": states.quiet,
    }
    text = json.dumps(described).encode()
    pieces = [header_of(_MAGIC, _FORMAT, text), text]
    for one in states.tenants:
        encoded = encode_state(one.state)
        pieces += [_SIZE.pack(sum(map(len, encoded))), *encoded]
    return pieces


def decode_groups(data: bytes | memoryview) -> GroupStates:
    """Return what these bytes describe.

    Raises:
        ValueError: they describe none, or not one that can be.
    """
    _, text, rest = open_body(data, _MAGIC, [_FORMAT], "about groups of tenants")
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
