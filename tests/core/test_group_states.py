"""What the tenants of a server have, as bytes: read as it was written, or refused."""

import json
import struct
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from infinistore.core.pool_state import (
    GroupLayout,
    GroupStates,
    PoolState,
    TenantState,
    decode_groups,
    encode_groups,
    encode_state,
    is_of_groups,
)

STATE = PoolState("run", "bitmap", 64, [8192], ["key"], [(0, 0, 5, 7)], [], [[], [(0, 128, 64, 0)]])
LAYOUT = GroupLayout("a", [8192], mapped=True, writers=["ann"])
OTHER = GroupLayout("b", [64, 128], mapped=False, writers=None)
STATES = GroupStates([LAYOUT, OTHER], [TenantState("a", "ann", STATE), TenantState("a", "ben", STATE)], 3)


def bytes_of(described: Any, rest: bytes = b"") -> bytes:
    text = json.dumps(described).encode()
    return struct.pack("=8sQQQ", b"INFGRPS\n", 1, len(text), xxhash.xxh3_64_intdigest(text)) + text + rest


def test_what_was_written_is_read() -> None:
    data = b"".join(encode_groups(STATES))
    assert is_of_groups(data)
    assert decode_groups(data) == STATES
    assert not is_of_groups(b"".join(encode_state(STATE)))


@given(st.data())
def test_bytes_that_were_cut_or_changed_are_refused(data: st.DataObject) -> None:
    good = bytearray(b"".join(encode_groups(STATES)))
    at = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        del good[at:]
    else:
        good[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match=r"^(it|a store of it) "):
        decode_groups(bytes(good))


GROUP = {"name": "a", "arenas": [8192], "mapped": True, "writers": None}
GOOD: dict[str, Any] = {"groups": [GROUP], "tenants": [], "quiet": 0}


@pytest.mark.parametrize(
    "described",
    [
        [],
        {},
        {**GOOD, "groups": {}},
        {**GOOD, "groups": [GROUP, GROUP]},
        {**GOOD, "groups": [3]},
        {**GOOD, "groups": [{**GROUP, "arenas": []}]},
        {**GOOD, "groups": [{**GROUP, "arenas": [-1]}]},
        {**GOOD, "groups": [{**GROUP, "name": "../a"}]},
        {**GOOD, "groups": [{**GROUP, "writers": [""]}]},
        {**GOOD, "quiet": -1},
        {**GOOD, "quiet": True},
        {**GOOD, "tenants": [["a", "ann"]]},
        {**GOOD, "tenants": [["a"]]},
        {**GOOD, "tenants": [["a", 3]]},
    ],
)
def test_a_description_that_cannot_be_is_refused(described: Any) -> None:
    with pytest.raises(ValueError, match=r"^(it|must) "):
        decode_groups(bytes_of(described))
    assert decode_groups(bytes_of(GOOD)).groups == [GroupLayout("a", [8192], mapped=True, writers=None)]


@pytest.mark.parametrize(
    "states",
    [
        GroupStates([OTHER], [TenantState("b", "ann", STATE)]),
        GroupStates([LAYOUT], [TenantState("a", "ann", STATE)] * 2),
        GroupStates([LAYOUT], [TenantState("c", "ann", STATE)]),
    ],
    ids=["another pool", "twice", "another group"],
)
def test_stores_that_do_not_fit_their_groups_are_refused(states: GroupStates) -> None:
    with pytest.raises(ValueError, match=r"^(it has a store twice|a store of it has another pool)"):
        decode_groups(b"".join(encode_groups(states)))


@pytest.mark.parametrize(
    ("writers", "members", "now", "fits"),
    [
        ([], ["ann", "ben"], (True, False), True),
        (["ann"], ["ann"], (True, False), True),
        (["ann"], [], (True, False), True),
        (["ann"], ["ben"], (True, False), False),
        (["ann"], ["ann", "ben"], (True, False), False),
        (["ann"], ["ann", "ben"], (True, True), True),
        (None, ["ann"], (True, False), False),
        (None, ["ann", "ben"], (True, True), True),
        ([], ["ann"], (False, False), False),
    ],
)
def test_who_may_have_mapped_memory_decides_whose_it_can_become(
    writers: list[str] | None, members: list[str], now: tuple[bool, bool], fits: bool
) -> None:
    layout = GroupLayout("a", [8192], mapped=True, writers=writers)
    assert (layout.why_not(members, mapped=now[0], writable=now[1]) == "") is fits
