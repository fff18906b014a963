"""What an operator has a cluster in etcd do, from outside: nodes drain, or serve again,
and all purge.

A request stands as soon as it is written: a node that is away finds it when it comes
back, and carries out a purge before it is registered again. How far a node is, it says
in etcd itself. What is waited for is that those which are there have done it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import attrs

from infinistore.cluster.documents import Drain, read_purged, write_drain
from infinistore.cluster.etcd.gateway import (
    EtcdMisbehaved,
    EtcdRefused,
    Item,
    delete,
    put,
    range_of,
    read_outcome,
    read_range,
    read_watch,
    transaction,
    unless_changed,
    watch,
)
from infinistore.cluster.etcd.layout import Layout, Listing
from infinistore.cluster.etcd.session import EtcdSession, EtcdUnavailable, NextLine, Pause
from infinistore.cluster.membership import NodeState
from infinistore.errors import ConfigError

_RETRY_S: Final = 0.5


@attrs.frozen
class NodeStanding:
    """What etcd says of one node. `drain` is None if nobody asked for one; `state` is
    None while the node is not registered, with `weight` 0.
    """

    drain: Drain | None
    state: NodeState | None
    weight: int = 0

    @classmethod
    def of(cls, listing: Listing, node_id: str) -> "NodeStanding":
        """Take what is listed of a node."""
        node = listing.nodes.get(node_id)
        drain = listing.drains.get(node_id)
        return cls(drain, None, 0) if node is None else cls(drain, node.state, node.weight)


async def begin_drain(session: EtcdSession, layout: Layout, node_id: str, *, force: bool) -> bool:
    """Ask a node to drain. Returns whether nobody had asked for it before.

    Raises:
        ConfigError: etcd knows no such node; or nobody else takes blocks, without
            `force`.
        EtcdUnavailable, EtcdMisbehaved, EtcdRefused: etcd may not have written it.
    """
    while True:
        listing = await _list(session, layout)
        if node_id in listing.drains:
            return False
        if node_id not in listing.nodes:
            raise _unknown(layout, listing, node_id)
        staying = [
            node.id
            for node in listing.nodes.values()
            if node.id != node_id and node.state is not NodeState.DRAINING and node.weight
        ]
        if not staying and not force:
            raise ConfigError(
                f"{node_id} is the last node of the cluster {layout.cluster!r} that takes blocks: without it every put "
                "fails, and what it has is lost; add --force if you mean it"
            )
        marks = [Item(layout.drain(one)) for one in (node_id, *staying[:1])]  # nobody drains the other meanwhile
        write = transaction([*map(unless_changed, marks)], [put(marks[0].key, write_drain(Drain()))], marks[0].key)
        if read_outcome(await session.call(write)).succeeded:
            return True


async def end_drain(session: EtcdSession, layout: Layout, node_id: str) -> bool:
    """Let a node serve again. Returns whether it was asked to drain before.

    Raises:
        ConfigError: etcd knows no such node.
        EtcdUnavailable, EtcdMisbehaved, EtcdRefused: etcd may not have written it.
    """
    listing = await _list(session, layout)
    if node_id in listing.drains:
        mark = layout.drain(node_id)
        await session.call(transaction([], [delete(mark)], mark))
        return True
    if node_id not in listing.nodes:
        raise _unknown(layout, listing, node_id)
    return False


async def read_drains(session: EtcdSession, layout: Layout) -> Mapping[str, Drain]:
    """Return the drains that were asked for, by the ids of their nodes.

    Raises:
        EtcdUnavailable, EtcdMisbehaved, EtcdRefused: etcd does not say.
    """
    return (await _list(session, layout)).drains


async def follow_node(
    session: EtcdSession, layout: Layout, node_id: str, *, until: Callable[[NodeStanding], bool]
) -> None:
    """Follow what etcd says of a node. A flow that ends when `until` says so, which is
    called with all that is news. While etcd is away, it waits.

    Raises:
        EtcdRefused: etcd refuses.
    """
    while True:
        try:
            found = read_range(await session.call(range_of(layout.prefix)))
            items = {item.key: item for item in found.items}
            if until(NodeStanding.of(_listing(layout, items), node_id)):
                return
            await session.open_stream(watch(layout.prefix, found.revision + 1))
            while True:
                line = await NextLine(_READ_AGAIN_S)
                change = None if line is None else read_watch(line)
                if change is None or change.canceled:
                    break
                change.apply_to(items)
                if until(NodeStanding.of(_listing(layout, items), node_id)):
                    return
        except (EtcdUnavailable, EtcdMisbehaved):
            session.turn()
        await Pause(_RETRY_S)


_READ_AGAIN_S: Final = 10.0
"""A watch is silent when its member has lost the others."""


def _listing(layout: Layout, items: Mapping[str, Item]) -> Listing:
    # The configuration does not matter here, whatever it says.
    return Listing.of(layout, [item for item in items.values() if item.key != layout.config])


async def _list(session: EtcdSession, layout: Layout) -> Listing:
    found = read_range(await session.call(range_of(layout.prefix)))
    return _listing(layout, {item.key: item for item in found.items})


def _unknown(layout: Layout, listing: Listing, node_id: str) -> ConfigError:
    known = sorted({*listing.nodes, *listing.drains})
    if not known:
        return ConfigError(f"etcd knows no cluster {layout.cluster!r}: no server is registered there")
    return ConfigError(f"the cluster {layout.cluster!r} has no node {node_id!r}; it has {', '.join(known[:20])}")


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
