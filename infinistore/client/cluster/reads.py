"""Reads from a cluster, and matches of prefixes: cut by owner, and merged in the order
of the caller.

Usually each key has one place. With copies, and while nodes join or leave, a key may be
in several: the first one is asked first, and the next one for what is missing there or
whose node is lost. `ReadOrder` says which is the first. A node that usually takes twice
as long as the other copy comes second, except for one read in sixteen, by which it is
noticed when the node recovers.

What was found elsewhere than on a node that has just joined is copied there, in the
background, from a later place of its key to the first one. No copy brings back a key
that was deleted meanwhile, by a client with the same view: before it reads from another
place, the call asks the first one for a mark, and the copy is put with it
(`infinistore/core/deletions.py`). `writes.delete` tells the first place last.

When a node is late, the other copies of its blocks are asked, too: the read is hedged.
The first answer that has everything wins ("The Tail at Scale", Dean and Barroso, 2013).
What the other copies send goes to new memory, and to the caller's only when nothing
else can write there any more.

For a prefix, all owners are asked at the same time, and the first hole counts. A token
of a hold on several nodes is a list of `NODE=TOKEN`, separated by `&`, with the name of
the node escaped as in a URL.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import quote, unquote

import attrs

from infinistore.client.cluster.calls import CallInView, is_lost
from infinistore.client.cluster.nodes import parts_of
from infinistore.client.connection.effects import Background, Outcome, Part, Together
from infinistore.client.memory.views import Leased
from infinistore.client.requests import Batch, Get, GetInto, GetToDevice, Lease, Put, ReleaseHolds
from infinistore.cluster.membership import NodeState
from infinistore.errors import ChecksumMismatch, InfiniStoreException, PermissionDenied
from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import (
    Exists,
    Found,
    KeyedRequest,
    Keys,
    Mark,
    Matched,
    MatchPrefix,
    Prefetch,
    Prefetched,
    StoreRequest,
    TimesLeft,
)

_LEAST_S: Final = 0.002
"""Nothing is late before that: a busy process wakes up about as late."""
_PATIENCE: Final = 2
"""How many of the other copy's usual answers a late node is waited for at least."""
_SLOWER: Final = 2
"""How many times as long as the other copy a node takes if that is asked instead."""
_READS_A_TRY: Final = 16
"""One in so many reads goes to the slower node."""


class Hedge:
    """What a driver does about a part that is late: the `hedge` of that part."""

    def __init__(
        self,
        call: CallInView,
        request: Get | GetInto | Exists | Lease,
        index: int,
        positions: Sequence[int],
        places: Sequence[Sequence[int]],
    ) -> None:
        self.won = False
        """Whether the other copies answered for the node."""
        self.node = node = call.view.nodes[index]
        self._call = call
        self._request = request
        self._positions = positions
        self._places = places
        self._asked: list[Sequence[int]] = []
        self._clock: Callable[[], float] = call.calls.clock
        self._begun = self._clock()
        self._until = self._begun + call.left_s / 2  # as for the part: the other half is for the copies in turn
        kind, count = type(request), len(positions)
        other = call.view.nodes[places[positions[0]][1]]
        most_s = max(call.calls.lookup_s / 2, _PATIENCE * other.answers.usual_s(kind, count))
        late_s = node.answers.late_s(kind, count)
        self.after_s = most_s if late_s is None else max(_LEAST_S, min(late_s, most_s))
        """After how many seconds the part is late."""

    def begin(self) -> list[Part]:
        """Return what to ask the other copies now that the part is late; nothing if
        they cannot have everything, or if the budget is spent.
        """
        calls = self._call.calls
        nodes = self._call.view.nodes
        by_node: dict[int, list[int]] = {}
        for position in self._positions:
            by_node.setdefault(self._places[position][1], []).append(position)
        if any(nodes[index].lost for index in by_node) or not calls.budget.spend(len(self._positions)):
            return []
        self._call.counters.hedges += 1
        self._asked = list(by_node.values())
        left_s = self._until - self._clock()
        within_s = min(calls.lookup_s, left_s) if isinstance(self._request, Exists) else left_s
        return [Part(nodes[index].store, self._elsewhere(positions), within_s) for index, positions in by_node.items()]

    def _elsewhere(self, positions: Sequence[int]) -> Get | Exists | Lease:
        """Return the request for other copies, which writes to new memory."""
        if isinstance(self._request, GetInto):
            return Get([self._request.keys[i] for i in positions])
        return self._request.at(positions)

    def is_full(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether the other copies have everything."""
        return not any(isinstance(outcome, KeptError) for outcome in outcomes) and all(
            self._fits(position, value)
            for positions, outcome in zip(self._asked, outcomes, strict=True)
            for position, value in zip(
                positions, outcome.handed if isinstance(outcome, Leased) else outcome, strict=True
            )
        )

    def _fits(self, position: int, value: Any) -> bool:
        if isinstance(self._request, GetInto):
            return value is not None and len(value) <= len(self._request.batch.views[position])
        return value is not None and value is not False

    def settle(self, first: Outcome | None, others: Sequence[Outcome] | None) -> Outcome:
        """Return the outcome of the part, when everything has ended. `first` is None if
        the other copies had everything before it had.
        """
        failed = isinstance(first, KeptError)
        if not failed:  # an error says nothing about how long answers take
            self.node.answers.note(type(self._request), len(self._positions), self._clock() - self._begun)
        answered = first is not None and not failed
        if answered or others is None or not self.is_full(others):
            for other in others or ():
                if isinstance(other, Leased):
                    other.leave(quietly=True, stacklevel=1)
            return first
        self.won = True
        self._call.counters.hedges_won += 1
        if isinstance(self._request, Lease):
            place = {position: number for number, position in enumerate(self._positions)}
            parts = [[place[position] for position in positions] for positions in self._asked]
            return Leased.merged(len(self._positions), zip(parts, others, strict=True))
        found = dict(
            pair
            for positions, outcome in zip(self._asked, others, strict=True)
            for pair in zip(positions, outcome, strict=True)
        )
        if isinstance(self._request, GetInto):
            for position, value in found.items():
                self._request.batch.views[position][: len(value)] = value
                found[position] = len(value)
        return [found[position] for position in self._positions]


def hedges_for(
    call: CallInView, request: Any, parts: Sequence[tuple[int, Sequence[int]]], places: Sequence[Sequence[int]]
) -> list[Hedge | None]:
    """Return the hedge of each part of a read, in order; none without copies."""
    calls = call.calls
    if not calls.hedges or call.view.view.copies == 1 or not isinstance(request, Get | GetInto | Exists | Lease):
        return []
    calls.budget.earn(len(request.keys))
    return [
        Hedge(call, request, index, positions, places) if all(len(places[i]) > 1 for i in positions) else None
        for index, positions in parts
    ]


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
    outcomes = await call.ask(parts_of(request, parts))
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
    places = _places_to_read(call, request)
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
        outcomes = await call.ask_all(parts_of(request, parts), hedges, is_last=is_last)
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


def _places_to_read(call: CallInView, request: KeyedRequest[Any] | Lease) -> list[Sequence[int]]:
    """Return the places of the keys of a request that reads, and count it."""
    call.calls.reads += 1
    places = call.places(request.keys)
    if call.calls.reads % _READS_A_TRY == 0:
        return places
    for index, positions in _first_parts(places):
        kind, count = type(request), len(positions)
        usual_s = call.view.nodes[index].answers.usual_s(kind, count)
        if usual_s > _LEAST_S:  # below that, what differs is how long others kept the processor
            for position in positions:
                other, *later = places[position][1:] or [index]
                other_s = call.view.nodes[other].answers.usual_s(kind, count)
                if 0 < other_s * _SLOWER < usual_s and call.view.read_order.may_swap(places[position]):
                    places[position] = other, index, *later
    return places


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


def _first_parts(places: Sequence[Sequence[int]]) -> list[tuple[int, Sequence[int]]]:
    """Return the first places, each with the positions of its keys."""
    return _by_place(places, [position for position, place in enumerate(places) if place], 0, (), set())


async def _marks(call: CallInView, request: KeyedRequest[Any], indices: Iterable[int]) -> dict[int, int]:
    """Return the marks of those of these nodes that have joined, if what this request
    reads is to be copied there. None, and no copy, for a node of an older release, or
    one where this client may not write; it is not asked again.
    """
    # What nobody has verified would get a place, and perhaps a checksum, of its own.
    if not (call.calls.verifies and isinstance(request, Get | GetInto)):
        return {}
    view, nodes = call.view.view, call.view.nodes
    joined = [i for i in sorted(indices) if view.nodes[i].state is NodeState.JOINING and nodes[i].takes_copies]
    marks: dict[int, int] = {}
    answers = await call.ask_all([(index, Mark()) for index in joined], is_last=False) if joined else ()
    for index, mark in zip(joined, answers, strict=True):
        if not mark or (isinstance(mark, KeptError) and issubclass(mark.kind, PermissionDenied)):
            nodes[index].takes_copies = False
        elif not isinstance(mark, KeptError):
            marks[index] = mark
    return marks


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
            asked = await Together([Part(source, TimesLeft(Keys(batch.keys))) for source, _, batch, _ in copying])
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
    """Return for each key the first of its places that has it, -1 if none has."""
    places = call.places(keys)
    parts = [
        part
        for rank in range(max(map(len, places), default=0))
        for part in _by_place(
            places, [position for position, place in enumerate(places) if len(place) > rank], rank, (), set()
        )
    ]
    outcomes = await call.ask([(index, Exists(Keys([keys[i] for i in positions]))) for index, positions in parts])
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
        places = _places_to_read(call, request)
        parts = _first_parts(places)
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
            outcomes = await call.ask_all(parts_of(request, parts), hedges, is_last=is_last)
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


async def match_prefix(call: CallInView, request: MatchPrefix) -> Matched:
    """Count the leading keys that are there; hold them, and nothing beyond them."""
    keys = request.keys
    view = call.view
    parts = view.parts(keys) if view.has_one_place else await _parts_that_are_there(call, keys)
    outcomes = await _ask_or_release(call, parts_of(request, parts))
    if len(parts) == 1 and view.has_one_place and not is_lost(outcomes[0]):
        (index, _), match = parts[0], outcomes[0]
        return Matched(match.matched, _token(call, {index: match.hold} if match.hold else {}), match.on_disk)
    first_hole = sum(len(positions) for _, positions in parts)
    for (_, positions), outcome in zip(parts, outcomes, strict=True):
        matched = 0 if is_lost(outcome) else outcome.matched
        if is_lost(outcome):
            call.counters.lost_reads += len(positions)
        if matched < len(positions):
            first_hole = min(first_hole, positions[matched])
    held: dict[int, Matched] = {}
    beyond: dict[int, MatchPrefix] = {}
    for (index, positions), outcome in zip(parts, outcomes, strict=True):
        if not is_lost(outcome):
            wanted = sum(position < first_hole for position in positions[: outcome.matched])
            held[index] = outcome._replace(on_disk=min(outcome.on_disk, wanted))
            if wanted < outcome.matched and outcome.hold:
                beyond[index] = request.at(positions[:wanted])
    if beyond:
        await _hold_less(call, held, beyond)
    tokens = {index: match.hold for index, match in held.items() if match.hold}
    return Matched(first_hole, _token(call, tokens), sum(match.on_disk for match in held.values()))


async def _parts_that_are_there(call: CallInView, keys: Sequence[str]) -> list[tuple[int, Sequence[int]]]:
    """Return the leading keys that are there, by the node that has them."""
    found = await present_anywhere(call, keys)
    leading = (*found, -1).index(-1)
    parts: dict[int, list[int]] = {}
    for position, index in enumerate(found[:leading]):
        parts.setdefault(index, []).append(position)
    return list(parts.items())


async def _hold_less(call: CallInView, held: dict[int, Matched], wanted: dict[int, MatchPrefix]) -> None:
    """Hold on some nodes only what is wanted of them, instead of what is held there."""
    fewer = [(index, request) for index, request in wanted.items() if request.keys]
    less = dict(zip([index for index, _ in fewer], await call.ask_all(fewer), strict=True))
    superfluous: list[tuple[int, StoreRequest[Any]]] = []
    for index, request in wanted.items():
        outcome = less.get(index, Matched(0))
        if isinstance(outcome, KeptError):  # then it holds too much, until its time is over
            continue
        if outcome.matched == len(request.keys):
            outcome, held[index] = held[index], outcome
        if outcome.hold:
            superfluous.append((index, ReleaseHolds(outcome.hold)))
    await call.ask_all(superfluous)


async def prefetch(call: CallInView, request: Prefetch) -> Prefetched:
    """Have all owners, or the copies that are read, begin to read blocks from disk."""
    view = call.view
    parts = view.parts(request.keys) if view.has_one_place else _first_parts(call.places(request.keys))
    outcomes = await _ask_or_release(call, parts_of(request, parts))
    reading = skipped = 0
    tokens: dict[int, str] = {}
    for (index, _), outcome in zip(parts, outcomes, strict=True):
        if not is_lost(outcome):
            reading += outcome.reading
            skipped += outcome.skipped
            if outcome.hold:
                tokens[index] = outcome.hold
    return Prefetched(reading, skipped, _token(call, tokens))


async def release_holds(call: CallInView, request: ReleaseHolds) -> bool:
    """End a hold on all its nodes; False if it has ended on all of them."""
    parts: list[tuple[int, StoreRequest[Any]]] = []
    indices = {node.id: index for index, node in enumerate(call.view.view.nodes)}
    for one in request.hold.split("&"):
        name, separator, token = one.rpartition("=")
        if not separator:  # of a store of one server
            parts += [(index, ReleaseHolds(token)) for index in indices.values()]
        elif unquote(name) in indices:
            parts.append((indices[unquote(name)], ReleaseHolds(token)))
    outcomes = await call.ask(parts)
    return any(outcome for outcome in outcomes if not is_lost(outcome))


async def _ask_or_release(call: CallInView, parts: Sequence[tuple[int, StoreRequest[Any]]]) -> list[Outcome]:
    """Ask, and if a node refuses, release what the others hold."""
    outcomes = await call.ask_all(parts)
    refused = [
        (index, outcome)
        for (index, _), outcome in zip(parts, outcomes, strict=True)
        if isinstance(outcome, KeptError) and not is_lost(outcome)
    ]
    if refused:
        held = [
            (index, ReleaseHolds(outcome.hold))
            for (index, _), outcome in zip(parts, outcomes, strict=True)
            if not isinstance(outcome, KeptError) and outcome.hold
        ]
        await call.ask_all(held)
        raise call.error(*refused[0])
    return outcomes


def _token(call: CallInView, tokens: dict[int, str]) -> str:
    nodes = call.view.view.nodes
    return "&".join(f"{quote(nodes[index].id, safe='')}={token}" for index, token in tokens.items())
