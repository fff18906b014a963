"""Which trust groups a server has, how large the pool of each is, and which tenants may
be in them.

All of it is fixed when the server starts: memory that clients of one group may have
mapped never becomes another group's.
"""

import mmap
from collections.abc import Iterable, Mapping

from infinistore.access.tenants import Tenants as NamedTenants
from infinistore.config import SMALLEST_POOL_BYTES, ServerConfig
from infinistore.core.tenants import why_not_reserved
from infinistore.disk_settings import SMALLEST_DISK_BYTES
from infinistore.errors import ConfigError
from infinistore.host import free_huge_pages
from infinistore.sizes import in_units
from infinistore.tenant_limits import DEFAULT_GROUP, TenantLimits, why_no_places

__all__ = [
    "OnlyTenants",
    "PlannedGroups",
    "by_group",
    "check_disks",
    "check_settings",
    "disk_parts",
    "group_sizes",
    "is_for_one",
]


def check_settings(config: ServerConfig) -> None:
    """Raise ConfigError if the configuration has what does not work with tenants."""
    if config.auto_increase:
        raise ConfigError(
            "--tenants does not go together with --auto-increase: pools of groups have fixed sizes; leave out"
            " --auto-increase, or --tenants"
        )


def disk_parts(config: ServerConfig, size_bytes: int) -> list[int]:
    """Return what a tenant may take of each disk, of `size_bytes` on all."""
    total_bytes = sum(disk.size_bytes for disk in config.disks)
    return [size_bytes * disk.size_bytes // total_bytes for disk in config.disks]


def check_disks(config: ServerConfig, limits: Iterable[TenantLimits]) -> None:
    """Raise ConfigError if the disks have no room for what these tenants may have
    there, or one may have too little. Without disks, all have none."""
    wanted_bytes, total_bytes = 0, sum(disk.size_bytes for disk in config.disks)
    least_bytes = config.shards * SMALLEST_DISK_BYTES
    for one in limits if config.disks else ():
        if one.disk_max_bytes is not None:
            wanted_bytes += one.disk_max_bytes
            smallest_bytes = min(disk.size_bytes for disk in config.disks)
            if min(disk_parts(config, one.disk_max_bytes)) < least_bytes:
                enough_bytes = -(-least_bytes * total_bytes // smallest_bytes)
                raise ConfigError(
                    f"tenant {one.tenant!r} may have {in_units(one.disk_max_bytes)} on disk, which is divided among all"
                    f" disks and shards; give it a disk_max_bytes of {in_units(enough_bytes)} or more, or none"
                )
    if wanted_bytes > total_bytes:
        raise ConfigError(
            f"tenants may have {in_units(wanted_bytes)} on disk together, and the disks have {in_units(total_bytes)};"
            " lower disk_max_bytes, or give larger disks"
        )


def group_sizes(config: ServerConfig, tenants: NamedTenants, parts: int = 1) -> dict[str, int]:
    """Return the bytes of each group's pool.

    Groups that the file gives a size have it. Tenants that name no group share the
    rest. In one of `parts` shards, each group has that part, in whole pages.

    Raises:
        ConfigError: the sizes are more than the pool, or a group has none.
    """
    page_bytes = 1 if parts == 1 else free_huge_pages()[1] if config.huge_pages else mmap.PAGESIZE
    sizes = {name: size // parts // page_bytes * page_bytes or size // parts for name, size in tenants.groups.items()}
    rest_bytes = config.prealloc_bytes - sum(sizes.values())
    if rest_bytes < 0:
        raise ConfigError(
            f"the groups of {config.tenants} have {in_units(sum(sizes.values()))} together, and --prealloc-size is"
            f" {in_units(config.prealloc_bytes)}; make groups smaller, or the pool larger"
        )
    if DEFAULT_GROUP not in sizes and (not sizes or any(one.group == DEFAULT_GROUP for one in tenants.limits)):
        if not rest_bytes:
            raise ConfigError(
                f"the groups of {config.tenants} take all of --prealloc-size, and some tenants are in no group; make"
                " groups smaller, or the pool larger, or put each tenant into a group"
            )
        sizes[DEFAULT_GROUP] = rest_bytes
    by_group(tenants.limits, sizes)
    return sizes


def by_group(limits: Iterable[TenantLimits], groups: Iterable[str]) -> dict[str, list[TenantLimits]]:
    """Return the limits of the tenants of each group.

    Raises:
        ConfigError: a tenant is in another group.
    """
    found: dict[str, list[TenantLimits]] = {name: [] for name in groups}
    for one in limits:
        if one.group not in found:
            raise ConfigError(
                f"tenant {one.tenant!r} is in group {one.group!r}, which has no pool; name the group under groups: in"
                " the tenants file, and restart the server, because pools are made when it starts"
            )
        found[one.group].append(one)
    return found


def is_for_one(config: ServerConfig, tenants: NamedTenants, group: str) -> bool:
    """Whether a group's clients may write to its pool because it has one tenant now,
    and so may have no other later."""
    members = sum(one.group == group for one in tenants.limits)
    return group in tenants.groups and config.shm_writes == "auto" and members <= 1


class OnlyTenants:
    """Who the groups for one are for. Processes of a tenant that was removed keep what
    they have mapped, so nobody comes after it."""

    def __init__(self, groups: Mapping[str, Iterable[str]]) -> None:
        self._tenants = {name: set(tenants) for name, tenants in groups.items()}

    def tenants(self, group: str) -> list[str]:
        """Return who has been in a group for one."""
        return sorted(self._tenants[group])

    def check(self, wanted: Mapping[str, Iterable[TenantLimits]]) -> None:
        """Raise ConfigError if a group for one would have another tenant."""
        for name, tenants in self._tenants.items():
            if len(tenants | {one.tenant for one in wanted[name]}) > 1:
                raise ConfigError(
                    f"group {name!r} had one tenant when the server started, whose clients may write to its memory; "
                    "restart the server for another tenant there, or put it into a group of its own"
                )

    def note(self, wanted: Mapping[str, Iterable[TenantLimits]]) -> None:
        """Note who has been in them."""
        for name, tenants in self._tenants.items():
            tenants |= {one.tenant for one in wanted[name]}


class PlannedGroups:
    """The groups of a server with shards, as the supervisor sees them, which has no
    pool: what no shard would take is refused once, in the sizes of the whole server.
    """

    sessions = ()
    """It has none."""

    def __init__(self, config: ServerConfig, tenants: NamedTenants) -> None:
        """Raises ConfigError if the tenants file and the configuration do not fit."""
        check_settings(config)
        self._config = config
        self._sizes = group_sizes(config, tenants)
        least_bytes = config.shards * max(SMALLEST_POOL_BYTES, config.minimal_allocate_bytes)
        for name, size_bytes in self._sizes.items():
            if size_bytes < least_bytes:
                raise ConfigError(
                    f"{config.tenants}: group {name!r} has {in_units(size_bytes)} for {config.shards} shards; give it"
                    f" {in_units(least_bytes)} or more, or start fewer shards"
                )
        self._only = OnlyTenants({name: () for name in self._sizes if is_for_one(config, tenants, name)})
        self._apply(tenants.limits)

    async def apply_limits(self, limits: list[TenantLimits]) -> None:
        """Have these tenants from now on.

        Raises:
            ConfigError: these cannot be. Nothing has changed.
        """
        self._apply(limits)

    def _apply(self, limits: list[TenantLimits]) -> None:
        if problem := why_no_places(len(limits), self._config.max_connections):
            raise ConfigError(problem)
        check_disks(self._config, limits)
        wanted = by_group(limits, self._sizes)
        self._only.check(wanted)
        for name, members in wanted.items():
            if problem := why_not_reserved(members, self._sizes[name]):
                raise ConfigError(f"group {name!r}: {problem}")
        self._only.note(wanted)
