"""Reads from a cluster: cut by owner, and merged in the order of the caller.

Usually each key has one place. With copies, and while nodes join or leave, a key may be
in several: the first one is asked first, and the next one for what is missing there or
whose node is lost. What was found elsewhere than on a node that has just joined is
copied there, in the background, from a later place of its key to the first one.

No copy brings back a key that was deleted meanwhile, by a client with the same view:
before it reads from another place, the call asks the first one for a mark, and the copy
is put with it (`infinistore/core/deletions.py`). `writes.delete` tells the first place
last.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs

from infinistore.client.cluster.calls import CallInView, is_lost
from infinistore.client.cluster.hedging.hedge import hedges_for
from infinistore.client.cluster.nodes import part_of
from infinistore.client.connection.effects import Background, Part, Together
from infinistore.client.memory.views import Leased
from infinistore.client.requests import (
    Batch,
    Exists,
    Found,
    Get,
    GetInto,
    GetToDevice,
    KeyedRequest,
    Lease,
    Mark,
    Put,
    TimesLeft,
)
from infinistore.cluster.membership import NodeState
from infinistore.errors import ChecksumMismatch, InfiniStoreException
from infinistore.kept_errors import KeptError

__all__ = ["MOST_WARMING_BYTES", "exists", "lease", "present_anywhere", "read"]

_T = TypeVar("_T")
MOST_WARMING_BYTES: Final = 64 * 1024 * 1024
"""How much may be on its way to nodes that have joined."""


async def read(call: CallInView, request: KeyedRequest[_T]) -> list[_T]:
    """Read into new memory, into the caller's, or into that of GPUs."""
    return await _found(call, request, None)


async def exists(call: CallInView, request: Exists) -> list[bool]:
    """Tell for each key whether it is there."""
    return await _found(call, request, False)


async def _found(call: CallInView, request: KeyedRequest[_T], absent: Any) -> list[_T]:
    view = call.view
    if not view.has_one_place:
        return await _found_in_places(call, request, absent)
    parts = view.parts(request.keys)
    whole = len(parts) == 1
    outcomes = await call.ask([(index, part_of(request, positions)) for index, positions in parts])
    if whole and not is_lost(outcomes[0]):
        found: list[_T] = outcomes[0]
        return found
    merged = []
    for (_, positions), outcome in zip(parts, outcomes, strict=True):
        if is_lost(outcome):
            call.counters.lost_reads += len(positions)
            outcome = [absent] * len(positions)  # noqa: PLW2901
        merged.append((positions, outcome))
    return request.merge(merged)


async def _found_in_places(call: CallInView, request: KeyedRequest[_T], absent: Any) -> list[_T]:
    keys = request.keys
    if isinstance(request, GetInto | GetToDevice) and request.all_or_nothing:
        # What is missing in one place may be in another; then all others are wanted.
        request = attrs.evolve(request, all_or_nothing=False)  # type: ignore[assignment]
    places = call.view.placement.places(keys)
    found: list[Any] = [absent] * len(keys)
    lost: set[int] = set()
    silent: set[int] = set()
    damaged: dict[int, tuple[int, KeptError]] = {}
    on_disk = 0
    warm: dict[tuple[int, int], list[int]] = {}
    marks: dict[int, int] = {}
    left: Sequence[int] = [position for position, place in enumerate(places) if place]
    asked = 0
    while left:
        if asked == 1:
            marks = await _marks(call, request, {places[position][0] for position in left} - silent)
        parts = _by_place(places, left, asked, silent, lost)
        hedges = [] if asked else hedges_for(call, request, parts, places)
        is_last = all(len(places[position]) <= asked + 1 for position in left)
        outcomes = await call.ask_all(
            [(index, part_of(request, positions)) for index, positions in parts], hedges, is_last=is_last
        )
        for (index, positions), outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, KeptError):
                if is_lost(outcome):
                    silent.add(index)
                _note_failed(call, (index, positions), outcome, lost, damaged)
                continue
            on_disk += outcome.on_disk if isinstance(outcome, Found) else 0
            for position, value in zip(positions, outcome, strict=True):
                found[position] = value
                if value is not absent and marks.get(places[position][0]):
                    warm.setdefault((places[position][0], index), []).append(position)
        asked += 1
        left = [position for position in left if found[position] is absent and len(places[position]) > asked]
    for position, problem in damaged.items():
        if found[position] is absent:
            raise call.error(*problem)
    call.counters.lost_reads += sum(found[position] is absent for position in lost)
    await _warm(call, request, found, warm, marks)
    if isinstance(request, Exists):
        found = Found.partly_on_disk(found, on_disk)
    return found


def _note_failed(
    call: CallInView,
    part: tuple[int, Sequence[int]],
    outcome: KeptError,
    lost: set[int],
    damaged: dict[int, tuple[int, KeptError]],
) -> None:
    """Note why a part has nothing; raise what another copy is no remedy for."""
    index, positions = part
    if is_lost(outcome):
        lost.update(positions)
    elif issubclass(outcome.kind, ChecksumMismatch):
        damaged.update(dict.fromkeys(positions, (index, outcome)))
    else:
        raise call.error(index, outcome)


def _by_place(
    places: Sequence[Sequence[int]], left: Sequence[int], rank: int, silent: Container[int], lost: set[int]
) -> list[tuple[int, Sequence[int]]]:
    """Return the nodes that come at this rank, each with the positions of its keys.

    A call waits for a lost node once: those that are `silent` are not asked again, and
    what they might have is `lost`.
    """
    parts: dict[int, list[int]] = {}
    for position in left:
        index = places[position][rank]
        if index in silent:
            lost.add(position)
        else:
            parts.setdefault(index, []).append(position)
    return list(parts.items())


async def _marks(call: CallInView, request: KeyedRequest[Any], indices: Iterable[int]) -> dict[int, int]:
    """Return the marks of those of these nodes that have joined, if what this request
    reads is to be copied there. 0, and no copy, for a node of an older release.
    """
    # What nobody has verified would get a place, and perhaps a checksum, of its own.
    if not (call.calls.verifies and isinstance(request, Get | GetInto)):
        return {}
    joined = [index for index in sorted(indices) if call.view.view.nodes[index].state is NodeState.JOINING]
    marks = await call.ask_all([(index, Mark()) for index in joined], is_last=False) if joined else ()
    return {index: mark for index, mark in zip(joined, marks, strict=True) if not isinstance(mark, KeptError)}


async def _warm(
    call: CallInView,
    request: Any,
    found: Sequence[Any],
    warm: dict[tuple[int, int], list[int]],
    marks: Mapping[int, int],
) -> None:
    """Copy what was found elsewhere to the nodes that have joined and own it now."""
    counters = call.counters
    copying: list[tuple[Any, Any, Batch, int]] = []
    size_bytes = blocks = 0
    for (index, source), positions in warm.items():
        node = call.view.nodes[index]
        if node.lost:
            continue
        keys: list[str] = []
        copies: list[memoryview] = []
        for position in positions:
            value = found[position] if isinstance(request, Get) else request.batch.views[position][: found[position]]
            if counters.warming_bytes + size_bytes + len(value) > MOST_WARMING_BYTES:
                break
            size_bytes += len(value)
            keys.append(request.keys[position])
            copies.append(memoryview(bytes(value)))  # the caller's memory is the caller's when the call is over
        if keys:
            blocks += len(keys)
            copying.append((call.view.nodes[source].store, node.store, Batch(keys, copies), marks[index]))
    if not copying:
        return
    counters.warming_bytes += size_bytes

    async def copy() -> None:
        try:
            asked = await Together([Part(source, TimesLeft(batch.keys)) for source, _, batch, _ in copying])
            parts = [
                Part(target, put)
                for (_, target, batch, mark), times in zip(copying, asked, strict=True)
                if not isinstance(times, KeptError)
                for put in _copies_that_end(batch, times, mark)
            ]
            outcomes = await Together(parts)
            counters.warmed += 0 if any(isinstance(one, KeptError) for one in outcomes) else blocks
        finally:
            counters.warming_bytes -= size_bytes

    if not await Background(copy()):
        counters.warming_bytes -= size_bytes


def _copies_that_end(batch: Batch, times_us: Sequence[int | None], mark: int) -> list[Put]:
    """Return what copies blocks that end at different times; None: it is gone."""
    return [
        Put(batch.where([time == ttl_us for time in times_us]), replace=False, ttl_us=ttl_us, since=mark)
        for ttl_us in dict.fromkeys(time for time in times_us if time is not None)
    ]


async def present_anywhere(call: CallInView, keys: Sequence[str]) -> list[int]:
    """Return for each key the first of its places that has it, -1 if none has: all are
    asked at the same time.
    """
    places = call.view.placement.places(keys)
    parts = [
        part
        for rank in range(max(map(len, places), default=0))
        for part in _by_place(
            places, [position for position, place in enumerate(places) if len(place) > rank], rank, (), set()
        )
    ]
    outcomes = await call.ask([(index, Exists([keys[i] for i in positions])) for index, positions in parts])
    found = [-1] * len(keys)
    for (index, positions), outcome in zip(parts, outcomes, strict=True):
        if is_lost(outcome):
            continue
        for position, there in zip(positions, outcome, strict=True):
            if there and found[position] < 0:
                found[position] = index
    for (_, positions), outcome in zip(parts, outcomes, strict=True):
        if is_lost(outcome):
            call.counters.lost_reads += sum(found[position] < 0 for position in positions)
    return found


async def lease(call: CallInView, request: Lease) -> Leased:
    """Pin blocks on several nodes; if one refuses, the others are released."""
    view = call.view
    count = len(request.keys)
    places: list[Sequence[int]] = []
    if view.has_one_place:
        parts = view.parts(request.keys)
    else:
        places = view.placement.places(request.keys)
        parts = _by_place(places, [position for position, place in enumerate(places) if place], 0, (), set())
    leased: list[tuple[Sequence[int], Leased]] = []
    there: set[int] = set()
    lost: set[int] = set()
    silent: set[int] = set()
    left: Sequence[int] = ()
    asked = 0
    try:
        while parts or left:
            hedges = [] if asked else hedges_for(call, request, parts, places)
            is_last = all(len(place) <= asked + 1 for place in places)
            outcomes = await call.ask_all(
                [(index, part_of(request, positions)) for index, positions in parts], hedges, is_last=is_last
            )
            for (_, positions), outcome in zip(parts, outcomes, strict=True):
                if isinstance(outcome, Leased):
                    leased.append((positions, outcome))
            for (index, positions), outcome in zip(parts, outcomes, strict=True):
                if is_lost(outcome):
                    silent.add(index)
                    lost.update(positions)
                elif isinstance(outcome, KeptError):
                    raise call.error(index, outcome)
                else:
                    there.update(p for p, seen in zip(positions, outcome.handed, strict=True) if seen is not None)
            asked += 1
            left = [position for position, place in enumerate(places) if len(place) > asked and position not in there]
            parts = _by_place(places, left, asked, silent, lost)
    except InfiniStoreException:
        for _, part in leased:
            part.leave(quietly=True, stacklevel=1)
        raise
    call.counters.lost_reads += len(lost - there)
    return leased[0][1] if len(leased) == 1 and len(leased[0][0]) == count else Leased.merged(count, leased)
