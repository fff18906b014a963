"""Purges a cluster that registers in etcd, from outside.

The purge stands as soon as it is written: a node that is away carries it out before it
is registered again. What is waited for is that those which are there have done it.
"""

from collections.abc import Callable, Iterable, Mapping

import attrs

from infinistore.cluster.documents import read_purged
from infinistore.cluster.etcd.gateway import (
    EtcdMisbehaved,
    EtcdRefused,
    Item,
    put,
    range_of,
    read_outcome,
    read_range,
    read_watch,
    transaction,
    watch,
)
from infinistore.cluster.etcd.layout import Layout
from infinistore.cluster.etcd.session import EtcdSession, EtcdUnavailable, NextLine
from infinistore.errors import ConfigError

__all__ = ["Purged", "purge_cluster"]


@attrs.frozen
class Purged:
    """A purge of a cluster: its revision, and the ids of the nodes that have carried it
    out, and of those that are registered and have not said so in time.
    """

    revision: int
    done: tuple[str, ...]
    waiting: tuple[str, ...]


async def purge_cluster(
    session: EtcdSession, layout: Layout, unique: str, clock: Callable[[], float], timeout_s: float
) -> Purged:
    """Purge a cluster. A flow that waits `timeout_s` for its nodes. `unique` are 32
    random hexadecimal digits.

    Raises:
        ConfigError: etcd knows no such cluster.
        EtcdUnavailable, EtcdMisbehaved, EtcdRefused: etcd may not have written it.
    """
    until = clock() + timeout_s
    if not read_range(await session.call(range_of(layout.prefix))).items:
        raise ConfigError(f"etcd knows no cluster {layout.cluster!r}: no server has registered there yet")
    write = transaction([], [put(layout.purge, unique.encode())], layout.purge)
    revision = read_outcome(await session.call(write)).revision
    items: dict[str, Item] = {}
    try:
        found = read_range(await session.call(range_of(layout.prefix)))
        items = {item.key: item for item in found.items}
        await session.open_stream(watch(layout.prefix, found.revision + 1))
        while _waiting(layout, items, revision):
            line = await NextLine(max(0.0, until - clock()))
            change = None if line is None else read_watch(line)
            if change is None or change.canceled:
                break
            change.apply_to(items)
    except (EtcdUnavailable, EtcdMisbehaved, EtcdRefused):
        pass  # the purge stands; only who has carried it out is not heard any more
    waiting = _waiting(layout, items, revision)
    return Purged(revision, tuple(sorted(_registered(layout, items) - waiting)), tuple(sorted(waiting)))


def _registered(layout: Layout, items: Iterable[str]) -> set[str]:
    return {key.removeprefix(layout.nodes) for key in items if key.startswith(layout.nodes)}


def _waiting(layout: Layout, items: Mapping[str, Item], revision: int) -> set[str]:
    """The nodes that are registered and have not carried this purge out."""
    return {
        node_id
        for node_id in _registered(layout, items)
        if read_purged(items.get(layout.purged(node_id), Item("")).value) < revision
    }
