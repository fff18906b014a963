"""A late part against the other copies of its blocks, in threads.

The caller's thread carries the part out, so that nothing else writes to the caller's
memory. One thread looks at the clock for all calls of a store; those that carry out
parts ask the other copies. If these win, the call in the caller's thread is ended.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from infinistore.client.connection.effects import Outcome, Part
from infinistore.client.drivers.races.ending import Ending
from infinistore.client.memory.views import Leased
from infinistore.errors import InfiniStoreException, StoreUnavailable
from infinistore.host import start_thread
from infinistore.kept_errors import KeptError

__all__ = ["BlockingRaces"]

_IDLE_S: Final = 10.0
"""How long the thread that looks at the clock stays when there is nothing to do."""


class _Endable:
    """A store whose calls can be ended by another thread, all by one `Ending`."""

    def __init__(self, store: Any, ending: Ending) -> None:
        self._store = store
        self._ending = ending

    def _call(self, request: Any, within_s: float | None) -> Any:
        return self._store._call(request, within_s, self._ending)


class _Race:
    """One part, and what was asked because it was late."""

    def __init__(self, part: Part) -> None:
        self.part: Part | None = part
        """None when it is over."""
        self.first = Ending()
        self.others: list[Ending] = []
        self.answers: list[Outcome] | None = None
        self.asked = threading.Event()
        """Set when the other copies have answered."""
        self._lock = threading.Lock()
        self._asks = False

    def begin(self) -> list[Part]:
        """Return what to ask; nothing if the part is over."""
        part = self.part
        late = part.hedge.begin() if part is not None and part.hedge is not None else []
        asked = []
        for one in late:
            ending = Ending()
            asked.append(one._replace(store=_Endable(one.store, ending)))
            self.others.append(ending)
        with self._lock:
            if self.part is None:
                return []
            self._asks = bool(asked)
        return asked

    def answered(self, outcomes: list[Outcome] | None) -> None:
        """Take what the other copies said; None if nobody could ask them. What comes
        when the part is over holds nothing any more.
        """
        with self._lock:
            part = self.part
            if part is not None and part.hedge is not None and outcomes is not None:
                self.answers = outcomes
                if part.hedge.is_full(outcomes):
                    self.first.end()
        self.asked.set()
        for outcome in outcomes or () if part is None else ():
            if isinstance(outcome, Leased):
                outcome.leave(quietly=True, stacklevel=1)

    def leave(self, *, wants_others: bool) -> None:
        """Say that the part has ended. The other copies are waited for if they were
        asked and are wanted, else they are ended.
        """
        with self._lock:
            waits = wants_others and self._asks
            if not waits:
                self.part = None
        if waits:
            self.asked.wait()
            self.part = None
        else:
            for ending in self.others:
                ending.end()


class BlockingRaces:
    """The races of one store. `begin` has a thread carry out a function, or refuses;
    `at_once` carries out parts.
    """

    def __init__(
        self,
        begin: Callable[[Callable[[], None]], bool],
        at_once: Callable[[Sequence[Part]], list[Outcome]],
    ) -> None:
        self._begin = begin
        self._at_once = at_once
        self._due: list[tuple[float, int, _Race]] = []
        self._number = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waits_until = 0.0
        self._closed = False

    def run(self, part: Part) -> Outcome:
        """Carry out a part that has a hedge. Only requests to other copies may run on
        afterwards, for a moment: they are ended, and hold nothing of the caller's.
        """
        hedge = part.hedge
        assert hedge is not None
        race = _Race(part)
        if not self._watch(race, hedge.after_s):
            return _carry_out(part, None)
        outcome: Outcome | None = None
        try:
            outcome = _carry_out(part, race.first)
        finally:
            race.leave(wants_others=isinstance(outcome, KeptError))
        if race.first.ended and isinstance(outcome, KeptError):
            outcome = None
        return hedge.settle(outcome, race.answers)

    def _watch(self, race: _Race, after_s: float) -> bool:
        """Have the clock looked at; False if there is no thread for that."""
        due = time.monotonic() + after_s
        with self._changed:
            if self._closed:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="infinistore-hedges", daemon=True)
                try:
                    start_thread(thread)
                except StoreUnavailable:
                    return False
                self._thread = thread
            heapq.heappush(self._due, (due, next(self._number), race))
            if due < self._waits_until:
                self._changed.notify()
        return True

    def _run(self) -> None:
        while (race := self._next()) is not None:
            if race.part is not None and not self._begin(partial(self._ask, race)):
                race.answered(None)

    def _next(self) -> _Race | None:
        """Wait for the next part that is late; None if there is none for a while, or at
        the end.
        """
        with self._changed:
            while not self._closed:
                while self._due and self._due[0][2].part is None:
                    heapq.heappop(self._due)
                now = time.monotonic()
                if self._due and self._due[0][0] <= now:
                    return heapq.heappop(self._due)[2]
                idle = not self._due
                self._waits_until = now + _IDLE_S if idle else self._due[0][0]
                self._changed.wait(self._waits_until - now)
                if idle and not self._due and time.monotonic() >= self._waits_until:
                    break
            self._due.clear()
            self._thread = None
            return None

    def _ask(self, race: _Race) -> None:
        outcomes = None
        try:
            late = race.begin()
            outcomes = self._at_once(late) if late else None
        finally:
            race.answered(outcomes)

    def close(self) -> None:
        """End the thread that looks at the clock."""
        with self._changed:
            self._closed = True
            self._changed.notify()


def _carry_out(part: Part, ending: Ending | None) -> Outcome:
    store, request, within_s, _ = part
    try:
        return store._call(request, within_s, ending)
    except InfiniStoreException as error:
        return KeptError(error)
