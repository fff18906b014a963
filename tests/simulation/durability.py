"""What goes from one server to the next on its disks, and what must not.

The promises of docs/promises.md, "With a disk": after a restart there is every block
that was durable, of each key the newest durable one or a newer one, and no key whose
deletion had returned.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import attrs

from tests.simulation.history import Call, End, History
from tests.simulation.promises import PromiseException

__all__ = ["broken_durability", "by_life"]


def by_life(history: History) -> Iterator[tuple[History, Sequence[Call]]]:
    """Yield the history of each server, and the calls before it that put what may be on
    its disks.

    Of a call during which a server ended, nobody knows which server answered: its
    findings are left out, and its effects may be in any of them.
    """
    starts_s = _starts_s(history)
    ends_s = [*(life.ended for life in history.lives[:-1]), math.inf]
    kept_since_s = -1.0
    for life, start_s, end_s in zip(history.lives, starts_s, ends_s, strict=True):
        if not life.recovers:
            kept_since_s = start_s
        calls = [
            call if start_s < call.begun and call.ended <= end_s else _without_findings(call)
            for call in history.calls
            if call.begun <= end_s and call.latest_s > start_s
        ]
        recovered = [call for call in history.calls if call.begun <= start_s and call.latest_s > kept_since_s]
        part = attrs.evolve(history, calls=calls, lives=[attrs.evolve(life, begun=start_s)], holds=[])
        yield part, recovered


def broken_durability(history: History, exceptions: frozenset[PromiseException]) -> Iterator[str]:
    """Yield what came from one server to another and should not have, and what should
    have and did not.
    """
    if not history.disks_failed or PromiseException.DISK_FAILED not in exceptions:
        yield from _Durability(history, exceptions).problems()


def _starts_s(history: History) -> list[float]:
    """Return when what each server did can have begun: at the end of the one before."""
    return [-1.0, *(life.ended for life in history.lives[:-1])]


def _without_findings(call: Call) -> Call:
    end = End.UNKNOWN if call.end is End.RETURNED else call.end
    return attrs.evolve(call, end=end, seen=[], present=[], durable=())


class _Durability:
    def __init__(self, history: History, exceptions: frozenset[PromiseException]) -> None:
        self._history = history
        self._exceptions = exceptions
        self._starts_s = _starts_s(history)
        self._puts: dict[str, list[Call]] = defaultdict(list)
        self._put_of: dict[tuple[str, bytes], Call] = {}
        self._removals: dict[str, list[Call]] = defaultdict(list)
        self._flushes: dict[str, list[Call]] = defaultdict(list)
        for call in history.calls:
            for name, value in call.puts.items():
                if call.may_have_effect and name not in call.skipped:
                    self._puts[name].append(call)
                    self._put_of[name, value] = call
            for name in call.removes if call.may_have_effect else ():
                self._removals[name].append(call)
            for name in call.durable:
                self._flushes[name].append(call)

    def problems(self) -> Iterator[str]:
        for call in self._history.calls:
            if call.end is End.RETURNED:
                for name, value in call.seen:
                    if value is None:
                        yield from self._loss(name, call)
                    elif (name, value) in self._put_of:
                        yield from self._return(name, self._put_of[name, value], call)
        for life in self._history.lives:
            if life.damaged_blocks and not self._history.corrupted_puts:
                yield f"{life.damaged_blocks} blocks on disk were damaged, although no disk has failed"
            if life.crashed:  # what was being written may be there in part
                break

    def _return(self, name: str, put: Call, read: Call) -> Iterator[str]:
        """Find what removed, or replaced durably, a value that came back."""
        start_s = self._starts_s[self._number_at(read.begun)]
        if put.latest_s > start_s:
            return
        for removal in self._removals[name]:
            if removal.end is End.RETURNED and put.latest_s < removal.begun and removal.ended <= start_s:
                yield (
                    f"{name}: the value of call {put.number} came back with another server in call {read.number},"
                    f" although call {removal.number} ({removal.method}) had removed it"
                )
        for newer in self._puts[name]:
            if newer.end is End.RETURNED and put.latest_s < newer.begun and newer.ended <= start_s:
                may = PromiseException.OLDER_BLOCK in self._exceptions
                if not may or self._made_durable(name, newer, start_s):
                    yield (
                        f"{name}: the value of call {put.number} came back with another server in call {read.number},"
                        f" although call {newer.number} had replaced it{' durably' if may else ''}"
                    )

    def _made_durable(self, name: str, put: Call, until_s: float) -> bool:
        """Whether the server that carried out a put was told to make it durable, and
        did. The next one may have had an older value, and made that durable. And what
        is durable may be a later block that was corrupted.
        """
        if any(key == name and one.latest_s > put.begun for key, one in self._history.corrupted_puts):
            return False
        number = self._number_at(put.ended)
        return any(
            put.ended <= one.begun and one.ended <= until_s and self._number_at(one.begun) == number
            for one in self._flushes[name]
        )

    def _loss(self, name: str, read: Call) -> Iterator[str]:
        """Find a durable block that is missing although nothing is late."""
        if read.begun < self._history.calm_since_s:
            return
        if any(name == key for key, _ in self._history.corrupted_puts):  # it has not its checksum
            return
        number = self._number_at(read.begun)
        lives = self._history.lives
        if any(life.recycled for life in lives) and PromiseException.DISK_FULL in self._exceptions:
            return
        for flush in self._flushes[name]:
            puts = [put for put in self._puts[name] if put.end is End.RETURNED and put.ended <= flush.begun]
            since_s = max((put.begun for put in puts), default=flush.begun)
            changes = [one for one in self._puts[name] if one not in puts] + self._removals[name]
            kept = all(life.recovers for life in lives[self._number_at(flush.ended) + 1 : number + 1])
            if kept and flush.ended < read.begun and all(one.latest_s < since_s for one in changes):
                yield f"{name}: call {read.number} did not find what call {flush.number} had made durable"

    def _number_at(self, time: float) -> int:
        """Return the number of the server at a time."""
        return sum(start_s < time for start_s in self._starts_s) - 1
