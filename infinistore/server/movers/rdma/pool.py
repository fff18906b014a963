"""The server's RDMA device, and the pool as the device knows it.

The pool is registered for this side only: no key exists that a peer could use.
"""

import logging
import mmap
from collections.abc import Sequence
from itertools import repeat
from operator import add

from infinistore.config import ServerConfig
from infinistore.core.arena import Arena
from infinistore.core.pool import Pool
from infinistore.errors import ConfigError
from infinistore.transports.rdma import opening
from infinistore.transports.rdma.choice import near_address
from infinistore.transports.rdma.devices import Place
from infinistore.transports.rdma.memory import address_of
from infinistore.transports.rdma.plan import Placement
from infinistore.transports.rdma.verbs import Device, NoRdma, Region

__all__ = ["RdmaPool", "open_rdma"]

_log = logging.getLogger("infinistore.server")


class RdmaPool:
    """A device, and the arenas of a pool, each registered once for local use."""

    def __init__(self, device: Device, *, dead_after_s: float) -> None:
        self.device = device
        self.dead_after_s = dead_after_s
        self._bases: list[int] = []
        self.regions: list[Region] = []
        """The registered memory of each arena, by its number."""
        # Where bytes are read that nobody looks at.
        self._scratch = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
        self._scratch_region = device.register(address_of(self._scratch), 1, remote=False)

    def add_arena(self, arena: Arena) -> None:
        """Register the next arena. Blocking, 0.1 s and more per GiB.

        Raises:
            NoRdma: the system does not allow it.
        """
        assert arena.index == len(self.regions)
        self.regions.append(self.device.register(arena.address, arena.length, remote=False))
        self._bases.append(arena.address)

    def placement(self, extents: Sequence[tuple[int, ...]]) -> Placement:
        """Return the placement of these extents, or entries, of the pool."""
        arenas = [extent[0] for extent in extents]
        offsets = [extent[1] for extent in extents]
        if arenas and arenas.count(arenas[0]) == len(arenas):
            base, key = self._bases[arenas[0]], self.regions[arenas[0]].local_key
            return Placement(list(map(add, offsets, repeat(base))), [key] * len(arenas))
        bases, regions = self._bases, self.regions
        addresses = [bases[arena] + offset for arena, offset in zip(arenas, offsets, strict=True)]
        return Placement(addresses, [regions[arena].local_key for arena in arenas])

    def scratch(self, count: int) -> Placement:
        """Return `count` placements of one byte that nothing reads, as the target of a
        read-back.
        """
        return Placement([address_of(self._scratch)] * count, [self._scratch_region.local_key] * count)

    def close(self) -> None:
        """Close the device; idempotent."""
        self.device.close()


def open_rdma(config: ServerConfig, pool: Pool) -> RdmaPool | None:
    """Open the device that the settings name, or the first that works, and register the
    pool. Blocking.

    None where that is not possible, with the reason in the log.

    Raises:
        ConfigError: it is not possible, and the settings require it.
    """
    device: Device | None = None
    try:
        device = opening.open_device(
            config.dev_name,
            config.ib_port,
            config.link_type,
            config.hint_gid_index,
            near_address(config.host),
            place=None if config.numa_node is None else Place(numa_node=config.numa_node),
        )
        rdma = RdmaPool(device, dead_after_s=config.rdma_timeout_s)
        for arena in pool.arenas:
            rdma.add_arena(arena)
    except NoRdma as error:
        if device is not None:
            device.close()
        if config.require_rdma:
            raise ConfigError(f"--require-rdma: {error}") from None
        wanted = config.dev_name is not None
        _log.log(logging.WARNING if wanted else logging.INFO, "serving without RDMA", extra={"reason": str(error)})
        return None
    _log.info("serving RDMA", extra={"device": device.place, "reason": device.reason})
    return rdma
