"""What the store promises, one promise a test. The reference model checks combinations;
here each stands alone.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import xxhash

from infinistore.core import Client, CoreLimits, Growth, StoreCore, Watermarks, create_arena
from infinistore.core.space import EXTRA_STEPS
from infinistore.errors import LimitExceeded, OutOfMemory, UnknownReservation, ValueTooLarge
from infinistore.eviction.reuse import WantedPool
from tests.core.conftest import FakeClock

MakeCore = Callable[..., StoreCore]


def put(
    core: StoreCore,
    client: Client,
    values: dict[str, bytes],
    *,
    replace: bool = True,
    hashed: bool = True,
    ttl_s: float = 0,
) -> list[int]:
    reservation = core.reserve(client, [len(value) for value in values.values()])
    for view, value in zip(reservation.views, values.values(), strict=True):
        view[:] = value
    checksums = [xxhash.xxh3_64_intdigest(value) for value in values.values()] if hashed else None
    return core.commit(reservation, list(values), checksums, replace=replace, ttl_s=ttl_s)


def get(core: StoreCore, client: Client, *keys: str) -> list[bytes | None]:
    lease = core.lease(client, keys)
    values = [None if view is None else bytes(view) for view in lease.views]
    core.release(lease)
    return values


def recency(core: StoreCore) -> list[str]:
    """The keys, coldest first."""
    return list(core.index)


def blocks(*names: str, size: int = 64) -> dict[str, bytes]:
    return {name: (name.encode() * size)[:size] for name in names}


# Writing


def test_a_reservation_is_invisible_until_it_is_committed(core: StoreCore, client: Client) -> None:
    reservation = core.reserve(client, [3, 4])
    reservation.views[0][:] = b"one"
    assert core.exists(["x", "y"]) == b"\0\0"
    assert core.statistics().reserved_bytes == 128
    core.commit(reservation, ["x", "y"], None)
    assert core.exists(["x", "y"]) == b"\1\1"
    assert get(core, client, "x") == [b"one"]
    assert core.statistics().reserved_bytes == 0


def test_the_room_of_replaced_blocks_can_be_given_back_later(core: StoreCore, client: Client) -> None:
    put(core, client, {"k": b"old", "other": b"old"})
    lease = core.lease(client, ["other"])
    reservation = core.reserve(client, [3, 3])
    core.commit(reservation, ["k", "other"], None, free=False)
    assert core.pool.used_bytes == 4 * 64
    core.free_replaced()
    assert core.pool.used_bytes == 3 * 64  # what is leased stays
    core.release(lease)
    core.free_replaced()
    assert core.pool.used_bytes == 2 * 64


def test_the_last_commit_of_a_key_wins(core: StoreCore, client: Client) -> None:
    first, second = core.reserve(client, [5]), core.reserve(client, [6])
    first.views[0][:], second.views[0][:] = b"first", b"second"
    core.commit(second, ["k"], None)
    core.commit(first, ["k"], None)
    assert get(core, client, "k") == [b"first"]
    assert core.pool.used_bytes == 64


def test_without_replace_an_existing_key_is_skipped_and_its_new_room_returns(core: StoreCore, client: Client) -> None:
    put(core, client, {"b": b"old", "z": b"z"})
    assert put(core, client, {"a": b"new", "b": b"new", "c": b"new"}, replace=False) == [1]
    assert get(core, client, "a", "b", "c") == [b"new", b"old", b"new"]
    assert core.pool.used_bytes == 4 * 64
    assert core.statistics().puts == 4


def test_a_batch_with_a_skipped_key_is_touched_as_a_whole(core: StoreCore, client: Client) -> None:
    put(core, client, blocks("b", "z"))
    put(core, client, blocks("a", "b", "c"), replace=False)
    assert recency(core) == ["z", "c", "b", "a"]


def test_commit_and_abort_are_idempotent(core: StoreCore, client: Client) -> None:
    put(core, client, blocks("k"))
    reservation = core.reserve(client, [1])
    assert core.commit(reservation, ["k"], None, replace=False) == [0]
    assert core.commit(reservation, ["k"], None, replace=False) == [0]
    core.abort(reservation)
    assert core.exists(["k"]) == b"\1"
    other = core.reserve(client, [1])
    core.abort(other)
    core.abort(other)
    assert core.pool.used_bytes == 64


def test_an_aborted_reservation_cannot_be_committed(core: StoreCore) -> None:
    reservation = core.reserve(core.open_client("a"), [1])
    core.abort(reservation)
    with pytest.raises(UnknownReservation, match="reserve again"):
        core.commit(reservation, ["k"], None)


@pytest.mark.parametrize(
    ("keys", "checksums", "message"),
    [
        (["a"], None, "2 blocks"),
        (["a", "b", "c"], None, "3 keys"),
        (["a", "b"], [1], "1 checksums"),
        (["a", "a"], None, "'a'"),
    ],
)
def test_a_commit_that_does_not_fit_leaves_the_reservation_open(
    core: StoreCore, keys: list[str], checksums: list[int] | None, message: str
) -> None:
    reservation = core.reserve(core.open_client("a"), [1, 1])
    with pytest.raises(ValueError, match=message):
        core.commit(reservation, keys, checksums)
    assert len(core) == 0
    core.commit(reservation, ["a", "b"], None)
    assert len(core) == 2


@pytest.mark.parametrize("size", [0, -1])
def test_an_empty_value_is_refused(core: StoreCore, size: int) -> None:
    with pytest.raises(ValueError, match=f"a value must have at least one byte, not {size}"):
        core.reserve(core.open_client("a"), [64, size])
    assert core.pool.used_bytes == 0


def test_an_empty_batch_is_allowed_everywhere(core: StoreCore, client: Client) -> None:
    reservation = core.reserve(client, [])
    assert not reservation.views
    assert not reservation.merged_views
    assert core.commit(reservation, [], []) == []
    lease = core.lease(client, [])
    assert not any([lease.views, lease.merged_views, lease.lengths, lease.checksums])
    core.release(lease)
    assert core.exists([]) == b""
    assert core.match_prefix([]) == core.delete([]) == 0


# Reading


def test_a_lease_gives_read_only_views_and_none_for_what_is_missing(core: StoreCore, client: Client) -> None:
    put(core, client, {"a": b"AA", "b": b"B"})
    lease = core.lease(client, ["b", "missing", "a", "b"])
    views = [None if view is None else bytes(view) for view in lease.views]
    assert views == [b"B", None, b"AA", b"B"]
    assert lease.lengths == [1, 0, 2, 1]
    checksum = xxhash.xxh3_64_intdigest
    assert lease.checksums == [checksum(b"B"), 0, checksum(b"AA"), checksum(b"B")]
    assert b"".join(lease.merged_views) == b"BAAB"
    for view in [*lease.views, *lease.merged_views]:
        assert view is None or view.readonly
    statistics = core.statistics()
    assert (statistics.hits, statistics.misses, statistics.hit_bytes) == (3, 1, 4)


@pytest.mark.parametrize("removal", ["delete", "replace", "purge", "evict"])
def test_a_leased_block_keeps_its_bytes_until_the_last_release(core: StoreCore, client: Client, removal: str) -> None:
    put(core, client, {"k": b"precious"})
    leases = [core.lease(client, ["k"]), core.lease(client, ["k"])]
    if removal == "delete":
        assert core.delete(["k"]) == 1
    elif removal == "replace":
        put(core, client, {"k": b"other"})
    elif removal == "purge":
        assert core.purge() == 1
    else:
        assert core.evict(0.0, 0.0) == 0
    writer = core.open_client("writer")
    while core.pool.used_bytes < core.pool.capacity_bytes:  # whatever is free gets overwritten
        core.reserve(core.open_client("writer"), [64]).views[0][:] = b"!" * 64
    core.release(leases[0])
    with pytest.raises(OutOfMemory):
        core.reserve(writer, [4096])
    assert [bytes(view) for lease in leases[1:] for view in lease.views if view is not None] == [b"precious"]
    used = core.pool.used_bytes
    core.release(leases[1])
    core.release(leases[1])
    assert core.pool.used_bytes == (used if removal == "evict" else used - 64)
    assert core.statistics().condemned_bytes == core.statistics().pinned_bytes == 0


def test_a_key_leased_twice_in_one_batch_is_pinned_twice(core: StoreCore, client: Client) -> None:
    put(core, client, blocks("k"))
    twice, once = core.lease(client, ["k", "k"]), core.lease(client, ["k"])
    core.release(once)
    assert core.statistics().pinned_bytes == 64
    core.release(twice)
    assert core.statistics().pinned_bytes == 0


def test_a_lease_of_bounded_bytes_takes_the_leading_blocks_and_at_least_one(core: StoreCore, client: Client) -> None:
    put(core, client, blocks("a", "b", "c", "d"))
    assert len(core.lease(client, ["a", "b", "missing", "c", "d"], max_bytes=192).entries) == 4
    assert len(core.lease(client, ["a", "b"], max_bytes=1).entries) == 1
    assert core.statistics().misses == 1


# Recency


def test_exists_verify_and_keys_do_not_touch(core: StoreCore) -> None:
    put(core, core.open_client("a"), blocks("1", "2", "3"))
    core.exists(["3", "2"])
    core.verify("3")
    core.keys()
    assert recency(core) == ["3", "2", "1"]


def test_the_head_of_a_prefix_outlives_its_tail(core: StoreCore, client: Client) -> None:
    put(core, client, blocks(*(f"{i:02}" for i in range(64))))
    put(core, client, blocks("new", "newer"))
    assert core.match_prefix([f"{i:02}" for i in range(64)]) == 62


# Eviction and room


def test_eviction_goes_from_the_high_to_the_low_watermark(make_core: MakeCore) -> None:
    core = make_core(watermarks=Watermarks(low=0.5, high=0.75))  # of 64 blocks
    client = core.open_client("a")
    for i in range(48):
        put(core, client, blocks(str(i)))
    assert len(core) == 48
    put(core, client, blocks("one more"))
    assert len(core) == 32
    assert recency(core)[0] == "17"
    assert core.statistics().evicted.on_demand == 17
    for i in range(16):
        put(core, client, blocks(f"again {i}"))
    assert core.statistics().evicted.on_demand == 17


def test_one_reservation_evicts_what_it_needs_and_a_bounded_number_more(make_core: MakeCore) -> None:
    blocks_in_all = 8 * EXTRA_STEPS
    core = make_core(blocks_in_all * 64, watermarks=Watermarks(low=0.25, high=1.0))
    client = core.open_client("a")
    for start in range(0, blocks_in_all, EXTRA_STEPS):
        put(core, client, blocks(*(f"{start + i}" for i in range(EXTRA_STEPS))))
    assert core.statistics().evicted.on_demand == 0
    evicted = 0
    for i in range(6):
        put(core, client, blocks(*(f"{i} {j}" for j in range(10))))
        needed = 10 if i == 0 else 0  # afterwards there is room, and only the way down goes on
        evicted += needed + EXTRA_STEPS
        assert core.statistics().evicted.on_demand == evicted
    while core.pool.used_bytes > 0.25 * core.pool.capacity_bytes:
        put(core, client, blocks("last"))
    evicted = core.statistics().evicted.on_demand
    put(core, client, blocks("last"))
    assert core.statistics().evicted.on_demand == evicted


def test_pins_that_keep_the_store_above_the_low_watermark_do_not_empty_it_later(make_core: MakeCore) -> None:
    core = make_core(watermarks=Watermarks(low=0.25, high=0.75))
    client = core.open_client("a")
    put(core, client, blocks(*map(str, range(32))))
    lease = core.lease(core.open_client("reader"), [str(i) for i in range(32)])
    put(core, client, blocks("x", *map(str, range(100, 115))))
    put(core, client, blocks("y"))  # above the high watermark: all that is not pinned goes
    assert core.statistics().evicted.on_demand == 16
    core.release(lease)
    put(core, client, blocks("z"))
    assert core.exists(["y", "z"]) == b"\1\1"
    assert core.statistics().evicted.on_demand == 16


def test_a_batch_larger_than_what_is_not_pinned_evicts_nothing(make_core: MakeCore) -> None:
    core = make_core(limits=CoreLimits(max_pinned_ratio=1.0))
    reader, writer = core.open_client("reader"), core.open_client("writer")
    put(core, writer, blocks(*map(str, range(64))))
    core.lease(reader, ["0", "1"])
    core.evict(0.9, 0.9)
    core.reserve(reader, [64, 64])
    keys = recency(core)
    with pytest.raises(
        OutOfMemory, match=r"3,904 bytes.*of 4 KiB.*128 bytes are pinned.*128 bytes by unfinished.*larger pool"
    ):
        core.reserve(writer, [64] * 61)
    assert recency(core) == keys
    core.reserve(writer, [64] * 60)
    assert sorted(recency(core)) == ["0", "1"]


def test_a_pinned_block_at_the_cold_end_becomes_the_warmest(core: StoreCore, client: Client) -> None:
    for i in range(64):
        put(core, client, blocks(str(i)))
    lease = core.lease(client, ["63", "62"])
    core.match_prefix([str(i) for i in range(62)])
    assert recency(core)[:2] == ["62", "63"]
    put(core, client, blocks("new"))
    assert recency(core)[-4:] == ["0", "62", "63", "new"]
    assert core.exists(["61", "62", "63"]) == b"\0\1\1"
    core.release(lease)


def test_a_batch_refused_by_fragmentation_evicts_in_growing_steps_and_succeeds(core: StoreCore, client: Client) -> None:
    for i in range(64):
        put(core, client, blocks(f"{i:02}"))
    core.delete([f"{i:02}" for i in range(0, 64, 2)])  # every other block: no two free ones are neighbours
    put(core, client, blocks("large", size=256))
    statistics = core.statistics()
    assert core.exists(["large"]) == b"\1"
    assert statistics.evicted.on_demand == 0
    assert statistics.evicted.fragmentation == 4  # one round: as many bytes as the batch has


def test_a_batch_refused_by_fragmentation_gives_up_after_a_bounded_amount(make_core: MakeCore) -> None:
    core = make_core(64 * 256, limits=CoreLimits(max_pinned_ratio=1.0))
    client = core.open_client("a")
    for i in range(256):
        put(core, client, blocks(f"{i:03}"))
    core.lease(client, [f"{i:03}" for i in range(0, 256, 2)])  # these stay, and leave only holes of one block
    core.delete([f"{i:03}" for i in range(1, 8, 2)])
    with pytest.raises(OutOfMemory, match=r"pieces"):
        core.reserve(client, [128, 128])
    assert core.statistics().evicted.fragmentation == 4 + 8 + 16 + 32
    assert core.statistics().reserved_bytes == 0


def test_a_value_that_no_arena_can_hold_is_too_large_and_evicts_nothing(make_core: MakeCore) -> None:
    core = make_core(4096, 8192)
    client = core.open_client("a")
    put(core, client, blocks("k"))
    with pytest.raises(ValueTooLarge, match="8 KiB in one piece"):
        core.reserve(client, [1, 8193])
    assert core.exists(["k"]) == b"\1"
    core.reserve(client, [8192])


def test_a_value_above_the_limit_is_too_large(make_core: MakeCore) -> None:
    core = make_core(limits=CoreLimits(max_value_bytes=100))
    client = core.open_client("a")
    core.reserve(client, [100])
    with pytest.raises(ValueTooLarge, match="max_value_bytes=100"):
        core.reserve(client, [101])


def test_manual_and_periodic_eviction_are_counted_apart_and_can_be_sliced(core: StoreCore) -> None:
    put(core, core.open_client("a"), blocks(*map(str, range(64))))
    assert core.evict(0.5, 1.0) == 0
    assert core.evict(0.75, 0.9, "periodic", max_blocks=10) == 10
    assert core.evict(0.75, 0.75, "periodic", max_blocks=10) == 6
    assert core.evict(0.5, 0.5) == 16
    evicted = core.statistics().evicted
    assert (evicted.periodic, evicted.manual) == (16, 16)
    for low, high in ((0.6, 0.5), (-0.1, 0.5), (0.5, 1.1)):
        with pytest.raises(ValueError, match="watermarks"):
            core.evict(low, high)
    assert len(core) == 32


# Clients and limits


def test_a_client_may_hold_its_share_and_one_batch_of_any_size(make_core: MakeCore) -> None:
    core = make_core(limits=CoreLimits(max_pinned_ratio=0.25))
    client = core.open_client("greedy")
    put(core, core.open_client("b"), blocks("k"))
    large = core.reserve(client, [64] * 40)
    with pytest.raises(LimitExceeded, match=r"'greedy'.*2.5 KiB.*64 bytes more.*max_pinned_ratio=0.25"):
        core.reserve(client, [64])
    with pytest.raises(LimitExceeded, match="max_pinned_ratio"):
        core.lease(client, ["k"])
    assert core.lease(client, ["missing"]).entries == [None]
    core.abort(large)
    core.reserve(client, [64] * 15)
    lease = core.lease(client, ["k"])
    assert client.pinned_bytes == 1024
    core.release(lease)
    assert client.pinned_bytes == 960


@pytest.mark.parametrize("call", ["reserve", "lease", "exists", "match_prefix", "delete", "hold_prefix"])
def test_a_batch_has_a_bounded_number_of_keys(make_core: MakeCore, call: str) -> None:
    core = make_core(limits=CoreLimits(max_batch_keys=2))
    client = core.open_client("a")
    keys = ["a", "b", "c"]
    calls: dict[str, Callable[[], object]] = {
        "reserve": lambda: core.reserve(client, [1, 1, 1]),
        "lease": lambda: core.lease(client, keys),
        "exists": lambda: core.exists(keys),
        "match_prefix": lambda: core.match_prefix(keys),
        "delete": lambda: core.delete(keys),
        "hold_prefix": lambda: core.hold_prefix(client, keys, 1.0),
    }
    with pytest.raises(LimitExceeded, match=r"3 keys.*max_batch_keys=2.*split"):
        calls[call]()


def test_closing_a_client_returns_all_its_room(core: StoreCore, client: Client) -> None:
    other = core.open_client("b")
    put(core, client, blocks("x", "y"))
    core.reserve(client, [64, 64])
    core.lease(client, ["x"])
    core.delete(["x"])
    assert core.pool.used_bytes == 4 * 64
    core.close_client(client)
    core.close_client(client)
    assert core.pool.used_bytes == 64
    statistics = core.statistics()
    assert (statistics.clients, statistics.reservations, statistics.leases) == (1, 0, 0)
    assert get(core, other, "y") == [blocks("y")["y"]]
    with pytest.raises(ValueError, match="'a' is closed"):
        core.reserve(client, [1])


def test_a_quarantined_client_keeps_its_room_until_it_is_closed(core: StoreCore) -> None:
    client = core.open_client("lost")
    put(core, client, blocks("x"))
    reservation, lease = core.reserve(client, [64, 64]), core.lease(client, ["x"])
    core.quarantine(client)
    core.abort(reservation)
    core.release(lease)
    for refused in (
        lambda: core.commit(reservation, ["a", "b"], None),
        lambda: core.reserve(client, [1]),
        lambda: core.lease(client, ["x"]),
        lambda: core.hold_prefix(client, ["x"], 1.0),
    ):
        with pytest.raises(ValueError, match="quarantined"):
            refused()
    statistics = core.statistics()
    assert (statistics.quarantined_bytes, statistics.quarantined_clients) == (192, 1)
    assert (statistics.reserved_bytes, statistics.pinned_bytes) == (128, 64)
    core.close_client(client)
    core.quarantine(client)
    statistics = core.statistics()
    assert (statistics.quarantined_bytes, statistics.quarantined_clients, statistics.used_bytes) == (0, 0, 64)


# Holds


def test_a_hold_keeps_a_prefix_until_it_is_released_by_anyone(core: StoreCore, client: Client) -> None:
    put(core, client, blocks("a", "b", "d"))
    count, hold = core.hold_prefix(client, ["a", "b", "c", "d"], 5.0)
    assert (count, hold > 0) == (2, True)
    core.close_client(client)
    assert core.evict(0.0, 0.0) == 1
    assert core.exists(["a", "b", "d"]) == b"\1\1\0"
    assert core.release_hold(hold)
    assert not core.release_hold(hold)
    assert core.evict(0.0, 0.0) == 2


def test_the_same_random_numbers_give_the_same_ids_of_holds(make_core: MakeCore) -> None:
    def hold_of(source: random.Random | None) -> int:
        core = make_core(random=source)
        client = core.open_client("a")
        put(core, client, blocks("k"))
        return core.hold_prefix(client, ["k"], 1.0)[1]

    assert hold_of(random.Random(7)) == hold_of(random.Random(7)) != hold_of(random.Random(8))
    assert hold_of(None) != hold_of(None)  # the operating system's


def test_the_id_of_a_hold_has_64_bits_and_is_neither_0_nor_in_use(make_core: MakeCore) -> None:
    numbers = iter([0, 5, 5, 0, 2**64 - 1])

    class Source(random.Random):
        def getrandbits(self, k: int, /) -> int:
            assert k == 64
            return next(numbers)

    core = make_core(random=Source())
    client = core.open_client("a")
    put(core, client, blocks("k"))
    assert [core.hold_prefix(client, ["k"], 1.0)[1] for _ in range(2)] == [5, 2**64 - 1]


def test_holds_end_in_their_time_although_many_others_were_released_before_theirs(
    core: StoreCore, client: Client, clock: FakeClock
) -> None:
    put(core, client, blocks("k"))
    for left_s in (30.0, 10.0, 20.0):
        core.hold_prefix(client, ["k"], left_s)
    for _ in range(300):
        assert core.release_hold(core.hold_prefix(client, ["k"], 40.0)[1])
    began = clock.now
    for after_s in (10.0, 20.0, 30.0):
        assert core.expire_holds() == began + after_s
        clock.now = began + after_s
    assert core.expire_holds() is None
    assert core.statistics().holds == 0


def test_what_is_left_of_the_time_of_a_hold_is_told(core: StoreCore, client: Client, clock: FakeClock) -> None:
    clock.now += 100.0
    put(core, client, blocks("k"))
    hold = core.hold_prefix(client, ["k"], 3.0)[1]
    for later_s, left_s in ((2.5, 0.5), (9.0, 0.0)):
        clock.now += later_s
        assert [(hold_id, left_s) for hold_id, left_s, _ in core.holds.export()] == [(hold, left_s)]


def test_a_hold_ends_when_its_time_is_over(core: StoreCore, client: Client, clock: FakeClock) -> None:
    put(core, client, blocks("a", "b"))
    _, short = core.hold_prefix(client, ["a"], 2.0)
    _, long = core.hold_prefix(client, ["a", "b"], 3.0)
    assert core.expire_holds() == clock.now + 2.0
    clock.now += 2.0
    assert core.expire_holds() == clock.now + 1.0
    assert core.statistics().held_bytes == 128
    assert not core.release_hold(short)
    clock.now += 1.0
    assert not core.release_hold(long)
    assert core.expire_holds() is None
    assert core.statistics().held_bytes == core.statistics().pinned_bytes == 0


def test_reserve_ends_holds_whose_time_is_over(make_core: MakeCore, clock: FakeClock) -> None:
    core = make_core(limits=CoreLimits(max_held_ratio=1.0))
    client = core.open_client("a")
    put(core, client, blocks(*map(str, range(64))))
    core.hold_prefix(client, [str(i) for i in range(64)], 2.0)
    with pytest.raises(OutOfMemory):
        core.reserve(client, [64])
    clock.now += 2.0
    core.reserve(client, [64])


def test_holds_are_bounded_in_time_and_bytes(make_core: MakeCore) -> None:
    core = make_core(limits=CoreLimits(max_hold_s=5.0, max_held_ratio=2 / 64))
    client = core.open_client("a")
    put(core, client, blocks("a", "b", "c"))
    with pytest.raises(LimitExceeded, match="max_hold_s=5"):
        core.hold_prefix(client, ["a"], 5.1)
    for hold_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="hold_s"):
            core.hold_prefix(client, ["a"], hold_s)
    core.hold_prefix(client, ["a", "b"], 5.0)
    core.hold_prefix(client, ["b", "a"], 5.0)  # held already: takes nothing more
    with pytest.raises(LimitExceeded, match="max_held_ratio"):
        core.hold_prefix(client, ["c"], 5.0)
    assert core.statistics().held_bytes == 128


def test_released_holds_do_not_pile_up(core: StoreCore, client: Client) -> None:
    put(core, client, blocks("a"))
    for _ in range(1000):
        core.release_hold(core.hold_prefix(client, ["a"], 60.0)[1])
    assert len(core.holds._ends) < 100


def test_a_client_that_ends_gives_its_space_back_in_the_order_in_which_it_took_it(make_core: MakeCore) -> None:
    core = make_core(limits=CoreLimits(max_pinned_ratio=1.0))
    client = core.open_client("a")
    places = [core.reserve(client, [64]).extents for _ in range(16)]
    freed: list[Any] = []
    core.pool.free = freed.append  # type: ignore[assignment,method-assign]
    core.close_client(client)
    assert freed == places


# Removing and looking


def test_delete_counts_what_was_there(core: StoreCore) -> None:
    put(core, core.open_client("a"), blocks("a", "b"))
    assert core.delete(["a", "missing", "a"]) == 1
    assert core.statistics().deleted == 1
    assert core.pool.used_bytes == 64


def test_keys_deleted_and_blocks_dropped_are_counted_since_the_start(core: StoreCore) -> None:
    put(core, core.open_client("a"), blocks(*map(str, range(9))))
    core.delete(["0", "1"])
    core.purge(3)
    for key in ("2", "3"):
        entry = core.index.get(key)
        assert entry is not None
        core.pool.view(entry[:3])[0] ^= 1
        assert not core.verify(key)
    statistics = core.statistics()
    assert (statistics.deleted, statistics.checksum_drops, statistics.keys) == (5, 2, 2)


def test_purge_takes_all_or_the_coldest(core: StoreCore) -> None:
    put(core, core.open_client("a"), blocks("a", "b", "c"))
    assert core.purge(1) == 1
    assert recency(core) == ["b", "a"]
    assert core.purge() == 2
    assert core.pool.used_bytes == 0


def test_a_purge_in_slices_removes_a_bounded_number_at_once(make_core: MakeCore) -> None:
    core = make_core(8193 * 64, limits=CoreLimits(max_batch_keys=8193))
    put(core, core.open_client("a"), blocks(*map(str, range(8193))))
    assert list(core.purge_in_slices()) == [4096, 4096, 1]
    assert core.pool.used_bytes == 0


def test_keys_come_in_code_point_order_page_by_page(core: StoreCore) -> None:
    put(core, core.open_client("a"), blocks("b/2", "b/10", "a", "ü", "b/1"))
    assert core.keys() == ["a", "b/1", "b/10", "b/2", "ü"]
    assert core.keys(prefix="b/", limit=2) == ["b/1", "b/10"]
    assert core.keys(prefix="b/", limit=2, after="b/10") == ["b/2"]


def test_keys_begin_with_the_first_and_come_a_thousand_at_a_time(make_core: MakeCore) -> None:
    core = make_core(1001 * 64)
    names = sorted(["A", "Z", *(f"{i:03}" for i in range(999))])
    put(core, core.open_client("a"), blocks(*names))
    assert core.keys() == names[:1000]
    assert core.keys(after=names[999]) == names[1000:]


def test_verify_drops_a_block_that_is_not_what_was_written(core: StoreCore, client: Client) -> None:
    put(core, client, {"sound": b"sound", "bad": b"good"})
    unhashed = core.reserve(client, [4])
    core.commit(unhashed, ["unhashed"], None)
    lease = core.lease(client, ["bad"])
    core.pool.view(lease.extents[0])[0] ^= 1
    assert core.verify("sound")
    assert core.verify("missing")
    assert core.verify("unhashed")
    assert not core.verify("bad")
    assert core.exists(["sound", "bad"]) == b"\1\0"
    assert core.statistics().checksum_drops == 1
    assert core.statistics().condemned_bytes == 64
    core.release(lease)
    assert core.pool.used_bytes == 128


# Statistics


def test_the_wanted_pool_is_told_in_bytes(core: StoreCore) -> None:
    core.index.reuse.wanted = WantedPool(2.5, 0.25)
    told = core.statistics()
    assert (told.wanted_capacity_bytes, told.avoidable_puts) == (10_240, 0.25)


# Names


def test_names_that_do_not_fit_are_refused_by_what_is_wrong_with_them(core: StoreCore, client: Client) -> None:
    reservation = core.reserve(client, [64] * 3)
    for keys, checksums, problem in (
        (["a"], None, r"3 blocks needs as many keys \(and checksums\), not 1 keys$"),
        (["a", "b", "c"], [1, 2], "not 3 keys and 2 checksums$"),
        (["a", "b", "b"], None, "there twice: 'b'$"),
    ):
        with pytest.raises(ValueError, match=problem):
            core.commit(reservation, keys, checksums)
    assert core.prepare(reservation, ["a", "b", "c"], lambda: None)
    with pytest.raises(ValueError, match=r"^this reservation was prepared: its blocks have names already$"):
        core.commit(reservation, ["a", "b", "c"], None)
    core.abort(reservation)
    assert reservation.state == "aborted"
    with pytest.raises(UnknownReservation, match=r"^this reservation was aborted; reserve again"):
        core.commit(reservation, ["a", "b", "c"], None)


# Growth


def test_growth_is_wanted_when_a_put_has_to_evict(make_core: MakeCore) -> None:
    calls: list[bool] = []
    core = make_core(growth=Growth(4096 * 3))
    core.growth.on_wanted = lambda: calls.append(core.growth.wanted)
    client = core.open_client("a")
    assert core.growth.growable_bytes == core.statistics().growable_bytes == 4096 * 2
    put(core, client, blocks(*map(str, range(64))))
    assert not core.growth.wanted
    put(core, client, blocks("x"))
    put(core, client, blocks("y"))
    assert core.growth.wanted
    assert calls == [True]
    core.add_arena(create_arena(1, 4096))
    assert (core.growth.wanted, core.growth.growable_bytes, core.pool.capacity_bytes) == (False, 4096, 8192)
    put(core, client, blocks(*(f"{i} again" for i in range(64))))
    assert core.statistics().evicted.on_demand == 2


def test_a_batch_that_may_fit_later_is_out_of_memory_now_and_asks_for_growth(make_core: MakeCore) -> None:
    core = make_core(growth=Growth(4096 * 3))
    client = core.open_client("a")
    with pytest.raises(OutOfMemory, match="try again"):
        core.reserve(client, [8192])
    assert core.growth.wanted
    core.add_arena(create_arena(1, 8192))
    core.reserve(client, [8192])


def test_a_pool_that_cannot_grow_wants_nothing(make_core: MakeCore) -> None:
    core = make_core(growth=Growth(4096 * 2, lambda: pytest.fail("asked to grow")))
    core.growth.stop()
    with pytest.raises(OutOfMemory, match="larger pool"):
        core.reserve(core.open_client("a"), [64] * 65)
    assert not core.growth.wanted


def test_statistics_count_every_kind_of_room(make_core: MakeCore) -> None:
    core = make_core(4096, 4096)
    client = core.open_client("a")
    put(core, client, {"a": b"1", "b": b"22"})
    core.lease(client, ["a"])
    core.hold_prefix(client, ["a", "b"], 1.0)
    core.reserve(client, [65])
    statistics = core.statistics()
    assert statistics.capacity_bytes == 8192
    assert statistics.used_bytes == statistics.allocator.used_bytes == 4 * 64
    assert (statistics.pinned_bytes, statistics.held_bytes, statistics.reserved_bytes) == (128, 128, 128)
    assert (statistics.puts, statistics.put_bytes, statistics.keys, statistics.arenas) == (2, 3, 2, 2)
    assert (statistics.reservations, statistics.leases, statistics.holds) == (1, 1, 1)
