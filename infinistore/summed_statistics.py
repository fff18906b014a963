"""The statistics of several servers as those of one store.

For a store that is spread over servers: counts and sizes are added, limits of one
connection are the smallest of all, lists are joined. `instance` changes when any of the
servers restarts, so that readers of counters notice.
"""

import hashlib
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from typing import Any, Final, TypeVar

import attrs

from infinistore.statistics import (
    AllocatorStatistics,
    ClientStatistics,
    DiskTierStatistics,
    EvictionStatistics,
    OperationStatistics,
    PrefixStatistics,
    ServerDetails,
    ServerStatistics,
    SpinStatistics,
    Stats,
    StoreStatistics,
)

__all__ = ["summed", "summed_disks", "summed_store"]

_MOST_CLIENTS: Final = 256
_MOST_PREFIXES: Final = 64

_Record = TypeVar("_Record", bound=attrs.AttrsInstance)


def summed(several: Sequence[Stats]) -> Stats:
    """Return the statistics of servers, at least one, as those of one store.

    `details` and `server` are there if all servers gave them, `disk` if any did.
    """
    servers = [one.server for one in several if one.server is not None]
    details = [one.details for one in several if one.details is not None]
    disks = [one.disk for one in several if one.disk is not None]
    return Stats(
        transport=_words(one.transport for one in several),
        transport_reason=_words((one.transport_reason for one in several), separator="; "),
        store=summed_store([one.store for one in several]),
        server=_server(servers) if len(servers) == len(several) else None,
        details=_details(details) if len(details) == len(several) else None,
        disk=summed_disks(disks) if disks else None,
    )


def _added(records: Sequence[_Record], **others: Any) -> _Record:
    """Add all fields of these records, except for `others`."""
    names = [field.name for field in attrs.fields(type(records[0])) if field.name not in others]
    return type(records[0])(**{name: sum(getattr(one, name) for one in records) for name in names}, **others)


def _words(words: Iterable[str], separator: str = ", ") -> str:
    return separator.join(dict.fromkeys(words))


def summed_store(stores: Sequence[StoreStatistics]) -> StoreStatistics:
    """Return the statistics of stores, at least one, as those of one."""
    allocators: list[AllocatorStatistics] = [one.allocator for one in stores]
    evicted: list[EvictionStatistics] = [one.evicted for one in stores]
    allocator = _added(
        allocators,
        name=_words(one.name for one in allocators),
        unit_bytes=max(one.unit_bytes for one in allocators),
        largest_free_extent_bytes=max(one.largest_free_extent_bytes for one in allocators),
    )
    return _added(stores, evicted=_added(evicted), allocator=allocator)


def _server(servers: Sequence[ServerStatistics]) -> ServerStatistics:
    spins: list[SpinStatistics] = [one.spin for one in servers]
    return _added(
        servers,
        instance=_instance([one.instance for one in servers]),
        version=_words(one.version for one in servers),
        uptime_s=min(one.uptime_s for one in servers),
        spin=_added(spins),
    )


def _instance(instances: Sequence[str]) -> str:
    """Return a text in the form of an instance that stands for all of these."""
    if len(instances) == 1:
        return instances[0]
    return hashlib.blake2b("\0".join(instances).encode(), digest_size=16).hexdigest()


def _details(several: Sequence[ServerDetails]) -> ServerDetails:
    arenas = chain.from_iterable(one.arenas for one in several)
    clients = chain.from_iterable(one.clients for one in several)
    return ServerDetails(
        operations=_operations(chain.from_iterable(one.operations for one in several)),
        clients=heapq.nlargest(_MOST_CLIENTS, clients, key=_moved_bytes),
        arenas=[attrs.evolve(arena, index=index) for index, arena in enumerate(arenas)],
        prefixes=_prefixes(chain.from_iterable(one.prefixes for one in several)),
        state="draining" if any(one.state == "draining" for one in several) else "serving",
        max_connections=_unless_unknown(sum, [one.max_connections for one in several]),
        max_pinned_bytes=_unless_unknown(min, [one.max_pinned_bytes for one in several]),
    )


def _moved_bytes(client: ClientStatistics) -> int:
    return client.received_bytes + client.sent_bytes


def _unless_unknown(combine: Callable[[list[int]], int], numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return combine(known) if len(known) == len(numbers) else None


def _operations(several: Iterable[OperationStatistics]) -> list[OperationStatistics]:
    alike: dict[tuple[str, str, str], list[OperationStatistics]] = {}
    for one in several:
        alike.setdefault((one.kind, one.transport, one.outcome), []).append(one)
    return [
        _added(
            ones,
            kind=kind,
            transport=transport,
            outcome=outcome,
            latency_counts=[sum(counts) for counts in zip_longest(*(one.latency_counts for one in ones), fillvalue=0)],
        )
        for (kind, transport, outcome), ones in alike.items()
    ]


def _prefixes(several: Iterable[PrefixStatistics]) -> list[PrefixStatistics]:
    """Add what has the same prefix. Errors of independent samples add as squares."""
    alike: dict[str, list[PrefixStatistics]] = {}
    for one in several:
        alike.setdefault(one.prefix, []).append(one)
    added = [
        _added(
            ones,
            prefix=prefix,
            keys_error=math.ceil(math.hypot(*(one.keys_error for one in ones))),
            payload_error_bytes=math.ceil(math.hypot(*(one.payload_error_bytes for one in ones))),
        )
        for prefix, ones in alike.items()
    ]
    return heapq.nlargest(_MOST_PREFIXES, added, key=lambda one: one.payload_bytes)


def summed_disks(tiers: Sequence[DiskTierStatistics]) -> DiskTierStatistics:
    """Return the statistics of the disks of stores, at least one, as those of one."""
    return _added(tiers, disks=[disk for tier in tiers for disk in tier.disks])
