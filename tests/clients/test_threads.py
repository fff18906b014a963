"""Blocking work of asynchronous stores: it uses the caller's memory, so that nobody
goes on before it has ended.
"""

import asyncio
import threading

import pytest
import trio

from infinistore.client.worker_threads import in_thread
from tests.clients.event_loops import under_asyncio


class Work:
    """Something that takes until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self.ended = False

    def __call__(self) -> str:
        self.begun.set()
        self.let_go.wait()
        self.ended = True
        return "result"


async def test_with_trio_a_cancelled_task_waits_for_its_end() -> None:
    work = Work()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_thread, work)
            await trio.to_thread.run_sync(work.begun.wait)
            scope.cancel()
            work.let_go.set()
    assert work.ended


@under_asyncio
async def test_with_asyncio_a_cancelled_task_waits_for_its_end() -> None:
    work = Work()
    task = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(work.begun.wait)
    for _ in range(3):
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done()
    work.let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended


@pytest.mark.parametrize("run", [trio.run, lambda function: asyncio.run(function())], ids=["trio", "asyncio"])
def test_it_returns_what_the_work_returns(run: object) -> None:
    assert callable(run)
    work = Work()
    work.let_go.set()

    async def main() -> str:
        return await in_thread(work)

    assert run(main) == "result"
