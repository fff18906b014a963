"""Writes to a cluster: each part is finished, whatever becomes of the others."""

from collections.abc import Sequence
from typing import Any

from infinistore.client.cluster.calls import CallInView, error_of, is_lost, naming
from infinistore.client.cluster.nodes import parts_of
from infinistore.client.cluster.reads import present_anywhere
from infinistore.client.connection.calls import unknown_outcome
from infinistore.client.connection.effects import Outcome, Part, Together
from infinistore.client.memory.views import ReservedRoom
from infinistore.client.requests import Batch, Commit, Copy, Marks, Put, PutFromDevice, Reserve
from infinistore.cluster.membership import NodeState
from infinistore.errors import LimitExceeded, PartialPut, StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import Delete, Flush, Mark, Pin

_WHERE = "give keys that belong together the same hash tag, as in '{prompt 7}/layer 3', so that one node has them all"


def _written_to(call: CallInView, keys: Sequence[str]) -> list[list[tuple[int, Sequence[int]]]]:
    """Return, for each copy, the nodes to write to with the positions of their keys."""
    view = call.view
    first = view.parts(keys)
    if view.view.copies == 1:
        return [first]
    ranks = view.placement.ranks(keys, view.view.copies)
    copies: list[list[tuple[int, Sequence[int]]]] = [first]
    for rank in range(1, view.view.copies):
        parts: dict[int, list[int]] = {}
        for position, owners in enumerate(ranks):
            if len(owners) > rank:
                parts.setdefault(owners[rank], []).append(position)
        copies.append(list(parts.items()))
    return copies


async def put(call: CallInView, request: Put | PutFromDevice) -> list[str]:
    """Store a batch; return the keys that were skipped because they were there.

    Raises:
        PartialPut: the nodes of some keys could not be reached.
    """
    keys = request.keys
    parts = [part for copy in _written_to(call, keys) for part in copy]
    outcomes = await call.ask(parts_of(request, parts))
    return _skipped(call, keys, parts, outcomes)


async def marks(call: CallInView, request: Marks) -> dict[str, int | KeptError]:
    """Ask the nodes that keys are written to for a mark; return it by their ids."""
    view = call.view
    ranks = view.placement.ranks(request.keys, view.view.copies)
    indices = sorted({index for owners in ranks for index in owners})
    marks = await call.ask_all([(index, Mark()) for index in indices], patiently=True)
    return {view.nodes[index].node.id: mark for index, mark in zip(indices, marks, strict=True)}


async def copy(call: CallInView, request: Copy) -> list[str]:
    """Store a batch as copies; return the keys that were skipped because they were
    there, or had been deleted.

    Raises:
        PartialPut: the nodes of some keys could not be reached, or made no mark.
    """
    keys = request.batch.keys
    parts = [part for copy in _written_to(call, keys) for part in copy]
    sent: list[tuple[int, Put]] = []
    outcomes: list[Outcome] = []
    for index, positions in parts:
        node = call.view.nodes[index]
        mark = request.marks.get(node.node.id, 0)
        if mark and not isinstance(mark, KeptError):
            sent.append((index, Put(request.batch.at(positions), False, request.ttl_us, mark)))
            outcomes.append(None)
        else:
            why = mark.again() if mark else "it is of an older release, or owns the keys since a moment ago"
            outcomes.append(KeptError(StoreUnavailable(f"{node} takes no copies: {why}")))
    answers = iter(await call.ask(sent))
    outcomes = [next(answers) if outcome is None else outcome for outcome in outcomes]
    return _skipped(call, keys, parts, outcomes)


def _skipped(
    call: CallInView, keys: Sequence[str], parts: Sequence[tuple[int, Sequence[int]]], outcomes: Sequence[Outcome]
) -> list[str]:
    """Return the skipped keys; raise `PartialPut` if one may be nowhere."""
    if any(map(is_lost, outcomes)):
        _tell_lost(call, keys, parts, outcomes)
    if len(parts) == 1:
        skipped: list[str] = outcomes[0]
        return skipped
    names = {key for outcome in outcomes if not is_lost(outcome) for key in outcome}
    return [key for key in keys if key in names] if names else []


def _tell_lost(
    call: CallInView, keys: Sequence[str], parts: Sequence[tuple[int, Sequence[int]]], outcomes: Sequence[Outcome]
) -> None:
    """Raise `PartialPut` if a key is nowhere for certain."""
    stored: set[int] = set()
    unknown: set[int] = set()
    missed: set[int] = set()
    problems: list[str] = []
    for (_, positions), outcome in zip(parts, outcomes, strict=True):
        if not is_lost(outcome):
            stored.update(positions)
            continue
        error: Any = outcome.again()
        problems.append(str(error))
        missed.update(positions)
        if error.outcome_is_unknown:
            unknown.update(positions)
    call.counters.lost_copies += len(missed)
    missed -= stored
    if not missed:
        return
    lost = [call.view.nodes[index] for (index, _), outcome in zip(parts, outcomes, strict=True) if is_lost(outcome)]
    raise PartialPut(
        naming(f"{len(missed)} of {len(keys)} blocks were not stored: {problems[0]}", lost),
        [keys[position] for position in sorted(stored)],
        [keys[position] for position in sorted(missed - unknown)],
        [keys[position] for position in sorted(missed & unknown)],
    )


async def delete(call: CallInView, request: Delete) -> int:
    """Delete keys wherever they are; return how many were there.

    While blocks are copied from node to node, those that copies come from are told
    before those that they go to: `infinistore/core/deletions.py` says why. Before them,
    so are the nodes that are no place of a key, if they answer within the time of a
    lookup: they may have it from before, and be a place again in the next view.

    Raises:
        StoreUnavailable: a place of a key could not be reached. The keys of the others
            were deleted.
    """
    keys = request.keys
    view = call.view
    if view.has_one_place:
        turns = [view.parts(keys)]
        count = -1
    else:
        count = sum(place >= 0 for place in await present_anywhere(call, list(dict.fromkeys(keys))))
        if view.moves_blocks:
            former, *turns = _in_turns(call, keys)
            most_s = min(call.calls.lookup_s, call.left_s / 4)
            await call.ask_all(parts_of(request, former), reserve_s=call.left_s - most_s)
        else:
            turns = [_by_node(call, keys)]
    outcomes = await call.ask_in_turns([parts_of(request, parts) for parts in turns])
    check_done(call, [index for parts in turns for index, _ in parts], outcomes, "deleted")
    return sum(outcomes) if count < 0 else count


def _by_node(call: CallInView, keys: Sequence[str]) -> list[tuple[int, Sequence[int]]]:
    """Return each node that may have some of these keys, and their positions."""
    by_node: dict[int, list[int]] = {}
    for position, places in enumerate(call.view.placement.places(keys)):
        for index in places:
            by_node.setdefault(index, []).append(position)
    return [*by_node.items()]


def _in_turns(call: CallInView, keys: Sequence[str]) -> list[list[tuple[int, Sequence[int]]]]:
    """Return nodes, and positions of keys: those that are no places of the keys, then
    the places, those that copies come from before those they go to.

    A draining node passes on to others, and no block goes there; the first place of a
    key gets copies from its later places.
    """
    nodes = call.view.view.nodes
    turns: tuple[dict[int, list[int]], ...] = ({}, {}, {}, {})
    for position, places in enumerate(call.view.placement.places(keys)):
        for index, node in enumerate(nodes):
            is_draining = node.state is NodeState.DRAINING
            turn = 0 if index not in places else 1 if is_draining else 2 if index != places[0] else 3
            turns[turn].setdefault(index, []).append(position)
    return [[*parts.items()] for turn, parts in enumerate(turns) if parts or turn == 0]


def check_done(call: CallInView, indices: Sequence[int], outcomes: Sequence[Outcome], what: str) -> None:
    """Raise `StoreUnavailable` if a part has met a lost node."""
    lost = [
        (call.view.nodes[index], outcome) for index, outcome in zip(indices, outcomes, strict=True) if is_lost(outcome)
    ]
    if lost:
        text = f"not everything was {what}: {lost[0][1].again()}"
        raise unknown_outcome(
            StoreUnavailable(naming(text, [node for node, _ in lost])),
            any(outcome.again().outcome_is_unknown for _, outcome in lost),
        )


async def flush(call: CallInView, request: Flush) -> int:
    """Make blocks durable on all their nodes; return how many the first ones have."""
    copies = _written_to(call, request.keys)
    parts = [part for copy in copies for part in copy]
    outcomes = await call.ask(parts_of(request, parts))
    return sum(outcome for outcome in outcomes[: len(copies[0])] if not is_lost(outcome))


async def pin(call: CallInView, request: Pin) -> list[bool]:
    """Pin keys where they belong, or unpin them wherever they are, which may be where
    they belonged before; tell for each whether any node has done so.

    Raises:
        StoreUnavailable: a node could not be reached. The others have done their part.
    """
    if request.pinned:
        parts = _by_node(call, request.keys)
    else:
        parts = [(index, range(len(request.keys))) for index in range(len(call.view.nodes))]
    outcomes = await call.ask(parts_of(request, parts))
    check_done(call, [index for index, _ in parts], outcomes, "pinned" if request.pinned else "unpinned")
    done = [False] * len(request.keys)
    for (_, positions), outcome in zip(parts, outcomes, strict=True):
        for position, pinned in zip(positions, outcome, strict=True):
            done[position] |= pinned
    return done


async def reserve(call: CallInView, request: Reserve) -> ReservedRoom:
    """Take room on the one node that owns all keys.

    Raises:
        LimitExceeded: several nodes do.
    """
    owners = call.view.parts(request.keys)
    if len(owners) > 1:
        raise LimitExceeded(
            f"a reservation is stored in one step, and these {len(request.keys)} keys belong to {len(owners)} nodes;"
            f" {_WHERE}, or use put_many"
        )
    index = owners[0][0] if owners else 0
    (outcome,) = await call.ask([(index, request)])
    if is_lost(outcome):
        raise call.error(index, outcome)
    request.kept.place = call.view.nodes[index]
    room: ReservedRoom = outcome
    return room


async def commit(call: CallInView, request: Commit) -> None:
    """Store what was written to reserved room, on its node and those of its copies."""
    node = request.kept.place
    room = request.room
    copies = _written_to(call, room.keys)
    # First the others: as long as the room is not committed, nobody else writes there.
    # They leave half of the time for that.
    half_s = call.left_s / 2
    parts = [
        Part(
            call.view.nodes[index].store,
            Put(Batch(room.keys, room.memory).at(positions), ttl_us=request.ttl_us),
            half_s,
        )
        for copy in copies
        for index, positions in copy
        if call.view.nodes[index] is not node and not call.view.nodes[index].lost
    ]
    for outcome in await Together(parts) if len(copies) > 1 else ():
        if isinstance(outcome, KeptError):
            call.counters.lost_copies += 1
    (outcome,) = await Together([Part(node.store, request, call.left_s)])
    if isinstance(outcome, KeptError):
        await call.calls.watch(node)
        raise error_of(node, outcome)
