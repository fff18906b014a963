"""Processes that are stopped in the middle of ordinary code, and their store
buffers.
"""

import random
from collections.abc import Awaitable, Callable

import pytest
import trio

from tests.simulation.clock import VirtualClock
from tests.simulation.processes import Killed, Process, Processes


def run(main: Callable[[Processes, trio.Nursery], Awaitable[None]], seed: int = 1) -> None:
    clock = VirtualClock()
    clock.at(1e6, lambda: None)  # at the end Trio waits for nothing

    async def begin() -> None:
        processes = Processes(clock, random.Random(seed))
        trio.lowlevel.add_instrument(processes)
        async with trio.open_nursery() as nursery:
            await main(processes, nursery)

    trio.run(begin, clock=clock)


def steps_until_stopped(processes: Processes, process: Process) -> None:
    stops = processes.counts["stops"]
    while processes.counts["stops"] == stops:
        processes.step(process)


def test_others_go_on_while_a_process_is_stopped_and_its_own_tasks_do_not() -> None:
    seen: list[str] = []

    async def main(processes: Processes, nursery: trio.Nursery) -> None:
        process = Process("stopped")

        async def stopped() -> None:
            for _ in range(100):
                before = len(seen)
                steps_until_stopped(processes, process)
                assert "own" not in seen[before:]
                await trio.sleep(0.001)

        async def other(name: str) -> None:
            for _ in range(1000):
                seen.append(name)
                await trio.sleep(0.0001)

        processes.start_soon(nursery, process, stopped)
        processes.start_soon(nursery, process, other, "own")
        nursery.start_soon(other, "other")

    run(main)
    assert seen.count("own") == seen.count("other") == 1000


def test_a_stop_is_not_interrupted_by_cancellation() -> None:
    async def main(processes: Processes, nursery: trio.Nursery) -> None:
        process = Process("stopped")
        done: list[str] = []

        async def work() -> None:
            with trio.move_on_after(0):
                steps_until_stopped(processes, process)
                done.append("what it was doing")
                await trio.lowlevel.checkpoint()
                done.append("what came later")

        processes.start_soon(nursery, process, work)
        await trio.sleep(10)
        assert done == ["what it was doing"]

    run(main)


def test_a_store_is_seen_by_its_process_at_once_and_by_others_at_a_fence() -> None:
    async def main(processes: Processes, nursery: trio.Nursery) -> None:
        process = Process("writer")
        memory = {"first": 0, "second": 0}

        async def write() -> None:
            processes.store(process, memory, "first", 1, "key")
            processes.store(process, memory, "first", 2, "key")
            processes.store(process, memory, "second", 3, "other key")
            assert process.own == {"key": 2, "other key": 3}
            assert memory == {"first": 0, "second": 0}
            process.flush_one()
            assert memory == {"first": 1, "second": 0}
            processes.fence()
            assert (memory, process.own) == ({"first": 2, "second": 3}, {})
            processes.store(process, memory, "first", 4, "key")

        processes.start_soon(nursery, process, write)
        await trio.sleep(1)
        assert memory["first"] == 4  # it has ended: nothing stays in a buffer for ever

    run(main)


def test_a_killed_process_stores_nothing_more_and_goes_on_with_an_error() -> None:
    async def main(processes: Processes, nursery: trio.Nursery) -> None:
        process = Process("killed")
        memory = {"word": 0}

        async def work() -> None:
            processes.store(process, memory, "word", 1, "key")
            with pytest.raises(Killed):
                steps_until_stopped(processes, process)
            processes.store(process, memory, "word", 2, "key")

        processes.start_soon(nursery, process, work)
        while process.stopped is None:
            await trio.lowlevel.checkpoint()
        process.kill()
        await trio.sleep(1)
        assert process.stopped is None
        assert memory == {"word": 1}

    run(main)


def test_a_process_that_is_killed_quietly_goes_on_without_effect() -> None:
    async def main(processes: Processes, nursery: trio.Nursery) -> None:
        process = Process("killed")
        memory = {"word": 0}
        done: list[str] = []

        async def work() -> None:
            steps_until_stopped(processes, process)
            processes.store(process, memory, "word", 1, "key")
            done.append("all")

        processes.start_soon(nursery, process, work)
        while process.stopped is None:
            await trio.lowlevel.checkpoint()
        process.kill(quietly=True)
        await trio.sleep(1)
        assert (done, memory) == (["all"], {"word": 0})

    run(main)


@pytest.mark.parametrize("same", [True, False])
def test_the_seed_decides_where_a_process_is_stopped(same: bool) -> None:
    def stops(seed: int) -> list[float]:
        times: list[float] = []

        async def main(processes: Processes, nursery: trio.Nursery) -> None:
            process = Process("stopped")

            async def work() -> None:
                for _ in range(200):
                    processes.step(process)
                    times.append(trio.current_time())

            processes.start_soon(nursery, process, work)

        run(main, seed)
        return times

    assert (stops(1) == stops(1 if same else 2)) is same
