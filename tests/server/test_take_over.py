"""A process takes the place of a server: what the other process gets, and what becomes
of the server if it goes away in the middle.
"""

import errno
import os
import stat
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infinistore import open_store
from infinistore.config import ServerConfig
from infinistore.core.pool_state import GroupStates, PoolState
from infinistore.errors import ConfigError, InvalidRequest, ServerReplaced, StoreUnavailable
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import Get, Keys, Numbers, Put, PutReply, TakeOver, TakeOverReply, TakeOverStep
from infinistore.protocol.server_connection import Received
from infinistore.protocol.versions import MINOR, OFFER, Capability, Offer
from infinistore.server import Server
from infinistore.server import server as server_module
from infinistore.server.composition import run_server
from infinistore.server.connection import Conversation
from infinistore.server.disk import ServerDisks
from infinistore.server.session.session import Session
from infinistore.server.take_over import giving
from infinistore.server.take_over import taking as taking_module
from infinistore.server.take_over.giving import Giving
from infinistore.server.take_over.memory import OneStore, PoolLost, Taken, decode, make_ownership, take_ownership
from infinistore.server.take_over.taking import Taking, begin_taking
from infinistore.transports.base import drive
from infinistore.transports.sockets.trio_streams import connect_tcp, connect_unix
from tests.server.running import Peer, fill_twice, make_config, until

BLOCK = b"b" * 5000


@asynccontextmanager
async def running(config: ServerConfig) -> AsyncGenerator[tuple[Server, trio.Event]]:
    """A server until the block is left, and what is set when it has ended."""
    ended = trio.Event()

    async def run(task_status: trio.TaskStatus[Server]) -> None:
        await run_server(config, on_listening=task_status.started)
        ended.set()

    async with trio.open_nursery() as nursery:
        server: Server = await nursery.start(run)
        yield server, ended
        nursery.cancel_scope.cancel()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerConfig:
    """Of a server that waits for no process, and no request, until its time is over."""
    monkeypatch.setattr(giving, "DECIDE_S", 3600.0)
    return make_config(unix_socket=str(tmp_path / "socket"), drain_timeout_s=600.0)


def taking_over(config: ServerConfig, **settings: Any) -> ServerConfig:
    plain: dict[str, Any] = {"unix_socket": config.unix_socket, "take_over": True, "drain_timeout_s": 600.0}
    return make_config(**{**plain, **settings})


def ask(address: Sequence[tuple[str, int]], method: str, path: str) -> int:
    """Ask the management API; return the status."""
    connection = HTTPConnection(*address[0])
    try:
        connection.request(method, path)
        return connection.getresponse().status
    finally:
        connection.close()


async def taker_of(config: ServerConfig, steps: int) -> Peer:
    """A process that takes over, after so many steps."""
    peer = await peer_of(config)
    for step in range(steps):
        descriptors: list[int] = []
        await drive(peer.connection.request(TakeOver(step), descriptors=descriptors), peer.stream)
        for descriptor in descriptors:
            os.close(descriptor)
    return peer


async def until_over(server: Server) -> None:
    """Wait until nobody takes over any more."""
    found = server.context.giving
    assert found is not None
    await until(lambda: found.taker is None and not found.wanted.is_set())


async def begun(config: ServerConfig, resources: ExitStack) -> Taking:
    taking = await begin_taking(config, "", resources)
    assert taking is not None
    return taking


async def peer_of(config: ServerConfig) -> Peer:
    peer = Peer(await connect_unix(config.unix_socket))
    await peer.hello()
    return peer


async def test_the_successor_serves_what_the_server_had(config: ServerConfig) -> None:
    async with running(config) as (old, old_ended):
        async with open_store(f"unix://{config.unix_socket}") as store:
            await store.put("key", BLOCK)
            old_addresses = old.addresses
            async with running(taking_over(config)) as (new, _):
                await old_ended.wait()
                assert new.addresses == old_addresses
                assert await store.get("key") == BLOCK
                assert stat.S_ISSOCK(os.stat(config.unix_socket).st_mode)
        with pytest.raises(FileNotFoundError):
            os.stat(config.unix_socket)


async def test_a_successor_that_goes_away_costs_the_server_nothing(config: ServerConfig) -> None:
    async with running(config) as (old, old_ended), open_store(f"unix://{config.unix_socket}") as store:
        await store.put("key", BLOCK)
        for steps in (1, 2, 2):
            (await taker_of(config, steps)).stream.close()
            await until_over(old)
            assert await store.get("key") == BLOCK
            await store.put("key", BLOCK)
        assert not old_ended.is_set()


async def test_only_one_process_at_a_time_may_take_over(config: ServerConfig) -> None:
    async with running(config) as (old, _):
        with ExitStack() as resources:
            await begun(taking_over(config), resources)
            with pytest.raises(ConfigError, match="another process takes over already"):
                await begun(taking_over(config), resources)
        with ExitStack() as resources:
            await until_over(old)
            await begun(taking_over(config), resources)


async def test_a_step_out_of_turn_is_refused(config: ServerConfig) -> None:
    async with running(config):
        peer = await peer_of(config)
        for step in (TakeOverStep.HAND_OVER, TakeOverStep.END):
            with pytest.raises(InvalidRequest, match="does not take over"):
                await peer.ask(TakeOver(step))
        assert isinstance(await peer.ask(Put(Keys(["k"]), pack_u64([1]), checksums=False), b"1"), PutReply)
        peer.stream.close()


def be_older(monkeypatch: pytest.MonkeyPatch, *, then: str) -> None:
    """Let servers be of a release that decides itself, and that breaks the connection
    instead of giving its last answer.
    """
    made: list[int] = []
    answer = Giving.answer

    def make_and_note() -> int:
        made.append(make_ownership())
        return made[-1]

    def reply(names: Keys, numbers: Numbers) -> TakeOverReply:
        return TakeOverReply(Keys([name.replace("ownership", "unknown") for name in names]), numbers)

    async def answer_but_the_last(
        found: Giving, conversation: Conversation, message: TakeOver, received: Received
    ) -> None:
        if message.step != TakeOverStep.END:
            await answer(found, conversation, message, received)
            return
        if then == "ends":
            assert take_ownership(made[-1])
        conversation.stream.close()

    monkeypatch.setattr(giving, "make_ownership", make_and_note)
    monkeypatch.setattr(giving, "TakeOverReply", reply)
    monkeypatch.setattr(Giving, "answer", answer_but_the_last)


async def test_an_older_server_that_ends_without_its_last_answer_is_followed_by_an_empty_one(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is gone, so nobody else serves; but until then, it may have served on."""
    be_older(monkeypatch, then="ends")
    async with running(config) as (_, old_ended), open_store(f"unix://{config.unix_socket}") as store:
        await store.put("key", BLOCK)
        async with running(taking_over(config)):
            assert old_ended.is_set()
            assert not await store.exists("key")
            await store.put("key", BLOCK)
            assert await store.get("key") == BLOCK
    [warning] = [record for record in caplog.records if record.message == "the cache starts empty"]
    assert "its last answer was lost" in warning.__dict__["reason"]


async def test_an_older_server_that_serves_on_without_its_last_answer_has_no_successor(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_older(monkeypatch, then="serves on")
    monkeypatch.setattr(taking_module, "ENDS_S", 0.0)
    async with running(config) as (old, old_ended), open_store(f"unix://{config.unix_socket}") as store:
        await store.put("key", BLOCK)
        with pytest.raises(ConfigError, match="see whether it serves on"):
            await run_server(taking_over(config), on_listening=lambda server: None)
        await until_over(old)
        assert not old_ended.is_set()
        assert await store.get("key") == BLOCK


class NoStore(OneStore):
    """Takes nothing over."""

    def __init__(self, taking: Taking) -> None:
        self._taking = taking

    def adopt(self, state: PoolState) -> Taken:
        return Taken(0, 0, [[] for _ in range(len(self._taking.streams) + 1)])


async def give_up(server: Server) -> None:
    """Have the server wait no longer."""
    found = server.context.giving
    assert found is not None
    assert found.taker is not None
    found.taker.stream.close()
    await until_over(server)


@pytest.mark.parametrize("then", ["serves", "is taken over", "ends"])
async def test_a_successor_that_is_late_does_not_serve(config: ServerConfig, then: str) -> None:
    """However long it was stopped, and whatever has become of the server."""
    async with running(config) as (old, old_ended), open_store(f"unix://{config.unix_socket}") as store:
        await store.put("key", BLOCK)
        with ExitStack() as resources:
            taking = await begun(taking_over(config), resources)
            await taking.take(OneStore(old.core), resources)
            await give_up(old)
            assert await store.delete(["key"]) == 1
            async with AsyncExitStack() as others:
                if then == "is taken over":
                    await others.enter_async_context(running(taking_over(config)))
                if then == "ends":
                    old.drain()
                if then != "serves":
                    await old_ended.wait()
                with pytest.raises(ConfigError, match="has served on"):
                    await taking.end()
                if then != "ends":
                    assert not await store.exists("key")


class Successors:
    """Two processes that would take over a server."""

    def __init__(self, server: Server, config: ServerConfig) -> None:
        assert server.context.giving is not None
        self._giving = server.context.giving
        self._config = config
        self._resources = (ExitStack(), ExitStack())
        self._takings: list[Taking | None] = [None, None]
        self.owners = 0

    async def act(self, act: str, number: int) -> None:
        taking = self._takings[number]
        if act == "give up":
            if self._giving.taker is not None:
                self._giving.taker.stream.close()
        elif act == "leave":
            self._resources[number].close()
            self._takings[number] = None
        elif taking is None:
            if act == "begin" and not self._giving.wanted.is_set():  # else it waits to be accepted
                self._takings[number] = await begun(taking_over(self._config), self._resources[number])
        elif act == "take":
            await taking.take(NoStore(taking), self._resources[number])
        elif act == "end":
            await taking.end()
            self.owners += 1


ACTS = st.tuples(st.sampled_from(["begin", "take", "end", "leave", "give up"]), st.integers(0, 1))


LATE = [("begin", 0), ("take", 0), ("give up", 0), ("begin", 1), ("take", 1), ("end", 1), ("end", 0)]


@given(acts=st.lists(ACTS, max_size=10))
@example(acts=LATE)
@settings(max_examples=25)
def test_of_a_server_and_its_successors_one_serves(acts: list[tuple[str, int]]) -> None:
    """Whatever they do in which order, and whoever is late."""

    async def main() -> None:
        with TemporaryDirectory() as folder:
            config = make_config(unix_socket=f"{folder}/socket", drain_timeout_s=600.0)
            async with running(config) as (server, ended):
                successors = Successors(server, config)
                for act, number in [*acts, ("leave", 0), ("leave", 1)]:
                    with suppress(ConfigError, PoolLost):
                        await successors.act(act, number)
                    await trio.testing.wait_all_tasks_blocked()
                assert successors.owners <= 1
                if successors.owners:
                    await ended.wait()
                else:
                    assert not ended.is_set()
                    await until_over(server)
                    peer = await peer_of(config)
                    put = Put(Keys(["k"]), pack_u64([1]), checksums=False)
                    assert isinstance(await peer.ask(put, b"1"), PutReply)
                    peer.stream.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(giving, "DECIDE_S", 3600.0)
        trio.run(main)


async def test_a_server_that_was_stopped_meanwhile_does_not_serve_on(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor serves before the server has heard of that."""
    may_go_on, decide = trio.Event(), Giving.decide

    async def decide_late(found: Giving) -> bool:
        await may_go_on.wait()
        return await decide(found)

    monkeypatch.setattr(Giving, "decide", decide_late)
    async with running(config) as (_, old_ended), open_store(f"unix://{config.unix_socket}") as store:
        await store.put("key", BLOCK)
        async with running(taking_over(config)):
            assert await store.get("key") == BLOCK
            assert not old_ended.is_set()
            may_go_on.set()
            await old_ended.wait()
            assert await store.get("key") == BLOCK
            assert stat.S_ISSOCK(os.stat(config.unix_socket).st_mode)


@pytest.mark.parametrize("sent_bytes", [0, 20, 1000])
async def test_a_server_that_drains_waits_for_no_successor(config: ServerConfig, sent_bytes: int) -> None:
    async with running(config) as (old, old_ended):
        taker = await taker_of(config, 1)
        head = taker.connection.encode(TakeOver(TakeOverStep.HAND_OVER)).head
        await taker.stream.send_all([memoryview(head)[:sent_bytes]])
        await trio.testing.wait_all_tasks_blocked()  # the server has read it
        old.drain()
        await trio.testing.wait_all_tasks_blocked()
        with suppress(StoreUnavailable):
            await taker.stream.send_all([memoryview(head)[sent_bytes:]])
        if sent_bytes > len(head):
            taker.stream.close()  # it has begun to hand over
        await old_ended.wait()
        taker.stream.close()


async def test_over_tcp_nobody_takes_over(config: ServerConfig) -> None:
    async with running(config) as (old, _):
        peer = Peer(await connect_tcp("127.0.0.1", old.addresses.port))
        await peer.hello()
        with pytest.raises(InvalidRequest, match="Unix socket"):
            await peer.ask(TakeOver(TakeOverStep.BEGIN))
        peer.stream.close()


async def test_another_user_may_not_take_over(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giving, "peer_user", lambda sock: os.geteuid() + 1)
    async with running(config):
        with ExitStack() as resources, pytest.raises(ConfigError, match="only the user of the server"):
            await begun(taking_over(config), resources)


async def test_a_request_that_came_too_late_was_not_done_and_says_so(config: ServerConfig) -> None:
    async with running(config):
        peer = await peer_of(config)
        taker = await taker_of(config, 2)
        with pytest.raises(ServerReplaced, match="nothing of this was done"):
            await peer.ask(Get(Keys(["k"]), pack_u64()))
        peer.stream.close()
        taker.stream.close()


async def test_a_put_under_way_is_finished(config: ServerConfig) -> None:
    async with running(config) as (old, old_ended):
        peer = await peer_of(config)
        async with trio.open_nursery() as nursery:
            encoded = peer.connection.encode(
                Put(Keys(["slow", "too"]), pack_u64([2500, 2500]), checksums=False), payload_bytes=5000
            )
            await peer.stream.send_all([memoryview(encoded.head), memoryview(BLOCK)[:1000]])
            await until(lambda: old.core.statistics().reservations)
            found: list[Server] = []
            scope = trio.CancelScope()

            async def successor() -> None:
                with scope:
                    await run_server(taking_over(config), on_listening=found.append)

            nursery.start_soon(successor)
            assert old.context.giving is not None
            await old.context.giving.wanted.wait()
            await peer.stream.send_all([memoryview(BLOCK)[1000:]])
            await old_ended.wait()
            scope.cancel()
        peer.stream.close()


async def test_nothing_is_purged_that_the_successor_would_bring_back(config: ServerConfig) -> None:
    async with running(config) as (old, _), open_store(f"unix://{config.unix_socket}") as store:
        await store.put("key", BLOCK)
        purge = partial(ask, old.addresses.management, "POST", "/purge")
        taker = await taker_of(config, 2)
        assert await trio.to_thread.run_sync(purge) == 503
        assert len(old.core) == 1
        taker.stream.close()
        await until_over(old)
        assert await trio.to_thread.run_sync(purge) == 200
        assert not await store.exists("key")


@pytest.mark.parametrize("serves_on", [True, False])
async def test_a_purge_is_not_told_of_as_done_while_a_successor_could_bring_the_blocks_back(
    config: ServerConfig, serves_on: bool
) -> None:
    async with running(config) as (old, old_ended), open_store(f"unix://{config.unix_socket}") as store:
        await store.put("key", BLOCK)
        purged = trio.Event()

        async def purge() -> None:
            await old.purge()
            purged.set()

        with ExitStack() as resources:
            taking = await begun(taking_over(config), resources)
            await taking.take(OneStore(old.core), resources)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(purge)
                await trio.testing.wait_all_tasks_blocked()
                assert len(old.core) == 1
                if serves_on:
                    await give_up(old)
                    await purged.wait()
                    assert not await store.exists("key")
                else:
                    await taking.end()
                    await old_ended.wait()
                    await trio.testing.wait_all_tasks_blocked()
                    assert not purged.is_set()
                nursery.cancel_scope.cancel()


async def test_nobody_takes_over_in_the_middle_of_a_purge(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take long, on a disk that does not answer. The server serves on, and stops
    when it is told to."""

    async def purge(disks: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(ServerDisks, "purge", purge)
    async with running(config) as (old, old_ended), trio.open_nursery() as nursery:
        nursery.start_soon(old.purge)
        await trio.testing.wait_all_tasks_blocked()
        with ExitStack() as resources:
            taking = await begun(taking_over(config), resources)
            with pytest.raises(ConfigError, match="is being purged; try again"):
                await taking.take(OneStore(old.core), resources)
        await until_over(old)
        async with open_store(f"unix://{config.unix_socket}") as store:
            await store.put("key", BLOCK)
        old.drain()
        await old_ended.wait()
        nursery.cancel_scope.cancel()


async def test_a_purge_of_a_server_that_has_ended_its_service_is_never_done(config: ServerConfig) -> None:
    async with running(config) as (old, old_ended), trio.open_nursery() as nursery:
        old.drain()
        await old_ended.wait()
        nursery.start_soon(old.purge)
        await trio.testing.wait_all_tasks_blocked()
        assert nursery.child_tasks
        nursery.cancel_scope.cancel()


async def test_without_a_server_the_cache_starts_empty(config: ServerConfig) -> None:
    async with running(taking_over(config)) as (new, _):
        assert len(new.core) == 0


async def test_a_pool_that_does_not_fit_starts_empty(config: ServerConfig, caplog: pytest.LogCaptureFixture) -> None:
    async with running(config) as (old, old_ended), open_store(f"unix://{config.unix_socket}") as store:
        await store.put("key", BLOCK)
        async with running(taking_over(config, service_port=old.addresses.port, prealloc_bytes=1 << 20)) as (new, _):
            await old_ended.wait()
            assert len(new.core) == 0
            assert [record for record in caplog.records if record.getMessage() == "the cache starts empty"]
            await store.put("key", BLOCK)


async def test_a_state_of_a_newer_format_is_refused_and_the_server_serves_on(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_by_another_release(data: bytes) -> PoolState | GroupStates:
        version = int.from_bytes(data[8:16], sys.byteorder) + 1
        return decode(data[:8] + version.to_bytes(8, sys.byteorder) + data[16:])

    monkeypatch.setattr(taking_module, "decode", read_by_another_release)
    async with running(config) as (_, old_ended), open_store(f"unix://{config.unix_socket}") as store:
        await store.put("key", BLOCK)
        with pytest.raises(ConfigError, match=r"it has format 4, .* reads format 2 or 3\. .*start without --take-over"):
            await run_server(taking_over(config), on_listening=lambda server: None)
        assert not old_ended.is_set()
        assert await store.get("key") == BLOCK


async def test_a_process_of_an_older_release_is_refused_before_anything_ends(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Offer(MINOR, OFFER.capabilities & ~Capability.OWNERSHIP)
    monkeypatch.setattr(taking_module, "ClientConnection", partial(ClientConnection, offer=older))
    async with running(config) as (server, _):
        found = server.context.giving
        assert found is not None
        with (
            ExitStack() as resources,
            pytest.raises(ConfigError, match="server is of a newer release than the process"),
        ):
            await begun(taking_over(config), resources)
        assert (found.taker, found.wanted.is_set()) == (None, False)


async def test_a_larger_pool_keeps_the_blocks(config: ServerConfig) -> None:
    async with running(config), open_store(f"unix://{config.unix_socket}") as store:
        await store.put("key", BLOCK)
        larger = taking_over(config, prealloc_bytes=config.prealloc_bytes + (1 << 20))
        async with running(larger) as (new, _):
            assert [arena.length for arena in new.core.pool.arenas] == [config.prealloc_bytes, 1 << 20]
            assert await store.get("key") == BLOCK


async def test_another_allocator_keeps_the_blocks(config: ServerConfig) -> None:
    async with running(config), open_store(f"unix://{config.unix_socket}") as store:
        await store.put("key", BLOCK)
        async with running(taking_over(config, allocator="slab")):
            assert await store.get("key") == BLOCK


async def test_views_of_a_lease_stay_until_their_client_is_gone(config: ServerConfig) -> None:
    async with running(config) as (_, old_ended), open_store(f"shm://{config.unix_socket}") as store:
        await store.put("leased", BLOCK)
        async with store.lease(["leased"]) as views, running(taking_over(config)) as (new, _):
            await old_ended.wait()
            assert new.core.statistics().quarantined_bytes > 0
            await store.delete(["leased"])
            await fill_twice(store, new.core.pool.capacity_bytes, bytes(len(BLOCK)))
            assert bytes(views[0] or b"") == BLOCK


async def test_a_hold_goes_on_and_its_owner_may_end_it(config: ServerConfig) -> None:
    async with running(config) as (_, old_ended), open_store(f"unix://{config.unix_socket}") as store:
        await store.put("key", BLOCK)
        match = await store.match_prefix(["key"], hold_s=60)
        async with running(taking_over(config)) as (new, _):
            await old_ended.wait()
            assert new.core.statistics().held_bytes > 0
            assert await store.release_hold(match.hold) is True
            assert new.core.statistics().held_bytes == 0
            assert await store.release_hold(match.hold) is False


async def test_views_of_a_lease_outlive_any_number_of_servers(config: ServerConfig) -> None:
    async with running(config) as (_, first_ended), open_store(f"shm://{config.unix_socket}") as store:
        await store.put("leased", BLOCK)
        lease = AsyncExitStack()
        views = await lease.enter_async_context(store.lease(["leased"]))
        async with running(taking_over(config)) as (_, second_ended), lease:
            await first_ended.wait()
            async with running(taking_over(config)) as (new, _):
                await second_ended.wait()
                await trio.testing.wait_all_tasks_blocked()  # whatever is to be seen of its end
                assert new.core.statistics().quarantined_bytes > 0
                await store.delete(["leased"])
                await fill_twice(store, new.core.pool.capacity_bytes, bytes(len(BLOCK)))
                assert bytes(views[0] or b"") == BLOCK
                await lease.aclose()
                while new.core.statistics().quarantined_bytes:
                    await store.put("next", BLOCK)


async def test_room_of_a_client_that_nobody_sees_any_more_is_never_used_again(config: ServerConfig) -> None:
    async with running(config) as (old, old_ended):
        lost = old.core.open_client("lost by an internal error")
        old.core.reserve(lost, [5000])
        old.core.quarantine(lost)
        async with running(taking_over(config)) as (new, _):
            await old_ended.wait()
            await trio.testing.wait_all_tasks_blocked()
            assert new.core.statistics().quarantined_bytes > 0


async def test_a_server_without_descriptors_serves_on(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with running(config) as (old, old_ended), open_store(f"unix://{config.unix_socket}") as store:
        await store.put("key", BLOCK)
        with ExitStack() as resources, monkeypatch.context() as patch:
            taking = await begun(taking_over(config), resources)
            patch.setattr(os, "memfd_create", refuse)
            with pytest.raises(ConfigError, match="Too many open files"):
                await taking.take(OneStore(old.core), resources)
        await until_over(old)
        assert await store.get("key") == BLOCK
        assert not old_ended.is_set()


async def test_a_request_that_does_not_end_keeps_the_server(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = attrs.evolve(config, drain_timeout_s=0.05)
    monkeypatch.setattr(server_module, "LAST_WRITES_S", 0.05)
    async with running(impatient) as (old, old_ended), open_store(f"unix://{config.unix_socket}") as store:
        await store.put("key", BLOCK)
        peer = await peer_of(config)
        encoded = peer.connection.encode(
            Put(Keys(["slow", "too"]), pack_u64([2500, 2500]), checksums=False), payload_bytes=5000
        )
        await peer.stream.send_all([memoryview(encoded.head), memoryview(BLOCK)[:1000]])
        await until(lambda: old.core.statistics().reservations)
        with monkeypatch.context() as patch, ExitStack() as resources:
            patch.setattr(Session, "cut", lambda session: None)  # as if it waited for a thread
            taking = await begun(taking_over(config), resources)
            with pytest.raises(ConfigError, match="does not end; try again"):
                await taking.take(OneStore(old.core), resources)
        await until_over(old)
        assert await store.get("key") == BLOCK
        assert not old_ended.is_set()
        peer.stream.close()


async def test_a_request_behind_one_that_does_not_end_is_ended_as_well(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = attrs.evolve(config, drain_timeout_s=0.05)
    monkeypatch.setattr(server_module, "LAST_WRITES_S", 0.05)
    cut: list[Session] = []
    async with running(impatient) as (old, _):
        peers = [await peer_of(config) for _ in range(2)]
        for peer in peers:
            encoded = peer.connection.encode(
                Put(Keys(["slow", "too"]), pack_u64([2500, 2500]), checksums=False), payload_bytes=5000
            )
            await peer.stream.send_all([memoryview(encoded.head), memoryview(BLOCK)[:1000]])
        await until(lambda: old.core.statistics().reservations == 2)
        with monkeypatch.context() as patch, ExitStack() as resources:
            patch.setattr(Session, "cut", property(lambda session: partial(cut.append, session)))
            taking = await begun(taking_over(config), resources)
            with pytest.raises(ConfigError, match="does not end"):
                await taking.take(OneStore(old.core), resources)
        assert len(set(cut)) == 2
        for peer in peers:
            peer.stream.close()
