"""Requests that concern all nodes of a cluster, whoever owns which key."""

import itertools
from typing import Final, TypeVar

import attrs

from infinistore.client import requests
from infinistore.client.cluster.calls import CallInView, Handlers, is_lost
from infinistore.client.cluster.reads import exists, lease, match_prefix, prefetch, read, release_holds
from infinistore.client.cluster.writes import check_done, commit, copy, delete, flush, marks, pin, put, reserve
from infinistore.client.connection.effects import Outcome, Sleep
from infinistore.client.requests import EndCopies, Followed, FollowRemovalsOfNodes, ListKeysOfEveryNode, RemovedKeys
from infinistore.cluster.membership import NodeState
from infinistore.cluster.placement import still_finds
from infinistore.errors import StoreUnavailable
from infinistore.protocol import messages
from infinistore.protocol.messages import Evict, Exists, Keys, ListKeys, Mark, Purge, Statistics, StoreRequest
from infinistore.statistics import ClusterStatistics, NodeStatistics, Stats, merged

_T = TypeVar("_T")
_WAIT_SHARE: Final = 0.5
"""How long each node waits for a removal, as a part of `lookup_deadline_s`: one that is
silent for longer than that counts as lost."""


async def _ask_everyone(call: CallInView, request: StoreRequest[_T]) -> list[Outcome]:
    return await call.ask([(index, request) for index in range(len(call.view.nodes))])


async def list_keys(call: CallInView, request: ListKeys) -> list[str]:
    """Return one page of keys, in code point order, of the nodes that answer.

    Raises:
        StoreUnavailable: every node is asked for, and one could not be reached.
    """
    pages = await _ask_everyone(call, request)
    if isinstance(request, ListKeysOfEveryNode):
        check_done(call, range(len(pages)), pages, "listed")
    return sorted({key for page in pages if not is_lost(page) for key in page})[: request.limit]


async def end_copies(call: CallInView, request: EndCopies) -> bool:
    """End copies; tell whether nodes join or drain, so that there may be any.

    Raises:
        StoreUnavailable: a node could not be reached. Those to the others have ended.
    """
    if not call.view.moves_blocks:
        return False
    nodes = range(len(call.view.nodes))
    check_done(call, nodes, await call.ask([(index, Mark(True)) for index in nodes], patiently=True), "deleted")
    return True


async def evict(call: CallInView, request: Evict) -> int:
    """Evict cold blocks of all nodes that answer; return how many."""
    return sum(count for count in await _ask_everyone(call, request) if not is_lost(count))


async def purge(call: CallInView, request: Purge) -> int:
    """Delete everything, on nodes that blocks are copied from before those that they
    are copied to, as `delete` does. What has joined is purged twice: such nodes copy
    from each other.

    Raises:
        StoreUnavailable: a node could not be reached. The others are empty.
    """
    nodes = call.view.view.nodes
    draining = [index for index, node in enumerate(nodes) if node.state is NodeState.DRAINING]
    others = [index for index, node in enumerate(nodes) if node.state is not NodeState.DRAINING]
    joined = [index for index, node in enumerate(nodes) if node.state is NodeState.JOINING]
    turns = [turn for turn in (draining, others, joined) if turn]
    counts = await call.ask_in_turns([[(index, request) for index in turn] for turn in turns])
    check_done(call, list(itertools.chain(*turns)), counts, "purged")
    return sum(counts)


async def statistics(call: CallInView, request: Statistics) -> Stats:
    """Add up the statistics of all nodes that answer.

    Raises:
        StoreUnavailable: none does.
    """
    outcomes = await _ask_everyone(call, request)
    found: list[Stats] = [outcome for outcome in outcomes if not is_lost(outcome)]
    if not outcomes:
        raise StoreUnavailable("the cluster has no nodes; start one")
    if not found:
        raise outcomes[0].again()
    view = call.view.view
    nodes = [
        NodeStatistics(
            id=node.id,
            address=node.address,
            state=node.state.value,
            problem=str(outcome.again()) if is_lost(outcome) else "",
            stats=None if is_lost(outcome) else outcome,
        )
        for node, outcome in zip(view.nodes, outcomes, strict=True)
    ]
    counters = call.counters
    return attrs.evolve(
        merged(found),
        transport_reason="; ".join(f"{node.id}: {node.stats.transport_reason}" for node in nodes if node.stats),
        cluster=ClusterStatistics(
            epoch=view.epoch,
            view_age_s=call.calls.nodes.membership.age_s,
            copies=view.copies,
            lost_reads=counters.lost_reads,
            lost_copies=counters.lost_copies,
            hedges=counters.hedges,
            hedges_won=counters.hedges_won,
            warmed_blocks=counters.warmed,
            moved_slots=call.view.placement.moved_slots,
            nodes=nodes,
        ),
    )


async def removed(call: CallInView, request: FollowRemovalsOfNodes) -> Followed:
    """Ask all nodes which keys were removed, and wait a moment for one; tell
    those that no node has.

    A node that has lost its log makes a gap, and so does a view in which reads do not
    look everywhere they did. A node that does not answer is asked again, from where it
    was.

    Raises:
        StoreUnavailable: no node answers.
    """
    view = call.view.view
    nodes = [node.id for node in view.nodes]
    short = attrs.evolve(request, wait_s=min(request.wait_s, _WAIT_SHARE * call.calls.lookup_s))
    outcomes: list[Outcome] = await call.ask([(index, short.at(node)) for index, node in enumerate(nodes)])
    if all(map(is_lost, outcomes)):
        await Sleep(max(0.0, min(short.wait_s, call.left_s)))
        if not outcomes:
            raise StoreUnavailable("the cluster has no nodes; start one")
        raise outcomes[0].again()
    places = {node: place for node, place in request.places.items() if node in nodes}
    missed: int | None = 0 if request.view is None or still_finds(view, request.view) else None
    found: dict[str, None] = {}
    for node, outcome in zip(nodes, outcomes, strict=True):
        if is_lost(outcome):
            continue
        followed: Followed = outcome
        if request.places and node not in request.places:
            missed = None
        places[node] = followed.places[""]
        found.update(dict.fromkeys(followed.removed.keys))
        more = followed.removed.missed
        missed = None if missed is None or more is None else missed + more
    keys = list(found)
    if keys:
        there = await exists(call, Exists(Keys(keys)))
        keys = [key for key, is_there in zip(keys, there, strict=True) if not is_there]
    return Followed(places, RemovedKeys(keys, missed), view)


HANDLERS: Final[Handlers] = {
    requests.Put: put,
    requests.PutFromDevice: put,
    requests.Get: read,
    requests.GetInto: read,
    requests.GetToDevice: read,
    requests.Lease: lease,
    requests.Reserve: reserve,
    requests.Commit: commit,
    messages.Exists: exists,
    messages.MatchPrefix: match_prefix,
    requests.ReleaseHolds: release_holds,
    requests.Marks: marks,
    requests.Copy: copy,
    EndCopies: end_copies,
    messages.Delete: delete,
    messages.Pin: pin,
    messages.Flush: flush,
    messages.Prefetch: prefetch,
    FollowRemovalsOfNodes: removed,
    messages.ListKeys: list_keys,
    ListKeysOfEveryNode: list_keys,
    messages.Evict: evict,
    messages.Purge: purge,
    messages.Statistics: statistics,
}
"""What carries out each kind of request."""
