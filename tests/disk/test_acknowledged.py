"""A purge or deletion that has returned holds for every state that may survive: on
disks that are not written any more, in snapshots, on disks that were away. What may be
back is an error.
"""

import errno
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from infinistore.disk.jobs import Flush, Replace, Result, Write, WriteSuperblock
from infinistore.disk.volume import Volume
from infinistore.errors import DiskFailed
from tests.disk.conftest import Machine
from tests.tables import for_each

NAMES = [f"block {number}" for number in range(4)]
WRITES = (Write, Flush, Replace, WriteSuperblock)


def purge(machine: Machine) -> None:
    machine.take(machine.tiers.purge(50.0))


def delete(machine: Machine) -> None:
    machine.take(machine.tiers.delete([*NAMES, "in memory"], 50.0))


REMOVALS = (purge, delete)


def filled(disks: int) -> Machine:
    machine = Machine(disks=disks)
    machine.settle()
    for name in NAMES:
        machine.put_names(name)
        machine.flush(name)
    machine.forget_memory()
    machine.put_names("in memory")
    return machine


def is_acknowledged(machine: Machine, remove: Callable[[Machine], None]) -> bool:
    try:
        remove(machine)
    except DiskFailed:
        return False
    return True


def has_any(machine: Machine) -> bool:
    return machine.get(*NAMES, "in memory") != [None] * (len(NAMES) + 1)


def moments(machine: Machine) -> Iterator[int]:
    """Pass through the states of what the tier does now, until it rests."""
    for moment in count():
        yield moment
        while not any(disk.under_way for disk in machine.disks):
            machine.start_jobs()
            deadline = machine.tier.next_deadline()
            if not any(disk.under_way for disk in machine.disks) and (deadline or 1e9) > machine.clock.now:
                return
        disk = next(disk for disk in machine.disks if disk.under_way)
        machine.finish(disk, disk.under_way[0])
        machine.start_jobs()


@for_each(remove=REMOVALS, disks=(1, 2))
def test_what_comes_while_a_store_ends_is_done_or_refused(remove: Callable[[Machine], None], disks: int) -> None:
    answers = []
    for at in count():
        machine = filled(disks)
        machine.tier.close(machine.clock.now + 100)
        is_over = at not in moments(machine)
        answers.append(is_acknowledged(machine, remove))
        machine.settle(200.0)
        machine.restart()
        assert not (answers[-1] and has_any(machine)), f"after {at} jobs"
        machine.close()
        if is_over:
            break
    assert set(answers) == {True, False}, "in time, and too late"


def fail_writes(machine: Machine, number: int) -> None:
    """Let a disk be read-only from now on."""
    disk = machine.disks[number]
    finish = disk.finish

    def failing(job: object) -> Result:
        if isinstance(job, WRITES):
            disk.under_way.remove(job)
            return Result(job, errno.EROFS)
        return finish(job)  # type: ignore[arg-type]

    disk.finish = failing  # type: ignore[method-assign]
    for name in NAMES:  # some for each
        machine.put_names(f"another {name}")
        machine.flush(f"another {name}")
    assert machine.tier.statistics().disks[number].state == "read-only"


def heal(machine: Machine) -> None:
    for disk in machine.disks:
        vars(disk).pop("finish", None)


@for_each(remove=REMOVALS)
def test_what_a_disk_that_is_not_written_any_more_brings_back_is_told(remove: Callable[[Machine], None]) -> None:
    machine = filled(1)
    fail_writes(machine, 0)
    assert not is_acknowledged(machine, remove)
    assert not has_any(machine), "it is done as long as the store is open"
    heal(machine)
    machine.restart()
    assert has_any(machine)
    machine.close()


@for_each(remove=REMOVALS)
def test_of_several_disks_one_that_is_given_up_brings_nothing_back(remove: Callable[[Machine], None]) -> None:
    machine = filled(2)
    fail_writes(machine, 1)
    machine.settle()
    assert is_acknowledged(machine, remove), "the other knows that it is to be emptied"
    heal(machine)
    machine.restart()
    assert not has_any(machine)
    machine.close()


@pytest.mark.parametrize("remove", REMOVALS)
def test_what_an_internal_error_leaves_on_a_disk_is_told(
    remove: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = filled(1)

    def planted(volume: Volume) -> bool:
        raise ZeroDivisionError("as told")

    with monkeypatch.context() as patched:
        patched.setattr(Volume, "step", planted)
        machine.settle()
    assert not is_acknowledged(machine, remove)
    machine.close()


def test_a_disk_that_was_away_brings_nothing_back_whenever_the_store_ends() -> None:
    for at in count():
        machine = filled(2)
        both = machine.disks
        machine.disks = both[:1]
        machine.restart()
        delete(machine)
        machine.disks = both
        machine.crash()
        is_over = at not in moments(machine)
        machine.tier.close(machine.clock.now + 100)
        machine.settle(200.0)
        machine.restart()
        assert not has_any(machine), f"after {at} jobs"
        machine.close()
        if is_over:
            return
