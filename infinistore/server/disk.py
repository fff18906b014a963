"""The disks of a server: runs their jobs, and lets requests wait for them.

A `DiskService` runs the disks of one store. The tier decides, the runner does the I/O
in threads, and the service passes jobs to the one and results to the other.
`ServerDisks` has the services of all stores of a server. Requests wait with `settle`;
each wait ends by its deadline, and may be cancelled at any time: what a disk reads or
writes for it stays the tier's.

Leaves to others: which blocks are where, and when (`infinistore.disk`); files and
threads (`infinistore.disk_io`).
"""

import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, cast

import trio

from infinistore.access.identity import DEFAULT_TENANT
from infinistore.config import ServerConfig
from infinistore.core.journal import Journal
from infinistore.core.store import StoreCore
from infinistore.disk.settings import Admission, TierSettings
from infinistore.disk.tiers import Steps, Tiers
from infinistore.disk.waits import Wait
from infinistore.server.environment import Environment
from infinistore.statistics import DiskTierStatistics, merged
from infinistore.tenant_limits import TenantLimits

if TYPE_CHECKING:
    from infinistore.disk_io.store_disks import StoreDisks

_log = logging.getLogger("infinistore.server")
_T = TypeVar("_T")
_REPLY_SHARE = 0.1
"""The part of a caller's time that is kept for the reply, so that a miss is in time."""
NO_DEADLINE_S: Final = 24 * 3600.0
JOBS_END_S: Final = 5.0
"""How long jobs of disks that were begun are waited for at the end."""


def time_for_disks_s(deadline_us: int) -> float:
    """Return how long a request may wait for disks; `deadline_us` 0 means no limit."""
    return deadline_us * 1e-6 * (1 - _REPLY_SHARE) if deadline_us else NO_DEADLINE_S


async def settled(wait: Wait) -> None:
    """Wait until a wait is settled."""
    if not wait.settled:
        event = trio.Event()
        wait.when_settled(event.set)
        await event.wait()


async def settle(steps: Steps[_T]) -> _T:
    """Run the steps of a request, waiting where they wait; return its result."""
    while True:
        try:
            wait = next(steps)
        except StopIteration as end:
            return cast("_T", end.value)
        if wait is None:
            await trio.lowlevel.checkpoint()
        else:
            await settled(wait)


def make_journal(config: ServerConfig) -> Journal:
    """Return the journal of a store that has disks."""
    return Journal(reads=config.disk_admission == "second-use")


class DiskService:
    """Runs the disks of one store, whose core has a journal. `clock` is the core's."""

    def __init__(self, disks: "StoreDisks", core: StoreCore, config: ServerConfig, environment: Environment) -> None:
        settings = TierSettings(
            admission=cast("Admission", config.disk_admission),
            compress=config.disk_compress,
            wait_s=config.disk_wait_s,
        )
        self._runner = disks.runner
        self._clock = environment.clock
        self._work = trio.Event()
        self._running = trio.CancelScope()
        self.tiers = disks.below(core, clock=environment.clock, settings=settings, random=environment.random)
        """The store and its disks."""

    async def run(self) -> None:
        """Start jobs and take their results, until cancelled.

        An unexpected error ends the disks, and not the server.
        """
        try:
            with self._running:
                await self._run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on
            self.tiers.fail(error)

    async def _run(self) -> None:
        self.tiers.when_there_is_work(self._wake)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_results)
            while True:
                self._work = trio.Event()
                self._runner.submit(self.tiers.jobs())
                deadline = self.tiers.next_deadline()
                with trio.move_on_after(math.inf if deadline is None else max(0.0, deadline - self._clock())):
                    await self._work.wait()

    async def _take_results(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._runner.fd)
            for result in self._runner.take():  # one at a time: each may take a millisecond
                self.tiers.done([result])
                self._wake()
                await trio.lowlevel.checkpoint()

    def _wake(self) -> None:
        self._work.set()

    async def finish(self, within_s: float) -> bool:
        """Write all that is queued while `run` runs; return whether that was done."""
        wait = self.tiers.close(within_s)
        await settled(wait)
        return not wait.unmet

    async def close(self) -> None:
        """End `run`, and close the disks, so that another process may open them."""
        self._running.cancel()
        await trio.to_thread.run_sync(partial(self._runner.close, timeout_s=JOBS_END_S))

    async def abandon(self) -> bool:
        """Write nothing more, and close the disks, while `run` runs: nobody uses the
        store any more. Return whether all jobs have returned, so that the files may
        go."""
        self.tiers.stop()
        self._wake()
        with trio.move_on_after(JOBS_END_S):
            while not self.tiers.is_idle:
                await self._work.wait()
                await trio.lowlevel.checkpoint()
        idle = self.tiers.is_idle
        await self.close()
        return idle


def _nothing() -> None:
    """Nobody asked to be called."""


class ServerDisks:
    """The disks of all stores of a server: of none, of the only one, or of each tenant
    that may have blocks on disk. `whole` is the store of the server, which has the
    stores of all tenants."""

    def __init__(self, whole: Tiers) -> None:
        self.closed = False
        """Whether there were disks, and are closed: the server cannot go on."""
        self.whole = whole
        """The store of the server."""
        self.on_end: Callable[[], object] = _nothing
        """Called when nothing uses the store of a tenant any more that has gone."""
        self._services: dict[str, DiskService] = {}
        self._tasks: list[Callable[[], Awaitable[None]]] = []
        self._changed = trio.Event()

    def add(self, service: DiskService, tenant: str = DEFAULT_TENANT) -> None:
        """Run these disks, too."""
        self._services[tenant] = service
        self._begin(service.run)

    def _begin(self, task: Callable[[], Awaitable[None]]) -> None:
        """Let `run` run a task."""
        self._tasks.append(task)
        self._changed.set()

    def tiers(self, tenant: str, core: StoreCore) -> Tiers:
        """Return the store of a tenant, whose memory is `core`, with its disks."""
        service = self._services.get(tenant)
        return Tiers(core) if service is None else service.tiers

    async def run(self) -> None:
        """Run the disks of all stores, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                changed = self._changed = trio.Event()
                while self._tasks:
                    nursery.start_soon(self._tasks.pop())
                await changed.wait()

    async def open_for(self, limits: Iterable[TenantLimits]) -> None:
        """Open the disks of those tenants that this server has not had yet.

        Raises:
            ConfigError: a disk cannot be used.
        """

    def keep(self, limits: Iterable[TenantLimits]) -> None:
        """End the disks of all but these tenants, and remove their blocks."""

    async def finish(self, within_s: float) -> None:
        """Write what is queued and the marks of a clean end, within the time."""
        if not self._services:
            return
        _log.info("writing what only memory has", extra={"at_most_s": round(within_s, 1)})
        done: list[bool] = []

        async def finish(service: DiskService) -> None:
            done.append(await service.finish(within_s))

        async with trio.open_nursery() as nursery:
            for service in self._services.values():
                nursery.start_soon(finish, service)
        if not all(done):
            _log.warning("a disk did not end in time")

    async def close(self) -> None:
        """End `run`, and close the disks."""
        for service in list(self._services.values()):
            self.closed = True
            await service.close()

    async def purge(self) -> int:
        """Delete everything, and wait until no crash can bring it back; return how many
        keys there were in memory.

        Raises:
            DiskFailed: everything is deleted, but some of it may be back when a disk is
                opened again.
        """
        return await settle(self.whole.purge(NO_DEADLINE_S))

    def statistics(self) -> DiskTierStatistics | None:
        """Return the figures of all disks together; None without disks."""
        found = [one for service in self._services.values() if (one := service.tiers.statistics()) is not None]
        return merged(found) if found else None
