"""A store without disks, and errors that nobody expects, inside of the tier: they end a
disk, or all, and nothing else. Nobody waits for ever, and nobody is told that something
is durable which is not.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from infinistore.disk.demotion import Demotion
from infinistore.disk.jobs import Flush, ReadInto, Write
from infinistore.disk.promotion import Promotion
from infinistore.disk.tiers import Steps, Tiers
from infinistore.disk.volume import Volume
from infinistore.disk.waits import Wait
from infinistore.errors import DeadlineExceeded, DiskFailed, LimitExceeded
from tests.disk.conftest import FOREVER, Machine, content

MakeMachine = Callable[..., Machine]
NAMES = [f"block {number}" for number in range(8)]


class Planted(Exception):
    """An error that nobody expects."""


def plant(monkeypatch: pytest.MonkeyPatch, of: type, name: str, when: Callable[..., bool] = lambda *_: True) -> None:
    """Let a method raise."""
    real = getattr(of, name)

    def planted(self: Any, *arguments: Any, **options: Any) -> Any:
        if when(self, *arguments):
            raise Planted("as told")
        return real(self, *arguments, **options)

    monkeypatch.setattr(of, name, planted)


def guarded(machine: Machine) -> Machine:
    """Let a machine use its tier as a server does."""
    machine.driven = machine.tiers
    return machine


def begun(steps: Steps[int]) -> Wait:
    """Begin a request, and return what it waits for."""
    wait = next(steps)
    assert wait is not None
    return wait


def check_memory_only(machine: Machine, *in_memory: str) -> None:
    """Check that the store serves on, and that its disks are off."""
    assert machine.get(*in_memory, "missing") == [*map(content, in_memory), None]
    assert machine.tiers.exists([*in_memory, "missing"]) == b"\1" * len(in_memory) + b"\0"
    assert machine.tiers.match_prefix([*in_memory, "missing"]).matched == len(in_memory)
    held = machine.tiers.prefetch(machine.client, in_memory, 9.0)
    assert machine.tiers.release_hold(held.hold_id)
    assert machine.tiers.hold_prefix(machine.client, in_memory, 9.0).matched == len(in_memory)
    for disk in machine.tier.statistics().disks:
        assert disk.state == "off"
        assert "Planted: as told" in disk.alarm
        assert "start the store again" in disk.alarm
    for number in range(100):  # and nothing grows
        machine.put_names(f"more {number % 8}")
    assert machine.core.journal is not None
    assert len(machine.core.journal) == 0
    assert machine.tiers.jobs() == []
    assert machine.tiers.next_deadline() is None
    assert machine.until(machine.tiers.close(FOREVER)).unmet
    assert machine.core.statistics().reserved_bytes == 0
    machine.core.expire_holds()
    machine.clock.now += 10
    machine.forget_memory()  # nothing is pinned


def test_without_disks_the_answers_are_those_of_memory(machine: Machine) -> None:
    tiers = Tiers(machine.core)
    machine.put_names("a", "b", "d")
    assert tiers.exists(["a", "c"]) == b"\1\0"
    assert (tiers.match_prefix(["a", "c"]).matched, tiers.match_prefix(["a", "c"]).in_memory) == (1, 1)
    keys, waits = tiers.fetch(["a", "c"], FOREVER)
    assert (keys, list(waits)) == (["a", "c"], [])
    held = tiers.prefetch(machine.client, ["a", "c", "d"], 9.0)
    assert (held.reading, held.skipped) == (0, 0)
    machine.core.evict(0.0, 0.0)
    assert tiers.exists(["a", "b", "d"]) == b"\1\0\1"
    assert tiers.release_hold(held.hold_id)
    assert machine.take(tiers.flush(["a", "a"], FOREVER)) == 0
    assert machine.take(tiers.delete(["a", "c"], FOREVER)) == 1
    assert machine.take(tiers.purge(FOREVER)) == 1
    assert (tiers.statistics(), tiers.jobs(), tiers.next_deadline(), tiers.close(FOREVER).unmet) == (None, [], None, 0)


def raises_failure(wait: Wait) -> bool:
    assert wait.settled
    with pytest.raises(DiskFailed, match=r"Planted: as told.*[Ss]tart the store again"):
        wait.check()
    return True


@pytest.mark.parametrize("part", [(Demotion, "work"), (Demotion, "durable"), (Promotion, "work")])
def test_an_error_in_a_decision_turns_the_disks_off(
    machine: Machine, part: tuple[type, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    guarded(machine)
    machine.put_on_disk("old")
    machine.put_names("a", "b")
    plant(monkeypatch, *part)
    flush = begun(machine.tiers.flush(["a"], FOREVER))
    read = next(machine.tiers.fetch(["old"], FOREVER)[1])
    deletion = begun(machine.tiers.delete(["old", "b"], FOREVER))
    purge = begun(machine.tiers.purge(FOREVER)) if part[0] is Promotion else flush
    with caplog.at_level(logging.ERROR):
        machine.settle()
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert all(map(raises_failure, (flush, deletion, purge)))
    assert read.settled
    for late in (machine.tiers.flush(["a"], FOREVER), machine.tiers.delete(["missing"], FOREVER)):
        assert raises_failure(begun(late))
    check_memory_only(machine, "a")
    with pytest.raises(DiskFailed, match="Planted: as told"):
        machine.take(machine.tiers.purge(FOREVER))
    assert len(machine.core) == 0


def test_an_error_while_somebody_asks_finds_what_is_in_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded(machine)
    machine.put_names("a")
    machine.settle()
    plant(monkeypatch, Volume, "find")
    plant(monkeypatch, Volume, "contains")
    assert machine.tiers.exists(["a", "b"]) == b"\1\0"
    assert list(machine.tiers.fetch(["b"], FOREVER)[1]) == []
    check_memory_only(machine, "a")


def test_a_request_that_is_refused_turns_nothing_off(machine: Machine) -> None:
    guarded(machine)
    machine.put_names("a")
    with pytest.raises(LimitExceeded):
        machine.tiers.prefetch(machine.client, ["a"], 1e9)
    assert machine.tier.statistics().disks[0].state == "healthy"


def test_what_a_disk_still_reads_and_writes_stays_pinned(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    guarded(machine)
    machine.put_on_disk("old")
    machine.stuck = lambda job: isinstance(job, ReadInto | Write)
    machine.put_names("a")
    machine.begin_writing()
    assert not next(machine.tiers.fetch(["old"], FOREVER)[1]).settled
    machine.start_jobs()
    plant(monkeypatch, Demotion, "work")
    machine.settle()
    machine.core.evict(0.0, 0.0)
    assert machine.peek("a") == [content("a")]
    assert machine.core.statistics().reserved_bytes > 0
    machine.stuck = lambda job: False
    machine.settle()
    check_memory_only(machine, "a")


@pytest.mark.parametrize("method", ["done", "step", "events", "jobs"])
def test_an_error_in_one_volume_turns_that_disk_off_and_no_other(
    make_machine: MakeMachine, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = guarded(make_machine(disks=2))
    machine.put_apart(*NAMES)
    plant(monkeypatch, Volume, method, lambda volume, *_: volume.number == 0)
    names = [f"new {number}" for number in range(8)]
    for name in names:
        machine.put_names(name)
    assert machine.flush(*names) == 0  # on the other disk
    assert [disk.state for disk in machine.tier.statistics().disks] == ["off", "healthy"]
    machine.forget_memory()
    assert machine.get(*names) == list(map(content, names))
    assert 0 < sum(block is not None for block in machine.get(*NAMES)) < len(NAMES)
    assert machine.delete(*names[:2]) == 2
    assert machine.take(machine.tiers.purge(9.0)) > 0
    assert machine.until(machine.tiers.close(FOREVER)).unmet == 0


def test_an_error_in_the_result_of_a_job_settles_who_waits_for_that_disk(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded(machine)
    machine.put_on_disk("old")
    plant(monkeypatch, Volume, "done", lambda _, result: isinstance(result.job, Flush))
    machine.put_names("a")
    flush = begun(machine.tiers.flush(["a"], 9.0))
    deletion = begun(machine.tiers.delete(["old"], 9.0))
    machine.settle(most_s=1.0)
    assert (flush.settled, flush.unmet, deletion.settled, deletion.unmet) == (True, 1, True, 1)
    assert machine.get("a") == [content("a")]
    assert machine.tier.statistics().disks[0].state == "off"
    machine.forget_memory()  # nothing is pinned


def test_an_error_while_a_disk_recovers_ends_what_waits_for_its_index(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = make_machine()
    machine.put_on_disk("old")
    plant(monkeypatch, Volume, "done")
    machine.crash()
    guarded(machine)
    purge = begun(machine.tiers.purge(9.0))
    machine.put_names("a")
    machine.settle(most_s=1.0)
    assert (purge.settled, purge.unmet) == (True, 1)
    assert machine.get("a", "old") == [content("a"), None]
    assert machine.tier.statistics().disks[0].state == "off"


def test_a_deletion_that_a_disk_did_not_make_durable_in_time_is_told_so(machine: Machine) -> None:
    machine.put_on_disk("a")
    machine.stuck = lambda job: isinstance(job, Flush)
    with pytest.raises(DeadlineExceeded, match="may be back"):
        machine.take(machine.tiers.delete(["a"], 1.0))
