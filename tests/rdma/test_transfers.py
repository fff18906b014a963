"""Blocks through real queue pairs: every size, thousands at once, registered or not,
two clients, the rule machine.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import attrs
import pytest
import trio
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

import infinistore
from infinistore.config import ServerConfig
from infinistore.transports.rdma.ibverbs import CHAIN, VerbsDevice
from tests.clients.event_loops import TrioThread, as_blocking
from tests.clients.stores import Loops, Opened, looker
from tests.clients.test_store_machine import ClientMachine
from tests.rdma.conftest import Host
from tests.rdma.serving import opened, serving, url
from tests.server.running import KIB, MIB, running_server

SIZES = [1, 2, 63, 64, 65, 1000, 4095, 4096, 4097, 64 * KIB - 1, 64 * KIB, MIB + 1, 3 * MIB, 8 * MIB]


def noise(count: int) -> bytes:
    return random.Random(count).randbytes(count)


@pytest.mark.parametrize("registered", [True, pytest.param(False, marks=pytest.mark.nightly)])
async def test_blocks_of_every_size_come_back_as_they_were(hosts: tuple[Host, Host], registered: bool) -> None:
    async with opened(hosts) as (_, store):
        source, target = bytearray(noise(8 * MIB)), bytearray(8 * MIB)
        if registered:
            await store.register(source)
            await store.register(target)
        for size in SIZES:
            await store.put(f"{size}", memoryview(source)[:size])
        for size in SIZES:
            target[: size + 1] = bytes(len(target[: size + 1]))
            assert await store.get_into(f"{size}", target) == size
            assert target[:size] == source[:size]
            assert not any(target[size : size + 1]), "and not a byte more"
        assert (await store.stats()).transport == "rdma"


@pytest.mark.nightly
@pytest.mark.parametrize("registered", [True, False])
async def test_thousands_of_blocks_go_in_one_call(hosts: tuple[Host, Host], registered: bool) -> None:
    """Far more work requests than the queue holds: none of the blocks touches the next,
    on either side.
    """
    count, size = 3000, 300
    async with opened(hosts) as (_, store):
        source, target = bytearray(noise(count * 512)), bytearray(count * 512)
        if registered:
            await store.register(source)
            await store.register(target)
        spans = [slice(i * 512, i * 512 + size) for i in range(count)]
        await store.put_many([(f"{i}", memoryview(source)[span]) for i, span in enumerate(spans)])
        await store.get_many_into([(f"{i}", memoryview(target)[span]) for i, span in enumerate(spans)])
        assert all(target[span] == source[span] for span in spans)
        assert not any(target[size:512])
        assert await store.get_many(["0", "missing", f"{count - 1}"]) == [source[:size], None, source[spans[-1]]]
    assert count > 10 * CHAIN


@pytest.mark.nightly
async def test_an_arena_is_registered_once_and_nothing_by_a_put_or_get(hosts: tuple[Host, Host]) -> None:
    registered: list[int] = []
    register = VerbsDevice.register

    def counted(self: VerbsDevice, address: int, length: int, **options: Any) -> Any:
        registered.append(length)
        return register(self, address, length, **options)

    with mock.patch.object(VerbsDevice, "register", counted):
        async with opened(hosts) as (server, store):
            arena_bytes = server.core.pool.arenas[0].length
            assert sorted(registered) == [1, arena_bytes]  # and the byte that reads back from GPUs go to
            buffer = bytearray(noise(MIB))
            with await store.register(buffer):
                await store.put("staged", noise(MIB // 2))
                before = len(registered)
                for number in range(5):
                    await store.put(f"{number}", buffer)
                    await store.get_into(f"{number}", buffer)
                    assert await store.get("staged") == noise(MIB // 2)
                assert len(registered) == before
                assert registered.count(arena_bytes) == 1


@pytest.mark.nightly
async def test_two_clients_at_once_do_not_meet(hosts: tuple[Host, Host]) -> None:
    async with serving(hosts[0]) as server:

        async def work(name: str) -> None:
            async with infinistore.open_store(url(server, hosts[1]), deadline_s=300) as store:
                values = {f"{name}/{i}": name.encode() * 20_000 + noise(i + 1) for i in range(8)}
                buffers = {key: bytearray(len(value)) for key, value in values.items()}
                for buffer in buffers.values():
                    await store.register(buffer)
                for _ in range(3):
                    await store.put_many(values)
                    assert await store.get_many_into(buffers) == [len(value) for value in values.values()]
                    assert buffers == values
                assert (await store.stats()).transport == "rdma"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, "one")
            nursery.start_soon(work, "two")
        await server.quiet()


@pytest.mark.nightly
def test_the_store_does_what_the_model_does(hosts: tuple[Host, Host]) -> None:
    @contextmanager
    def over_rdma(loops: Loops, config: ServerConfig, options: dict[str, Any], seed: int) -> Iterator[Opened]:
        config = attrs.evolve(config, dev_name=hosts[0].device, require_rdma=True)
        given: dict[str, Any] = {"device": hosts[1].device, "inline_bytes": 0, "staging_bytes": 16 * KIB, **options}
        with loops.trio.entered(lambda: running_server(config)) as server:
            address = f"rdma://127.0.0.1:{server.server.addresses.port}"
            with loops.trio.entered(lambda: infinistore.open_store(address, **given)) as store:
                yield Opened(as_blocking(store, loops.trio), server.core, looker(loops), config.max_batch_keys, server)

    with TrioThread() as thread:
        loops = Loops(thread, None)  # type: ignore[arg-type]  # no asyncio here
        machine = type("Machine", (ClientMachine,), {"opener": staticmethod(over_rdma), "loops": loops})
        run_state_machine_as_test(machine, settings=settings(max_examples=4, stateful_step_count=25))
