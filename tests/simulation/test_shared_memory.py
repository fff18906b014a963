"""Tables and blocks that two processes of a simulation share."""

import random
from array import array
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import trio
from xxhash import xxh3_64_intdigest

from infinistore.protocol.messages import Numbers
from infinistore.protocol.shared_tables import READER_BYTES, CommitWord, Hazards, HazardTable, TouchLog
from tests.simulation.clock import VirtualClock
from tests.simulation.processes import Process, Processes
from tests.simulation.shared_memory import Copier, Tables

SERVER, CLIENT = "server", "client"


def run(main: Callable[[Processes, trio.Nursery], Awaitable[None]], seed: int = 1) -> None:
    clock = VirtualClock()
    clock.at(1e6, lambda: None)  # at the end Trio waits for nothing

    async def begin() -> None:
        processes = Processes(clock, random.Random(seed))
        trio.lowlevel.add_instrument(processes)
        async with trio.open_nursery() as nursery:
            await main(processes, nursery)

    trio.run(begin, clock=clock)


def test_two_ends_of_a_table_see_each_other() -> None:
    async def main(processes: Processes, nursery: trio.Nursery) -> None:
        server, client = Process(SERVER), Process(CLIENT)
        tables = Tables(processes)
        with ExitStack() as stack:
            arena = tables.create_arena(server, 0, READER_BYTES, name="reader")
            stack.callback(arena.close)
            mapped = tables.map_memory(client, arena.fd, READER_BYTES, writable=True).memory
            numbers = Numbers(array("Q", [4096, 8192]))

            async def use() -> None:
                hazard = HazardTable(mapped).add(numbers, numbers, numbers)
                assert hazard == 0
                assert TouchLog(mapped).append(b"touched")
                CommitWord(mapped).commit(7, numbers)

            processes.start_soon(nursery, client, use)
            await trio.sleep(100)
            hazards = Hazards(arena.memory)
            assert hazards.look() == [(0, 4096, 4096, 4096, 1), (0, 8192, 8192, 8192, 1)]
            assert TouchLog(arena.memory).take() == b"touched"
            assert CommitWord(arena.memory).checksums_of(7, 2) == [4096, 8192]

    run(main)


def test_memory_that_holds_no_table_is_left_as_it_is() -> None:
    async def main(processes: Processes, nursery: trio.Nursery) -> None:
        tables, process = Tables(processes), Process(SERVER)
        arena = tables.create_arena(process, 0, 4096)
        mapping = tables.map_memory(process, arena.fd, 4096, writable=False)
        arena.memory[:3] = b"abc"
        assert bytes(mapping.memory[:3]) == b"abc"
        arena.close()

    run(main)


def test_a_block_that_changes_while_it_is_copied_is_torn() -> None:
    torn: list[bool] = []

    def copy(seed: int) -> None:
        async def main(processes: Processes, nursery: trio.Nursery) -> None:
            process = Process(CLIENT)
            copier = Copier(processes, process, random.Random(seed), steps=1)
            source, target = bytearray(b"a" * 1000), bytearray(1000)

            async def read() -> None:
                sources, targets = [memoryview(source)], [memoryview(target)]
                (checksum,) = await copier.copy(sources, targets, [1000], 1000, hash_targets=True)
                assert checksum == xxh3_64_intdigest(target)
                torn.append(len(set(target)) == 2)

            async def write() -> None:
                await trio.sleep(0.00001)
                source[:] = b"b" * 1000

            processes.start_soon(nursery, process, read)
            nursery.start_soon(write)

        torn.clear()
        run(main, seed)
        found.append(torn[0])

    found: list[bool] = []
    for seed in range(30):
        copy(seed)
    assert set(found) == {True, False}
