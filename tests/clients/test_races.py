"""A part that is late races with what is asked in its place: in the three drivers, with
stores that answer when the test says so: as soon as something has happened.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from infinistore.client.connection.effects import LatePart, Part
from infinistore.client.drivers.asyncio_driver import asyncio_gather
from infinistore.client.drivers.blocking_driver import PartThreads
from infinistore.client.drivers.trio_driver import trio_gather
from infinistore.client.memory.views import Leased, Watch
from infinistore.errors import DeadlineExceeded, StoreUnavailable
from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import Exists, Keys
from tests.asking import until
from tests.bad_days.refused_threads import refused_threads
from tests.clients.event_loops import under_asyncio

LATE_S = 0.01
PAUSE_S = 0.001
"""Between two looks at whether a store may answer."""
NEVER_S = 3600.0
Answer = Any
"""What a store answers, an error that it raises, or None if it is silent."""


class Late(LatePart):
    """A hedge that asks these stores; an answer that is not "short" is a full one."""

    def __init__(self, *stores: Any, after_s: float = LATE_S) -> None:
        self.stores = stores
        self.after_s = after_s
        self.begun = 0
        self.looked = 0
        self.settled: list[tuple[Any, Any]] = []

    def begin(self) -> list[Part]:
        self.begun += 1
        return [Part(store, Exists(Keys(["key"]))) for store in self.stores]

    def is_full(self, outcomes: Sequence[Any]) -> bool:
        self.looked += 1
        return not any(isinstance(outcome, KeptError) or outcome == "short" for outcome in outcomes)

    def settle(self, first: Any, others: Any) -> Any:
        self.settled.append((first, others))
        full = others is not None and self.is_full(others)
        return others[0] if full and (first is None or isinstance(first, KeptError)) else first


def at_once() -> bool:
    return True


class TrioStore:
    """Answers, fails, or waits for ever, when something holds; knows whether a call was
    cut short.
    """

    def __init__(self, answer: Answer, when: Callable[[], object] = at_once) -> None:
        self.answer, self.when = answer, when
        self.under_way = self.calls = 0

    async def pause(self) -> None:
        await trio.sleep(PAUSE_S)

    @property
    def is_over(self) -> bool:
        return self.calls > self.under_way

    async def _call(self, request: Any, within_s: float | None = None) -> Any:
        self.calls += 1
        self.under_way += 1
        try:
            await self.pause()
            while self.answer is None or not self.when():
                await self.pause()
        finally:
            self.under_way -= 1
        if isinstance(self.answer, Exception):
            raise self.answer.with_traceback(None)
        return self.answer


class AsyncioStore(TrioStore):
    async def pause(self) -> None:
        await asyncio.sleep(PAUSE_S)


class ThreadStore(TrioStore):
    """The same for threads: what is silent waits until it is ended."""

    def __init__(self, answer: Answer, when: Callable[[], object] = at_once) -> None:
        super().__init__(answer, when)
        self.ended = threading.Event()

    def _call(self, request: Any, within_s: float | None = None, ending: Any = None) -> Any:
        self.calls += 1
        self.under_way += 1
        if ending is not None:
            wakes = SimpleNamespace(wake=self.ended.set, shut_down=lambda turn: None)
            ending.begun(SimpleNamespace(deadline=0.0, turn=None), wakes, wakes)
        while (self.answer is None or not self.when()) and not self.ended.wait(PAUSE_S):
            pass
        self.under_way -= 1
        if self.answer is None:
            raise StoreUnavailable("ended")
        if isinstance(self.answer, Exception):
            raise self.answer.with_traceback(None)
        return self.answer


def carry_out_with_trio(part: Part) -> Any:
    return trio.run(trio_gather, [part], clock=trio.testing.MockClock(autojump_threshold=0))[0]


def carry_out_with_asyncio(part: Part) -> Any:
    return asyncio.run(asyncio_gather([part]))[0]


def carry_out_with_threads(part: Part) -> Any:
    threads = PartThreads()
    try:
        return threads.carry_out([part])[0]
    finally:
        threads.close()


DRESSES = [
    pytest.param(TrioStore, carry_out_with_trio, id="trio"),
    pytest.param(AsyncioStore, carry_out_with_asyncio, id="asyncio"),
    pytest.param(ThreadStore, carry_out_with_threads, id="threads"),
]
in_all_dresses = pytest.mark.parametrize(("store", "carry_out"), DRESSES)


@in_all_dresses
def test_what_answers_in_time_races_with_nobody(store: Any, carry_out: Callable[[Part], Any]) -> None:
    hedge = Late(other := store("other"), after_s=NEVER_S)
    assert carry_out(Part(store("first"), Exists(Keys(["key"])), None, hedge)) == "first"
    assert (hedge.begun, other.calls) == (0, 0)
    assert hedge.settled == [("first", None)]


@in_all_dresses
def test_the_others_win_against_what_is_silent_and_that_is_over_before_the_outcome_is_made(
    store: Any, carry_out: Callable[[Part], Any]
) -> None:
    first, other = store(None), store("other")
    hedge = Late(other, store("another", lambda: other.is_over))
    settle = hedge.settle

    def settle_when_over(*outcomes: Any) -> Any:
        assert first.under_way == 0
        return settle(*outcomes)

    hedge.settle = settle_when_over  # type: ignore[assignment, method-assign]
    assert carry_out(Part(first, Exists(Keys(["key"])), None, hedge)) == "other"
    assert hedge.settled == [(None, ["other", "another"])]


@in_all_dresses
def test_the_first_wins_against_silent_others_which_are_ended(store: Any, carry_out: Callable[[Part], Any]) -> None:
    hedge = Late(other := store(None), after_s=0.0)
    assert carry_out(Part(store("first", lambda: other.calls), Exists(Keys(["key"])), None, hedge)) == "first"
    while other.under_way:  # a thread ends a moment later
        pass
    assert hedge.settled == [("first", None)]


@in_all_dresses
@pytest.mark.parametrize("answer", ["short", StoreUnavailable("planned")])
def test_what_the_others_lack_is_waited_for(store: Any, carry_out: Callable[[Part], Any], answer: Any) -> None:
    hedge = Late(store("other"), store(answer))
    assert carry_out(Part(store("first", lambda: hedge.looked), Exists(Keys(["key"])), None, hedge)) == "first"
    assert hedge.settled[0][0] == "first"


@in_all_dresses
def test_an_error_of_the_first_waits_for_the_others(store: Any, carry_out: Callable[[Part], Any]) -> None:
    lost: Any = None
    hedge = Late(other := store("other", lambda: lost.is_over))
    lost = store(StoreUnavailable("planned"), lambda: other.calls)
    assert carry_out(Part(lost, Exists(Keys(["key"])), None, hedge)) == "other"


@in_all_dresses
def test_of_two_errors_the_first_counts(store: Any, carry_out: Callable[[Part], Any]) -> None:
    first: Any = None
    hedge = Late(other := store(StoreUnavailable("other"), lambda: first.is_over))
    first = store(StoreUnavailable("first"), lambda: other.calls)
    outcome = carry_out(Part(first, Exists(Keys(["key"])), None, hedge))
    assert "first" in str(outcome.again())


@in_all_dresses
def test_without_a_budget_nobody_else_is_asked(store: Any, carry_out: Callable[[Part], Any]) -> None:
    hedge = Late()
    assert carry_out(Part(store("first", lambda: hedge.begun), Exists(Keys(["key"])), None, hedge)) == "first"
    assert hedge.begun == 1


@in_all_dresses
def test_an_unexpected_error_is_raised_as_it_is(store: Any, carry_out: Callable[[Part], Any]) -> None:
    with pytest.raises(ZeroDivisionError, match="planned"):
        carry_out(Part(store(ZeroDivisionError("planned")), Exists(Keys(["key"])), None, Late(store("other"))))


async def test_a_cancelled_call_leaves_nothing_behind_under_trio(autojump_clock: trio.testing.MockClock) -> None:
    first, other = TrioStore(None), TrioStore(None)
    with trio.move_on_after(1):
        await trio_gather([Part(first, Exists(Keys(["key"])), None, Late(other))])
    assert (first.calls, other.calls) == (1, 1)
    assert (first.under_way, other.under_way) == (0, 0)


@under_asyncio
async def test_a_cancelled_call_leaves_nothing_behind_under_asyncio() -> None:
    first, other = AsyncioStore(None), AsyncioStore(None)
    call = asyncio.create_task(asyncio_gather([Part(first, Exists(Keys(["key"])), None, Late(other))]))
    while not other.calls:  # noqa: ASYNC110 - any of three kinds of store sets it
        await asyncio.sleep(0)
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call
    assert call.cancelled()
    assert (first.under_way, other.under_way) == (0, 0)
    assert len(asyncio.all_tasks()) == 1


def test_of_the_others_that_no_thread_asked_in_time_the_answers_of_those_asked_are_known() -> None:
    class Slow(Late):
        def begin(self) -> list[Part]:
            one, another = super().begin()
            return [one, another._replace(within_s=0.0)]

    hedge = Slow(other := ThreadStore("other"), late := ThreadStore("another"))
    first = ThreadStore(StoreUnavailable("planned"), lambda: hedge.begun)
    carry_out_with_threads(Part(first, Exists(Keys(["key"])), None, hedge))
    ((_, (answer, missing)),) = hedge.settled
    assert (answer, missing.kind, other.calls, late.calls) == ("other", DeadlineExceeded, 1, 0)


def test_leases_of_others_that_answer_when_the_race_is_over_are_left() -> None:
    watch = Watch(None)
    leased = Leased([watch.over(memoryview(bytearray(8)), writable=False)], watch)
    other = ThreadStore(leased, lambda: False)  # it answers when it is ended
    first = ThreadStore("first", lambda: other.calls)
    assert carry_out_with_threads(Part(first, Exists(Keys(["key"])), None, Late(other))) == "first"
    until(lambda: not watch.alive)


def test_without_a_thread_for_the_clock_a_part_races_with_nobody() -> None:
    hedge = Late(other := ThreadStore("other"), after_s=0.0)
    looks = iter(range(20))
    with refused_threads():
        first = ThreadStore("first", lambda: next(looks) == 19)
        assert carry_out_with_threads(Part(first, Exists(Keys(["key"])), None, hedge)) == "first"
    assert other.calls == 0


def test_many_races_of_many_threads_share_one_clock() -> None:
    threads = PartThreads()

    def call(_: int) -> list[Any]:
        outcomes: list[Any] = []
        for _ in range(20):
            part = Part(ThreadStore(None), Exists(Keys(["key"])), None, Late(ThreadStore("other"), after_s=0.001))
            outcomes.extend(threads.carry_out([part, part._replace(store=ThreadStore("first"))]))
        return outcomes

    with ThreadPoolExecutor(4) as callers:
        for outcomes in callers.map(call, range(4)):
            assert outcomes == ["other", "first"] * 20
    threads.close()
