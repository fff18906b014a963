"""The promises of docs/promises.md, executed on the history of a run.

No two puts have the same value, so that it is known which put a read has seen, and the
history of a key needs no search. All that is known about one value is a zone: from the
first moment at which it was certainly there, to the last one. In a history that keeps
the promises, no two of these overlap, and nothing that replaces or removes the value,
or finds the key without one, lies inside (P. B. Gibbons and E. Korach, Testing Shared
Memories, SIAM Journal on Computing 26(4), 1997).

A value may be lost at any moment, which is why more is checked where it may not be:
while a hold lasts, and as long as a server has evicted nothing.

With disks, a server may have what one before it had. Then the history of each server is
checked by itself: a value of an earlier one was there from its start on, or never. What
may come from one server to the next, `durability` checks.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import attrs

from tests.simulation.durability import broken_durability, by_life
from tests.simulation.errors import may_be_corrupted, wrong_errors, wrongly_allowed
from tests.simulation.history import Call, End, History, Life
from tests.simulation.promises import PromiseException, promise_exceptions

__all__ = ["check"]

_CLOCK_S = 1e-5
"""How exact clocks and times to live are."""


@attrs.define(eq=False)
class _Value:
    """What is known about one value of one key: its put, and its zone."""

    put: Call
    first_s: float
    """When it was certainly there for the first time, if it ever was."""
    last_s: float
    """When it was certainly there for the last time."""
    certain: bool
    """Whether it was ever there."""
    recovered: bool = False
    """Whether it can only have come from a disk, when the server started."""
    ends_s: float = math.inf
    """When its time to live was certainly over."""

    @property
    def may_end_s(self) -> float:
        """When its time to live can have been over at the earliest."""
        return self.put.begun + self.put.lasts_s

    def see(self, begun: float, ended: float) -> None:
        self.first_s = min(self.first_s, ended)
        self.last_s = max(self.last_s, begun)
        self.certain = True

    def __str__(self) -> str:
        return f"the value of call {self.put.number} ({self.put.method} of {self.put.client})"


@attrs.frozen
class _Absence:
    """At some moment between two others, a key had no value."""

    begun: float
    ended: float
    why: str
    was_found: bool = False
    """Whether a call has only found it so, and did not bring it about."""


@attrs.define
class _Key:
    """What is known about one key."""

    values: dict[bytes, _Value] = attrs.field(factory=dict)
    absences: list[_Absence] = attrs.field(factory=list)
    presences: list[Call] = attrs.field(factory=list)
    removals: list[Call] = attrs.field(factory=list)
    """The calls that may have removed its value."""
    unpins: list[Call] = attrs.field(factory=list)
    """The calls after which it may be evicted."""


def check(history: History, exceptions: frozenset[PromiseException] | None = None) -> list[str]:
    """Return what is wrong with a history. `exceptions` are by default those that
    docs/promises.md lists.
    """
    exceptions = promise_exceptions() if exceptions is None else exceptions
    if history.tables:
        return list(_problems_of_tenants(history, exceptions))
    problems = list(wrong_errors(history))
    if history.nodes:
        return [*problems, *_problems_of_nodes(history, exceptions)]
    if not history.has_disks:
        return [*_Checker(history, exceptions).problems(), *problems]
    for part, recovered in by_life(history):
        problems += _Checker(part, exceptions, recovered).problems()
    return [*problems, *broken_durability(history, exceptions)]


def _problems_of_tenants(history: History, exceptions: frozenset[PromiseException]) -> Iterator[str]:
    """Yield what is wrong with each tenant, as if it were the only one there."""
    yield from wrongly_allowed(history)
    for tenant in sorted({name for name, _ in history.tenant_of.values()}):
        part = history.of_tenant(tenant)
        found = _problems_of_nodes(part, exceptions) if part.nodes else _Checker(part, exceptions).problems()
        for problem in (*found, *wrong_errors(part)):
            yield f"{tenant}: {problem}"


def _problems_of_nodes(history: History, exceptions: frozenset[PromiseException]) -> Iterator[str]:
    """Yield what is wrong in a cluster: each node by itself for the keys that were
    nowhere else; of the others, only whether values are those of their keys.
    """
    lost = PromiseException.LOST_NODE in exceptions
    for name, lives in history.nodes.items():
        own = {key for key, node in history.places.items() if node == name}
        yield from _Checker(history.part(own, lives, name, lost=lost), exceptions).problems()
    moved = {key for call in history.calls for key in call.keys} - history.places.keys()
    others = _Checker(history.part(moved, [], lost=lost), exceptions)
    yield from others.wrong_values() if PromiseException.OTHER_PLACE in exceptions else others.problems()


class _Checker:
    """Checks a history, or that of one server. `recovered` are the calls before it
    whose values may be on its disks."""

    def __init__(
        self, history: History, exceptions: frozenset[PromiseException], recovered: Sequence[Call] = ()
    ) -> None:
        self._history = history
        self._exceptions = exceptions
        self._recovered = recovered
        self._lives = history.lives
        if PromiseException.RESTART not in exceptions:
            lives = history.lives
            evicted, dropped = any(life.evicted for life in lives), any(life.dropped for life in lives)
            self._lives = [Life(0.0, math.inf, evicted, dropped)]
        self._misses_are_absences = not history.has_disks or PromiseException.LATE_READ not in exceptions
        self._keys: dict[str, _Key] = defaultdict(_Key)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong."""
        for call in self._recovered:
            for name, value in call.puts.items():
                if call.may_have_effect and name not in call.skipped and call.lasts_s == math.inf:
                    start_s = self._lives[0].begun
                    self._keys[name].values[value] = _Value(call, start_s, start_s, certain=False, recovered=True)
        for call in self._history.calls:
            self._note_effects(call)
        for call in self._history.calls:
            yield from self._note_findings(call)
        self._note_restarts()
        for name, key in self._keys.items():
            absences = [one for one in key.absences if self._misses_are_absences or not one.was_found]
            yield from _overlaps(name, key)
            yield from _resurrections(name, key, absences)
            yield from _presences_of_nothing(name, key, absences)
            yield from self._losses(name, key)
        for call in self._history.calls:
            if call.end is End.RETURNED and len(call.seen) > 1:
                yield from self._torn_batches(call)

    def wrong_values(self) -> Iterator[str]:
        """Yield which calls read what nobody has put under that key."""
        for call in self._history.calls:
            self._note_effects(call)
        for call in self._history.calls:
            yield from self._note_findings(call)

    # What is known

    def _latest_s(self, call: Call) -> float:
        """When a call can have had its effect at the latest."""
        if PromiseException.LATE_OUTCOME in self._exceptions:
            return call.latest_s
        return call.ended

    def _note_effects(self, call: Call) -> None:
        certain = call.end is End.RETURNED
        for name, value in call.puts.items():
            key = self._keys[name]
            if name in call.skipped:
                continue
            if call.may_have_effect:
                latest_s = self._latest_s(call)
                ends_s = latest_s + call.lasts_s + _CLOCK_S
                key.values[value] = _Value(call, latest_s, call.begun, certain, ends_s=ends_s)
        if call.may_have_effect:
            for name in call.unpins:
                self._keys[name].unpins.append(call)
            for name in call.removes:
                self._keys[name].removals.append(call)
                if certain:
                    self._keys[name].absences.append(_Absence(call.begun, call.ended, f"call {call.number} removed it"))

    def _note_findings(self, call: Call) -> Iterator[str]:
        if call.end is not End.RETURNED:  # what it found before it raised does not count
            return
        for name, value in call.seen:
            key = self._keys[name]
            if value is None:
                key.absences.append(_found_absent(call))
                continue
            if may_be_corrupted(call, name, self._history):  # perhaps into another value that was put
                continue
            found = key.values.get(value)
            if found is None:
                yield f"call {call.number}: {call.client} read under {name} what nobody has put: {value[:80]!r}"
            elif found.put.begun > call.ended:
                yield f"call {call.number}: {call.client} read under {name} what call {found.put.number} put later"
            else:
                found.see(call.begun, call.ended)
                if call.begun > found.ends_s:
                    yield f"call {call.number}: {call.client} read {name} after the time of call {found.put.number}"
        for name, there in call.present:
            if there:
                self._keys[name].presences.append(call)
            else:
                self._keys[name].absences.append(_found_absent(call))

    def _note_restarts(self) -> None:
        """The end of a server makes everything absent."""
        for life in self._lives:
            if life.ended < math.inf:
                for key in self._keys.values():
                    key.absences.append(_Absence(life.ended, life.ended, "its server ended"))
        for key in self._keys.values():
            key.absences.sort(key=lambda one: one.begun)

    # What is wrong

    def _torn_batches(self, call: Call) -> Iterator[str]:
        """A read sees all of a batch, or none of it that was not replaced later."""
        split_allowed = PromiseException.SPLIT_BATCH in self._exceptions
        if split_allowed and not call.is_whole:
            return
        found = {name: self._keys[name].values.get(value) for name, value in call.seen if value is not None}
        for name, value in found.items():
            batch = value.put if value is not None else None
            if batch is None or len(batch.puts) < 2 or (split_allowed and not batch.is_whole):
                continue
            if batch.may_skip and batch.end is not End.RETURNED:  # nobody knows which keys it has skipped
                continue
            for other in batch.puts:
                beside = None if other in batch.skipped else found.get(other)
                if beside is not None and beside.put is not batch and beside.first_s < batch.begun:
                    yield (
                        f"call {call.number}: {call.client} read {name} of call {batch.number}, and {other} as it was"
                        f" before that, from call {beside.put.number}"
                    )

    def _losses(self, name: str, key: _Key) -> Iterator[str]:
        """Find what was lost without a reason."""
        puts = sorted(
            (one.put for one in key.values.values() if one.put.end is End.RETURNED), key=lambda put: put.ended
        )
        newest = list(accumulate(puts, _begun_later))
        removals = sorted(key.removals, key=lambda call: call.begun)
        latest_s = list(accumulate(map(self._latest_s, removals), max))

        def may_be_removed(since_s: float, until_s: float) -> bool:
            count = bisect_right(removals, until_s, key=lambda call: call.begun)
            return count > 0 and latest_s[count - 1] >= since_s

        for absence in key.absences:
            if not absence.was_found or (life := self._life_of(absence)) is None:
                continue
            count = bisect_left(puts, absence.begun, key=lambda put: put.ended)
            if count and not self._may_lose(life):
                put = newest[count - 1]
                there = (one for one in key.values.values() if self._latest_s(one.put) >= put.begun)
                may_end = any(one.may_end_s <= absence.ended for one in there)
                if put.begun >= life.begun and not may_end and not may_be_removed(put.begun, absence.ended):
                    yield f"{name}: what call {put.number} ({put.method} of {put.client}) put was lost: {absence.why}"
            for hold in self._history.holds if self._misses_are_absences else ():
                since_s = hold.match.begun
                if (
                    hold.since_s < absence.begun
                    and absence.ended < hold.until_s
                    and name in hold.keys
                    and life.begun <= since_s
                    and not life.dropped
                    and not may_be_removed(since_s, absence.ended)
                    and not self._may_end(key, since_s, absence.ended)
                    and (hold.pins or not self._may_change(key, since_s, absence.ended))
                    and not any(one.begun <= absence.ended and self._latest_s(one) >= since_s for one in key.unpins)
                ):
                    yield f"{name}: {absence.why}, although call {hold.match.number} held it"

    def _may_change(self, key: _Key, since_s: float, until_s: float) -> bool:
        """Whether a key may have got another value in some time."""
        return any(one.put.begun <= until_s and self._latest_s(one.put) >= since_s for one in key.values.values())

    def _may_end(self, key: _Key, since_s: float, until_s: float) -> bool:
        """Whether the time to live of a key may have been over at some moment."""
        return any(one.may_end_s <= until_s and one.ends_s >= since_s for one in key.values.values())

    def _may_lose(self, life: Life) -> bool:
        evicted = life.evicted and PromiseException.EVICTION in self._exceptions
        return evicted or (life.dropped and PromiseException.CHECKSUM_DROP in self._exceptions)

    def _life_of(self, absence: _Absence) -> Life | None:
        """Return the server that ran all the time; None if there were several."""
        for life in self._lives:
            if life.begun <= absence.begun and absence.ended <= life.ended:
                return life
        return None


def _begun_later(one: Call, other: Call) -> Call:
    return other if other.begun > one.begun else one


def _found_absent(call: Call) -> _Absence:
    return _Absence(call.begun, call.ended, f"call {call.number} ({call.method}) did not find it", was_found=True)


def _overlaps(name: str, key: _Key) -> Iterator[str]:
    """Find two values that were there at the same time."""
    for earlier, later in pairwise(_spans(key)):
        if later.first_s < earlier.last_s:
            yield f"{name}: {earlier} and {later} were there at the same time"


def _resurrections(name: str, key: _Key, absences: Sequence[_Absence]) -> Iterator[str]:
    """Find values that were there again after they had been replaced or removed."""
    spans = _spans(key)
    starts = [span.first_s for span in spans]

    def around(begun: float, ended: float) -> _Value | None:
        count = bisect_left(starts, begun)
        return spans[count - 1] if count and ended < spans[count - 1].last_s else None

    for absence in absences:
        span = around(absence.begun, absence.ended)
        if span is not None:
            yield f"{name}: {span} was there again after {absence.begun:.6f} s, when {absence.why}"
    for value in key.values.values():
        if value.certain and value.last_s <= value.first_s:
            span = around(value.last_s, value.first_s)
            if span is not None:
                yield f"{name}: {span} was there again after it had been replaced by {value}"


def _presences_of_nothing(name: str, key: _Key, found: Sequence[_Absence]) -> Iterator[str]:
    """Find calls that say that a key is there when no value can be."""
    values = sorted(key.values.values(), key=lambda one: one.put.begun)
    begun = [one.put.begun for one in values]
    latest_s = (one.first_s if one.certain or one.recovered else math.inf for one in values)
    latest = list(accumulate(latest_s, max))
    ends_s = list(accumulate((one.ends_s for one in values), max))
    absences = sorted(found, key=lambda one: one.ended)
    ended = [one.ended for one in absences]
    last_absence = list(accumulate((one.begun for one in absences), max))
    for call in key.presences:
        count = bisect_left(begun, call.ended)
        before = bisect_left(ended, call.begun)
        is_over = count and ends_s[count - 1] < call.begun
        if not count or is_over or (before and latest[count - 1] < last_absence[before - 1]):
            yield f"{name}: call {call.number} ({call.method} of {call.client}) found it, but nothing can be there"


def _spans(key: _Key) -> list[_Value]:
    """Return the values that were there for more than one moment, in order."""
    spans = [one for one in key.values.values() if one.certain and one.first_s < one.last_s]
    return sorted(spans, key=lambda one: one.first_s)
