"""The disks of a server: a plug of the world.

They survive the servers that use them, unless a crash takes them along. Each job takes
a while of virtual time, so that results come in any order, and may hang. What goes
wrong with a disk, and what it keeps when the power fails, `disk` says.
"""

import os
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias, cast

import attrs

from infinistore.config import ServerConfig
from infinistore.disk.format import is_unwritten, most_snapshot_bytes
from infinistore.disk.jobs import Job, Result
from infinistore.disk.volume import Volume
from infinistore.disk_io.folder import DiskFolder
from infinistore.disk_io.runner import DiskRunner, RunnerStatistics
from infinistore.disk_io.store_disks import StoreDisks
from infinistore.disk_settings import DiskPlace
from infinistore.server.environment import Environment
from tests.simulation.clock import Timer
from tests.simulation.disk import SUPERBLOCK, DiskFaults, SimulatedDisk
from tests.simulation.nodes import ServerNode
from tests.simulation.world import Plug, World

__all__ = ["DiskSettings", "SimulatedDisks"]

_KIB = 1024
_CONFIGURED_BYTES = 64 * _KIB * _KIB  # the least that a configuration takes; the volumes are smaller
_SUPERBLOCK_BYTES = 8 * _KIB
_FAULTS = tuple(field.name for field in attrs.fields(DiskFaults))
_Note: TypeAlias = Callable[[SimulatedDisk, str], None]


@attrs.frozen(kw_only=True)
class DiskSettings:
    """The disks of a server, how slow they are, and what goes wrong with them."""

    disks: int = 0
    segments: int = 16
    segment_bytes: int = 256 * _KIB
    admission: str = "eager"
    compress: bool = False
    wait_s: float = 1.0
    """How long reads wait for them."""
    most_delay_s: float = 0.002
    """How long a job takes at most, if it does not hang."""
    faults: tuple[tuple[str, float], ...] = ()
    """Those of `DiskFaults`, each with its chance."""
    rot: float = 0.0
    """That a bit flips somewhere, for each job."""
    hang: float = 0.0
    """That a job takes up to `most_hang_s`."""
    most_hang_s: float = 20.0

    @property
    def may_fail(self) -> bool:
        """Whether anything goes wrong but crashes."""
        return bool(self.faults or self.rot or self.hang)

    @classmethod
    def choose(cls, chance: random.Random) -> "DiskSettings":
        """Choose disks that have some kinds of faults, or none."""
        wanted = chance.choice([0.0, 0.0, 0.3, 0.6])
        faults = [(name, chance.choice([0.003, 0.02])) for name in _FAULTS if chance.random() < wanted]
        return cls(
            disks=chance.choice([1, 1, 2]),
            segments=chance.choice([2, 3, 16, 16]),
            segment_bytes=chance.choice([64, 64, 256]) * _KIB,
            admission=chance.choice(["eager", "eager", "lazy", "second-use"]),
            wait_s=chance.choice([0.02, 1.0]),
            most_delay_s=chance.choice([0.0005, 0.005, 0.05]),
            faults=tuple(faults),
            rot=0.01 if chance.random() < wanted else 0.0,
            hang=0.003 if chance.random() < wanted else 0.0,
            most_hang_s=chance.choice([1.0, 30.0]),
            compress=chance.random() < 0.5,
        )


class SimulatedDisks(Plug):
    """The disks of one server."""

    def __init__(self, settings: DiskSettings) -> None:
        self.settings = settings
        self.disks: list[SimulatedDisk] = []
        self._runner: _Runner | None = None
        self._volumes: list[Volume] = []
        self._are_new = True
        self._is_healed = False

    def start(self, world: World) -> None:
        """The world begins."""
        self.world = world
        self._random: random.Random = world.generator("disks")
        for number in range(self.settings.disks):
            disk = SimulatedDisk(world.generator(f"disk {number}"), number)
            disk.faults = DiskFaults(**dict(self.settings.faults))
            self.disks.append(disk)

    def config(self, server: ServerNode, config: ServerConfig) -> ServerConfig:
        """Return the configuration of a server with these disks."""
        places = tuple(DiskPlace(Path(f"/simulated/{disk.number}"), _CONFIGURED_BYTES) for disk in self.disks)
        settings = self.settings
        return attrs.evolve(
            config,
            disks=places,
            disk_admission=settings.admission,
            disk_compress=settings.compress,
            disk_wait_s=settings.wait_s,
        )

    def environment(self, server: ServerNode, environment: Environment) -> Environment:
        """Return what a server that starts takes from its machine."""
        history = server.history
        history.lives[-1].recovers = not self._are_new
        self._are_new = False

        def note(disk: SimulatedDisk, fault: str) -> None:
            history.disks_failed = True
            self.world.fault(f"DISK_{fault.upper()}", f"disk {disk.number}")

        def open_disks(places: Sequence[DiskPlace], chance: random.Random) -> StoreDisks:
            self._runner = _Runner(self, note)
            self._volumes = [self.open_volume(disk, chance) for disk in self.disks]
            return StoreDisks(self._volumes, self._runner, [_folder(place) for place in places])

        for disk in self.disks:
            disk.on_fault = partial(note, disk)
        return attrs.evolve(environment, open_disks=open_disks)

    def open_volume(self, disk: SimulatedDisk, chance: random.Random) -> Volume:
        """Open what is on a disk, or make it a volume, as a server does that starts."""
        segments, length = self.settings.segments, self.settings.segment_bytes
        capacity_bytes = segments * length + most_snapshot_bytes(segments, length) + _SUPERBLOCK_BYTES
        superblock = disk.contents(SUPERBLOCK)
        if not is_unwritten(superblock):
            return Volume.open(disk.number, superblock=superblock, files=disk.files(), capacity_bytes=capacity_bytes)
        return Volume.create(
            disk.number,
            capacity_bytes=capacity_bytes,
            uuid=chance.getrandbits(128).to_bytes(16, "little"),
            seed=chance.getrandbits(64),
            segment_bytes=length,
        )

    def kill(self, server: ServerNode) -> None:
        """A server is about to crash: no job that is under way ends."""
        if self._runner is not None:
            self._runner.lose_power()

    def crash(self, server: ServerNode, *, keeps_disk: bool) -> None:
        """A server has crashed, perhaps with its disks."""
        if not keeps_disk:
            self._are_new = True
            for disk in self.disks:
                self.world.trace.add(f"disk {disk.number}", "wiped")
                disk.wipe()
                disk.faults = DiskFaults() if self._is_healed else DiskFaults(**dict(self.settings.faults))

    def note_losses(self, server: ServerNode) -> None:
        """Note whether the disks have overwritten or damaged anything."""
        assert server.server is not None
        disks = server.server.context.disks.statistics()
        if disks is not None:
            life = server.history.lives[-1]
            life.recycled = any(volume.statistics().recycled_segments for volume in self._volumes)
            life.damaged_blocks = sum(one.damaged_blocks for one in disks.disks)

    def heal(self) -> None:
        """Disks are well and fast, and what hung comes back."""
        self._is_healed = True
        for disk in self.disks:
            disk.faults.heal()
        if self._runner is not None:
            self._runner.finish_hung()

    def duration_s(self) -> tuple[float, bool]:
        """Choose how long a job takes, and whether that is a hang."""
        settings, chance = self.settings, self._random.random
        if self._is_healed:
            return 0.0005 * chance(), False
        if settings.hang and chance() < settings.hang:
            return settings.most_hang_s * chance(), True
        return settings.most_delay_s * chance() ** 2, False

    def rot(self, disk: SimulatedDisk) -> bool:
        """Perhaps flip a bit of a segment; return whether one was flipped."""
        if self._is_healed or not self.settings.rot or self._random.random() >= self.settings.rot:
            return False
        files = [(name, length) for name, length in disk.files().items() if length and name.startswith("segments/")]
        if not files:
            return False
        name, length = self._random.choice(files)
        disk.rot(name, self._random.randrange(length), self._random.randrange(8))
        return True


class _Runner(DiskRunner):
    """Runs the jobs of one server, each for a while."""

    def __init__(self, plug: SimulatedDisks, note: _Note) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._plug = plug
        self._note = note
        self._is_closed = False
        self._results: list[Result] = []
        self._hung: dict[Job, Timer] = {}

    def add(self, volume: int, folder: DiskFolder) -> None:
        """Do nothing: it serves all disks from the start."""

    def submit(self, jobs: Iterable[Job]) -> None:
        """Begin jobs."""
        if self._is_closed:
            return
        for job in jobs:
            disk = self._plug.disks[job.volume]
            disk.start([job])
            seconds, hangs = self._plug.duration_s()
            timer = self._plug.world.clock.after(seconds, partial(self._finish, disk, job))
            if hangs:
                self._hung[job] = timer
                self._note(disk, "hang")

    def _finish(self, disk: SimulatedDisk, job: Job) -> None:
        self._hung.pop(job, None)
        if self._is_closed:
            return
        result = disk.finish(job)
        disk.history.clear()
        if self._plug.rot(disk):
            self._note(disk, "rot")
        self._plug.world.trace.add(f"disk {disk.number}", type(job).__name__, result.errno, result.transferred_bytes)
        if not self._results:
            os.eventfd_write(self.fd, 1)
        self._results.append(result)

    def finish_hung(self) -> None:
        """Finish what hangs."""
        for job, timer in list(self._hung.items()):
            timer.cancel()
            self._finish(self._plug.disks[job.volume], job)

    def take(self) -> list[Result]:
        """Return the results since the last call."""
        if self._results:
            os.eventfd_read(self.fd)
        results, self._results = self._results, []
        return results

    def statistics(self) -> dict[int, RunnerStatistics]:
        """Say nothing."""
        return {}

    def lose_power(self) -> None:
        """No job ends any more, and what was not flushed may be lost."""
        self._is_closed = True
        for disk in self._plug.disks:
            disk.crash()

    def close(self, *, timeout_s: float) -> bool:
        """End. If jobs hang, the power fails, too: they are done in part, or not."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if not self._is_closed and any(disk.under_way for disk in self._plug.disks):
            self.lose_power()
        self._is_closed = True
        return True


def _folder(place: DiskPlace) -> DiskFolder:
    """Return as much of a folder as statistics need."""
    return cast(DiskFolder, SimpleNamespace(path=place.folder, direct=True))
