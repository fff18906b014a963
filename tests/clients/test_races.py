"""A part that is late races with what is asked in its place: in the three drivers, with
stores that answer when the test says so.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from infinistore.client.connection.effects import LatePart, Part
from infinistore.client.drivers.at_once import PartThreads, asyncio_at_once, trio_at_once
from infinistore.client.requests import Exists
from infinistore.errors import StoreUnavailable
from infinistore.kept_errors import KeptError
from tests.bad_days.refused_threads import refused_threads

LATE_S = 0.01
NEVER_S = 3600.0
Answer = Any
"""What a store answers, an error that it raises, or None if it is silent."""


class Late(LatePart):
    """A hedge that asks these stores; an answer that is not "short" is a full one."""

    def __init__(self, *stores: Any, after_s: float = LATE_S) -> None:
        self.stores = stores
        self.after_s = after_s
        self.begun = 0
        self.settled: list[tuple[Any, Any]] = []

    def begin(self) -> list[Part]:
        self.begun += 1
        return [Part(store, Exists(["key"])) for store in self.stores]

    def is_full(self, outcomes: Sequence[Any]) -> bool:
        return not any(isinstance(outcome, KeptError) or outcome == "short" for outcome in outcomes)

    def settle(self, first: Any, others: Any) -> Any:
        self.settled.append((first, others))
        full = others is not None and self.is_full(others)
        return others[0] if full and (first is None or isinstance(first, KeptError)) else first


class TrioStore:
    """Answers, fails, or waits for ever; knows whether a call was cut short."""

    def __init__(self, answer: Answer, after_s: float = 0.0) -> None:
        self.answer, self.after_s = answer, after_s
        self.under_way = self.calls = 0

    async def sleep(self) -> None:
        await trio.sleep(NEVER_S if self.answer is None else self.after_s)

    async def _call(self, request: Any, within_s: float | None = None) -> Any:
        self.calls += 1
        self.under_way += 1
        try:
            await self.sleep()
        finally:
            self.under_way -= 1
        if isinstance(self.answer, Exception):
            raise self.answer.with_traceback(None)
        return self.answer


class AsyncioStore(TrioStore):
    def __init__(self, answer: Answer, after_s: float = 0.0) -> None:
        super().__init__(answer, after_s)
        self.begun = asyncio.Event()

    async def sleep(self) -> None:
        self.begun.set()
        await asyncio.sleep(NEVER_S if self.answer is None else self.after_s)


class ThreadStore:
    """The same for threads: what is silent waits until it is ended."""

    def __init__(self, answer: Answer, after_s: float = 0.0) -> None:
        self.answer, self.after_s = answer, after_s
        self.under_way = self.calls = 0
        self.ended = threading.Event()

    def _call(self, request: Any, within_s: float | None = None, ending: Any = None) -> Any:
        self.calls += 1
        self.under_way += 1
        if ending is not None:
            wakes = SimpleNamespace(wake=self.ended.set, shut_down=lambda turn: None)
            ending.begun(SimpleNamespace(deadline=0.0, turn=None), wakes, wakes)
        self.ended.wait(60 if self.answer is None else self.after_s)
        self.under_way -= 1
        if self.answer is None:
            raise StoreUnavailable("ended")
        if isinstance(self.answer, Exception):
            raise self.answer.with_traceback(None)
        return self.answer


def carry_out_with_trio(part: Part) -> Any:
    return trio.run(trio_at_once, [part], clock=trio.testing.MockClock(autojump_threshold=0))[0]


def carry_out_with_asyncio(part: Part) -> Any:
    return asyncio.run(asyncio_at_once([part]))[0]


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
    assert carry_out(Part(store("first"), Exists(["key"]), None, hedge)) == "first"
    assert (hedge.begun, other.calls) == (0, 0)
    assert hedge.settled == [("first", None)]


@in_all_dresses
def test_the_others_win_against_what_is_silent_and_that_is_over_before_the_outcome_is_made(
    store: Any, carry_out: Callable[[Part], Any]
) -> None:
    first = store(None)
    hedge = Late(store("other"), store("another", after_s=0.05))
    settle = hedge.settle

    def settle_when_over(*outcomes: Any) -> Any:
        assert first.under_way == 0
        return settle(*outcomes)

    hedge.settle = settle_when_over  # type: ignore[assignment, method-assign]
    assert carry_out(Part(first, Exists(["key"]), None, hedge)) == "other"
    assert hedge.settled == [(None, ["other", "another"])]


@in_all_dresses
def test_the_first_wins_against_silent_others_which_are_ended(store: Any, carry_out: Callable[[Part], Any]) -> None:
    hedge = Late(other := store(None), after_s=0.0)
    assert carry_out(Part(store("first", after_s=0.5), Exists(["key"]), None, hedge)) == "first"
    if other.calls:  # which usually it is
        while other.under_way:  # a thread ends a moment later
            pass
    assert hedge.settled == [("first", None)]


@in_all_dresses
@pytest.mark.parametrize("answer", ["short", StoreUnavailable("planned")])
def test_what_the_others_lack_is_waited_for(store: Any, carry_out: Callable[[Part], Any], answer: Any) -> None:
    hedge = Late(store("other"), store(answer))
    assert carry_out(Part(store("first", after_s=0.3), Exists(["key"]), None, hedge)) == "first"
    assert hedge.settled[0][0] == "first"


@in_all_dresses
def test_an_error_of_the_first_waits_for_the_others(store: Any, carry_out: Callable[[Part], Any]) -> None:
    hedge = Late(store("other", after_s=0.5))
    lost = store(StoreUnavailable("planned"), after_s=0.2)
    assert carry_out(Part(lost, Exists(["key"]), None, hedge)) == "other"


@in_all_dresses
def test_of_two_errors_the_first_counts(store: Any, carry_out: Callable[[Part], Any]) -> None:
    hedge = Late(store(StoreUnavailable("other"), after_s=0.3))
    outcome = carry_out(Part(store(StoreUnavailable("first"), after_s=0.1), Exists(["key"]), None, hedge))
    assert "first" in str(outcome.again())


@in_all_dresses
def test_without_a_budget_nobody_else_is_asked(store: Any, carry_out: Callable[[Part], Any]) -> None:
    hedge = Late()
    assert carry_out(Part(store("first", after_s=0.1), Exists(["key"]), None, hedge)) == "first"
    assert hedge.begun == 1


@in_all_dresses
def test_an_unexpected_error_is_raised_as_it_is(store: Any, carry_out: Callable[[Part], Any]) -> None:
    with pytest.raises(ZeroDivisionError, match="planned"):
        carry_out(Part(store(ZeroDivisionError("planned")), Exists(["key"]), None, Late(store("other"))))


async def test_a_cancelled_call_leaves_nothing_behind_under_trio(autojump_clock: trio.testing.MockClock) -> None:
    first, other = TrioStore(None), TrioStore(None)
    with trio.move_on_after(1):
        await trio_at_once([Part(first, Exists(["key"]), None, Late(other))])
    assert (first.calls, other.calls) == (1, 1)
    assert (first.under_way, other.under_way) == (0, 0)


def test_a_cancelled_call_leaves_nothing_behind_under_asyncio() -> None:
    async def body() -> None:
        first, other = AsyncioStore(None), AsyncioStore(None)
        call = asyncio.create_task(asyncio_at_once([Part(first, Exists(["key"]), None, Late(other))]))
        await other.begun.wait()
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        assert call.cancelled()
        assert (first.under_way, other.under_way) == (0, 0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(body())


def test_without_a_thread_for_the_clock_a_part_races_with_nobody() -> None:
    hedge = Late(other := ThreadStore("other"))
    with refused_threads():
        assert carry_out_with_threads(Part(ThreadStore("first", after_s=0.1), Exists(["key"]), None, hedge)) == "first"
    assert other.calls == 0


def test_many_races_of_many_threads_share_one_clock() -> None:
    threads = PartThreads()
    outcomes: list[Any] = []

    def call() -> None:
        for _ in range(20):
            part = Part(ThreadStore(None), Exists(["key"]), None, Late(ThreadStore("other"), after_s=0.001))
            outcomes.extend(threads.carry_out([part, part._replace(store=ThreadStore("first"))]))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    threads.close()
    assert outcomes == ["other", "first"] * 80
