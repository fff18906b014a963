"""The supervisor's decisions: each shard's part of the settings and its core, when all
shards know each other's addresses, whether the whole serves, and when to restart a
shard.

Each has an equal part of the pool and of each disk, rounded down. Ports follow the
first one. In a cluster, each is a node of its own, ID/0 and so on, and all together
have the weight of the whole. Limits of a connection, a request or a block are those of
every shard, because a client has connections to all of them. No processes and no clock:
the supervisor reports each event with its time.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from infinistore.addresses import host_and_port, with_port
from infinistore.config import SMALLEST_POOL_BYTES, ServerConfig
from infinistore.disk_settings import DiskPlace
from infinistore.errors import ConfigError
from infinistore.host import parse_list
from infinistore.protocol.messages import Shard
from infinistore.server.listeners import ServerAddresses

_TOPOLOGY: Final = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_PART_OF_DISK: Final = re.compile(r"shard-\d+-of-(\d+)")


def has_room(count: int, cores: int) -> bool:
    """Whether there are two cores for each of `count` shards.

    With fewer, a spinning shard takes the core that another shard or a client needs,
    and a pinned shard waits for the other users of its core.
    """
    return cores >= 2 * count


def divide(config: ServerConfig, *, page_bytes: int, available_bytes: int, spins: bool) -> list[ServerConfig]:
    """Return the settings of each shard.

    Without a setting, shards spin if `spins`. Parts of the pool are whole pages unless
    they are smaller than a page. `available_bytes` limits a pool that grows without a
    limit of its own.
    """
    return [
        attrs.evolve(
            config,
            shards=1,
            service_port=config.service_port + index if config.service_port else 0,
            unix_socket=_socket(config.unix_socket, index),
            node_id=None if config.node_id is None else f"{config.node_id}/{index}",
            node_weight=_weight(config.node_weight, config.shards),
            advertise=_advertised(config.advertise, index),
            spin_us=0 if config.spin_us is None and not spins else config.spin_us,
            prealloc_bytes=_part(config, config.prealloc_bytes, page_bytes),
            max_pool_bytes=_most(config, available_bytes, page_bytes),
            disks=tuple(
                DiskPlace(disk.folder / f"shard-{index}-of-{config.shards}", disk.size_bytes // config.shards)
                for disk in config.disks
            ),
        )
        for index in range(config.shards)
    ]


def _part(config: ServerConfig, size_bytes: int, page_bytes: int) -> int:
    part = size_bytes // config.shards
    rounded = part // page_bytes * page_bytes
    return rounded if rounded >= max(SMALLEST_POOL_BYTES, config.minimal_allocate_bytes) else part


def _most(config: ServerConfig, available_bytes: int, page_bytes: int) -> int | None:
    """Return how large the pool of one shard may grow; None if it may not."""
    most = config.max_pool_bytes
    if most is None and config.auto_increase:
        most = max(available_bytes, config.prealloc_bytes)
    return None if most is None else _part(config, most, page_bytes)


def _socket(place: str, index: int) -> str:
    """Return the Unix socket of a shard; `auto` names it by its port."""
    return place if place in ("auto", "off") or not index else f"{place}.{index}"


def _weight(whole: int, count: int) -> int:
    """Return the weight of one of `count` shards, at least 1 unless the whole is 0."""
    return max(round(whole / count), min(whole, 1))


def _advertised(place: str | None, index: int) -> str | None:
    """Return the address that a shard advertises; the port counts up, if given."""
    if place is None:
        return None
    host, port = host_and_port(place, 0)
    return with_port(host, port + index) if port else place


def prepare_disks(disks: Sequence[DiskPlace], count: int) -> None:
    """Create the folders in which shards have theirs. Blocking.

    Raises:
        ConfigError: a folder cannot be created, or has blocks of another number of
            shards. Keys would belong to other shards now, and outdated blocks would
            come back with the old number.
    """
    for disk in disks:
        try:
            disk.folder.mkdir(exist_ok=True)
            names = os.listdir(disk.folder)
        except OSError as error:
            raise ConfigError(f"--disk {disk.folder}: {error.strerror}; create the folder, or give another") from None
        others = {match[1] for match in map(_PART_OF_DISK.fullmatch, names) if match} - {str(count)}
        if "disk" in names or "tenants" in names:
            others.add("1")
        if others:
            raise ConfigError(
                f"--disk {disk.folder} has blocks of --shards {min(others, key=int)}, and they are lost to any other "
                "number; start with that number, or remove what is in the folder"
            )


def choose_cores(available: frozenset[int], siblings: Mapping[int, frozenset[int]], count: int) -> list[int] | None:
    """Return a core for each of `count` shards, on as many physical cores as there are;
    None if there is no room for that.

    `siblings` are the threads of the physical core of each.
    """
    if not has_room(count, len(available)):
        return None

    def rank(core: int) -> tuple[int, int]:
        """Its place among its siblings, and its number."""
        return len([other for other in siblings.get(core, ()) if other < core and other in available]), core

    return sorted(available, key=rank)[:count]


def siblings_here(cores: frozenset[int]) -> dict[int, frozenset[int]]:
    """Return the cores of this machine that share a physical core, if known."""
    found: dict[int, frozenset[int]] = {}
    for core in cores:
        try:
            found[core] = parse_list(Path(_TOPOLOGY.format(core)).read_text(encoding="ascii"))
        except (OSError, ValueError):
            found[core] = frozenset((core,))
    return found


_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 15.0
_STEADY_S: Final = 60.0


class ShardState:
    """One shard: its process, if it has one, and its past ones.

    It is restarted at once after a long life, with doubling pauses after short ones: a
    shard that cannot run must not keep a core busy with starting it.
    """

    def __init__(self, index: int, management_socket: Path | None) -> None:
        self.index = index
        self.management_socket = management_socket
        self.addresses: ServerAddresses | None = None
        """Where it listens, or did: it is restarted at the same port."""
        self.pid: int | None = None
        self.restarts = 0
        self.hangs = 0
        """How often its event loop hung."""
        self._serving_since: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    @property
    def serves(self) -> bool:
        """Whether it serves clients."""
        return self._serving_since is not None

    @property
    def state(self) -> str:
        """ "starting", "serving", or "down" until it is restarted."""
        return "down" if self.pid is None else "serving" if self.serves else "starting"

    def started(self, pid: int) -> None:
        """Note that it has a process."""
        self.pid = pid

    def serving(self, now: float) -> None:
        """Note that it serves."""
        self._serving_since = now

    def ended(self, now: float) -> float:
        """Note that its process is gone; return the pause before the next, in s."""
        if self._serving_since is not None and now - self._serving_since >= _STEADY_S:
            self._pause_s = _FIRST_PAUSE_S
        self.pid = self._serving_since = None
        self.restarts += 1
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def gave(self) -> None:
        """Note that its process is gone, and that this was wanted."""
        self.pid = self._serving_since = None

    def described(self) -> dict[str, Any]:
        """Return it as `GET /shards` does."""
        unix_socket = self.addresses.unix_socket if self.addresses else None
        return {
            "shard": self.index,
            "state": self.state,
            "pid": self.pid,
            "port": self.addresses.port if self.addresses else None,
            "unix_socket": None if unix_socket is None else str(unix_socket),
            "restarts": self.restarts,
            "hangs": self.hangs,
        }


@attrs.define
class Fleet:
    """All shards of a server."""

    shards: Sequence[ShardState]
    draining: bool = False
    _served: bool = False

    @property
    def state(self) -> str:
        """ "starting" until all shards have served at the same time, then "serving",
        then "draining". While one restarts, the others serve, and its blocks are
        missing.
        """
        self._served = self._served or self.all_serve
        return "draining" if self.draining else "serving" if self._served else "starting"

    @property
    def all_serve(self) -> bool:
        """Whether all shards serve now."""
        return all(shard.serves for shard in self.shards)

    def places(self) -> list[Shard] | None:
        """Return where all shards are; None until all listen."""
        found = [shard.addresses for shard in self.shards if shard.addresses is not None]
        if len(found) < len(self.shards):
            return None
        return [Shard(one.port, str(one.unix_socket or "")) for one in found]
