"""Space for new blocks at its edges: spares, the watermarks exactly, and how much is
evicted and examined at most.
"""

import re

import attrs
import pytest

from infinistore.core import Client, CoreLimits, Growth, StoreCore, Watermarks, space
from infinistore.errors import OutOfMemory
from tests.core.test_retired import Busy
from tests.core.test_store import MakeCore, blocks, put

BLOCK = 64


def evicted(core: StoreCore) -> int:
    return sum(attrs.astuple(core.statistics().evicted))


# Growth


def test_who_may_grow_is_asked_once_until_it_has_grown_or_cannot() -> None:
    calls: list[str] = []
    nobody = Growth()
    nobody.want()
    growth = Growth(3, lambda: calls.append("wanted"))
    assert growth.wanted is nobody.wanted is False
    for asked in range(1, 3):
        growth.want()
        growth.want()
        assert (growth.wanted, len(calls)) == (True, asked)
        growth.added(1)
        assert (growth.wanted, growth.growable_bytes) == (False, 3 - asked)
    growth.want()  # the last byte
    growth.stop()
    growth.want()
    assert (growth.wanted, growth.growable_bytes, len(calls)) == (False, 0, 3)


# By hand


def test_blocks_that_are_evicted_by_name_are_counted(core: StoreCore, client: Client) -> None:
    put(core, client, blocks("a", "b", "c"))
    assert [core.evict_keys(["a"]), core.evict_keys(["b", "a", "c"])] == [1, 2]
    assert core.statistics().evicted.manual == 3


# Spares


def test_a_spare_may_fill_the_pool_up_to_the_high_watermark_and_never_evicts(make_core: MakeCore) -> None:
    core = make_core(watermarks=Watermarks(low=0.5, high=0.75))  # 48 of 64 blocks
    client = core.open_client("a")
    put(core, client, blocks(*map(str, range(45))))
    assert core.reserve_spare(client, [BLOCK] * 4) is None
    core.delete(["0"])
    spare = core.reserve_spare(client, [BLOCK] * 4)
    assert spare is not None
    assert core.reserve_spare(client, [1]) is None
    core.abort(spare)
    assert core.reserve_spare(client, [1]) is not None
    assert (len(core), evicted(core)) == (44, 0)


def test_spares_and_other_reservations_take_an_eighth_of_the_pool_together(core: StoreCore, client: Client) -> None:
    core.reserve(client, [BLOCK] * 4)
    assert core.reserve_spare(client, [BLOCK] * 5) is None
    spare = core.reserve_spare(client, [BLOCK] * 4)
    assert spare is not None
    assert core.statistics().reserved_bytes == client.reserved_bytes == 8 * BLOCK
    assert core.reserve_spare(client, [1]) is None
    core.commit(spare, list("abcd"), None)
    assert core.statistics().reserved_bytes == 4 * BLOCK
    assert core.reserve_spare(client, [1]) is not None


def test_a_spare_that_only_fits_in_pieces_is_not_to_be_had_and_reserves_nothing(
    core: StoreCore, client: Client
) -> None:
    for i in range(64):
        put(core, client, blocks(str(i)))
    core.delete([str(i) for i in range(0, 64, 2)])
    assert core.reserve_spare(client, [2 * BLOCK]) is None
    assert (core.statistics().reserved_bytes, client.reserved_bytes, evicted(core)) == (0, 0, 0)


# Watermarks


def test_a_store_that_was_never_above_the_high_watermark_is_not_taken_down_to_the_low_one(make_core: MakeCore) -> None:
    core = make_core(watermarks=Watermarks(low=1 / 64, high=0.75))
    client = core.open_client("a")
    spare = core.reserve_spare(client, [BLOCK] * 8)
    assert spare is not None
    core.commit(spare, list("abcdefgh"), None)
    core.reserve(client, [BLOCK])
    assert (len(core), evicted(core)) == (8, 0)


def test_space_that_waits_to_be_free_starts_no_eviction_when_it_is_just_enough(make_core: MakeCore) -> None:
    core = make_core(watermarks=Watermarks(low=0.25, high=1.0), growth=Growth(8192))
    client = core.open_client("a")
    put(core, client, blocks(*map(str, range(64))))
    busy = Busy(core, news=10_000)
    core.delete(["0", "1"])
    assert core.pool.used_bytes == 64 * BLOCK  # they wait: the client has too much to tell
    core.reserve(client, [BLOCK] * 2)
    assert busy.asked == 1
    assert (len(core), evicted(core), core.growth.wanted) == (62, 0, False)


def test_reservations_that_keep_the_store_above_the_low_watermark_do_not_empty_it_later(make_core: MakeCore) -> None:
    core = make_core(watermarks=Watermarks(low=0.25, high=0.75))
    client, writer = core.open_client("a"), core.open_client("writer")
    put(core, client, blocks(*map(str, range(16))))
    unfinished = core.reserve(writer, [BLOCK] * 32)
    core.reserve(client, [BLOCK])  # above the high watermark: all that can be evicted goes
    assert (len(core), evicted(core)) == (0, 16)
    core.commit(unfinished, [f"late {i}" for i in range(32)], None)
    core.reserve(client, [BLOCK])
    assert (len(core), evicted(core)) == (32, 16)


def test_one_byte_above_the_low_watermark_is_a_block_to_evict(core: StoreCore) -> None:
    put(core, core.open_client("a"), blocks(*map(str, range(64))))
    assert core.evict(1.0, 1.0) == 0
    assert core.evict(4095 / 4096, 4095 / 4096) == 1
    assert core.evict(63 / 64, 63 / 64) == 0


# What is evicted


@pytest.mark.parametrize("over", [0, 1])
def test_blocks_of_several_sizes_are_evicted_until_the_last_byte_is_free(
    core: StoreCore, client: Client, over: int
) -> None:
    for i in range(16):
        put(core, client, blocks(f"short {i}"))
        put(core, client, blocks(f"long {i}", size=3 * BLOCK))
    low = (64 - 8 - over / BLOCK) / 64  # two pairs, and perhaps one byte more
    assert core.evict(low, low) == 4 + over
    assert core.pool.used_bytes == (64 - 8 - over) * BLOCK


@pytest.mark.parametrize("mixed", [False, True])
def test_a_slice_of_eviction_examines_no_more_blocks_than_it_may(core: StoreCore, client: Client, mixed: bool) -> None:
    for i in range(20):
        put(core, client, blocks(str(i), size=2 * BLOCK if mixed and i == 0 else BLOCK))
    lease = core.lease(client, ["3", "5"], touch=False)
    assert core.evict(0, 0, max_blocks=6) == 4  # what is pinned was examined, and is warm now
    assert core.evict(0, 0, max_blocks=14) == 14
    assert core.evict(0, 0, max_blocks=10) == 0
    core.release(lease)
    assert core.evict(0, 0, max_blocks=10) == 2


def test_blocks_without_checksums_are_evicted_like_others(core: StoreCore, client: Client) -> None:
    core.commit(core.reserve(client, [BLOCK] * 60), [str(i) for i in range(60)], None)
    lease = core.lease(client, ["59"])
    core.reserve(client, [BLOCK] * 10)
    assert core.exists(["0", "52", "53", "58", "59"]) == b"\1\1\0\0\1"
    assert (len(core), evicted(core)) == (54, 6)
    core.release(lease)


def test_the_rounds_against_fragmentation_examine_a_bounded_number_of_blocks(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "FRAGMENTATION_STEPS", 128)
    core = make_core(512 * BLOCK, limits=CoreLimits(max_pinned_ratio=1.0))
    client = core.open_client("a")
    for i in range(512):
        put(core, client, blocks(f"{i:03}"))
    core.lease(client, [f"{i:03}" for i in range(0, 512, 2)])  # these stay, and leave only holes of one block
    core.delete([f"{i:03}" for i in range(1, 64, 2)])
    with pytest.raises(OutOfMemory, match=re.escape("did not join enough of them (values of one size avoid this): ")):
        core.reserve(client, [2 * BLOCK] * 16)
    assert core.statistics().evicted.fragmentation == 8 + 16 + 32 + 64  # not 32 + 64 + 128


# Refusals


@pytest.mark.parametrize(
    ("growable_bytes", "remedy"),
    [
        (1, "; the pool may still grow: try again in a moment"),
        (0, "; release leases and reservations sooner, write smaller batches, or give the server a larger pool"),
    ],
)
def test_a_refusal_ends_with_what_helps(make_core: MakeCore, growable_bytes: int, remedy: str) -> None:
    core = make_core(growth=Growth(4096 + growable_bytes))
    with pytest.raises(OutOfMemory) as caught:
        core.reserve(core.open_client("a"), [BLOCK] * 65)
    assert str(caught.value).endswith(remedy)
