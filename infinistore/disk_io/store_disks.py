"""The disks of one store, opened: their volumes, and the runner of their jobs.

A server and an embedded store open their disks here, put them below their memory with
`StoreDisks.below`, and run the jobs.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from random import Random

import attrs

from infinistore.core import StoreCore
from infinistore.disk.settings import TierSettings
from infinistore.disk.tier import DiskTier
from infinistore.disk.tiers import Tiers
from infinistore.disk.volume import Volume
from infinistore.disk_io.folder import DiskFolder, open_folders
from infinistore.disk_io.runner import DiskRunner, ThreadRunner
from infinistore.disk_settings import DiskPlace
from infinistore.statistics import DiskStatistics, DiskTierStatistics


@attrs.frozen
class StoreDisks:
    """The disks of one store. The runner has to be closed before the store's pool."""

    volumes: Sequence[Volume]
    runner: DiskRunner
    folders: Sequence[DiskFolder]
    """The folder of each volume, by number."""

    def below(self, core: StoreCore, *, clock: Callable[[], float], settings: TierSettings, random: Random) -> Tiers:
        """Put these disks below a store, whose core has a journal and this clock."""
        tier = DiskTier(core, clock=clock, settings=settings, random=random)
        for volume in self.volumes:
            tier.add(volume)
        return Tiers(core, tier, self._describe)

    def _describe(self, found: DiskTierStatistics) -> DiskTierStatistics:
        """Add what the folders and the runner say of each disk."""
        running = self.runner.statistics()
        numbers = {volume.name: volume.number for volume in self.volumes}

        def described(disk: DiskStatistics) -> DiskStatistics:
            number = numbers[disk.path]
            jobs = running.get(number)
            return attrs.evolve(
                disk,
                path=str(self.folders[number].path),
                direct=self.folders[number].direct,
                queued_reads=0 if jobs is None else jobs.queued_reads,
                queued_writes=0 if jobs is None else jobs.queued_writes,
            )

        return attrs.evolve(found, disks=list(map(described, found.disks)))


def open_disks(places: Sequence[DiskPlace], random: Random) -> StoreDisks:
    """Lock and open disks; their indexes come back while the store serves.

    `random` draws what nobody may foresee: ids of disks and seeds of hashes. Blocks for
    some milliseconds a disk.

    Raises:
        ConfigError: a disk cannot be used. Nothing on it was changed.
        StoreUnavailable: this process gets no more threads.
    """
    with ExitStack() as undo:
        folders = open_folders([(place.folder, place.size_bytes) for place in places])
        for folder in folders:
            undo.callback(folder.discard)  # which may be closed already
        volumes = [
            _volume(number, folder, place.size_bytes, random)
            for number, (folder, place) in enumerate(zip(folders, places, strict=True))
        ]
        runner = ThreadRunner()
        undo.callback(runner.close, timeout_s=0.0)
        for volume, folder in zip(volumes, folders, strict=True):
            volume.name = str(folder.path)
            runner.add(volume.number, folder)
        undo.pop_all()
    return StoreDisks(volumes, runner, folders)


def _volume(number: int, folder: DiskFolder, size_bytes: int, random: Random) -> Volume:
    superblock = folder.superblock()
    if not superblock:
        uuid = random.getrandbits(128).to_bytes(16, "little")
        return Volume.create(number, capacity_bytes=size_bytes, uuid=uuid, seed=random.getrandbits(64))
    return Volume.open(
        number,
        superblock=superblock,
        files=folder.files(),
        capacity_bytes=size_bytes,
        name=f"disk {folder.path}",
    )
