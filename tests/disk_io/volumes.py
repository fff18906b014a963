"""Volumes on real disks: made, filled, and ended in one way or another."""

import select
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from xxhash import xxh3_64_intdigest

from infinistore.disk.log import Durable
from infinistore.disk.volume import Volume
from infinistore.disk_io import ThreadRunner, open_folder
from infinistore.sizes import MIB
from tests.disk_io.driving import memory_of

__all__ = ["fill_disk"]


def fill_disk(
    path: Path,
    batches: list[Mapping[str, bytes]],
    *,
    capacity_bytes: int = 8 * MIB,
    segment_bytes: int = MIB,
    clean: bool = True,
) -> None:
    """Make a disk, and append batches; an empty block is a tombstone. Without `clean`,
    it ends as in a crash after the last batch became durable.
    """
    runner = ThreadRunner()
    runner.add(0, open_folder(path))
    volume = Volume.create(0, capacity_bytes=capacity_bytes, uuid=b"u" * 16, seed=7, segment_bytes=segment_bytes)
    driver = _Driver(volume, runner)
    driver.drive(lambda: volume.state == "open" and volume.room() > 0)
    for batch in batches:
        views = memory_of(*batch.values())
        checksums = list(map(xxh3_64_intdigest, views))
        tokens: list[int | None] = []

        def appended(keys: list[str], views: list[memoryview], checksums: list[int], tokens: list[int | None]) -> bool:
            tokens.append(volume.append(keys, list(map(len, views)), checksums, views))
            return tokens[-1] is not None

        driver.drive(partial(appended, list(batch), views, checksums, tokens))
        events: list[object] = []
        driver.drive(partial(events.__contains__, Durable(tokens[-1] or 0)), events)
    if clean:
        volume.close()
        driver.drive(lambda: volume.state == "closed")
    assert runner.close(timeout_s=60)


class _Driver:
    """Runs the jobs of a volume. Some may still run when `drive` returns."""

    def __init__(self, volume: Volume, runner: ThreadRunner) -> None:
        self._volume = volume
        self._runner = runner
        self._running = 0

    def drive(self, until: Callable[[], bool], events: list[object] | None = None) -> None:
        volume, runner = self._volume, self._runner
        while not until():
            more = volume.step()
            jobs = volume.jobs()
            self._running += len(jobs)
            runner.submit(jobs)
            if events is not None:
                events.extend(volume.events())
            if self._running and not more:
                select.select([runner.fd], [], [], 60)
            for result in runner.take():
                self._running -= 1
                volume.done(result)
