"""What the tier promises, one promise a test. The machine checks combinations; here
each stands alone.
"""

import errno
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from infinistore.core import Journal, Pool, StoreCore
from infinistore.core.index import Index
from infinistore.disk import promotion
from infinistore.disk.jobs import Flush, HashBlocks, Job, ReadInto, Result, Write, file_bytes
from infinistore.disk.settings import TierSettings
from infinistore.disk.tier import DiskTier
from infinistore.errors import LimitExceeded
from tests.disk.conftest import FOREVER, SEGMENT_BYTES, UNIT_BYTES, Machine, content
from tests.simulation.disk import SimulatedDisk

MakeMachine = Callable[..., Machine]
NAMES = [f"block {number}" for number in range(8)]


def is_block_read(job: Job) -> bool:
    """Whether a job reads blocks for the tier: only these are hashed."""
    return isinstance(job, ReadInto) and bool(job.hash_lengths)


def block_reads(disk: SimulatedDisk) -> list[ReadInto]:
    return [job for job in disk.history if isinstance(job, ReadInto) and job.hash_lengths]


def written_bytes(machine: Machine) -> int:
    return sum(disk.written_bytes for disk in machine.tier.statistics().disks)


# Admission


def test_a_lazy_block_is_written_once_a_quarter_of_the_pool_came_after_it(make_machine: MakeMachine) -> None:
    machine = make_machine(settings=TierSettings())  # 64 units in the pool
    machine.put_names("a")
    for number in range(15):
        machine.put_names(f"newer {number}")
    machine.settle()
    assert machine.tier.exists(["a"]) == b"\1"
    assert machine.tier.statistics().ageing_bytes == 16 * UNIT_BYTES
    assert written_bytes(machine) == 0
    machine.put_names("the last")
    machine.settle()
    assert written_bytes(machine) == UNIT_BYTES
    machine.forget_memory()
    assert machine.tier.exists(["a", "newer 0"]) == b"\2\0"


def test_the_age_of_a_block_is_the_room_that_newer_ones_take(make_machine: MakeMachine) -> None:
    machine = make_machine(unit_bytes=4 * UNIT_BYTES, pool_bytes=64 * UNIT_BYTES, settings=TierSettings())
    for name in NAMES[:5]:  # small blocks, that take a unit each
        machine.put({name: b"small"})
    machine.settle()
    machine.forget_memory()
    assert machine.tier.exists(NAMES[:2]) == b"\2\0"


def test_an_eager_block_is_written_at_once(machine: Machine) -> None:
    machine.put_names("a")
    machine.settle()
    machine.forget_memory()
    assert machine.get("a") == [content("a")]


def test_a_second_use_block_is_written_when_it_was_read_once(make_machine: MakeMachine) -> None:
    machine = make_machine(settings=TierSettings(admission="second-use"))
    machine.put_names("read", "unread", "used")
    machine.settle()
    assert written_bytes(machine) == 0
    machine.peek("read")
    machine.core.note_use(["used"], read=True)
    machine.settle()
    machine.forget_memory()
    assert machine.tier.exists(["read", "unread", "used"]) == b"\2\0\2"


def test_second_use_needs_a_journal_that_tells_of_reads(machine: Machine) -> None:
    silent = StoreCore(Pool(machine.core.pool.allocator), clock=machine.clock, journal=Journal())
    with pytest.raises(ValueError, match="reads=True"):
        DiskTier(silent, clock=machine.clock, settings=TierSettings(admission="second-use"))
    without = StoreCore(Pool(machine.core.pool.allocator), clock=machine.clock)
    with pytest.raises(ValueError, match="journal"):
        DiskTier(without, clock=machine.clock)


def test_what_a_disk_has_is_not_written_again(machine: Machine) -> None:
    machine.put_on_disk("a")
    machine.put_names("a")  # the same block again
    machine.settle()
    assert machine.get("a") == [content("a")]
    machine.forget_memory()
    assert machine.get("a") == [content("a")]  # promoted, and evicted again
    machine.settle()
    assert written_bytes(machine) == UNIT_BYTES


def test_a_block_put_again_while_it_is_written_is_written_once(machine: Machine) -> None:
    machine.put_names("a")
    machine.begin_writing()
    machine.put_names("a")
    machine.settle()
    assert written_bytes(machine) == UNIT_BYTES
    machine.forget_memory()
    assert machine.get("a") == [content("a")]


# Writing


def test_writing_counts_neither_as_a_read_nor_as_a_use(machine: Machine) -> None:
    machine.put_names("old", "new")
    recency = list(machine.core.index)
    before = machine.core.statistics()
    machine.settle()
    after = machine.core.statistics()
    assert list(machine.core.index) == recency
    assert (after.hits, after.misses, after.clients) == (before.hits, before.misses, before.clients)
    assert written_bytes(machine) == 2 * UNIT_BYTES
    machine.forget_memory()
    machine.get("old")
    assert machine.core.statistics().puts == 2  # a promotion is none


def test_one_batch_takes_one_flush(machine: Machine) -> None:
    machine.put_names(*NAMES)
    machine.settle()
    (disk,) = machine.disks
    segments = [job for job in disk.history if isinstance(job, Flush)]
    assert len(segments) == 1


def test_little_waits_for_more_and_much_does_not(make_machine: MakeMachine) -> None:
    machine = make_machine(
        settings=TierSettings(admission="eager", group_s=0.1, group_bytes=4 * UNIT_BYTES), pool_bytes=128 * UNIT_BYTES
    )
    machine.put_names("a")
    while machine.step():
        pass
    assert written_bytes(machine) == 0
    assert machine.tier.next_deadline() == pytest.approx(machine.clock.now + 0.1)
    machine.put_names(*NAMES[:3])
    while machine.step():
        pass
    assert written_bytes(machine) == 4 * UNIT_BYTES


def test_what_is_pinned_to_be_written_is_bounded(make_machine: MakeMachine) -> None:
    machine = make_machine()  # 64 units: an eighth is 8
    machine.stuck = lambda job: isinstance(job, Write)
    machine.put_names(*(f"a{number}" for number in range(40)))
    for _ in range(20):
        machine.clock.now += 0.01
        machine.step()
    assert 0 < machine.tier.statistics().pinned_bytes <= 8 * UNIT_BYTES
    assert machine.core.evict(0.0, 0.0) >= 32  # eviction waits for nothing


def test_a_block_longer_than_a_segment_stays_in_memory_only(make_machine: MakeMachine) -> None:
    machine = make_machine(pool_bytes=256 * UNIT_BYTES)
    machine.put({"a": b"a", "too long": bytes(SEGMENT_BYTES), "b": b"b"})
    assert machine.flush("a", "too long", "b") == 1
    assert machine.get("too long") == [bytes(SEGMENT_BYTES)]
    assert machine.tier.statistics().failed_blocks > 0
    machine.forget_memory()
    assert machine.get("a", "too long", "b") == [b"a", None, b"b"]


@pytest.mark.parametrize("key_bytes", [8, 1000])
def test_blocks_whose_keys_leave_no_room_in_a_segment_go_to_several(make_machine: MakeMachine, key_bytes: int) -> None:
    machine = make_machine(pool_bytes=1024 * UNIT_BYTES)
    values = {f"{number:0{key_bytes}}": content(str(number)) for number in range(SEGMENT_BYTES // UNIT_BYTES)}
    machine.put(values)
    assert machine.flush(*values) == 0
    machine.forget_memory()
    assert machine.get(*values) == list(values.values())


def test_more_than_the_disks_take_is_skipped_as_whole_batches_tails_first(make_machine: MakeMachine) -> None:
    machine = make_machine(settings=TierSettings(admission="eager", group_bytes=4 * UNIT_BYTES, queue_s=1e-9))
    for name in "abcdef":
        machine.put_names(f"{name}1", f"{name}2")
    machine.settle()
    assert machine.tier.statistics().skipped_blocks == 8
    machine.forget_memory()
    assert machine.tier.exists(["a1", "a2", "b1", "b2", "c1", "f2"]) == b"\2\2\2\2\0\0"


def test_what_a_lost_client_may_still_write_is_not_written(machine: Machine) -> None:
    machine.put_names("held", "free")
    lost = machine.core.open_client("lost")
    machine.core.lease(lost, ["held"])
    machine.core.quarantine(lost)
    assert machine.flush("held", "free") == 1
    machine.core.close_client(lost)
    machine.forget_memory()
    assert machine.tier.exists(["held", "free"]) == b"\0\2"


def test_blocks_without_checksum_come_back_without_one(machine: Machine) -> None:
    machine.put_on_disk("a", checksums=False)
    assert machine.get("a") == [content("a")]
    (entry,) = machine.core.index.get_many(["a"])
    assert entry is not None and entry[3] == 0
    machine.settle()
    assert written_bytes(machine) == UNIT_BYTES  # to come back is no put


@pytest.mark.parametrize(("unit_bytes", "length"), [(64, 100), (512, 5000), (4096, 5000), (65536, 100)])
def test_any_unit_of_allocation_and_any_length_works(make_machine: MakeMachine, unit_bytes: int, length: int) -> None:
    machine = make_machine(unit_bytes=unit_bytes, pool_bytes=1 << 20)
    values = {name: content(name, length) for name in NAMES}
    machine.put(values)
    assert machine.on_disk(*NAMES)
    assert machine.get(*NAMES) == list(values.values())


def test_reading_into_padding_changes_no_other_block(make_machine: MakeMachine) -> None:
    machine = make_machine(unit_bytes=512, pool_bytes=64 * 1024)
    machine.put({name: content(name, 700) for name in NAMES})
    assert machine.on_disk(*NAMES)
    others = {f"other {number}": content(f"other {number}", 512) for number in range(80)}
    machine.put(others)
    machine.get(*NAMES[::2])
    assert machine.peek(*others) == list(others.values())


# Reading


@pytest.mark.parametrize("asked", [NAMES, NAMES[::-1], NAMES[::2] + NAMES[1::2]], ids=["written", "back", "across"])
def test_a_prefix_is_read_by_one_job_in_whatever_order_it_was_written(machine: Machine, asked: Sequence[str]) -> None:
    machine.put_on_disk(*NAMES)
    assert machine.get(*asked) == [content(name) for name in asked]
    (read,) = block_reads(machine.disks[0])
    assert file_bytes(read.views) == 8 * UNIT_BYTES


def test_a_long_prefix_is_read_part_by_part_heads_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "SORTED_BYTES", 4 * UNIT_BYTES)
    monkeypatch.setattr(promotion, "LARGEST_READ_BYTES", 4 * UNIT_BYTES)
    monkeypatch.setattr(promotion, "MOST_READS", 1)
    machine.put_on_disk(*NAMES)
    (disk,) = machine.disks
    asked = NAMES[::-1]
    wait = machine.tier.want(asked, machine.clock.now + 9)
    assert wait is not None
    machine.start_jobs()
    machine.finish(disk, disk.under_way[0])
    assert machine.peek(*asked[:4]) == [content(name) for name in asked[:4]]
    assert machine.peek(*asked[4:]) == [None] * 4
    assert machine.until(wait).unmet == 0


def test_disks_take_turns_in_a_read(make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = make_machine(disks=2)
    machine.put_apart(*NAMES)
    machine.forget_memory()
    monkeypatch.setattr(promotion, "LARGEST_READ_BYTES", 2 * UNIT_BYTES)
    monkeypatch.setattr(promotion, "MOST_READS", 1)
    wait = machine.tier.want(NAMES, machine.clock.now + 9)
    machine.start_jobs()
    assert [len(disk.under_way) for disk in machine.disks] == [1, 1]
    assert machine.until(wait).unmet == 0


def test_disks_take_turns_where_the_pool_has_room_for_one_read(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "LARGEST_READ_BYTES", UNIT_BYTES)
    machine = make_machine(disks=2, pool_bytes=4 * UNIT_BYTES)
    for name in NAMES:
        machine.put_apart(name)
    machine.forget_memory()
    wait = machine.tier.want(NAMES, machine.clock.now + 9)
    assert wait is not None
    order = []
    while not wait.settled:
        machine.start_jobs()
        [(disk, job)] = [(disk, job) for disk in machine.disks for job in disk.under_way]
        order.append(machine.disks.index(disk))
        machine.finish(disk, job)
    assert order == [0, 1] * 4


def test_a_key_is_read_once_however_many_want_it(machine: Machine) -> None:
    machine.put_on_disk("a", "b")
    waits = [machine.tier.want(keys, machine.clock.now + 9) for keys in (["a"], ["a", "b"], ["b", "a", "a"])]
    for wait in waits:
        assert machine.until(wait).unmet == 0
    assert sum(len(job.views) for job in block_reads(machine.disks[0])) == 2


def test_who_wants_what_is_in_memory_or_nowhere_waits_for_nothing(machine: Machine) -> None:
    machine.put_names("a")
    assert machine.tier.want(["a", "missing"], machine.clock.now + 9) is None


def test_what_comes_up_from_disk_does_not_evict_what_was_asked_for_with_it(machine: Machine) -> None:
    names = [f"block {number}" for number in range(65)]  # one more than the pool has room for
    for name in names:
        machine.put_names(name)
        assert machine.flush(name) == 0
    oldest, evicted = names[1], names[0]
    assert machine.tier.exists([oldest, evicted]) == b"\1\2"
    assert machine.get(oldest, evicted) == [content(oldest), content(evicted)]


@pytest.mark.parametrize(("deadline_s", "waits_s"), [(0.5, 0.5), (5.0, 1.0)])
def test_a_read_that_is_late_is_a_miss(machine: Machine, deadline_s: float, waits_s: float) -> None:
    machine.put_on_disk("a")
    machine.stuck = is_block_read
    begin = machine.clock.now
    wait = machine.until(machine.tier.want(["a"], begin + deadline_s))
    assert wait.unmet == 1
    assert machine.clock.now - begin == pytest.approx(waits_s)
    assert machine.peek("a") == [None]
    machine.stuck = lambda job: False
    machine.settle()
    assert machine.peek("a") == [content("a")]  # it came all the same


def test_a_read_without_room_in_the_pool_is_a_miss(machine: Machine) -> None:
    machine.put_on_disk("a")
    reservation = machine.core.reserve(machine.client, [UNIT_BYTES] * 64)
    assert machine.get("a") == [None]
    assert machine.tier.statistics().no_room_blocks == 1
    machine.core.abort(reservation)
    assert machine.get("a") == [content("a")]


def test_a_block_that_comes_up_leaves_what_was_put_meanwhile(machine: Machine) -> None:
    machine.put_on_disk("a")
    wait = machine.tier.want(["a"], machine.clock.now + 9)
    machine.start_jobs()
    machine.put({"a": b"newer"})
    machine.until(wait)
    assert machine.peek("a") == [b"newer"]
    machine.flush("a")
    machine.forget_memory()
    assert machine.get("a") == [b"newer"]


@pytest.mark.parametrize("removal", ["delete", "purge", "delete in memory"])
def test_a_read_under_way_does_not_bring_back_what_was_removed(machine: Machine, removal: str) -> None:
    machine.put_on_disk("a", "b")
    wait = machine.tier.want(["a", "b"], machine.clock.now + 9)
    machine.start_jobs()
    assert any(is_block_read(job) for job in machine.disks[0].under_way)
    if removal == "delete":
        machine.tier.delete(["a"], machine.clock.now + 9)
    elif removal == "purge":
        machine.tier.purge(machine.clock.now + 9)
    else:
        machine.core.delete(["a"])
    machine.until(wait)
    assert machine.get("a", "b") == [None, None if removal == "purge" else content("b")]


def test_who_stops_waiting_frees_no_room_that_is_still_read_into(machine: Machine) -> None:
    machine.put_on_disk("a")
    used = machine.core.pool.used_bytes
    machine.stuck = is_block_read
    wait = machine.tier.want(["a"], machine.clock.now + 0.1)
    machine.until(wait)
    assert machine.core.pool.used_bytes == used + UNIT_BYTES
    machine.clock.now += 100  # now it counts as hung, and its room is still its own
    while machine.step():
        pass
    assert machine.tier.statistics().disks[0].hung_jobs == 1
    assert machine.core.pool.used_bytes == used + UNIT_BYTES
    machine.stuck = lambda job: False
    machine.settle()
    assert machine.core.pool.used_bytes == used
    assert machine.get("a") == [content("a")]


def test_what_was_not_started_is_not_read_when_nobody_waits(machine: Machine) -> None:
    machine.put_on_disk(*NAMES)
    wait = machine.tier.want(NAMES, machine.clock.now + 0.1)
    machine.clock.now += 1
    machine.tier.jobs()
    machine.settle()
    assert wait is not None and wait.settled
    assert block_reads(machine.disks[0]) == []
    assert machine.tier.statistics().late_blocks == 8


# Looking


def test_both_tiers_are_counted_and_those_in_memory_named(machine: Machine) -> None:
    machine.put_on_disk("a", "b", "c")
    machine.get("b")
    assert machine.tier.exists(["a", "b", "missing"]) == b"\2\1\0"
    match = machine.tier.match_prefix(["a", "b", "c", "missing", "a"])
    assert (match.matched, match.in_memory) == (3, 1)
    assert machine.tier.match_prefix(["missing"]).matched == 0


def test_a_store_that_starts_serves_at_once_and_its_disk_is_absent_until_it_recovered(machine: Machine) -> None:
    machine.put_on_disk("a")
    machine.crash()
    assert machine.tier.exists(["a"]) == b"\0"
    assert machine.get("a") == [None]
    machine.settle()
    assert machine.get("a") == [content("a")]


def test_what_was_put_or_deleted_while_a_disk_recovered_stays_so(machine: Machine) -> None:
    machine.put_on_disk("a", "b", "c")
    machine.crash()
    machine.put({"a": b"newer"})
    deletion = machine.tier.delete(["b"], machine.clock.now + 99)
    assert machine.until(deletion.wait).unmet == 0
    machine.settle()
    machine.forget_memory()
    assert machine.get("a", "b", "c") == [b"newer", None, content("c")]
    machine.restart()
    assert machine.get("a", "b", "c") == [b"newer", None, content("c")]


# Prefetch and holds


def test_a_prefetch_reads_heads_first_within_a_quarter_of_the_pool(machine: Machine) -> None:
    names = [f"long {number}" for number in range(40)]
    machine.put_on_disk(*names)
    found = machine.tier.prefetch(names)
    assert (found.reading, found.skipped) == (16, 24)
    again = machine.tier.prefetch(names[16:])
    assert (again.reading, again.skipped) == (0, 24)  # until the first is done
    machine.settle()
    assert machine.tier.exists(names) == b"\1" * 16 + b"\2" * 24
    assert machine.tier.prefetch(names[16:]).reading == 16


def test_who_waits_goes_before_prefetches(make_machine: MakeMachine) -> None:
    machine = make_machine(pool_bytes=64 << 20, segments=80, settings=TierSettings(admission="eager", group_s=0.001))
    length = 64 * 1024
    names = [f"long {number}" for number in range(220)]
    for start in range(0, 220, 20):
        machine.put({name: content(name, length) for name in names[start : start + 20]})
        machine.settle()
    machine.forget_memory()
    machine.tier.prefetch(names[:200])
    wait = machine.tier.want(names[200:], machine.clock.now + 9)
    assert wait is not None
    (disk,) = machine.disks
    while not wait.settled:
        machine.start_jobs()
        machine.finish(disk, disk.under_way[0])
    assert machine.tier.exists(names) == b"\2" * 200 + b"\1" * 20


def test_a_held_prefix_survives_eviction_and_overwriting(make_machine: MakeMachine) -> None:
    machine = make_machine(segments=3)
    machine.put_names("in memory", "on disk")
    machine.flush()
    machine.forget_memory()
    machine.get("in memory")
    match = machine.tier.hold_prefix(machine.client, ["in memory", "on disk", "missing"], 50.0)
    assert (match.matched, match.in_memory) == (2, 1)
    assert match.hold_id
    for number in range(600):  # far more than the disk has room for
        machine.put_names(f"other {number}")
        if number % 8 == 0:
            machine.settle(0.1)
    assert machine.peek("in memory") == [content("in memory")]
    assert machine.get("on disk") == [content("on disk")]
    assert machine.tier.release_hold(match.hold_id)
    assert not machine.tier.release_hold(match.hold_id)
    assert machine.tier.statistics().held_bytes == 0


def test_a_hold_ends_with_its_time(machine: Machine) -> None:
    machine.put_on_disk("a")
    found = machine.tier.prefetch(["a"], hold_s=20.0)
    machine.settle(1.0)
    assert machine.core.statistics().held_bytes == UNIT_BYTES  # it came up, and is held there, too
    assert machine.tier.statistics().held_bytes == UNIT_BYTES
    machine.clock.now += 21
    machine.step()
    assert machine.tier.statistics().held_bytes == 0
    assert machine.core.statistics().holds == 0
    assert not machine.tier.release_hold(found.hold_id)


def test_holds_on_disk_are_bounded(make_machine: MakeMachine) -> None:
    machine = make_machine(pool_bytes=256 * UNIT_BYTES, segments=3)
    names = [f"long {number}" for number in range(100)]
    machine.put_on_disk(*names)
    with pytest.raises(LimitExceeded, match="on disk"):
        machine.tier.hold_prefix(machine.client, names, 10.0)
    with pytest.raises(LimitExceeded, match="max_hold_s"):
        machine.tier.hold_prefix(machine.client, names[:1], 1e6)
    assert machine.tier.statistics().held_bytes == 0


# Flush


def test_a_flush_makes_what_is_not_due_durable(make_machine: MakeMachine) -> None:
    machine = make_machine(settings=TierSettings())
    machine.put_names("a", "b")
    assert machine.flush("a", "missing") == 1
    machine.restart()
    assert machine.get("a", "b") == [content("a"), None]


def test_a_flush_of_everything_takes_what_ages(make_machine: MakeMachine) -> None:
    machine = make_machine(settings=TierSettings())
    machine.put_names(*NAMES)
    assert machine.flush() == 0
    machine.restart()
    assert machine.get(*NAMES) == [content(name) for name in NAMES]


def test_a_flush_of_everything_does_not_walk_through_the_store(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each key, that would take a third of a second for 4,000 of them."""
    machine = make_machine()
    machine.put_names("a", "b")
    with monkeypatch.context() as patched:
        patched.setattr(Index, "__iter__", None)
        wait = machine.tier.flush(None, FOREVER)
    assert machine.until(wait).unmet == 0
    assert machine.on_disk("a", "b")


def test_a_flush_follows_a_key_that_is_put_again_and_gives_up_a_deleted_one(machine: Machine) -> None:
    machine.put_names("again", "deleted")
    wait = machine.tier.flush(["again", "deleted"], machine.clock.now + 9)
    machine.start_jobs()
    machine.put({"again": b"newer"})
    machine.core.delete(["deleted"])
    assert machine.until(wait).unmet == 1
    machine.restart()
    assert machine.get("again", "deleted") == [b"newer", None]


def test_a_flush_ends_at_its_deadline(machine: Machine) -> None:
    machine.stuck = lambda job: isinstance(job, Flush)
    machine.put_names("a")
    wait = machine.tier.flush(["a"], machine.clock.now + 3)
    begin = machine.clock.now
    assert machine.until(wait).unmet == 1
    assert machine.clock.now == pytest.approx(begin + 3)


# Removing


def test_a_deletion_is_durable_once_it_was_waited_for(machine: Machine) -> None:
    machine.put_on_disk("a", "b")
    assert machine.delete("a", "missing") == 1
    machine.restart()
    assert machine.get("a", "b") == [None, content("b")]


def test_a_deletion_without_any_copy_waits_for_nothing(machine: Machine) -> None:
    assert machine.tier.delete(["missing"], machine.clock.now + 9).wait.settled


def test_a_block_deleted_while_it_is_written_gets_a_tombstone(machine: Machine) -> None:
    machine.put_names("a")
    machine.begin_writing()
    assert machine.delete("a") == 1
    assert machine.get("a") == [None]
    machine.restart()
    assert machine.get("a") == [None]


def test_an_older_block_of_a_key_needs_a_tombstone_too(machine: Machine) -> None:
    """Its newer one was in memory only, so the index does not know the key any more."""
    machine.put_on_disk("a")
    machine.stuck = lambda job: isinstance(job, Write)
    machine.put({"a": b"newer"})
    machine.step()
    machine.stuck = lambda job: False
    assert machine.delete("a") == 1
    machine.restart()
    assert machine.get("a") == [None]


def test_a_block_put_after_a_deletion_is_not_hidden_by_its_tombstone(machine: Machine) -> None:
    machine.put_on_disk("a")
    machine.tier.delete(["a"], machine.clock.now + 9)
    machine.put({"a": b"newer"})
    assert machine.flush("a") == 0
    machine.restart()
    assert machine.get("a") == [b"newer"]


def test_after_a_crash_an_older_block_may_return_if_its_successor_was_in_memory_only(machine: Machine) -> None:
    machine.put_on_disk("a")
    machine.put({"a": b"newer"})
    assert machine.peek("a") == [b"newer"]
    machine.restart()
    assert machine.get("a") == [content("a")]


def test_a_purge_is_durable_once_it_was_waited_for(machine: Machine) -> None:
    machine.put_on_disk("a")
    machine.put_names("b")
    machine.begin_writing()
    wait = machine.tier.purge(machine.clock.now + 9)
    machine.core.purge()
    assert machine.until(wait).unmet == 0
    assert machine.tier.exists(["a", "b"]) == b"\0\0"
    machine.put_names("c")
    assert machine.flush("c") == 0
    machine.restart()
    assert machine.get("a", "b", "c") == [None, None, content("c")]


# Room on disk


def test_what_was_read_of_late_survives_the_reuse_of_its_segment(make_machine: MakeMachine) -> None:
    machine = make_machine(segments=3)
    machine.put_on_disk("read", "unread")
    for number in range(900):
        machine.put_names(f"other {number}")
        if number % 8 == 0:
            machine.settle(0.1)
            machine.forget_memory()
            assert machine.get("read") == [content("read")]
    assert machine.tier.exists(["unread"]) == b"\0"
    assert machine.tier.statistics().reinserted_blocks > 0
    assert machine.volumes[0].statistics().recycled_segments > 3
    assert sum(machine.disks[0].files().values()) <= machine.capacity_bytes


# Several disks


def test_parts_of_a_batch_go_to_the_disks_in_turn(make_machine: MakeMachine) -> None:
    machine = make_machine(disks=2)
    machine.put_apart(*NAMES)
    assert [disk.written_blocks for disk in machine.tier.statistics().disks] == [4, 4]
    machine.restart()
    assert machine.get(*NAMES) == [content(name) for name in NAMES]


def test_a_disk_that_was_away_is_purged_when_it_comes_back(make_machine: MakeMachine) -> None:
    machine = make_machine(disks=2)
    machine.put_apart(*NAMES)
    first, second = machine.disks
    machine.forget_memory()
    on_second = [
        name
        for name, place in zip(NAMES, machine.tier.exists(NAMES), strict=True)
        if place and name in second.contents("segments/0").decode("latin-1")
    ]
    assert len(on_second) == 4
    machine.disks = [first]
    machine.restart()
    machine.put_names("new")
    assert machine.flush("new") == 0
    machine.disks = [first, second]
    machine.restart()
    assert machine.get(*on_second, "new") == [None] * 4 + [content("new")]


@pytest.mark.parametrize("admission", ["eager", "lazy"])
def test_batches_that_are_flushed_go_to_the_disks_in_turn(make_machine: MakeMachine, admission: Any) -> None:
    machine = make_machine(disks=2, settings=TierSettings(admission=admission, group_s=0.001))
    for name in NAMES:
        machine.put_names(name)
        assert machine.flush(name) == 0
    assert [disk.written_blocks for disk in machine.tier.statistics().disks] == [4, 4]


def test_a_flush_of_what_waits_already_hurries_it_and_writes_it_once(make_machine: MakeMachine) -> None:
    machine = make_machine(disks=2, settings=TierSettings(admission="eager", group_s=50.0))
    machine.put_names(*NAMES)
    machine.start_jobs()
    begin = machine.clock.now
    assert machine.flush(*NAMES) == 0
    assert machine.clock.now == begin
    machine.settle(100.0)
    assert written_bytes(machine) == len(NAMES) * UNIT_BYTES


def test_a_block_put_again_while_it_waits_for_its_turn_is_the_one_that_is_written(make_machine: MakeMachine) -> None:
    machine = make_machine(disks=2, settings=TierSettings(admission="eager", group_s=1.0))
    machine.put_names("a")
    machine.start_jobs()
    machine.put({"a": b"newer"})
    machine.settle(10.0)
    machine.forget_memory()
    assert machine.get("a") == [b"newer"]


def test_a_disk_may_be_replaced_by_a_new_one(make_machine: MakeMachine) -> None:
    machine = make_machine(disks=2)
    machine.put_apart(*NAMES)
    machine.disks[1].wipe()
    machine.restart()
    assert sum(value is not None for value in machine.get(*NAMES)) == 4


@pytest.mark.parametrize("slow", [0, 1])
def test_what_is_put_again_goes_to_the_disk_that_has_it_while_another_may_have_anything(
    make_machine: MakeMachine, slow: int
) -> None:
    machine = make_machine(disks=2)
    machine.put_apart(*NAMES)
    for disk in machine.disks:
        disk.crash()
    machine.stuck = lambda job: job.volume == slow
    machine.start()
    machine.settle()
    there = [name for name, place in zip(NAMES, machine.tier.exists(NAMES), strict=True) if place]
    assert len(there) == 4
    machine.put(dict.fromkeys(there, b"newer"))
    assert machine.flush(*there) == 0
    assert [disk.written_blocks for disk in machine.tier.statistics().disks] == [4 * slow, 4 * (1 - slow)]


def test_a_number_is_taken_once(machine: Machine) -> None:
    with pytest.raises(ValueError, match="disk 0"):
        machine.tier.add(machine.open_volume(SimulatedDisk(machine.random)))


# Faults


def test_a_batch_that_could_not_be_written_is_written_elsewhere(machine: Machine) -> None:
    (disk,) = machine.disks
    disk.faults.flush_error = 1.0
    machine.put_names("a")
    wait = machine.tier.flush(["a"], machine.clock.now + 100)
    while not any(isinstance(job, Flush) for job in disk.history):
        machine.clock.now += 0.01
        machine.step()
    disk.faults.heal()
    assert machine.until(wait).unmet == 0
    assert machine.tier.statistics().disks[0].write_errors == 1
    assert machine.volumes[0].statistics().abandoned_segments == 1
    machine.restart()
    assert machine.get("a") == [content("a")]


def test_a_disk_that_fails_again_and_again_becomes_read_only_with_an_alarm(machine: Machine) -> None:
    machine.put_on_disk("before")
    machine.disks[0].faults.flush_error = 1.0
    machine.put_names("after")
    assert machine.flush("after") == 1
    machine.settle()
    statistics = machine.tier.statistics().disks[0]
    assert statistics.state == "read-only"
    assert "read-only" in statistics.alarm
    assert machine.get("before") == [content("before")]
    deletion = machine.tier.delete(["before"], machine.clock.now + 9)
    assert (deletion.deleted, machine.until(deletion.wait).unmet) == (1, 1)
    assert machine.get("before") == [None]


def test_a_disk_that_takes_nothing_more_is_noticed_even_if_it_cannot_grow(machine: Machine) -> None:
    machine.disks[0].faults.write_error = 1.0
    machine.put_names("a")
    assert machine.flush("a") == 1
    assert machine.tier.statistics().disks[0].state == "read-only"


def test_a_disk_that_becomes_read_only_keeps_nothing_that_was_being_hashed_for_it(machine: Machine) -> None:
    machine.stuck = lambda job: isinstance(job, HashBlocks)
    machine.put_names("hashed", checksums=False)
    machine.settle(0.1)
    machine.disks[0].faults.flush_error = 1.0
    machine.put_names("written")
    assert machine.flush("written") == 1
    assert machine.tier.statistics().disks[0].state == "read-only"
    assert machine.core.statistics().pinned_bytes == UNIT_BYTES
    machine.stuck = lambda job: False
    machine.settle()
    assert machine.core.statistics().pinned_bytes == 0


def test_a_block_that_cannot_be_read_is_a_miss_and_dropped(machine: Machine) -> None:
    machine.put_on_disk("a")
    machine.disks[0].faults.read_error = 1.0
    assert machine.get("a") == [None]
    machine.disks[0].faults.heal()
    assert machine.tier.exists(["a"]) == b"\0"
    assert machine.tier.statistics().disks[0].read_errors == 1


def test_a_damaged_block_is_a_miss_and_its_neighbours_are_not(machine: Machine) -> None:
    machine.put_on_disk("a", "b", "c")
    (disk,) = machine.disks
    disk.rot("segments/0", disk.contents("segments/0").index(content("b")) + 99)
    assert machine.get("a", "b", "c") == [content("a"), None, content("c")]
    assert machine.tier.exists(["b"]) == b"\0"
    assert machine.tier.statistics().disks[0].damaged_blocks == 1


def test_a_client_that_scribbles_while_a_block_is_written_costs_that_copy(machine: Machine) -> None:
    machine.put_names("a")
    machine.begin_writing()
    (entry,) = machine.core.index.get_many(["a"])
    assert entry is not None
    machine.core.pool.view(entry[:3])[:4] = b"####"
    machine.settle()
    assert not machine.core.verify("a")  # the store notices
    assert machine.get("a") == [None]


def test_the_copy_on_disk_serves_when_the_one_in_memory_was_damaged(machine: Machine) -> None:
    machine.put_names("a")
    assert machine.flush("a") == 0
    (entry,) = machine.core.index.get_many(["a"])
    assert entry is not None
    machine.core.pool.view(entry[:3])[:4] = b"####"
    assert not machine.core.verify("a")
    assert machine.get("a") == [content("a")]


def test_a_disk_that_hangs_gets_no_jobs_until_they_return(machine: Machine) -> None:
    machine.put_on_disk("a")
    machine.stuck = is_block_read
    assert machine.get("a") == [None]
    machine.clock.now += 20
    machine.put_names("b")
    machine.settle()
    assert machine.tier.statistics().disks[0].hung_jobs == 1
    assert len(machine.disks[0].under_way) == 1
    assert machine.tier.exists(["a"]) == b"\0"
    machine.stuck = lambda job: False
    machine.settle()
    machine.forget_memory()
    assert machine.get("a", "b") == [content("a"), content("b")]


def test_what_other_disks_have_comes_while_one_is_slow(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "MOST_READS", 1)
    machine = make_machine(disks=2)
    machine.put_apart(*NAMES)
    machine.forget_memory()
    machine.stuck = lambda job: job.volume == 0 and is_block_read(job)
    values = [machine.get(*NAMES[:4]), machine.get(*NAMES[4:])]
    assert [value.count(None) for value in values] == [2, 2]


def test_a_disk_that_hung_does_not_give_what_was_replaced_meanwhile(machine: Machine) -> None:
    machine.put_on_disk("a")
    machine.stuck = is_block_read
    assert machine.get("a") == [None]
    machine.clock.now += 20
    machine.step()
    machine.put({"a": b"newer"})
    machine.tier.exists(["a"])
    machine.core.evict(0.0, 0.0)
    machine.stuck = lambda job: False
    machine.settle()
    assert machine.get("a") in ([None], [b"newer"])


def test_a_disk_that_is_gone_is_off_and_everything_on_it_a_miss(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.put_on_disk("a", "b")
    (disk,) = machine.disks
    finish = disk.finish
    monkeypatch.setattr(disk, "finish", lambda job: Result(finish(job).job, errno.ENODEV))
    assert machine.get("a") == [None]
    assert machine.get("b") == [None]
    statistics = machine.tier.statistics().disks[0]
    assert statistics.state == "off"
    assert "ENODEV" in statistics.alarm


def test_what_was_being_written_is_leased_no_more_when_its_disk_is_off(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.put_on_disk("a")
    machine.put_names("b")
    machine.stuck = lambda job: isinstance(job, Write)
    machine.begin_writing()
    (disk,) = machine.disks
    with monkeypatch.context() as patch:
        finish = disk.finish
        patch.setattr(disk, "finish", lambda job: Result(finish(job).job, errno.ENODEV))
        assert machine.get("a") == [None]
    assert machine.tier.statistics().disks[0].state == "off"
    assert machine.core.statistics().leases == 1
    machine.stuck = lambda job: False  # the write succeeds, and is not flushed
    machine.settle()
    assert machine.core.statistics().leases == 0
    assert machine.peek("b") == [content("b")]


def test_a_full_disk_is_as_large_as_it_could_be(make_machine: MakeMachine) -> None:
    machine = make_machine(segments=8)
    machine.disks[0].free_bytes = 3 * 256 * 1024
    for number in range(600):
        machine.put_names(f"a{number}")
        if number % 8 == 0:
            machine.settle(0.1)
            machine.forget_memory()
    statistics = machine.tier.statistics().disks[0]
    assert statistics.state == "healthy"
    assert statistics.capacity_bytes < 8 * 256 * 1024
    assert statistics.alarm.startswith("the disk has less room than it was given: its file system is full (ENOSPC)")
    machine.put_on_disk("last")
    machine.disks[0].free_bytes = 8 * 256 * 1024
    machine.restart()
    assert machine.tier.statistics().disks[0].capacity_bytes == 8 * 256 * 1024
    assert machine.tier.statistics().disks[0].alarm == ""


# Reads before writes


def test_while_a_disk_is_read_it_is_written_one_job_at_a_time_at_a_rate(make_machine: MakeMachine) -> None:
    machine = make_machine(
        pool_bytes=64 << 20,
        segments=160,
        settings=TierSettings(admission="eager", group_s=0.001, write_rate_beside_reads=4e6),
    )
    length = 64 * 1024
    machine.put({"read": content("read", length)})
    assert machine.on_disk("read")
    machine.stuck = is_block_read
    machine.tier.want(["read"], machine.clock.now + 100)
    machine.step()
    begin = machine.clock.now
    for start in range(0, 16, 2):
        machine.put({f"{start + i}": content(f"{start + i}", length) for i in range(2)})
        machine.settle(0.002)
    machine.until(machine.tier.flush(None, begin + 1000))
    seconds = machine.clock.now - begin
    assert seconds >= 16 * length / 4e6 * 0.8
    machine.stuck = lambda job: False
    machine.settle()


def test_what_a_disk_reads_for_itself_does_not_slow_writing_down(make_machine: MakeMachine) -> None:
    machine = make_machine(settings=TierSettings(admission="eager", group_s=0.001, write_rate_beside_reads=1.0))
    begin = machine.clock.now
    for number in range(8 * SEGMENT_BYTES // UNIT_BYTES):  # segments are overwritten, after their footers were read
        machine.put_names(f"k{number}")
        assert machine.flush() == 0
    assert any(isinstance(job, ReadInto) for job in machine.disks[0].history)
    assert machine.clock.now - begin < 10


# The end


def test_a_store_that_is_closed_keeps_what_was_queued(make_machine: MakeMachine) -> None:
    machine = make_machine(settings=TierSettings())
    machine.put_names(*NAMES)
    wait = machine.tier.close(machine.clock.now + 100)
    assert machine.until(wait).unmet == 0
    assert machine.tier.close(machine.clock.now + 100) is wait
    assert machine.volumes[0].statistics().snapshots == 1
    machine.restart()
    assert machine.get(*NAMES) == [content(name) for name in NAMES]


@pytest.mark.parametrize(("admission", "found"), [("lazy", b"\2\2"), ("eager", b"\2\2"), ("second-use", b"\0\0")])
def test_a_store_that_is_closed_keeps_what_was_only_in_memory_unless_reads_decide(
    make_machine: MakeMachine, admission: Any, found: bytes
) -> None:
    machine = make_machine(settings=TierSettings(admission=admission, queue_s=1e-9, group_bytes=UNIT_BYTES))
    machine.put_names("a", "b")
    assert machine.flush("a") == 0
    for number in range(40):  # more than may wait
        machine.put_names(f"other {number}")
    machine.put({"a": b"newer"})
    machine.settle()
    assert machine.tier.exists(["a", "b"]) == b"\1\1"
    machine.until(machine.tier.close(machine.clock.now + 100))
    machine.restart()
    assert machine.tier.exists(["a", "b"]) == found
    if found[0]:
        assert machine.get("a") == [b"newer"]


def test_closing_ends_at_its_deadline_even_if_a_disk_hangs(machine: Machine) -> None:
    machine.put_names("a")
    machine.stuck = lambda job: True
    begin = machine.clock.now
    wait = machine.until(machine.tier.close(begin + 5))
    assert wait.unmet == 1
    assert machine.clock.now == pytest.approx(begin + 5)


def test_the_index_is_saved_from_time_to_time_if_anything_was_written(machine: Machine) -> None:
    machine.put_names("a")
    machine.settle()
    for _ in range(3):
        machine.clock.now += 301
        machine.settle()
    assert machine.volumes[0].statistics().snapshots == 1


def test_whoever_drives_the_tier_is_told_of_work_and_sleeps_without(machine: Machine) -> None:
    machine.put_on_disk("warm")
    machine.clock.now += 301
    machine.settle()
    assert machine.tier.next_deadline() is None
    calls: list[str] = []
    machine.tier.on_work = lambda: calls.append("work")
    machine.put_names("a")
    assert calls == ["work"]
    assert machine.tier.next_deadline() == machine.clock.now
    machine.settle()
    calls.clear()
    machine.tier.want(["warm"], machine.clock.now + 9)
    assert calls


def test_an_older_block_does_not_return_when_both_disks_were_recovering_as_the_newer_one_was_put(
    make_machine: MakeMachine,
) -> None:
    """Neither was known to have the key then, and only one gets the newer block."""
    machine = make_machine(disks=2, segments=3)
    for name in ("a", "b"):
        machine.put_names(name)
        machine.settle()
    machine.crash()
    machine.put({"a": b"newer"})
    machine.start_jobs()
    machine.settle()
    assert machine.on_disk("a")
    machine.restart()
    for number in range(40):  # "b" is on the disk that has the newer block, which is full at last
        machine.put({"b": content(f"b {number}", SEGMENT_BYTES // 8)})
        machine.flush("b")
        machine.forget_memory()
    assert machine.volumes[1].statistics().recycled_segments > 3
    assert machine.get("a") in ([None], [b"newer"])


def test_more_blocks_than_one_request_may_have_become_durable_together(make_machine: MakeMachine) -> None:
    machine = make_machine(max_batch_keys=4)
    names = [f"block {number}" for number in range(16)]
    for first in range(0, 16, 4):
        machine.put_names(*names[first : first + 4])
    assert machine.flush(*names) == 0
