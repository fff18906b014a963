"""The SSD tier of a server: runs its jobs, and lets requests wait for it.

`run` is one task of the server. The tier decides, the runner does the I/O in threads,
and this module passes jobs to the one and results to the other. It promises:

- Whatever waits, waits no longer than its deadline, and may be cancelled at any time:
  what a disk reads or writes for it stays the tier's.
- What is late, fails or finds no room is a miss, never an error.

Leaves to others: which blocks are where, and when (`infinistore.disk`); files and
threads (`infinistore.disk_io`).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Final, Protocol, cast

import trio

from infinistore.config import ServerConfig
from infinistore.core.clients import Client
from infinistore.core.store import StoreCore
from infinistore.disk.guarded_tier import Fetch, GuardedTier, Purging, names_on_disk
from infinistore.disk.settings import Admission, TierSettings
from infinistore.disk.tier import DiskTier
from infinistore.disk.waits import Prefetch, PrefixMatch, Wait
from infinistore.disk_io.store_disks import StoreDisks
from infinistore.statistics import DiskTierStatistics

_REPLY_SHARE = 0.1
"""The part of a caller's time that is left for the reply, so that a miss arrives before
the caller gives up."""
_NO_DEADLINE_S = 24 * 3600.0
JOBS_END_S: Final = 5.0
"""How long jobs of disks that were begun are waited for at the end."""


class ServerDisks(Protocol):
    """All disks of a server, see `DiskService`."""

    async def run(self) -> None:
        """Start jobs and take their results, until cancelled."""

    async def finish(self, within_s: float) -> bool:
        """Write what is queued and the marks of a clean end."""

    async def close(self) -> None:
        """End `run`, and close the disks."""

    async def purge(self) -> int:
        """Delete everything that is on a disk, and return how many keys of that there
        were in memory.

        Raises:
            DiskFailed: it is deleted, but some of it may be back when a disk is opened
                again.
        """

    def statistics(self) -> DiskTierStatistics | None:
        """Return the figures of all, if there are any."""


class DiskService:
    """The disks of one server, whose core has a journal. `clock` is the core's."""

    def __init__(
        self,
        disks: StoreDisks,
        core: StoreCore,
        config: ServerConfig,
        *,
        clock: Callable[[], float],
        random: Random,
    ) -> None:
        settings = TierSettings(admission=cast("Admission", config.disk_admission), wait_s=config.disk_wait_s)
        tier = DiskTier(core, clock=clock, settings=settings, random=random)
        self._disks = disks
        self._runner = disks.runner
        self._clock = clock
        self._work = trio.Event()
        self._running = trio.CancelScope()
        for volume in disks.volumes:
            tier.add(volume)
        self.tier = GuardedTier(tier)

    # Running

    async def run(self) -> None:
        """Start jobs and take their results, until cancelled.

        An unexpected error ends the disks, and not the server.
        """
        try:
            with self._running:
                await self._run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on
            self.tier.fail(error)

    async def _run(self) -> None:
        self.tier.when_there_is_work(self._wake)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_results)
            while True:
                self._work = trio.Event()
                self._runner.submit(self.tier.jobs())
                deadline = self.tier.next_deadline()
                with trio.move_on_after(math.inf if deadline is None else max(0.0, deadline - self._clock())):
                    await self._work.wait()

    async def _take_results(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._runner.fd)
            for result in self._runner.take():  # one at a time: each may take a millisecond
                self.tier.done([result])
                self._wake()
                await trio.lowlevel.checkpoint()

    def _wake(self) -> None:
        self._work.set()

    async def finish(self, within_s: float) -> bool:
        """Write what is queued and the marks of a clean end, while `run` runs; whether
        that was done within the time.
        """
        wait = self.tier.close(self._clock() + within_s)
        await self._settled(wait)
        return not wait.unmet

    async def close(self) -> None:
        """End `run`, and close the disks, so that another process may open them."""
        self._running.cancel()
        await trio.to_thread.run_sync(partial(self._runner.close, timeout_s=JOBS_END_S))

    async def abandon(self) -> bool:
        """Write nothing more, and close the disks, while `run` runs: nobody uses the
        store any more. Returns whether all jobs have returned, so that the files may
        go."""
        self.tier.abandon()
        self._wake()
        with trio.move_on_after(JOBS_END_S):
            while not self.tier.is_idle:
                await self._work.wait()
                await trio.lowlevel.checkpoint()
        idle = self.tier.is_idle
        await self.close()
        return idle

    def statistics(self) -> DiskTierStatistics:
        """Return the figures of the tier and its disks."""
        return self._disks.statistics(self.tier)

    # Reading

    async def fetch(self, keys: Sequence[str], deadline_us: int) -> int:
        """Bring keys that are on disk only into memory, and return how many of the
        leading ones to lease: at once, without a checkpoint.

        They are fewer than all if the pool has no room for all of them at once.
        `deadline_us` is what is left of the caller's deadline; 0 means none.
        """
        count = self.tier.fitting(keys)
        fetch = Fetch(self.tier, keys[:count] if count < len(keys) else keys, self._deadline(deadline_us))
        while (wait := fetch.next()) is not None:
            await self._settled(wait)
        return count

    def exists(self, keys: Sequence[str]) -> bytes:
        """Return one byte per key: 0 if it is nowhere, 1 in memory, 2 on disk only."""
        return self.tier.exists(keys)

    def match_prefix(self, keys: Sequence[str]) -> PrefixMatch:
        """Count the leading keys that are in memory or on disk; touch those in
        memory.
        """
        return self.tier.match_prefix(keys)

    def hold_prefix(self, client: Client, keys: Sequence[str], hold_s: float) -> PrefixMatch:
        """Match a prefix and hold it, in memory and on disk."""
        return self.tier.hold_prefix(client, keys, hold_s)

    def release_hold(self, hold: int) -> bool:
        """End a hold; False if there is none with this id."""
        return self.tier.release_hold(hold)

    def prefetch(self, keys: Sequence[str], hold_s: float) -> Prefetch:
        """Begin to bring keys into memory; with `hold_s`, hold what is there."""
        return self.tier.prefetch(keys, hold_s or None)

    # Writing and removing

    async def flush(self, keys: Sequence[str], deadline_us: int) -> int:
        """Wait until blocks are durable; return how many of the keys have a durable
        one.
        """
        wait = self.tier.flush(keys, self._deadline(deadline_us))
        await self._settled(wait)
        wait.check()
        return len(set(keys)) - wait.unmet

    async def delete(self, keys: Sequence[str], deadline_us: int) -> int:
        """Delete keys from memory and disk, and wait until no crash can bring them
        back; return how many were there.

        Raises:
            DiskFailed: they are deleted, but a disk that cannot be written may bring
                one back when it is opened again.
        """
        on_disk = names_on_disk(self.tier, keys)
        deletion = self.tier.delete(keys, self._deadline(deadline_us))
        self.tier.core.removal_log.note(on_disk)
        await self._settled(deletion.wait)
        deletion.wait.check(in_time=True)
        return deletion.deleted

    async def purge(self, deadline_us: int = 0) -> int:
        """Delete everything, and wait until no crash can bring it back; return how many
        keys there were in memory.

        Raises:
            DiskFailed: everything is deleted, but a disk that cannot be written may
                bring some of it back when it is opened again.
        """
        purging = Purging(self.tier, self._deadline(deadline_us))
        await self._settled(purging.disks)
        while purging.delete_some():
            await trio.lowlevel.checkpoint()
        for wait in purging.waits:
            await self._settled(wait)
        self.tier.core.removal_log.end()  # what was on disk only has no names here
        purging.check()
        return purging.deleted

    async def _settled(self, wait: Wait) -> None:
        if not wait.settled:
            settled = trio.Event()
            wait.when_settled(settled.set)
            await settled.wait()

    def _deadline(self, deadline_us: int) -> float:
        left_s = deadline_us * 1e-6 * (1 - _REPLY_SHARE) if deadline_us else _NO_DEADLINE_S
        return self._clock() + left_s
