"""Purges of both tiers, while others write, read and evict."""

from collections.abc import Callable

import pytest

from infinistore.disk.settings import TierSettings
from infinistore.errors import DeadlineExceeded, DiskFailed
from tests.disk.conftest import FOREVER, Machine, content

MakeMachine = Callable[..., Machine]


def purge(machine: Machine, meanwhile: Callable[[], object] = lambda: None, within_s: float = FOREVER) -> int:
    """Purge as a store does, with something that happens when the disks are purged;
    return how many keys were in memory."""
    return machine.take(machine.tiers.purge(within_s), meanwhile)


def test_what_is_flushed_and_evicted_during_a_purge_is_gone_after_it(machine: Machine) -> None:
    machine.put_names("a")
    purge(machine, lambda: machine.on_disk("a"))
    assert machine.tier.exists(["a"]) == b"\0"
    machine.restart()
    assert machine.get("a") == [None]


def test_what_is_flushed_during_a_purge_does_not_come_back_after_a_crash(machine: Machine) -> None:
    machine.put_names("a", "b")
    assert purge(machine, lambda: machine.flush("a")) == 2
    machine.restart()
    assert machine.get("a", "b") == [None, None]


def test_what_a_second_use_writes_during_a_purge_does_not_come_back_after_a_crash(make_machine: MakeMachine) -> None:
    machine = make_machine(settings=TierSettings(admission="second-use", group_s=0.001))
    machine.put_names("a")

    def read_twice() -> None:
        machine.get("a")
        machine.get("a")
        machine.settle()
        assert machine.tier.statistics().disks[0].written_blocks == 1

    purge(machine, read_twice)
    machine.restart()
    assert machine.get("a") == [None]


def test_new_keys_stay(machine: Machine) -> None:
    machine.put_names("a")
    deleted = purge(machine, lambda: machine.put_names("new"))
    assert (deleted, machine.get("a", "new")) == (1, [None, content("new")])


def test_many_keys_are_deleted_some_at_a_time(make_machine: MakeMachine) -> None:
    machine = make_machine(pool_bytes=2100 * 64, unit_bytes=64)
    for number in range(1500):
        machine.put({f"key {number}": b"a"})
    steps = machine.tiers.purge(FOREVER)
    machine.until(next(steps))
    assert [next(steps), next(steps)] == [None, None]
    assert len(machine.core) == 1500 - machine.core.limits.max_batch_keys
    assert machine.take(steps) == 1500
    assert len(machine.core) == 0


def test_a_disk_that_does_not_answer_fails_the_purge_which_is_done_all_the_same(machine: Machine) -> None:
    machine.put_names("a")
    machine.stuck = lambda job: True
    with pytest.raises(DeadlineExceeded, match="may be back"):
        purge(machine, within_s=1.0)
    assert machine.peek("a") == [None]


def test_a_purge_ends_though_a_disk_that_is_given_up_never_recovers(machine: Machine) -> None:
    machine.put_on_disk("a")
    machine.crash()
    machine.stuck = lambda job: True
    machine.start_jobs()
    wait = machine.tier.purge(FOREVER)
    assert not machine.step() and not wait.settled
    for hangs in range(3):  # the third time, it is off
        for job in list(machine.disks[0].under_way) if hangs else []:
            machine.finish(machine.disks[0], job)
        machine.start_jobs()
        machine.clock.now += machine.settings.hang_s
        machine.start_jobs()
    assert machine.tier.statistics().disks[0].state == "off"
    machine.until(wait)
    assert machine.disks[0].under_way
    with pytest.raises(DiskFailed, match="may be back"):
        wait.check(in_time=True)
