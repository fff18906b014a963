"""What several shards need of the settings of a server: ports for all, and enough to
divide.
"""

from collections.abc import Sequence
from typing import Final

from infinistore.disk_settings import SMALLEST_DISK_BYTES, DiskPlace
from infinistore.sizes import KIB, format_size

__all__ = ["MOST_SHARDS", "SMALLEST_POOL_BYTES", "conflicts_of_shards"]

MOST_SHARDS: Final = 256
SMALLEST_POOL_BYTES: Final = 64 * KIB
"""The least that a server must have, and each shard."""


def conflicts_of_shards(
    count: int, *, ports: tuple[int, int], pool_bytes: int, least_bytes: int, disks: Sequence[DiskPlace]
) -> list[tuple[tuple[str, ...], str]]:
    """Return what does not go together with this number of shards, as (keys of
    settings, problem).

    `ports` are those for clients and for management, 0 for a free one.
    """
    found: list[tuple[tuple[str, ...], str]] = []
    if count == 1:
        return found
    first, manage = ports
    last = first + count - 1
    if first and last > 65535:
        found.append((("shards", "service_port"), f"would need the ports {first} to {last}; lower --service-port"))
    if 0 < first < manage <= last:
        problem = f"is the port of a shard too: they have {first} to {last}; give one of them another port"
        found.append((("manage_port", "service_port", "shards"), problem))
    if pool_bytes < count * least_bytes:
        problem = f"leaves less than {format_size(least_bytes)} for each of {count} shards"
        found.append((("prealloc_size", "shards"), f"{problem}; give {format_size(count * least_bytes)} or more"))
    for disk in disks:
        if disk.size_bytes < count * SMALLEST_DISK_BYTES:
            problem = f"{disk} leaves less than {format_size(SMALLEST_DISK_BYTES)} for each of {count} shards"
            found.append((("disk", "shards"), f"{problem}; give {format_size(count * SMALLEST_DISK_BYTES)} or more"))
    return found
