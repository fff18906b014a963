"""A store hands its pool over, and another one goes on with it: every block that can be
verified is there, and nothing is reused that somebody may still touch.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinistore.allocators import create_allocator
from infinistore.core import Client, Pool, StoreCore
from infinistore.core.arena import adopt_arena, create_arena
from infinistore.core.hand_over import Adopted, adopt, export, verify_some
from infinistore.core.pool_state import HeldBlocks, PoolState, decode_state, encode_state
from infinistore.errors import ConfigError, LimitExceeded, OutOfMemory
from tests.core.test_store import MakeCore, put

UNIT_BYTES = 64
ARENA_BYTES = 8192


@pytest.fixture
def make_core() -> Iterator[MakeCore]:
    """Returns make_core(unit_bytes=..., like=...): a store, or one with the memory of
    another."""
    pools: list[Pool] = []

    def make(*, unit_bytes: int = UNIT_BYTES, like: StoreCore | None = None, arenas: int = 2) -> StoreCore:
        pool = Pool(create_allocator("bitmap", unit_bytes))
        pools.append(pool)
        core = StoreCore(pool, clock=lambda: 100.0)
        if like is None:
            for index in range(arenas):
                core.add_arena(create_arena(index, ARENA_BYTES))
        else:
            for arena in like.pool.arenas:
                core.add_arena(adopt_arena(arena.index, os.dup(arena.fd), arena.length))
        return core

    yield make
    for pool in pools:
        pool.close()


def read(core: StoreCore, key: str) -> bytes | None:
    client = core.open_client("reader")
    lease = core.lease(client, [key])
    (view,) = lease.views
    value = None if view is None else bytes(view)
    core.close_client(client)
    return value


def find(core: StoreCore, key: str) -> bytes | None:
    client = core.open_client("reader of one")
    entry = core.find_one(client, key)
    core.close_client(client)
    return None if entry is None else bytes(core.pool.view(entry))


def hand_over(old: StoreCore, new: StoreCore, *groups: list[Client]) -> Adopted:
    return adopt(new, decode_state(b"".join(encode_state(export(old, "run", groups)))))


def test_blocks_and_their_order_are_kept(make_core: MakeCore) -> None:
    old = make_core()
    client = old.open_client("writer")
    values = {f"key {n} \u00e4": os.urandom(10 + 50 * n) for n in range(20)}
    put(old, client, values)
    old.touch(["key 7 \u00e4"])
    before = old.all_keys()
    new = make_core(like=old)
    adopted = hand_over(old, new)
    assert (adopted.kept, adopted.dropped, adopted.stand_ins) == (20, 0, [])
    assert new.all_keys() == before
    assert new.statistics().used_bytes == old.statistics().used_bytes
    assert {key: read(new, key) for key in values} == values


def test_a_block_without_a_checksum_is_dropped(make_core: MakeCore) -> None:
    old = make_core()
    put(old, old.open_client("writer"), {"plain": b"1"}, hashed=False)
    new = make_core(like=old)
    assert hand_over(old, new).dropped == 1
    assert read(new, "plain") is None
    assert new.statistics().used_bytes == 0


@pytest.mark.parametrize("read", [read, find])
def test_a_damaged_block_is_not_served_when_asked_for_first(
    make_core: MakeCore, read: Callable[[StoreCore, str], bytes | None]
) -> None:
    old = make_core()
    put(old, old.open_client("writer"), {"good": b"1" * 100, "bad": b"2" * 100})
    entry = old.index.get("bad")
    assert entry is not None
    old.pool.view(entry[:3])[50] = 0
    new = make_core(like=old)
    hand_over(old, new)
    assert new.exists(["good", "bad"]) == b"\1\1"
    assert read(new, "bad") is None
    assert read(new, "good") == b"1" * 100
    assert new.statistics().checksum_drops == 1
    assert not verify_some(new, 1 << 20)


def test_a_lease_without_its_damaged_blocks_is_the_one_that_was_asked_for(make_core: MakeCore) -> None:
    old = make_core()
    put(old, old.open_client("writer"), {key: bytes(100) for key in ("a", "b", "c", "d", "e")})
    for key in ("a", "c"):
        entry = old.index.get(key)
        assert entry is not None
        old.pool.view(entry[:3])[50] = 1
    new = make_core(like=old)
    hand_over(old, new)
    before = new.all_keys()
    assert new.unverified is not None
    reader = new.open_client("reader")
    for keys in (["a", "b"], ["c", "d", "e"]):
        lease = new.lease(reader, keys, max_bytes=200, touch=False)
        assert list(lease.lengths) == [0, 100]  # as many as fit before one of them turned out damaged
        assert new.all_keys() == [key for key in before if new.exists([key]) == b"\1"]
    assert (new.unverified.dropped, new.statistics().checksum_drops) == (2, 2)


def test_blocks_are_verified_in_slices_the_warmest_first(make_core: MakeCore) -> None:
    old = make_core()
    put(old, old.open_client("writer"), {str(n): bytes([n]) * 100 for n in range(10)})
    for key in ("9", "0"):  # the coldest, and the warmest
        entry = old.index.get(key)
        assert entry is not None
        old.pool.view(entry[:3])[0] ^= 1
    new = make_core(like=old)
    hand_over(old, new)
    new.delete(["5"])
    assert verify_some(new, 100)
    assert (new.statistics().checksum_drops, new.exists(["0", "9"])) == (1, b"\0\1")
    slices = 1
    while verify_some(new, 100):
        slices += 1
    assert slices >= 8
    assert new.all_keys() == [str(n) for n in range(8, 0, -1) if n != 5]


def test_what_clients_hold_is_not_reused_before_they_are_gone(make_core: MakeCore) -> None:
    old = make_core()
    writer, reader = old.open_client("writer"), old.open_client("reader")
    put(old, writer, {"kept": b"k" * 1000, "replaced": b"r" * 1000, "gone": b"g" * 1000})
    lease = old.lease(reader, ["kept", "replaced", "gone"])
    put(old, writer, {"replaced": b"n" * 1000})
    old.delete(["gone"])
    reserved = old.reserve(writer, [2000])
    held = [*lease.views, *reserved.views]
    assert None not in held
    held[3][:] = b"w" * 2000  # type: ignore[index]
    before = [bytes(view) for view in held if view is not None]
    new = make_core(like=old)
    adopted = hand_over(old, new, [reader], [writer])
    assert [client.state for client in adopted.stand_ins] == ["quarantined"] * 2
    assert (read(new, "kept"), read(new, "replaced"), read(new, "gone")) == (b"k" * 1000, b"n" * 1000, None)
    fill = new.open_client("fill")
    for n in range(100):
        put(new, fill, {f"fill {n}": bytes(1000)})
    with suppress(OutOfMemory, LimitExceeded):
        while True:
            new.reserve(fill, [1000]).views[0][:] = bytes(1000)
    assert [bytes(view) for view in held if view is not None] == before
    for client in adopted.stand_ins:
        new.close_client(client)
    new.close_client(fill)
    new.purge()
    assert new.statistics().used_bytes == new.statistics().pinned_bytes == 0
    assert new.statistics().condemned_bytes == 0


def test_a_hold_goes_on_under_its_id(make_core: MakeCore) -> None:
    old = make_core()
    client = old.open_client("writer")
    put(old, client, {"held": b"1" * 100})
    _, hold = old.hold_prefix(client, ["held"], 5.0)
    new = make_core(like=old)
    hand_over(old, new)
    assert new.statistics().held_bytes == old.statistics().held_bytes > 0
    assert new.release_hold(hold)
    assert not new.release_hold(hold)
    assert new.delete(["held"]) == 1
    assert new.statistics().used_bytes == 0


def test_times_to_live_and_pins_go_on(make_core: MakeCore) -> None:
    old = make_core()
    client = old.open_client("writer")
    put(old, client, {"pinned": b"p" * 64})
    put(old, client, {"ends": b"e" * 64, "both": b"b" * 64}, ttl_s=5.0)
    put(old, client, {"unhashed": b"u" * 64}, hashed=False, ttl_s=9.0)
    assert old.retention.protect(["pinned", "both", "unhashed"]) == b"\1\1\1"
    old.retention.clock = lambda: 101.0
    new = make_core(like=old)
    hand_over(old, new)
    assert new.retention.times_left(["ends", "both", "pinned", "unhashed"]) == [4.0, 4.0, None, 0.0]
    assert new.statistics().protected_keys == 2
    new.retention.clock = lambda: 104.0
    assert new.keys() == ["pinned"]
    assert new.statistics().protected_bytes == 64
    assert new.evict(0.0, 0.0) == 0


def test_a_pin_with_a_time_ends_in_the_new_process(make_core: MakeCore) -> None:
    old = make_core()
    put(old, old.open_client("writer"), {"short": b"s" * 64, "long": b"l" * 64, "ever": b"e" * 64})
    put(old, old.open_client("other"), {"unhashed": b"u" * 64}, hashed=False)
    old.retention.protect(["short", "unhashed"], 5.0)
    old.retention.protect(["long"], 9.0)
    old.retention.protect(["ever"])
    old.retention.clock = lambda: 101.0
    new = make_core(like=old)
    hand_over(old, new)
    new.retention.clock = lambda: 103.999
    assert new.statistics().protected_keys == 3
    new.retention.clock = lambda: 104.0
    assert new.statistics().protected_keys == 2
    new.retention.clock = lambda: 108.0
    assert new.statistics().protected_keys == 1
    assert new.evict(0.0, 0.0) == 2


@pytest.mark.parametrize("ends", [[(0, 1.0), (0, 2.0)], [(1, 1.0)], [(7, 1.0)], [(0, 1e11)]])
def test_a_state_that_ends_protection_where_there_is_none_is_refused(
    make_core: MakeCore, ends: list[tuple[int, float]]
) -> None:
    old = make_core()
    put(old, old.open_client("writer"), {"protected": b"p" * 64})
    put(old, old.open_client("another"), {"not protected": b"n" * 64})
    old.retention.protect(["protected"], 5.0)
    state = attrs.evolve(export(old, "i", []), protected_ends=ends)
    with pytest.raises(ValueError, match="it ends protection"):
        decode_state(b"".join(encode_state(state)))


def test_blocks_that_have_a_place_in_larger_units_are_kept(make_core: MakeCore) -> None:
    old = make_core()
    client = old.open_client("writer")
    put(old, client, {"first": b"1" * 64, "second": b"2" * 64, "third": b"3" * 64})
    new = make_core(like=old, unit_bytes=128)
    assert hand_over(old, new).dropped == 1
    assert [read(new, key) is not None for key in ("first", "second", "third")] == [True, False, True]


def test_nothing_changes_if_room_in_use_has_no_place(make_core: MakeCore) -> None:
    old = make_core()
    client = old.open_client("writer")
    put(old, client, {"first": b"1" * 64, "second": b"2" * 64})
    old.lease(client, ["second"])
    new = make_core(like=old, unit_bytes=128)
    with pytest.raises(ConfigError, match="in units of 64 bytes"):
        hand_over(old, new, [client])
    assert new.statistics().used_bytes == 0


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 7))
@settings(max_examples=300)
def test_malformed_bytes_are_refused(extra: bytes, place: int, bit: int) -> None:
    whole = b"".join(encode_state(STATE))
    assert decode_state(whole) == STATE
    changed = bytearray(whole)
    changed[place % len(whole)] ^= 1 << bit
    for data in (extra, whole[: place % len(whole)], bytes(changed), whole + b"\0" + extra):
        with pytest.raises(ValueError, match="it "):
            decode_state(data)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"entries": [(0, 0, 5, 7), (0, 0, 5, 7)]}, "twice"),
        ({"keys": ["same", "same"]}, "twice"),
        ({"keys": ["", "other"]}, "no store has"),
        ({"entries": [(0, 0, 5, 7), (1, 0, 5, 7)]}, "outside"),
        ({"entries": [(0, 0, 5, 7), (0, 4095, 5, 7)]}, "outside"),
        ({"pins": [[(0, 0, 0, 7)]]}, "outside"),
        ({"holds": [HeldBlocks(0, 1.0, [])]}, "ids"),
        ({"holds": [HeldBlocks(1, 1e10, [])]}, "no end"),
    ],
)
def test_a_state_that_cannot_be_is_refused(change: dict[str, object], problem: str) -> None:
    fields = {name: getattr(STATE, name) for name in ("instance", "allocator", "unit_bytes", "arenas", "keys")}
    fields |= {name: getattr(STATE, name) for name in ("entries", "holds", "pins")}
    with pytest.raises(ValueError, match=problem):
        decode_state(b"".join(encode_state(PoolState(**{**fields, **change}))))


STATE = PoolState(
    "run",
    "bitmap",
    64,
    [4096],
    ["one", "\u00fcber"],
    [(0, 0, 5, 7), (0, 64, 5, 8)],
    [HeldBlocks(3, 1.5, [(0, 64, 5, 8)])],
    [[], [(0, 128, 64, 0)]],
    [(1, 2.5)],
    [0],
)
