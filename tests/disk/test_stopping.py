"""An orderly stop keeps all that a crash at the same moment would have kept, and what
else there is room for.
"""

import random

from infinistore.disk.settings import Admission, TierSettings
from tests.disk.conftest import FOREVER, UNIT_BYTES, Machine, content
from tests.tables import for_each

NAMES = [f"block {number}" for number in range(300)]


class Watched(Machine):
    """A machine whose memory is larger than its disks."""

    def __init__(self, disks: int, seed: int = 0, admission: Admission = "eager") -> None:
        self.left: set[str] = set()
        """What the disks had when it was stopped."""
        settings = TierSettings(admission=admission, group_s=0.001, group_bytes=16 * UNIT_BYTES, wait_s=FOREVER)
        super().__init__(disks=disks, segments=3, pool_bytes=400 * UNIT_BYTES, settings=settings, seed=seed)
        self.settle()

    def durable(self) -> list[str]:
        """The names whose newest block is on a disk."""
        found = [volume.contains(NAMES) for volume in self.volumes]
        return [name for name, *there in zip(NAMES, *found, strict=True) if any(there)]

    def take_steps(self) -> None:
        """Do what can be done before a job ends: a segment that is about to be
        overwritten is none any more then."""
        self.start_jobs()
        while (deadline := self.tier.next_deadline()) is not None and deadline <= self.clock.now:
            self.start_jobs()

    def crashed(self) -> "Watched":
        """Another machine, where the power failed at this moment."""
        twin = Watched(len(self.disks))
        twin.disks = [disk.copy(random.Random(disk.number)) for disk in self.disks]
        twin.restart()
        return twin

    def stop(self) -> None:
        """End in order, and start again."""
        wait = self.until(self.tier.close(self.clock.now + 1000))
        assert wait.unmet == 0
        assert self.clock.now < wait.deadline - 900, "nobody waits for room that there will not be"
        self.left = set(self.durable())
        self.restart()

    def recycled(self) -> int:
        return sum(volume.statistics().recycled_segments for volume in self.volumes)

    def values(self, names: list[str]) -> dict[str, bytes | None]:
        return dict(zip(names, self.get(*names), strict=True))


@for_each(disks=(1, 2), seed=range(4), admission=("eager", "lazy"))
def test_a_stop_keeps_what_a_crash_would_have_kept(disks: int, seed: int, admission: Admission) -> None:
    machine, chance, numbers = Watched(disks, seed, admission), random.Random(seed), 0
    values: dict[str, bytes] = {}
    for _ in range(chance.randrange(20, 60)):
        names = chance.sample(NAMES, 12)
        if chance.random() < 0.1:
            machine.delete(*names)
            continue
        numbers += 1
        values |= {name: content(f"{name} {numbers}") for name in names}
        machine.put({name: values[name] for name in names})
        if chance.random() < 0.7:
            machine.flush(*names)
    if seed % 2:
        machine.settle()
    for _ in range(chance.randrange(8)):  # in the middle of something
        machine.take_steps()
        for disk in machine.disks:
            if disk.under_way:
                machine.finish(disk, disk.under_way[0])
    machine.take_steps()
    durable = machine.durable()
    crashed = machine.crashed()
    kept = {name: value for name, value in crashed.values(durable).items() if value is not None}
    assert len(kept) > 50
    assert kept == {name: values[name] for name in kept}
    machine.stop()
    assert set(kept) <= machine.left
    assert machine.values(list(kept)) == kept
    assert machine.recycled() <= crashed.recycled(), "what the start overwrites, to have a segment to write to"
    machine.close()
    crashed.close()


@for_each(disks=(1, 2))
def test_a_stop_writes_what_replaced_others_first_and_fills_the_disk(disks: int) -> None:
    machine = Watched(disks, admission="lazy")
    machine.put_names(*NAMES[:20])
    machine.flush(*NAMES[:20])
    machine.put({name: content(f"new {name}") for name in NAMES[:20]})
    for first in range(20, 300, 20):
        machine.put_names(*NAMES[first : first + 20])
    machine.stop()
    assert machine.values(NAMES[:20]) == {name: content(f"new {name}") for name in NAMES[:20]}
    there = sum(value is not None for value in machine.values(NAMES).values())
    assert there > 80 * disks, "what there was room for is there, too"
    assert not machine.recycled(), "a segment is left to write to"
    machine.close()
