"""What happens on real queue pairs when a peer lies, dies or is cut off: an error soon,
nothing partial, room back.
"""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import NoReturn
from unittest import mock

import attrs
import pytest
import trio
import trio.lowlevel

import infinistore
from infinistore.client import AsyncStore
from infinistore.client.movers import rdma as rdma_pause
from infinistore.errors import StoreUnavailable, TransferFailed
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import Exists, ExistsReply, Keys, Put, RdmaConnect, RdmaConnectReply, RdmaPut
from infinistore.server.movers.rdma import RdmaMover
from infinistore.transports.rdma.ibverbs import open_device
from infinistore.transports.rdma.memory import RegisteredSpan, address_of
from infinistore.transports.rdma.verbs import Completion, Device, Endpoint, Operation, Queue
from tests.bad_days.servers import ServerProcess
from tests.rdma.conftest import Cable, Host
from tests.rdma.serving import opened, serving, url
from tests.server.running import MIB, Peer, RunningServer

VALUE = bytes(range(256)) * 256
Patience = Callable[[float], float]


@attrs.define
class RawClient:
    """Speaks the protocol, has some registered memory, and says of it what it wants."""

    server: RunningServer
    peer: Peer
    device: Device
    span: RegisteredSpan

    async def connect(self, *, serves: bool = False) -> Queue:
        queue = self.device.create_queue(serves=serves)
        end = queue.endpoint
        reply = await self.peer.ask(RdmaConnect(end.queue, end.packet, end.gid, end.lid, end.mtu, end.reads))
        assert isinstance(reply, RdmaConnectReply)
        own = Endpoint(reply.queue, reply.packet, reply.gid, reply.lid, reply.mtu, reply.reads)
        queue.connect(own, dead_after_s=0.25)
        return queue

    async def put(self, key: str, *, address: int = 0, remote_key: int = 0, size: int = len(VALUE)) -> None:
        place = pack_u64([address or self.span.address]), pack_u64([remote_key or self.span.key])
        await self.peer.ask(RdmaPut(Keys([key]), pack_u64([size]), *place, pack_u64()))

    async def exists(self, key: str) -> bool:
        return await self.peer.ask(Exists(Keys([key]))) == ExistsReply(b"\1")


@asynccontextmanager
async def raw_client(hosts: tuple[Host, Host]) -> AsyncGenerator[RawClient, None]:
    async with serving(hosts[0]) as server:
        device = open_device(hosts[1].device)
        try:
            span = RegisteredSpan(device, memoryview(bytearray(VALUE)))
            client = RawClient(server, await server.peer(), device, span)
            yield client
            client.peer.close()
            await server.quiet()
        finally:
            device.close()


async def completion_of(queue: Queue) -> Completion:
    while True:
        queue.arm()
        if found := queue.poll():
            return found[0]
        await trio.lowlevel.wait_readable(queue.fd)
        queue.take_events()


async def test_a_client_that_lies_about_its_memory_is_told_and_stores_nothing(
    hosts: tuple[Host, Host], patience: Patience
) -> None:
    async with raw_client(hosts) as client:
        wrong_key = client.span.key ^ 0x5500
        for lie in ({"address": client.span.address - 1}, {"remote_key": wrong_key}, {"size": len(VALUE) + 1}):
            await client.connect()
            with pytest.raises(TransferFailed, match="remote"), trio.fail_after(patience(60)):
                await client.put("lie", **lie)
            assert not await client.exists("lie")
        statistics = client.server.core.statistics()
        assert (statistics.reservations, statistics.used_bytes) == (0, 0)
        await client.peer.ask(Put(Keys(["inline"]), pack_u64([3]), checksums=False), b"abc")
        await client.connect()
        await client.put("truth")
        assert await client.exists("truth")


async def test_no_client_can_address_the_servers_memory(hosts: tuple[Host, Host], patience: Patience) -> None:
    async with raw_client(hosts) as client:
        await client.connect()
        await client.put("a")
        arena = client.server.core.pool.arenas[0]
        (pool,) = (mover.pool for mover in client.server.server.context.movers if isinstance(mover, RdmaMover))
        assert pool is not None
        for operation in Operation:
            for key in {pool.regions[0].local_key, pool.regions[0].remote_key}:
                queue = await client.connect(serves=True)
                before = bytes(arena.memory[: len(VALUE)])
                client.span.view[:] = b"x" * len(VALUE)
                own = client.device.register(client.span.address, len(VALUE), remote=False)
                queue.post(operation, [(client.span.address, own.local_key, address_of(arena.memory), key, 4096)], 1)
                with trio.fail_after(patience(60)):
                    completion = await completion_of(queue)
                assert completion.status != 0
                assert arena.memory[: len(VALUE)] == before
                assert client.span.view == b"x" * len(VALUE)
                queue.close()
                own.close()


@pytest.mark.nightly
async def test_nothing_is_written_to_the_callers_memory_after_a_cancelled_get(hosts: tuple[Host, Host]) -> None:
    async with opened(hosts) as (server, store):
        value = bytes(range(1, 256)) * (4 * MIB // 255)
        await store.put("a", value)
        target = bytearray(len(value))
        await store.register(target)
        cancelled = 0
        for _ in range(3):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(store.get_into, "a", target)
                    while not any(target[:: 64 * 1024]):  # it has begun
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            target[:] = bytes(len(target))
            cancelled += scope.cancelled_caught
            with trio.fail_after(60):
                while server.core.statistics().leases:
                    await trio.lowlevel.checkpoint()
            assert not any(target)
        assert cancelled
        assert await store.get_into("a", target) == len(value)
        assert target == value


@pytest.mark.nightly
async def test_memory_that_is_unregistered_under_a_transfer_is_not_touched_any_more(hosts: tuple[Host, Host]) -> None:
    async with opened(hosts, forced=False) as (server, store):
        value = bytes(range(1, 256)) * (4 * MIB // 255)
        target = bytearray(len(value))
        await store.put("a", value)
        registration = await store.register(target)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.get_into, "a", target)
            while not any(target[:: 64 * 1024]):
                await trio.lowlevel.checkpoint()
            registration.close()
        assert target == value
        assert server.core.statistics().leases == 0


async def test_a_pulled_cable_costs_a_moment_and_rdma_comes_back_with_it(
    hosts: tuple[Host, Host], cable: Cable, patience: Patience
) -> None:
    with mock.patch.object(rdma_pause, "FIRST_PAUSE_S", 0.0):
        async with opened(hosts, forced=False) as (server, store):
            values = {f"{i}": VALUE[i:] for i in range(8)}

            async def there_and_back() -> str:
                await store.put_many(values)
                assert list(map(bytes, filter(None, await store.get_many(values)))) == list(values.values())
                return (await store.stats()).transport

            assert await there_and_back() == "rdma"
            with trio.fail_after(patience(60)):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(there_and_back)
                    nursery.start_soon(there_and_back)
                    await trio.to_thread.run_sync(cable.pull)
                await there_and_back()
                await trio.to_thread.run_sync(cable.put_back)
                while await there_and_back() != "rdma":
                    pass
                # A connection that its client gave up keeps its reservation until the
                # server's queue pair gives up, too: its device may write until then.
                while server.core.statistics().reservations:
                    await trio.lowlevel.checkpoint()


@pytest.mark.nightly
async def test_without_a_cable_a_forced_transfer_is_an_error_soon(
    hosts: tuple[Host, Host], cable: Cable, patience: Patience
) -> None:
    async with opened(hosts) as (server, store):
        await store.put("a", VALUE)
        cable.pull()
        with trio.fail_after(patience(5)), pytest.raises(TransferFailed):
            await store.put_many({"a": b"new" * 1000, "b": VALUE})
        cable.put_back()
        with trio.fail_after(patience(60)):
            assert await store.get("a") == VALUE, "a new queue pair was connected"
        assert not await store.exists("b")
        assert server.core.statistics().reservations == 0


def put_and_get_for_ever(told: int, tells: int) -> NoReturn:
    """As a client of its own: the address of a store comes from one pipe, and the other
    is told when it has worked once.
    """

    async def main() -> None:
        async with infinistore.open_store(os.read(told, 1000).decode()) as store:
            buffer = bytearray(4 << 20)
            await store.register(buffer)
            while True:
                await store.put("from the dead", buffer)
                await store.get_into("from the dead", buffer)
                os.write(tells, b"!")

    try:
        trio.run(main)
    finally:
        os._exit(1)


def test_a_client_that_is_killed_gives_everything_back(hosts: tuple[Host, Host], patience: Patience) -> None:
    """It is forked before there is a server or a device: another interpreter takes half
    a minute to start in the virtual machine.
    """
    told, tells = os.pipe(), os.pipe()
    client = os.fork()
    if client == 0:
        put_and_get_for_ever(told[0], tells[1])
    os.close(told[0])
    os.close(tells[1])  # so that a client that has ended is the end of its pipe

    async def main() -> None:
        async with serving(hosts[0]) as server:
            os.write(told[1], url(server, hosts[1]).encode())
            try:
                assert await trio.to_thread.run_sync(os.read, tells[0], 1) == b"!"
                for _ in range(100):
                    await trio.lowlevel.checkpoint()
            finally:
                os.kill(client, signal.SIGKILL)
                await trio.to_thread.run_sync(os.waitpid, client, 0)
            with trio.fail_after(patience(60)):
                while server.server.telemetry.statistics().connections_open:
                    await trio.lowlevel.checkpoint()
            await server.quiet()
            async with infinistore.open_store(url(server, hosts[1]), deadline_s=300) as store:
                await store.put("a", VALUE)
                assert await store.get("a") == VALUE

    try:
        trio.run(main)
    finally:
        os.close(told[1])
        os.close(tells[0])


@pytest.mark.nightly
def test_a_server_that_is_killed_is_an_error_soon_and_found_again(hosts: tuple[Host, Host], patience: Patience) -> None:
    server = ServerProcess("--dev-name", hosts[0].device, "--require-rdma")
    server.start()

    async def through_the_death(store: AsyncStore) -> None:
        buffer = bytearray(VALUE * 16)
        await store.register(buffer)
        while True:
            try:
                await store.put("a", buffer)
                await store.get_into("a", buffer)
            except StoreUnavailable:
                return

    async def main() -> None:
        address = server.url.replace("tcp:", "rdma:") + f"?device={hosts[1].device}&inline_bytes=0"
        async with infinistore.open_store(address, deadline_s=patience(5)) as store:
            with trio.fail_after(patience(30)):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(through_the_death, store)
                    for _ in range(200):
                        await trio.lowlevel.checkpoint()
                    assert server.process is not None
                    os.kill(server.process.pid, signal.SIGKILL)
            await trio.to_thread.run_sync(server.restart)
            while True:
                try:
                    await store.put("b", VALUE)
                    break
                except StoreUnavailable:
                    await trio.lowlevel.checkpoint()  # it is left alone for a while after so many failures
            assert await store.get("b") == VALUE
            assert (await store.stats()).transport == "rdma"

    try:
        trio.run(main)
    finally:
        server.kill()


_CARELESS = """
import gc, os, sys
from infinistore.transports.rdma.memory import address_of
from infinistore.transports.rdma.ibverbs import open_device

buffer = bytearray(100_000)
device = open_device(sys.argv[1])
made = [device.create_queue(serves=True), device.register(address_of(memoryview(buffer)), len(buffer), remote=True)]
pid = os.fork()
if pid == 0:
    device.abandon()
    for part in (*made, device):
        part.close()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
made.append(device.create_queue(serves=True))  # the parent's device is as it was
device.itself = device  # for the garbage collector to find
del device, made
gc.collect()
"""


@pytest.mark.nightly
def test_a_process_that_forks_and_closes_nothing_ends_without_a_crash(hosts: tuple[Host, Host]) -> None:
    subprocess.run([sys.executable, "-c", _CARELESS, hosts[1].device], check=True)
