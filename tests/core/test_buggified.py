"""What a store may do, and does in simulations: it stays a store all the same."""

from collections.abc import Callable
from functools import partial
from random import Random

import pytest

from infinistore.core import CoreLimits, StoreCore
from infinistore.errors import OutOfMemory
from tests.simulation.buggify import BuggifiedStore, Buggify, Point

MakeCore = Callable[..., StoreCore]
KEYS = [f"key-{number}" for number in range(12)]
POINTS = {
    Point.ALLOCATION_REFUSED,
    Point.SCATTERED_BATCH,
    Point.EARLY_EVICTION,
    Point.SPARE_REFUSED,
    Point.LONGER_WAIT,
    Point.EARLY_RECLAIM,
    Point.SHORT_SLICE,
    Point.SHORT_ANSWER,
    Point.PREPARE_REFUSED,
}


def put(core: StoreCore, keys: list[str], size: int = 64, mark: bytes = b"x") -> None:
    client = core.open_client("writer")
    reservation = core.reserve(client, [size] * len(keys))
    for view in reservation.views:
        view[:] = mark * size
    core.commit(reservation, keys, None)
    core.close_client(client)


def always(*points: Point) -> Callable[..., StoreCore]:
    return partial(BuggifiedStore, Buggify(Random(1), dict.fromkeys(points, 1.0)))


def test_a_point_without_a_chance_never_fires() -> None:
    buggify = Buggify(Random(1), {Point.SHORT_SEND: 0.5})
    assert not any(buggify(Point.SLOW_SEND) for _ in range(100))
    assert any(buggify(Point.SHORT_SEND) for _ in range(100))
    assert list(buggify.fired) == [Point.SHORT_SEND]


def test_an_allocator_that_refuses_everything_makes_a_store_evict_and_then_refuse(make_core: MakeCore) -> None:
    buggify = Buggify(Random(1), {})
    core = make_core(make=partial(BuggifiedStore, buggify))
    put(core, KEYS)
    buggify.chances = {Point.ALLOCATION_REFUSED: 1.0}
    with pytest.raises(OutOfMemory, match="pieces"):
        put(core, ["other"])
    assert len(core) < len(KEYS)
    assert core.statistics().reserved_bytes == 0


def test_a_scattered_batch_is_whole(make_core: MakeCore) -> None:
    core = make_core(make=always(Point.SCATTERED_BATCH))
    client = core.open_client("a")
    reservation = core.reserve(client, [64] * 8)
    assert len(reservation.merged_views) > 1
    for number, view in enumerate(reservation.views):
        view[:] = bytes([number]) * 64
    core.commit(reservation, KEYS[:8], None)
    lease = core.lease(client, KEYS[:8])
    assert b"".join(lease.merged_views) == b"".join(bytes([number]) * 64 for number in range(8))


def test_a_scattered_batch_that_does_not_fit_takes_nothing(make_core: MakeCore) -> None:
    core = make_core(make=always(Point.SCATTERED_BATCH), limits=CoreLimits(max_pinned_ratio=1.0))
    keys = [str(number) for number in range(64)]
    put(core, keys)
    entries = sorted((core.index.get(key) or (0, 0, 0, 0), key) for key in keys)
    core.lease(core.open_client("reader"), [key for _, key in entries[::2]])  # no two free units in a row
    with pytest.raises(OutOfMemory):
        core.reserve(core.open_client("writer"), [64, 128])
    assert core.pool.used_bytes == sum(core.pool.footprint(length) for _, length in core.sample(1 << 30))


def test_what_a_client_may_not_name_or_get_in_advance_stays_unnamed_and_free(make_core: MakeCore) -> None:
    core = make_core(make=always(Point.SPARE_REFUSED, Point.PREPARE_REFUSED, Point.SHORT_ANSWER))
    client = core.open_client("a")
    assert core.reserve_spare(client, [64]) is None
    reservation = core.reserve(client, [64])
    assert not core.prepare(reservation, ["a"], list)
    assert core.exists(["a"]) == b"\0"
    put(core, KEYS)
    assert core.lease(client, KEYS, max_bytes=1 << 20).lengths == [64]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_a_store_gives_what_was_put_and_loses_no_space(make_core: MakeCore, seed: int) -> None:
    random = Random(seed)
    buggify = Buggify(random, dict.fromkeys(POINTS, 0.3))
    core = make_core(make=partial(BuggifiedStore, buggify))
    core.expect_hazards()
    latest: dict[str, bytes] = {}
    client = core.open_client("reader")
    for number in range(1, 200):
        keys = random.sample(KEYS, random.randint(1, 6))
        match random.randrange(5):
            case 0 | 1:
                try:
                    put(core, keys, random.choice([64, 200]), bytes([number]))
                except OutOfMemory:
                    continue
                latest |= dict.fromkeys(keys, bytes([number]))
            case 2:
                core.delete(keys)
                for key in keys:
                    latest.pop(key, None)
            case 3:
                while core.purge(4) and random.random() < 0.5:
                    pass
                core.reserve_spare(client, [64])
                core.prepare(core.reserve(client, []), [], lambda: None)
            case _:
                lease = core.lease(client, keys, max_bytes=1 << 20)
                for key, view in zip(keys, lease.views, strict=False):
                    assert view is None or bytes(view) == latest[key] * len(view)
                core.release(lease)
        for reservation in list(client.reservations):
            core.abort(reservation)
    assert buggify.fired.keys() == POINTS
    buggify.chances = {}
    core.close_client(client)
    statistics = core.statistics()
    assert (statistics.reserved_bytes, statistics.pinned_bytes) == (0, 0)
    assert statistics.used_bytes == sum(core.pool.footprint(length) for _, length in core.sample(1 << 30))
