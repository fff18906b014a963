"""The disks of tenants: each tenant that may have blocks on disk has a tier of its own,
in folders of its own.

So a lookup on disk is one in the tenant's own index, what one tenant writes overwrites
nothing of another, and a purge is one tenant's. A tenant that is gone has its folders
removed: at the start, or when the tenants file is read again.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Final

import trio

from infinistore.config import ServerConfig
from infinistore.disk.tiers import Tiers
from infinistore.disk_io.folder import TenantFolders
from infinistore.disk_settings import DESCRIPTORS_OF_A_DISK, DiskPlace
from infinistore.errors import ConfigError, DeadlineExceeded, DiskFailed, StoreUnavailable
from infinistore.server.disk import JOBS_END_S, NO_DEADLINE_S, DiskService, ServerDisks, make_journal, settle
from infinistore.server.environment import Environment
from infinistore.server.tenancy import Tenancy, check_disks, disk_parts
from infinistore.tenant_limits import TenantLimits

_log = logging.getLogger("infinistore.server")
_MOST_ENDS: Final = 2
"""The disks of how many tenants that are gone end at a time: however many these are,
and if their disks hang, they leave the threads of the server to others."""


async def open_tenant_disks(
    config: ServerConfig,
    limits: Iterable[TenantLimits],
    tenancy: Tenancy,
    environment: Environment,
    resources: ExitStack,
    *,
    reserve_descriptors: Callable[[int], None],
) -> "TenantDisks":
    """Open the disks of these tenants, which `tenancy` has from now on, and remove the
    blocks of all others. `resources` closes them. `reserve_descriptors` sets so many
    aside, or raises ConfigError.

    Raises:
        ConfigError: a disk cannot be used, or not by these tenants.
    """
    limits = list(limits)
    check_disks(config, limits)
    kept = {one.tenant for one in limits if one.disk_max_bytes is not None}
    if not kept:
        raise ConfigError(
            f"--disk: no tenant in {config.tenants} has a disk_max_bytes, so none may use it; add that, or leave out"
            " --disk"
        )
    folders = await environment.run_in_thread(TenantFolders, [disk.folder for disk in config.disks])
    resources.callback(folders.close)
    gone = await environment.run_in_thread(folders.wipe_all_but, kept)
    if gone:
        _log.info("the blocks of tenants that are gone were removed", extra={"tenants": gone})
    disks = TenantDisks(config, folders, tenancy, environment, resources, reserve_descriptors=reserve_descriptors)
    await disks.open_for(limits)
    tenancy.have(disks)
    return disks


class TenantDisks(ServerDisks):
    """The disks of all tenants that have some."""

    def __init__(
        self,
        config: ServerConfig,
        folders: TenantFolders,
        tenancy: Tenancy,
        environment: Environment,
        resources: ExitStack,
        *,
        reserve_descriptors: Callable[[int], None],
    ) -> None:
        super().__init__(Tiers(tenancy.whole))
        self._config = config
        self._reserve_descriptors = reserve_descriptors
        self._descriptors_each = len(config.disks) * DESCRIPTORS_OF_A_DISK
        self._folders = folders
        self._tenancy = tenancy
        self._environment = environment
        self._resources = resources
        self._groups: dict[str, str] = {}
        """The group of each tenant with disks."""
        self._known: set[str] = set()
        self._ends = trio.CapacityLimiter(_MOST_ENDS)

    async def open_for(self, limits: Iterable[TenantLimits]) -> None:
        """Open the disks of those tenants that this server has not had yet.

        Raises:
            ConfigError: a disk cannot be used.
        """
        limits = list(limits)
        check_disks(self._config, limits)
        for one in limits:
            if one.disk_max_bytes is not None and one.tenant not in self._known:
                await self._open_for(one, one.disk_max_bytes)
            self._known.add(one.tenant)

    async def _open_for(self, limits: TenantLimits, size_bytes: int) -> None:
        earlier = self._tenancy.groups()[limits.group].tenants.all_stores().get(limits.tenant)
        if earlier is not None and earlier.journal is None:
            raise ConfigError(
                f"clients of tenant {limits.tenant!r} from before the last restart still use its memory; give it disks"
                " when they have ended"
            )
        parts = disk_parts(self._config, size_bytes)
        folders = self._folders.of(limits.tenant)
        places = [DiskPlace(folder, part) for folder, part in zip(folders, parts, strict=True)]
        environment = self._environment
        self._reserve_descriptors(self._descriptors_each)
        try:
            disks = await environment.run_in_thread(environment.open_disks, places, environment.random)
        except (ConfigError, StoreUnavailable) as error:
            self._reserve_descriptors(-self._descriptors_each)
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the disks of tenant {limits.tenant!r} cannot be opened: {error}") from None
        self._resources.callback(disks.runner.close, timeout_s=JOBS_END_S)
        tenants = self._tenancy.groups()[limits.group].tenants
        # What was taken over from an earlier process has a journal already.
        store = tenants.add_store(limits, make_journal(self._config)) or tenants.all_stores()[limits.tenant]
        assert store.journal is not None, "nobody has used the store of a tenant that this server has not had"
        self._groups[limits.tenant] = limits.group
        self.add(DiskService(disks, store, self._config, environment), limits.tenant)

    def keep(self, limits: Iterable[TenantLimits]) -> None:
        """Let `run` end the disks of all but these tenants, and remove their blocks."""
        now = {one.tenant: one.group for one in limits}
        for tenant, group in list(self._groups.items()):
            if now.get(tenant) != group:
                del self._groups[tenant]
                self._begin(partial(self._end, tenant, self._services.pop(tenant)))

    async def close(self) -> None:
        """End `run`, and close the disks."""
        await super().close()
        self.closed = True
        self._folders.close()

    async def purge(self) -> int:
        """Delete everything of all tenants, and wait until no crash can bring it back;
        return how many keys there were in memory.

        Raises:
            DiskFailed: disks of these tenants could not be purged. All others are.
        """
        counts: list[int] = []
        failed: dict[str, str] = {}

        async def purge(tenant: str, service: DiskService) -> None:
            try:
                counts.append(await settle(service.tiers.purge(NO_DEADLINE_S)))
            except (DiskFailed, DeadlineExceeded) as error:
                failed[tenant] = str(error)

        async with trio.open_nursery() as nursery:
            for tenant, service in list(self._services.items()):
                nursery.start_soon(purge, tenant, service)
        counts.append(await super().purge())
        if failed:
            raise DiskFailed(f"of tenants {', '.join(sorted(failed))}: {next(iter(failed.values()))}")
        return sum(counts)

    async def _end(self, tenant: str, service: DiskService) -> None:
        """End the disks of a tenant that is gone, and remove its blocks."""
        async with self._ends:
            await self._end_now(tenant, service)

    async def _end_now(self, tenant: str, service: DiskService) -> None:
        idle = await service.abandon()
        self.on_end()
        problem = "a disk does not answer"
        if idle:
            self._reserve_descriptors(-self._descriptors_each)
            try:
                await self._environment.run_in_thread(self._folders.wipe, tenant)
            except ConfigError as error:
                problem = str(error)
            else:
                _log.info("the blocks of tenants that are gone were removed", extra={"tenants": [tenant]})
                return
        _log.warning(
            "the blocks of a tenant that is gone are on disk until the next start",
            extra={"tenant": tenant, "problem": problem},
        )
