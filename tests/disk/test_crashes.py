"""A crash at every job of a recorded run, and at every job of the recovery after it.

The run is the same each time, up to the job at which the power fails. Which of the
unflushed sectors are kept is chosen anew for each crash.
"""

import random
from collections.abc import Callable, Iterator

import pytest

from infinistore.disk.settings import TierSettings
from infinistore.disk.waits import Wait
from tests.disk.conftest import FOREVER, UNIT_BYTES, Machine, content
from tests.disk.model import Mark, Model

KEYS = [f"block {number}" for number in range(8)]
pytestmark = pytest.mark.nightly
SETTINGS = TierSettings(admission="eager", group_s=0.001, group_bytes=4 * UNIT_BYTES, wait_s=FOREVER)


class PowerFailure(Exception):
    """The job at which this run ends was finished."""


class Run:
    """One run of the same story, on disks that fail after `most_jobs` jobs."""

    def __init__(self, *, segments: int, disks: int, most_jobs: int | None) -> None:
        self.machine = Machine(segments=segments, disks=disks, settings=SETTINGS)
        self.machine.settle()
        self.model = Model()
        self.jobs = 0
        self.most_jobs = most_jobs
        self.numbers = 0
        self.is_closing = False
        self.has_reused = False

    def tell(self) -> None:
        """What happens. Each call waits until its jobs have ended."""
        self.put(*KEYS[:4])
        self.flush(*KEYS[:4])
        self.put(KEYS[1], KEYS[4])
        self.delete(KEYS[0])
        self.put(KEYS[0], KEYS[5])
        self.flush(KEYS[0], KEYS[1])
        self.machine.core.evict(0.0, 0.0)
        self.get(*KEYS)
        self.delete(KEYS[2], KEYS[5])
        self.purge()
        self.put(*KEYS[3:])
        self.flush(*KEYS[3:])
        self.delete(KEYS[3])
        for round_ in range(10):
            self.put(*(f"filler {round_} {number}" for number in range(8)), KEYS[6])
            self.flush(KEYS[6])
        self.get(*KEYS)
        self.close()

    def put(self, *keys: str) -> None:
        self.numbers += 1
        values = {key: content(f"{key} {self.numbers}") for key in keys}
        self.machine.put(values)
        self.model.put(values)

    def flush(self, *keys: str) -> None:
        flushed = self.model.flushing(keys)
        self.until(self.machine.tier.flush(keys, FOREVER), lambda: self.model.flushed(flushed))

    def delete(self, *keys: str) -> None:
        deletion = self.machine.tier.delete(keys, FOREVER)
        self.model.delete(keys)
        since = self.model.mark()
        self.until(deletion.wait, lambda: self.model.deletion_is_durable(keys, since))

    def purge(self) -> None:
        wait = self.machine.tier.purge(FOREVER)
        self.machine.core.purge()
        self.model.delete_all()
        since: Mark = self.model.mark()
        self.until(wait, lambda: self.model.all_deleted_durably(since))

    def get(self, *keys: str) -> None:
        self.until(self.machine.tier.want(keys, FOREVER), lambda: None)
        for key, value in zip(keys, self.machine.peek(*keys), strict=True):
            self.model.check(key, value)

    def close(self) -> None:
        self.is_closing = True
        self.until(self.machine.tier.close(self.machine.clock.now + 1000), lambda: None)

    def until(self, wait: Wait | None, then: Callable[[], None]) -> None:
        if wait is not None:
            while not wait.settled:
                self.end_a_job()
            if not wait.unmet:
                then()

    def end_a_job(self) -> None:
        machine = self.machine
        machine.start_jobs()
        jobs = [(disk, job) for disk in machine.disks for job in disk.under_way]
        if jobs:
            if self.jobs == self.most_jobs:
                raise PowerFailure
            self.jobs += 1
            machine.finish(*machine.random.choice(jobs))
        else:
            deadline = machine.tier.next_deadline()
            assert deadline is not None
            machine.clock.now = max(machine.clock.now, deadline)

    def crash(self, chance: random.Random) -> None:
        """Lose power, and open the disks again."""
        self.note_reuse()
        self.model.crash(orderly=self.is_closing)
        self.machine.disks = [disk.copy(chance) for disk in self.machine.disks]
        self.machine.crash()

    def note_reuse(self) -> None:
        """Note whether what was durable may be gone, because disks are full."""
        self.has_reused |= any(volume.statistics().recycled_segments for volume in self.machine.volumes)

    def check(self) -> None:
        """Recover, and read everything."""
        self.machine.settle()
        self.note_reuse()
        assert {disk.state for disk in self.machine.tier.statistics().disks} == {"healthy"}
        for key in KEYS:
            self.model.check(key, *self.machine.get(key), must=not self.has_reused)


@pytest.fixture(params=[(8, 1), (3, 1), (8, 2)], ids=["roomy", "full", "two disks"])
def make_run(request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    segments, disks = request.param
    runs: list[Run] = []

    def make(most_jobs: int | None = None) -> Run:
        runs.append(Run(segments=segments, disks=disks, most_jobs=most_jobs))
        return runs[-1]

    yield make
    for run in runs:
        run.machine.close()


def run_to(make_run: Callable[..., Run], most_jobs: int) -> Run:
    run = make_run(most_jobs)
    with pytest.raises(PowerFailure):
        run.tell()
    return run


def count_jobs(make_run: Callable[..., Run]) -> int:
    run = make_run()
    run.tell()
    run.crash(random.Random(0))
    run.check()
    return run.jobs


def test_a_crash_at_any_job_loses_nothing_durable_and_brings_nothing_back(make_run: Callable[..., Run]) -> None:
    count = count_jobs(make_run)
    assert count > 80
    for most_jobs in range(count):
        run = run_to(make_run, most_jobs)
        run.crash(random.Random(most_jobs))
        run.check()
        run.machine.close()


def test_a_crash_at_any_job_of_a_recovery_changes_nothing(make_run: Callable[..., Run]) -> None:
    count = count_jobs(make_run)
    for most_jobs in range(7, count, 29):
        for more in range(1000):
            run = run_to(make_run, most_jobs)
            run.crash(random.Random(most_jobs))
            run.jobs, run.most_jobs = 0, more
            try:
                while run.machine.volumes[-1].state == "recovering":
                    run.end_a_job()
            except PowerFailure:
                run.crash(random.Random(more))
                run.check()
                run.machine.close()
            else:
                assert more > 2
                break
