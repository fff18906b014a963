"""A store's connections, whatever becomes of the calls that use them: each belongs to
one call, one reservation or nobody, and what is over is closed once its pins are gone.
"""

import threading
from collections.abc import Callable
from socket import SHUT_RDWR
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from infinistore.client.connection.pool import ConnectionPool, Turns, new_turn
from infinistore.client.memory.views import ReservationLink
from infinistore.errors import StoreUnavailable
from infinistore.host import FORKED
from tests.examples import examples

places = st.integers(0, 99)


@attrs.define(eq=False)
class Link:
    """A connection without a stream, and what the model knows of it."""

    at: str = "used"
    """By whom: used, idle, pinned, kept, closing or closed."""
    usable: bool = True
    at_rest: bool = True
    mapped: Any = None
    turn: Any = None
    closed: bool = False
    """Whether its movers are."""
    pinned: bool = False
    reserved: bool = False
    left: bool = False
    events: list[str] = attrs.Factory(list)
    """What became of its stream."""
    close_pins: Callable[[], None] | None = None

    @property
    def pins(self) -> Any:
        return self

    @property
    def in_use(self) -> bool:
        return self.pinned

    watching = in_use

    def flush(self) -> None:
        self.left = False

    def close_after(self, close: Callable[[], None]) -> None:
        self.close_pins = close
        self.pins_end()

    def pins_end(self) -> None:
        if not self.pinned and self.close_pins is not None:
            self.close_pins()

    def close(self) -> None:
        self.closed = True

    @property
    def stream(self) -> Any:
        sock = SimpleNamespace(close=self._end, shutdown=self._shut_down)
        return SimpleNamespace(close=self._end, socket=sock)

    def _end(self) -> None:
        self.events.append("closed")

    def _shut_down(self, how: int) -> None:
        assert how == SHUT_RDWR
        self.events.append("shut down")
        raise OSError


class PoolMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.pool: Any = ConnectionPool()
        self.links: list[Link] = []
        self.kept: dict[Link, ReservationLink] = {}
        self.closed = False

    def some(self, place: int, *at: str) -> Link | None:
        found = [link for link in self.links if link.at in at]
        return found[place % len(found)] if found else None

    def over(self, link: Link) -> None:
        link.at = "closing" if link.pinned else "closed"

    def back(self, link: Link) -> None:
        """What becomes of one that a call has given back."""
        assert not link.left
        if not link.usable or self.closed:
            self.over(link)
        else:
            link.at = "pinned" if link.pinned else "idle"
            if link.mapped and link.mapped.closed:
                self.lost()

    def lost(self) -> None:
        for link in self.links:
            if link.at in ("idle", "pinned") and link.mapped and link.mapped.closed:
                self.over(link)

    @rule(mapped=st.booleans())
    def connect(self, mapped: bool) -> None:
        link = Link(mapped=SimpleNamespace(closed=False) if mapped else None, turn=new_turn())
        link.turn.acquire()
        self.links.append(link)
        self.pool.add(link)

    @rule(pinning=st.booleans())
    def take(self, pinning: bool) -> None:
        turn = new_turn()
        turn.acquire()
        taken = self.pool.take(pinning, turn)
        for link in self.links:
            if link.at == "pinned" and not link.pinned:
                link.at = "idle"
        wanted = "pinned" if pinning and self.some(0, "pinned") else "idle"
        if taken is None:
            assert not self.some(0, wanted)
        else:
            assert taken.at == wanted
            assert taken.turn is turn
            taken.at = "used"

    @rule(place=places, usable=st.booleans(), pinned=st.booleans())
    def give_back(self, place: int, usable: bool, pinned: bool) -> None:
        if (link := self.some(place, "used")) is None:
            return
        turn = link.turn
        link.usable, link.pinned, link.left = usable or pinned, pinned, pinned
        others = [other for other in self.links if other.at == "pinned"]
        for other in others:
            other.left = True
        self.pool.give_back(link)
        assert not any(other.left for other in others)
        turn.release()
        self.back(link)

    @rule(place=places, how=st.sampled_from(["at rest", "half-way", "not reserved", "no reservation", "interrupted"]))
    def leave(self, place: int, how: str) -> None:
        if (link := self.some(place, "used")) is None:
            return
        turn = link.turn
        link.at_rest, link.reserved = how != "half-way", how != "not reserved"
        link.usable = link.at_rest and not link.reserved
        kept = None if how == "no reservation" else ReservationLink()
        self.pool.leave(link, kept, interrupted=how == "interrupted")
        turn.release()
        if how == "interrupted":
            self.over(link)
        elif how == "at rest":
            assert kept is not None
            assert link.turn.locked()
            link.at, self.kept[link] = "kept", kept
        else:
            self.back(link)

    @rule(place=places)
    def take_kept(self, place: int) -> None:
        if (link := self.some(place, "kept")) is None:
            return
        kept, turn = self.kept.pop(link), new_turn()
        turn.acquire()
        assert self.pool.take_kept(kept, turn) is link
        assert (kept.link, link.turn) == (None, turn)
        link.at = "used"

    @rule(place=places)
    def a_reservation_lets_go(self, place: int) -> None:
        if (link := self.some(place, "kept")) is None:
            return
        link.usable = True
        self.kept.pop(link).let_go()
        assert not link.reserved
        self.back(link)

    @rule(place=places)
    def a_reservation_is_lost(self, place: int) -> None:
        if (link := self.some(place, "kept")) is None:
            return
        del self.kept[link]
        self.pool.close_interrupted()
        self.over(link)

    @rule(place=places)
    def a_call_is_interrupted(self, place: int) -> None:
        if (link := self.some(place, "used")) is None:
            return
        link.turn.release()
        self.pool.close_interrupted()
        self.over(link)

    @rule(place=places)
    def shut_down(self, place: int) -> None:
        link = self.some(place, "used")
        before = [list(one.events) for one in self.links]
        self.pool.shut_down(link.turn if link else new_turn())
        for one, events in zip(self.links, before, strict=True):
            assert one.events == (events if one is not link else [*events, "shut down"])

    @rule(place=places)
    def pins_end(self, place: int) -> None:
        if (link := self.some(place, "pinned", "closing", "used")) is not None:
            link.pinned = False
            link.pins_end()
            if link.at == "closing":
                link.at = "closed"

    @rule(place=places)
    def a_server_ends(self, place: int) -> None:
        link = self.some(place, "idle", "pinned", "used")
        if link is not None and link.mapped:
            link.mapped.closed = True
            self.pool.close_lost()
            self.lost()

    @rule(chance=places)
    def close(self, chance: int) -> None:
        if chance % 10:
            return
        self.pool.close()
        self.closed = True
        for link in self.links:
            if link.at in ("idle", "pinned"):
                self.over(link)

    @invariant()
    def each_is_where_it_belongs(self) -> None:
        if not hasattr(self, "pool"):
            return
        at = {name: {link for link in self.links if link.at == name} for name in ("idle", "pinned", "kept", "closed")}
        assert len(self.pool.idle) == len(set(self.pool.idle))
        assert set(self.pool.idle) == at["idle"]
        assert set(self.pool.pinned) == at["pinned"]
        assert self.pool.kept == at["kept"]
        assert self.pool.connections == set(self.links) - at["closed"]
        for link in self.links:
            assert link.events.count("closed") == (link.at == "closed")
            assert link.closed == (link.at in ("closing", "closed"))
            assert link.at != "closing" or link.turn.locked()
        if self.closed:
            with pytest.raises(StoreUnavailable, match=r"^this store is closed; open another one"):
                self.pool.check_open()
        else:
            self.pool.check_open()


def test_a_connection_belongs_to_one_at_a_time_and_is_closed_when_nobody_uses_it() -> None:
    run_state_machine_as_test(PoolMachine, settings=settings(max_examples=examples(300)))


def test_a_forked_child_closes_its_copies_and_no_more() -> None:
    pool: ConnectionPool[Any] = ConnectionPool()
    link = Link()
    pool.add(cast(Any, link))
    pool.let_go()
    pool.give_back(cast(Any, link))
    pool.close_interrupted()
    pool.close()
    assert (pool.closed, pool.idle, link.events, link.closed) == (FORKED, [], ["closed"], False)


@pytest.mark.parametrize("most", [1, 2])
def test_whoever_begins_hears_of_calls_that_were_interrupted(most: int) -> None:
    turns, limit = Turns(most), SimpleNamespace(deadline=0.0)
    lost, good, other = new_turn(), new_turn(), new_turn()
    with lost:
        assert turns.begin(lost, limit) is False
    with good:
        assert turns.begin(good, limit) is True
        with other:
            if most == 1:
                with pytest.raises(TimeoutError):
                    turns.begin(other, limit)
            else:
                assert turns.begin(other, limit) is False
                turns.end(other)
        assert list(turns.under_way) == [good]
        turns.end(good)
    assert turns.under_way == turns.waiting == {}


@pytest.mark.parametrize("interrupted", [True, False])
def test_whoever_waits_hears_of_calls_that_were_interrupted(interrupted: bool) -> None:
    turns, first, second = Turns(1, look_again_s=0.001), new_turn(), new_turn()
    first.acquire()
    turns.begin(first, SimpleNamespace(deadline=0.0))

    def end() -> None:
        while not turns.waiting:
            pass
        if not interrupted:
            turns.end(first)
        first.release()

    thread = threading.Thread(target=end)
    thread.start()
    with second:
        assert turns.begin(second, SimpleNamespace(deadline=float("inf"))) is interrupted
    thread.join()


def test_a_call_that_was_interrupted_while_it_waited_is_told_no_more() -> None:
    turns, bell = Turns(1), threading.Lock()
    with bell:
        turns.waiting[new_turn()] = bell
        turns.tell()
        assert turns.waiting == {}
        assert bell.locked()
