"""Tombstones on several disks, in any order of events, against a model: who waits, for
how many, and what may come back.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from infinistore.disk import deletions as module
from infinistore.disk.deletions import Deletions
from infinistore.disk.waits import Wait
from tests.examples import examples

MOST = 2
KEYS = list("abcd")
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, unique=True)
SWITCHES = ["is_writable", "is_leaving", "is_recovering", "counts", "room", "hung"]
numbers = st.integers(0, 2)


@attrs.define(eq=False)
class Volume:
    """What a disk has: blocks that count, and blocks that a crash could bring back."""

    blocks: set[str] = attrs.Factory(set)
    old: set[str] = attrs.Factory(set)
    room: bool = True
    appended: list[list[str]] = attrs.Factory(list)

    def lingers(self, keys: list[str]) -> list[bool]:
        return [key in self.old for key in keys]

    def contains(self, keys: list[str]) -> list[bool]:
        return [key in self.blocks for key in keys]

    def forget(self, keys: list[str]) -> None:
        assert set(keys) <= self.old
        self.blocks.difference_update(keys)

    def append(self, keys: list[str], lengths: list[int], checksums: list[int], views: list[memoryview]) -> int | None:
        assert lengths == checksums == [0] * len(keys)
        assert [bytes(view) for view in views] == [b""] * len(keys)
        if not self.room:
            return None
        self.appended.append(keys)
        return len(self.appended) - 1


@attrs.define(eq=False)
class Disk:
    """A disk, and what the model knows of its tombstones: who waits for each."""

    volume: Volume = attrs.Factory(Volume)
    is_writable: bool = True
    is_leaving: bool = False
    is_recovering: bool = False
    traffic: Any = attrs.Factory(lambda: SimpleNamespace(hung=0))
    counts: bool = True
    waiting: dict[str, list[int]] = attrs.Factory(dict)
    under_way: dict[int, dict[str, list[int]]] = attrs.Factory(dict)


class Disks(list[Disk]):
    """All disks of a tier."""

    changed: list[str]

    def note_changes(self, keys: list[str]) -> None:
        self.changed = keys

    def counts(self, disk: Disk) -> bool:
        return disk.counts


class DeletionsMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.disks = Disks(Disk() for _ in range(3))
        self.failed: list[Disk] = []
        self.deletions = Deletions(cast(Any, self.disks))
        for disk in self.disks:
            self.deletions.add(cast(Any, disk))
        self.waits: list[Wait] = []
        self.pending: Counter[int] = Counter()
        self.unmet: Counter[int] = Counter()
        self.unsafe = 0

    def some_disk(self, number: int) -> Any:
        return self.disks[number % len(self.disks)]

    def end(self, tombstones: dict[str, list[int]], *, met: bool) -> None:
        for number in (number for waits in tombstones.values() for number in waits):
            self.pending[number] -= 1
            self.unmet[number] += not met

    def bury(self, disk: Disk, tombstones: dict[str, list[int]]) -> None:
        if disk.is_writable:
            for key, waits in tombstones.items():
                disk.waiting.setdefault(key, []).extend(waits)
        else:
            self.unsafe += len(tombstones)
            self.end(tombstones, met=False)

    @rule(number=numbers, keys=some_keys)
    def put(self, number: int, keys: list[str]) -> None:
        volume = self.some_disk(number).volume
        volume.blocks.update(keys)
        volume.old.update(keys)

    @rule(keys=some_keys)
    def delete(self, keys: list[str]) -> None:
        self.deletions.delete(keys)
        assert self.disks.changed == keys
        for disk in self.disks:
            assert disk.volume.blocks.isdisjoint(keys)
            self.bury(disk, {key: [] for key in keys if key in disk.volume.old})

    @rule(number=numbers, keys=some_keys)
    def outdate(self, number: int, keys: list[str]) -> None:
        newest = self.some_disk(number)
        self.deletions.outdate(newest, keys)
        for disk in self.disks:
            if disk is not newest and not disk.is_leaving:
                self.bury(disk, {key: [] for key in keys if key in disk.volume.old})

    @rule(keys=some_keys)
    def wait(self, keys: list[str]) -> None:
        self.waits.append(self.deletions.wait(keys, 7.0))
        number = len(self.waits) - 1
        for tombstones in (one for disk in self.disks for one in (disk.waiting, *disk.under_way.values())):
            for key in tombstones.keys() & set(keys):
                tombstones[key].append(number)
                self.pending[number] += 1
        for key in keys:
            lost = any(disk.counts for disk in self.failed)
            self.unmet[number] += lost or any(
                key in disk.volume.old for disk in self.disks if disk.counts and not disk.is_writable
            )

    @rule(in_flight=st.sets(st.tuples(numbers, st.sampled_from(KEYS))))
    def work(self, in_flight: set[tuple[int, str]]) -> None:
        flying = {(self.some_disk(number), key) for number, key in in_flight}
        before = [len(disk.volume.appended) for disk in self.disks]
        has_more = self.deletions.work(lambda disk, key: (cast(Any, disk), key) in flying)
        expected = False
        for disk, count in zip(self.disks, before, strict=True):
            keys = [key for key in disk.waiting if (disk, key) not in flying][:MOST]
            if not keys or not disk.is_writable or disk.is_recovering or disk.traffic.hung:
                assert len(disk.volume.appended) == count
                continue
            self.end({key: disk.waiting.pop(key) for key in keys if key in disk.volume.blocks}, met=True)
            keys = [key for key in keys if key in disk.waiting]
            if keys and disk.volume.room:
                assert disk.volume.appended[count:] == [keys]
                disk.under_way[count] = {key: disk.waiting.pop(key) for key in keys}
            expected |= disk.volume.room or not keys
        assert has_more == expected

    @rule(number=numbers, token=st.integers(0, 6), is_lost=st.booleans())
    def batch_ended(self, number: int, token: int, is_lost: bool) -> None:
        disk = self.some_disk(number)
        token = [*disk.under_way, 99][token % (len(disk.under_way) + 1)]
        tombstones = disk.under_way.pop(token, None)
        if is_lost:
            known = self.deletions.lost(disk, token)
            self.bury(disk, tombstones or {})
        else:
            known = self.deletions.durable(disk, token, 0.0)
            self.end(tombstones or {}, met=True)
            disk.volume.old.difference_update((tombstones or {}).keys() - disk.volume.blocks)
        assert known is (tombstones is not None)

    @rule(
        number=numbers, what=st.sampled_from(["is_writable", "is_leaving", "is_recovering", "counts", "room", "hung"])
    )
    def something_changes(self, number: int, what: str) -> None:
        disk = self.some_disk(number)
        thing = disk.volume if what == "room" else disk.traffic if what == "hung" else disk
        setattr(thing, what, not getattr(thing, what))
        if what == "is_writable" and not disk.is_writable:
            self.give_up(disk)

    def give_up(self, disk: Disk) -> None:
        self.deletions.give_up(cast(Any, disk))
        self.unsafe += len(disk.waiting)
        waiting, disk.waiting = disk.waiting, {}
        self.end(waiting, met=False)

    @rule(number=numbers, chance=st.integers(0, 5))
    def fail(self, number: int, chance: int) -> None:
        if chance or len(self.disks) == 1:
            return
        disk = self.some_disk(number)
        self.give_up(disk)
        self.disks.remove(disk)
        self.deletions.remove(disk)
        for tombstones in disk.under_way.values():
            self.end(tombstones, met=False)
        self.failed.append(disk)

    @invariant()
    def each_waits_for_what_is_not_durable(self) -> None:
        if not hasattr(self, "disks"):
            return
        for number, wait in enumerate(self.waits):
            assert (wait.pending, wait.unmet, wait.deadline) == (self.pending[number], self.unmet[number], 7.0)
            assert wait.settled == (not self.pending[number])
        assert self.deletions.unsafe_keys == self.unsafe
        assert self.deletions.blocked() == [cast(Any, disk) for disk in self.disks if disk.waiting]
        assert self.deletions.is_idle == (not any(disk.waiting or disk.under_way for disk in self.disks))


def test_whoever_waits_for_tombstones_hears_of_each_once_whatever_disks_do() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_BLOCKS_PER_GROUP", MOST)
        run_state_machine_as_test(
            DeletionsMachine, settings=settings(max_examples=examples(300), stateful_step_count=60)
        )


def test_who_waits_for_a_batch_on_a_disk_that_fails_does_not_get_it() -> None:
    disk = Disk(Volume(old={"a", "b"}))
    deletions = Deletions(cast(Any, Disks([disk])))
    deletions.add(cast(Any, disk))
    deletions.delete(["a", "b"])
    wait = deletions.wait(["a", "b"], 7.0)
    assert not deletions.work(lambda disk, key: True)
    assert deletions.work(lambda disk, key: False)
    deletions.remove(cast(Any, disk))
    assert (wait.settled, wait.unmet) == (True, 2)
