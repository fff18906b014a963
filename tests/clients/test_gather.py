"""Requests to several stores at once: really at the same time, and an error of one does
not end the others.
"""

import asyncio
import threading
import time
from typing import Any

import pytest
import trio

from infinistore.client.connection.effects import Part
from infinistore.client.drivers.asyncio_driver import asyncio_gather
from infinistore.client.drivers.blocking_driver import PartThreads
from infinistore.client.drivers.trio_driver import trio_gather
from infinistore.errors import DeadlineExceeded, OutOfMemory
from infinistore.kept_errors import KeptError
from infinistore.protocol.messages import Exists, Keys
from tests.bad_days.refused_threads import refused_threads


class Meeting:
    """A store whose calls end only when all three are under way; the one for `fails`
    raises then.
    """

    def __init__(self, event: Any, fails: str = "") -> None:
        self.event, self.fails, self.begun = event, fails, 0

    async def _call(self, request: Any, within_s: float | None = None) -> Any:
        self.begun += 1
        if self.begun == 3:
            self.event.set()
        await self.event.wait()
        if request.keys == [self.fails]:
            raise OutOfMemory("planned")
        return request.keys


class BlockingMeeting:
    """The same for threads."""

    def __init__(self, fails: str = "", error: type[Exception] = OutOfMemory) -> None:
        self.barrier, self.fails, self.error = threading.Barrier(3), fails, error

    def _call(self, request: Any, within_s: float | None = None) -> Any:
        self.barrier.wait(60)
        if request.keys == [self.fails]:
            raise self.error("planned")
        return request.keys


class Slow:
    """A store whose calls take 1.5 s by the clock of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.had_s = 0.0, list[float | None]()
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def _call(self, request: Any, within_s: float | None = None) -> Any:
        self.now_s += 1.5
        self.had_s.append(within_s)
        return request.keys


class Plain:
    def _call(self, request: Any, within_s: float | None = None) -> Any:
        return request.keys


def parts(store: Any) -> list[Any]:
    return [Part(store, Exists(Keys([key]))) for key in "abc"]


def check_that_b_failed(outcomes: list[Any]) -> None:
    assert outcomes[::2] == [["a"], ["c"]]
    assert isinstance(outcomes[1], KeptError)
    assert outcomes[1].kind is OutOfMemory


def test_parts_are_under_way_at_the_same_time() -> None:
    async def with_asyncio() -> list[Any]:
        return await asyncio_gather(parts(Meeting(asyncio.Event())))

    assert trio.run(trio_gather, parts(Meeting(trio.Event()))) == [["a"], ["b"], ["c"]]
    assert asyncio.run(with_asyncio()) == [["a"], ["b"], ["c"]]


def test_an_error_is_an_outcome_and_does_not_end_the_others() -> None:
    async def with_asyncio() -> list[Any]:
        return await asyncio_gather(parts(Meeting(asyncio.Event(), "b")))

    check_that_b_failed(trio.run(trio_gather, parts(Meeting(trio.Event(), "b"))))
    check_that_b_failed(asyncio.run(with_asyncio()))


def test_no_parts_let_other_tasks_run() -> None:
    async def with_trio() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await trio_gather([])
        assert scope.cancelled_caught

    async def with_asyncio() -> None:
        other = asyncio.create_task(asyncio.sleep(0))
        assert await asyncio_gather([]) == []
        assert await asyncio_gather([]) == []
        assert other.done()

    trio.run(with_trio)
    asyncio.run(with_asyncio())


def test_parts_of_threads_are_under_way_at_the_same_time() -> None:
    threads = PartThreads()
    for _ in range(3):  # the first starts threads, the others find them
        assert threads.carry_out(parts(BlockingMeeting())) == [["a"], ["b"], ["c"]]
    check_that_b_failed(threads.carry_out(parts(BlockingMeeting("b"))))
    with pytest.raises(ZeroDivisionError, match="planned"):
        threads.carry_out(parts(BlockingMeeting("b", ZeroDivisionError)))
    assert threads.carry_out([]) == []
    threads.close()


def test_few_threads_do_for_many_calls() -> None:
    threads = PartThreads()
    before = threading.active_count()
    for _ in range(50):
        threads.carry_out(parts(Plain()))
    assert threading.active_count() - before <= 2
    threads.close()
    threads.close()
    assert threads.carry_out(parts(Plain())) == [["a"], ["b"], ["c"]]


def test_without_more_threads_the_caller_carries_out_all_parts() -> None:
    with refused_threads():
        assert PartThreads().carry_out(parts(Plain())) == [["a"], ["b"], ["c"]]


def test_parts_that_no_thread_takes_share_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Slow(monkeypatch)
    with refused_threads():
        outcomes = PartThreads().carry_out([part._replace(within_s=2.0) for part in parts(store)])
    assert outcomes[:2] == [["a"], ["b"]]
    assert isinstance(outcomes[2], KeptError) and outcomes[2].kind is DeadlineExceeded
    assert store.had_s == [2.0, 0.5]
