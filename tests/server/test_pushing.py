"""What a node that drains passes on, in which order, and what it lets go of."""

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock
from xxhash import xxh3_64_intdigest

from infinistore.allocators import create_allocator
from infinistore.cluster.documents import Drain
from infinistore.core import Pool, StoreCore, create_arena
from infinistore.core.limits import CoreLimits
from infinistore.errors import OutOfMemory, PartialPut, PermissionDenied, StoreUnavailable
from infinistore.server.cluster import Drainer, PushLimits, push

KIB = 1024
PLENTY = PushLimits(most_bytes=1 << 40, bytes_per_s=1 << 40)


class Others:
    """The store of the other nodes, as far as `push` uses it."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.has: dict[str, bytes] = {}
        self.ends: dict[str, float | None] = {}
        self.at: list[float] = []
        self.mark = {"other": 0}
        self.deleted: Collection[str] = ()
        self.before_marks: Callable[[], Any] = lambda: None
        self.before_put: Callable[[list[str]], Any] = lambda keys: None

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Any, None]:
        yield self

    async def missing(self, keys: Collection[str]) -> list[str]:
        return [key for key in keys if key not in self.has]

    async def marks(self, keys: list[str]) -> dict[str, int]:
        await trio.lowlevel.checkpoint()
        self.before_marks()
        self.mark = {"other": self.mark["other"] + 1}
        return self.mark

    async def copy(self, items: dict[str, memoryview], marks: dict[str, int], ttl_s: float | None) -> list[str]:
        assert marks is self.mark
        await trio.lowlevel.checkpoint()
        self.batches.append(list(items))
        self.ends.update(dict.fromkeys(items, ttl_s))
        self.at.append(trio.current_time())  # real time: none of its tests is in that
        self.before_put(list(items))
        skipped = [key for key in items if key in self.has or key in self.deleted]
        self.has.update({key: bytes(view) for key, view in items.items() if key not in skipped})
        return skipped


@pytest.fixture
def core() -> Any:
    pool = Pool(create_allocator("bitmap", KIB))
    pool.add_arena(create_arena(0, 4096 * KIB))
    yield StoreCore(pool, clock=lambda: 0.0, limits=CoreLimits(max_batch_keys=8))
    pool.close()


def put(core: StoreCore, *keys: str, ttl_s: float = 0) -> None:
    client = core.open_client("test")
    reservation = core.reserve(client, [KIB] * len(keys))
    values = [key.encode().ljust(KIB, b".") for key in keys]
    for view, data in zip(reservation.views, values, strict=True):
        view[:] = data
    core.commit(reservation, keys, [xxh3_64_intdigest(data) for data in values], ttl_s=ttl_s)
    core.close_client(client)


def has_all(keys: Sequence[str]) -> list[bool]:
    return [True] * len(keys)


async def pushed(core: StoreCore, others: Others, limits: PushLimits = PLENTY) -> Drain:
    told: list[Drain] = [Drain()]
    await push(core, others.open, has_all, limits, told.append)
    assert core.statistics().leases == 0
    assert core.statistics().clients == 0
    return told[-1]


async def test_the_hottest_group_goes_first_as_a_whole_and_its_head_first(
    core: StoreCore, autojump_clock: MockClock
) -> None:
    put(core, "{cold}1", "{cold}2", "{cold}3")
    put(core, "alone")
    put(core, "{warm}1", "{warm}2", "{warm}3")
    core.match_prefix(["{cold}1"])  # its head was used last
    others = Others()
    drain = await pushed(core, others)
    order = [key for batch in others.batches for key in batch]
    assert order == ["{cold}1", "{cold}2", "{cold}3", "{warm}1", "{warm}2", "{warm}3", "alone"]
    assert others.has["{warm}2"].rstrip(b".") == b"{warm}2"
    size = 7 * KIB
    assert drain == Drain(groups=3, moved_groups=3, moved_blocks=7, moved_bytes=size, size_bytes=size, done_bytes=size)
    assert core.all_keys()[-1] == "{cold}1"  # passing on is no use


async def test_a_batch_is_bounded_and_several_groups_share_one(core: StoreCore, autojump_clock: MockClock) -> None:
    put(core, *[f"{{{number // 2}}}{number}" for number in range(8)])
    put(core, *[f"other {number}" for number in range(4)])
    others = Others()
    await pushed(core, others)
    assert [len(batch) for batch in others.batches] == [8, 4]  # max_batch_keys


async def test_what_ends_is_passed_on_with_what_is_left_of_its_time(core: StoreCore, autojump_clock: MockClock) -> None:
    put(core, "{a}1", "{a}2", ttl_s=60.0)
    put(core, "{a}3")
    put(core, "{a}4", ttl_s=90.0)
    core.retention.clock = lambda: 45.0
    others = Others()
    drain = await pushed(core, others)
    assert others.ends == {"{a}1": 15.0, "{a}2": 15.0, "{a}3": None, "{a}4": 45.0}
    assert (drain.moved_groups, drain.moved_blocks) == (1, 4)


async def test_a_block_is_read_after_the_marks_were_made(core: StoreCore, autojump_clock: MockClock) -> None:
    put(core, "{a}1", "{a}2")
    others = Others()
    others.before_marks = lambda: core.delete(["{a}1"])
    await pushed(core, others)
    assert others.batches == [["{a}2"]]


async def test_what_ends_meanwhile_is_not_passed_on(core: StoreCore, autojump_clock: MockClock) -> None:
    put(core, *[f"{{first}}{number}" for number in range(8)], ttl_s=60.0)
    put(core, *[f"{{then}}{number}" for number in range(8)])
    others = Others()

    def end_the_others(keys: list[str]) -> None:
        core.retention.clock = lambda: 60.0

    others.before_put = end_the_others
    drain = await pushed(core, others)
    assert others.ends == {f"{{then}}{number}": None for number in range(8)}
    assert (drain.moved_blocks, drain.failed_groups) == (8, 0)


async def test_what_is_there_stays_as_it_is(core: StoreCore, autojump_clock: MockClock) -> None:
    put(core, "{a}1", "{a}2")
    put(core, "{b}1", "{b}2")
    others = Others()
    others.has = {"{a}1": b"newer", "{a}2": b"newer", "{b}1": b"newer"}
    drain = await pushed(core, others)
    assert others.has["{a}1"] == b"newer"
    assert (drain.moved_groups, drain.skipped_groups, drain.moved_blocks) == (1, 1, 1)


async def test_no_more_is_passed_on_than_was_said(core: StoreCore, autojump_clock: MockClock) -> None:
    put(core, "{cold}1")
    put(core, "{large}1", "{large}2", "{large}3", "{large}4")
    put(core, "{hot}1", "{hot}2")
    others = Others()
    drain = await pushed(core, others, PushLimits(most_bytes=3 * KIB, bytes_per_s=1 << 40))
    assert list(others.has) == ["{hot}1", "{hot}2", "{cold}1"]  # the large group would not fit as a whole
    assert drain.groups == 2


async def test_it_takes_its_time(core: StoreCore, autojump_clock: MockClock) -> None:
    put(core, *[f"{{a}}{number}" for number in range(8)])
    put(core, *[f"{{b}}{number}" for number in range(8)])
    others = Others()
    started = trio.current_time()
    await pushed(core, others, PushLimits(most_bytes=1 << 30, bytes_per_s=2 * KIB))
    assert [at - started for at in others.at] == [0, 4]
    assert trio.current_time() - started >= 8


async def test_it_says_how_much_is_done_and_how_long_the_rest_takes(core: StoreCore, autojump_clock: MockClock) -> None:
    put(core, *[f"{{a}}{number}" for number in range(8)])
    put(core, *[f"{{b}}{number}" for number in range(8)])
    others = Others()
    told: list[Drain] = []
    await push(core, others.open, has_all, PushLimits(1 << 30, bytes_per_s=2 * KIB), told.append)
    assert [(one.ratio, one.size_bytes) for one in told] == [(0, 16 * KIB), (0.5, 16 * KIB), (1, 16 * KIB)]
    assert [one.elapsed_s for one in told] == [0, 0, 4]
    assert [one.left_s for one in told] == [None, None, 0]  # at first, nothing has taken a second yet
    late = Drain(size_bytes=100, done_bytes=25, elapsed_s=10)
    assert (late.ratio, late.left_s) == (0.25, 30.0)


async def test_what_is_written_meanwhile_is_passed_on_too(core: StoreCore, autojump_clock: MockClock) -> None:
    put(core, "{a}1")
    others = Others()

    def write_once(keys: list[str]) -> None:
        if keys == ["{a}1"]:
            put(core, "{a}2", "{b}1")

    others.before_put = write_once
    drain = await pushed(core, others)
    assert set(others.has) == {"{a}1", "{a}2", "{b}1"}
    assert drain.moved_blocks == 3


async def test_groups_whose_node_is_lost_are_counted_and_told_once(
    core: StoreCore, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    put(core, "{a}1", "{a}2")
    put(core, "{b}1", "{b}2")
    others = Others()

    def lose(keys: list[str]) -> None:
        others.has.update(dict.fromkeys(["{a}1", "{a}2"], b""))
        raise PartialPut("b is gone", stored=["{a}1", "{a}2"], failed=["{b}1"], unknown=["{b}2"])

    others.before_put = lose
    with caplog.at_level(logging.WARNING):
        drain = await pushed(core, others)
    assert (drain.moved_groups, drain.failed_groups, drain.moved_blocks) == (1, 1, 2)
    assert [record.getMessage() for record in caplog.records] == ["blocks were not passed on"]


@pytest.mark.parametrize("error", [OutOfMemory("full"), StoreUnavailable("nobody there")])
async def test_whatever_refuses_does_not_end_it(core: StoreCore, autojump_clock: MockClock, error: Exception) -> None:
    put(core, "{b}1")
    put(core, *[f"{{a}}{number}" for number in range(8)])
    others = Others()

    def refuse(keys: list[str]) -> None:
        if "{b}1" in keys:
            raise error

    others.before_put = refuse
    drain = await pushed(core, others)
    assert (drain.failed_groups, drain.moved_groups) == (1, 1)


@pytest.mark.parametrize("error", [PartialPut("new owner", failed=["{a}1", "{a}2"]), OutOfMemory("full")])
async def test_what_failed_is_tried_again_and_counted_once(
    core: StoreCore, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    put(core, "{b}1")
    put(core, "{a}1", "{a}2")
    others = Others()
    errors = [error, error]

    def refuse_twice(keys: list[str]) -> None:
        if "{a}1" not in keys:
            put(core, "{c}1")  # the next time, the room is for {a}
        elif errors:
            raise errors.pop()

    others.before_put = refuse_twice
    core.limits = CoreLimits(max_batch_keys=2)
    drain = await pushed(core, others, PushLimits(most_bytes=3 * KIB, bytes_per_s=1 << 40))
    size = 3 * KIB
    assert drain == Drain(
        groups=2, moved_groups=2, moved_blocks=3, moved_bytes=size, size_bytes=size, done_bytes=size, elapsed_s=2
    )
    assert not caplog.records


async def test_what_an_answering_node_refused_while_another_is_lost_is_tried_again(
    core: StoreCore, autojump_clock: MockClock
) -> None:
    put(core, "{a}1", "{b}1", "{c}1")
    others = Others()

    def lose_once(keys: list[str]) -> None:
        if len(others.batches) == 1:
            others.has["{a}1"] = b""
            raise PartialPut("c is gone", stored=["{a}1", "{b}1"], failed=["{c}1"])

    others.before_put = lose_once
    drain = await pushed(core, others)
    assert others.batches == [["{a}1", "{b}1", "{c}1"], ["{b}1", "{c}1"]]
    assert (drain.groups, drain.moved_groups, drain.moved_blocks) == (3, 3, 3)


async def test_a_node_that_does_not_say_what_it_has_does_not_end_it(
    core: StoreCore, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    put(core, "{b}1", *[f"{{a}}{number}" for number in range(7)])
    others = Others()
    others.deleted = ["{b}1"]

    async def refuse(keys: Collection[str]) -> list[str]:
        if keys:
            raise PermissionDenied("not you")
        return []

    others.missing = refuse  # type: ignore[method-assign]
    drain = await pushed(core, others)
    assert (drain.groups, drain.moved_groups, drain.failed_groups) == (2, 1, 1)
    assert [vars(record)["problem"] for record in caplog.records] == ["not you"]


async def test_a_store_that_cannot_be_opened_is_told(
    core: StoreCore, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    @asynccontextmanager
    async def refused() -> AsyncGenerator[Any, None]:
        raise StoreUnavailable("no")
        yield

    put(core, "a")
    await push(core, refused, has_all, PLENTY, lambda drain: None)
    assert "blocks were not passed on" in caplog.text


async def test_what_was_refused_for_another_deletion_is_tried_again(core: StoreCore, autojump_clock: MockClock) -> None:
    put(core, "{a}1", "{a}2", "{b}1")
    others = Others()
    others.has["{b}1"] = b"there"
    others.deleted = ["{a}2"]
    others.before_marks = lambda: setattr(others, "deleted", others.deleted if others.mark["other"] < 1 else ())
    drain = await pushed(core, others)
    assert others.batches == [["{a}1", "{a}2", "{b}1"], ["{a}2"]]
    assert set(others.has) == {"{a}1", "{a}2", "{b}1"}
    assert drain.moved_blocks == 2


async def test_what_is_refused_again_and_again_is_given_up(
    core: StoreCore, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    put(core, "{a}1")
    others = Others()
    others.deleted = ["{a}1"]
    drain = await pushed(core, others)
    assert others.batches == [["{a}1"]] * 3
    assert drain == Drain(groups=1, failed_groups=1, size_bytes=KIB, done_bytes=KIB, elapsed_s=2)
    (record,) = caplog.records
    assert (vars(record)["groups"], "deleted" in vars(record)["problem"]) == (1, True)


async def test_other_tasks_run_between_small_parts_of_the_keys(core: StoreCore, autojump_clock: MockClock) -> None:
    for first in range(0, 1024, 8):
        put(core, *[f"{number}" for number in range(first, first + 8)])
    asked: list[int] = []

    def has_none(keys: Sequence[str]) -> list[bool]:
        asked.append(len(keys))
        return [False] * len(keys)

    await push(core, Others().open, has_none, PLENTY, lambda drain: None)
    assert asked == [512, 512]


async def test_what_a_former_owner_has_still_is_not_passed_on(core: StoreCore, autojump_clock: MockClock) -> None:
    put(core, "old", "own")
    others = Others()
    await push(core, others.open, lambda keys: [key == "own" for key in keys], PLENTY, lambda drain: None)
    assert others.batches == [["own"]]


async def test_a_damaged_block_is_dropped_and_not_passed_on(core: StoreCore, autojump_clock: MockClock) -> None:
    put(core, "good", "bad")
    entry = core.index.get("bad")
    assert entry is not None
    core.pool.views([entry[:3]], writable=True)[0][0] ^= 1
    others = Others()
    await pushed(core, others)
    assert list(others.has) == ["good"]
    assert core.all_keys() == ["good"]


async def test_a_fault_while_it_drains_ends_the_drain_and_not_the_server(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(on_progress: Callable[[Drain], None]) -> None:
        on_progress(Drain(groups=3, moved_groups=1))
        raise RuntimeError("ours")

    told: list[Drain] = []
    drainer = Drainer(fail, told.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drainer.run)
        drainer.want(True)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert told[-1] == Drain(done=True, groups=3, moved_groups=1)
    assert drainer.statistics().state == "drained"
    assert "internal error; what is left is not passed on" in caplog.text


async def test_cancelled_it_lets_go_at_once(core: StoreCore) -> None:
    put(core, "a")
    others = Others()
    with trio.CancelScope() as scope:
        others.before_put = lambda keys: scope.cancel()
        await push(core, others.open, has_all, PLENTY, lambda drain: None)
    assert scope.cancelled_caught
    assert (core.statistics().leases, core.statistics().clients, core.statistics().pinned_bytes) == (0, 0, 0)


async def test_blocks_that_end_at_other_times_than_refused_ones_are_passed_on_all_the_same(
    core: StoreCore, autojump_clock: MockClock
) -> None:
    put(core, "{c}1", ttl_s=20)
    put(core, "{b}1", ttl_s=10)
    put(core, "{a}1")
    others = Others()
    others.has["{a}1"] = b"there"

    def refuse(keys: list[str]) -> None:
        if keys == ["{b}1"]:
            raise StoreUnavailable("b is gone")

    others.before_put = refuse
    drain = await pushed(core, others)
    assert (drain.moved_groups, drain.skipped_groups, drain.failed_groups) == (1, 1, 1)
    assert "{c}1" in others.has
