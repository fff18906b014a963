"""A process takes the place of a server: what the other process gets, and what becomes
of the server if it goes away in the middle.
"""

import errno
import os
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
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
from infinistore.client.api.store import AsyncStore
from infinistore.config import ServerConfig
from infinistore.core.pool_state import GroupStates, PoolState
from infinistore.errors import ConfigError, InvalidRequest, ServerReplaced, StoreUnavailable
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import Get, Keys, Numbers, Put, PutReply, TakeOver, TakeOverReply, TakeOverStep
from infinistore.protocol.server_connection import Received
from infinistore.protocol.versions import MINOR, OFFER, Capability, Offer
from infinistore.server import composition
from infinistore.server import server as server_module
from infinistore.server.composition import run_server
from infinistore.server.connection import Conversation
from infinistore.server.disk import ServerDisks
from infinistore.server.session.session import Session
from infinistore.server.take_over import giving
from infinistore.server.take_over import taking as taking_module
from infinistore.server.take_over.giving import HandoverServer
from infinistore.server.take_over.memory import OneStore, PoolLost, Taken, decode, make_ownership, take_ownership
from infinistore.server.take_over.taking import HandoverClient, begin_taking
from infinistore.sizes import DefaultSize
from infinistore.transports.base import drive
from tests.server.http_client import ask
from tests.server.running import POOL_BYTES, Peer, RunningServer, fill_twice, make_config, running_server, until

BLOCK = b"b" * 5000


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerConfig:
    """Of a server that waits for no process, and no request, until its time is over."""
    monkeypatch.setattr(giving, "DECIDE_S", 3600.0)
    return make_config(unix_socket=str(tmp_path / "socket"), drain_timeout_s=600.0)


@pytest.fixture
async def old(config: ServerConfig) -> AsyncIterator[RunningServer]:
    """The server that is taken over."""
    async with running_server(config) as server:
        yield server


@pytest.fixture
async def store(old: RunningServer) -> AsyncIterator[AsyncStore]:
    async with open_store(f"unix://{old.unix_path}") as store:
        yield store


@pytest.fixture
async def mapping(old: RunningServer) -> AsyncIterator[AsyncStore]:
    async with open_store(f"shm://{old.unix_path}") as store:
        yield store


def taking_over(old: RunningServer, **settings: Any) -> ServerConfig:
    plain: dict[str, Any] = {"unix_socket": str(old.unix_path), "take_over": True, "drain_timeout_s": 600.0}
    return make_config(**{**plain, **settings})


async def taker_of(server: RunningServer, steps: int) -> Peer:
    """A process that takes over, after so many steps."""
    peer = await server.local_peer()
    for step in range(steps):
        descriptors: list[int] = []
        await drive(peer.connection.request(TakeOver(step), descriptors=descriptors), peer.stream)
        for descriptor in descriptors:
            os.close(descriptor)
    return peer


def giving_of(server: RunningServer) -> HandoverServer:
    """The end of a server that gives away all it has."""
    found = server.server.context.giving
    assert found is not None
    return found


async def put(peer: Peer) -> None:
    assert isinstance(await peer.ask(Put(Keys(["k"]), pack_u64([1]), checksums=False), b"1"), PutReply)


async def begin_put(server: RunningServer) -> Peer:
    """A client in the middle of a put, which has room."""
    before = server.core.statistics().reservations
    peer = await server.local_peer()
    await peer.send_head(Put(Keys(["slow", "too"]), pack_u64([2500, 2500]), checksums=False), payload_bytes=5000)
    await peer.send(BLOCK[:1000])
    await server.until(reservations=before + 1)
    return peer


async def until_over(server: RunningServer) -> None:
    """Wait until nobody takes over any more."""
    found = giving_of(server)
    await until(lambda: found.taker is None and not found.wanted.is_set())


async def begun(config: ServerConfig, resources: ExitStack) -> HandoverClient:
    taking = await begin_taking(config, "", resources)
    assert taking is not None
    return taking


async def test_the_successor_serves_what_the_server_had(old: RunningServer) -> None:
    async with open_store(f"unix://{old.unix_path}") as store:
        await store.put("key", BLOCK)
        old_addresses = old.server.addresses
        async with running_server(taking_over(old)) as new:
            await old.finished.wait()
            assert new.server.addresses == old_addresses
            assert await store.get("key") == BLOCK
            assert stat.S_ISSOCK(os.stat(old.unix_path).st_mode)
    with pytest.raises(FileNotFoundError):
        os.stat(old.unix_path)


async def test_a_successor_that_goes_away_costs_the_server_nothing(old: RunningServer, store: AsyncStore) -> None:
    await store.put("key", BLOCK)
    for steps in (1, 2, 2):
        (await taker_of(old, steps)).stream.close()
        await until_over(old)
        assert await store.get("key") == BLOCK
        await store.put("key", BLOCK)
    assert not old.ended


async def test_only_one_process_at_a_time_may_take_over(old: RunningServer) -> None:
    with ExitStack() as resources:
        await begun(taking_over(old), resources)
        with pytest.raises(ConfigError, match="another process takes over already"):
            await begun(taking_over(old), resources)
    with ExitStack() as resources:
        await until_over(old)
        await begun(taking_over(old), resources)


async def test_a_step_out_of_turn_is_refused(old: RunningServer) -> None:
    peer = await old.local_peer()
    for step in (TakeOverStep.HAND_OVER, TakeOverStep.END):
        with pytest.raises(InvalidRequest, match="does not take over"):
            await peer.ask(TakeOver(step))
    await put(peer)


def be_older(monkeypatch: pytest.MonkeyPatch, *, then: str) -> None:
    """Let servers be of a release that decides itself, and that breaks the connection
    instead of giving its last answer.
    """
    made: list[int] = []
    answer = HandoverServer.answer

    def make_and_note() -> int:
        made.append(make_ownership())
        return made[-1]

    def reply(names: Keys, numbers: Numbers) -> TakeOverReply:
        return TakeOverReply(Keys([name.replace("ownership", "unknown") for name in names]), numbers)

    async def answer_but_the_last(
        found: HandoverServer, conversation: Conversation, message: TakeOver, received: Received
    ) -> None:
        if message.step != TakeOverStep.END:
            await answer(found, conversation, message, received)
            return
        if then == "ends":
            assert take_ownership(made[-1])
        conversation.stream.close()

    monkeypatch.setattr(giving, "make_ownership", make_and_note)
    monkeypatch.setattr(giving, "TakeOverReply", reply)
    monkeypatch.setattr(HandoverServer, "answer", answer_but_the_last)


async def test_an_older_server_that_ends_without_its_last_answer_is_followed_by_an_empty_one(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is gone, so nobody else serves; but until then, it may have served on."""
    be_older(monkeypatch, then="ends")
    async with running_server(config) as old, open_store(f"unix://{old.unix_path}") as store:
        await store.put("key", BLOCK)
        async with running_server(taking_over(old)):
            assert old.ended
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
    async with running_server(config) as old, open_store(f"unix://{old.unix_path}") as store:
        await store.put("key", BLOCK)
        with pytest.raises(ConfigError, match="see whether it serves on"):
            await run_server(taking_over(old), on_listening=lambda server: None)
        await until_over(old)
        assert not old.ended
        assert await store.get("key") == BLOCK


class NoStore(OneStore):
    """Takes nothing over."""

    def __init__(self, taking: HandoverClient) -> None:
        self._taking = taking

    def adopt(self, state: PoolState) -> Taken:
        return Taken(0, 0, [[] for _ in range(len(self._taking.streams) + 1)])


async def give_up(server: RunningServer) -> None:
    """Have the server wait no longer."""
    taker = giving_of(server).taker
    assert taker is not None
    taker.stream.close()
    await until_over(server)


@pytest.mark.parametrize("then", ["serves", "is taken over", "ends"])
async def test_a_successor_that_is_late_does_not_serve(old: RunningServer, store: AsyncStore, then: str) -> None:
    """However long it was stopped, and whatever has become of the server."""
    await store.put("key", BLOCK)
    with ExitStack() as resources:
        taking = await begun(taking_over(old), resources)
        await taking.take(OneStore(old.core), resources)
        await give_up(old)
        assert await store.delete(["key"]) == 1
        async with AsyncExitStack() as others:
            if then == "is taken over":
                await others.enter_async_context(running_server(taking_over(old)))
            if then == "ends":
                old.server.drain()
            if then != "serves":
                await old.finished.wait()
            with pytest.raises(ConfigError, match="has served on"):
                await taking.end()
            if then != "ends":
                assert not await store.exists("key")


class Successors:
    """Two processes that would take over a server."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._giving = giving_of(server)
        self._resources = (ExitStack(), ExitStack())
        self._takings: list[HandoverClient | None] = [None, None]
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
                self._takings[number] = await begun(taking_over(self._server), self._resources[number])
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
            async with running_server(config) as old:
                successors = Successors(old)
                for act, number in [*acts, ("leave", 0), ("leave", 1)]:
                    try:
                        await successors.act(act, number)
                    except (ConfigError, PoolLost):
                        await successors.act("leave", number)
                    await trio.testing.wait_all_tasks_blocked()
                assert successors.owners <= 1
                if successors.owners:
                    await old.finished.wait()
                else:
                    assert not old.ended
                    await until_over(old)
                    await put(await old.local_peer())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(giving, "DECIDE_S", 3600.0)
        trio.run(main)


async def test_a_server_that_was_stopped_meanwhile_does_not_serve_on(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor serves before the server has heard of that."""
    may_go_on, decide = trio.Event(), HandoverServer.decide

    async def decide_late(found: HandoverServer) -> bool:
        await may_go_on.wait()
        return await decide(found)

    monkeypatch.setattr(HandoverServer, "decide", decide_late)
    async with running_server(config) as old, open_store(f"unix://{old.unix_path}") as store:
        await store.put("key", BLOCK)
        async with running_server(taking_over(old)):
            assert await store.get("key") == BLOCK
            assert not old.ended
            may_go_on.set()
            await old.finished.wait()
            assert await store.get("key") == BLOCK
            assert stat.S_ISSOCK(os.stat(old.unix_path).st_mode)


@pytest.mark.parametrize("sent_bytes", [0, 20, 1000])
async def test_a_server_that_drains_waits_for_no_successor(old: RunningServer, sent_bytes: int) -> None:
    taker = await taker_of(old, 1)
    head = taker.connection.encode(TakeOver(TakeOverStep.HAND_OVER)).head
    await taker.stream.send_all([memoryview(head)[:sent_bytes]])
    await trio.testing.wait_all_tasks_blocked()  # the server has read it
    old.server.drain()
    await trio.testing.wait_all_tasks_blocked()
    with suppress(StoreUnavailable):
        await taker.stream.send_all([memoryview(head)[sent_bytes:]])
    if sent_bytes > len(head):
        taker.stream.close()  # it has begun to hand over
    await old.finished.wait()


async def test_over_tcp_nobody_takes_over(old: RunningServer) -> None:
    with pytest.raises(InvalidRequest, match="Unix socket"):
        await (await old.peer()).ask(TakeOver(TakeOverStep.BEGIN))


async def test_another_user_may_not_take_over(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giving, "peer_user", lambda sock: os.geteuid() + 1)
    async with running_server(config) as old:
        with ExitStack() as resources, pytest.raises(ConfigError, match="only the user of the server"):
            await begun(taking_over(old), resources)


async def test_a_request_that_came_too_late_was_not_done_and_says_so(old: RunningServer) -> None:
    peer = await old.local_peer()
    await taker_of(old, 2)
    with pytest.raises(ServerReplaced, match="nothing of this was done"):
        await peer.ask(Get(Keys(["k"]), pack_u64()))


async def test_a_put_under_way_is_finished(old: RunningServer) -> None:
    peer = await begin_put(old)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(run_server, taking_over(old), on_listening=lambda server: None))
        await giving_of(old).wanted.wait()
        await peer.send(BLOCK[1000:])
        await old.finished.wait()
        nursery.cancel_scope.cancel()


async def test_nothing_is_purged_that_the_successor_would_bring_back(old: RunningServer, store: AsyncStore) -> None:
    await store.put("key", BLOCK)
    purge = partial(ask, old.server.addresses.management[0], "POST", "/purge")
    taker = await taker_of(old, 2)
    assert (await purge()).status == 503
    assert len(old.core) == 1
    taker.close()
    await until_over(old)
    assert (await purge()).status == 200
    assert not await store.exists("key")


@pytest.mark.parametrize("serves_on", [True, False])
async def test_a_purge_is_not_told_of_as_done_while_a_successor_could_bring_the_blocks_back(
    old: RunningServer, store: AsyncStore, serves_on: bool
) -> None:
    await store.put("key", BLOCK)
    purged = trio.Event()

    async def purge() -> None:
        await old.server.purge()
        purged.set()

    with ExitStack() as resources:
        taking = await begun(taking_over(old), resources)
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
                await old.finished.wait()
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
    async with running_server(config) as old, trio.open_nursery() as nursery:
        nursery.start_soon(old.server.purge)
        await trio.testing.wait_all_tasks_blocked()
        with ExitStack() as resources:
            taking = await begun(taking_over(old), resources)
            with pytest.raises(ConfigError, match="is being purged; try again"):
                await taking.take(OneStore(old.core), resources)
        await until_over(old)
        async with open_store(f"unix://{old.unix_path}") as store:
            await store.put("key", BLOCK)
        old.server.drain()
        await old.finished.wait()
        nursery.cancel_scope.cancel()


async def test_a_purge_of_a_server_that_has_ended_its_service_is_never_done(config: ServerConfig) -> None:
    async with running_server(config) as old, trio.open_nursery() as nursery:
        old.server.drain()
        await old.finished.wait()
        nursery.start_soon(old.server.purge)
        await trio.testing.wait_all_tasks_blocked()
        assert nursery.child_tasks
        nursery.cancel_scope.cancel()


async def test_without_a_server_the_cache_starts_empty(config: ServerConfig) -> None:
    async with running_server(attrs.evolve(config, take_over=True)) as new:
        assert len(new.core) == 0


async def test_a_pool_that_does_not_fit_starts_empty(
    old: RunningServer, store: AsyncStore, caplog: pytest.LogCaptureFixture
) -> None:
    await store.put("key", BLOCK)
    async with running_server(taking_over(old, service_port=old.server.addresses.port, prealloc_bytes=1 << 20)) as new:
        await old.finished.wait()
        assert len(new.core) == 0
        assert [record for record in caplog.records if record.getMessage() == "the cache starts empty"]
        await store.put("key", BLOCK)


@pytest.mark.parametrize("default_bytes", [POOL_BYTES // 2, POOL_BYTES * 2])
async def test_a_size_that_nobody_chose_is_that_of_the_earlier_pool(
    old: RunningServer, store: AsyncStore, default_bytes: int
) -> None:
    """Half of the memory that is available beside the earlier pool says nothing."""
    await store.put("key", BLOCK)
    async with running_server(taking_over(old, prealloc_bytes=DefaultSize(default_bytes))) as new:
        assert [arena.length for arena in new.core.pool.arenas] == [POOL_BYTES]
        assert new.server.addresses.pool_bytes == POOL_BYTES
        assert await store.get("key") == BLOCK


async def test_a_size_that_nobody_chose_is_found_anew_where_the_earlier_pool_is_lost(
    old: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composition, "default_pool_bytes", lambda: DefaultSize(3 << 20))
    port, most_bytes = old.server.addresses.port, POOL_BYTES - (1 << 20)
    less = taking_over(old, service_port=port, prealloc_bytes=DefaultSize(2 << 20), max_pool_bytes=most_bytes)
    async with running_server(less) as new:
        assert new.core.pool.capacity_bytes == 3 << 20


async def test_a_state_of_a_newer_format_is_refused_and_the_server_serves_on(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_by_another_release(data: bytes) -> PoolState | GroupStates:
        version = int.from_bytes(data[8:16], sys.byteorder) + 1
        return decode(data[:8] + version.to_bytes(8, sys.byteorder) + data[16:])

    monkeypatch.setattr(taking_module, "decode", read_by_another_release)
    async with running_server(config) as old, open_store(f"unix://{old.unix_path}") as store:
        await store.put("key", BLOCK)
        with pytest.raises(ConfigError, match=r"it has format 4, .* reads format 2 or 3\. .*start without --take-over"):
            await run_server(taking_over(old), on_listening=lambda server: None)
        assert not old.ended
        assert await store.get("key") == BLOCK


async def test_a_process_of_an_older_release_is_refused_before_anything_ends(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Offer(MINOR, OFFER.capabilities & ~Capability.OWNERSHIP)
    monkeypatch.setattr(taking_module, "ClientConnection", partial(ClientConnection, offer=older))
    async with running_server(config) as old:
        found = giving_of(old)
        with (
            ExitStack() as resources,
            pytest.raises(ConfigError, match="server is of a newer release than the process"),
        ):
            await begun(taking_over(old), resources)
        assert (found.taker, found.wanted.is_set()) == (None, False)


async def test_a_larger_pool_keeps_the_blocks(old: RunningServer, store: AsyncStore) -> None:
    await store.put("key", BLOCK)
    larger = taking_over(old, prealloc_bytes=POOL_BYTES + (1 << 20))
    async with running_server(larger) as new:
        assert [arena.length for arena in new.core.pool.arenas] == [POOL_BYTES, 1 << 20]
        assert await store.get("key") == BLOCK


async def test_another_allocator_keeps_the_blocks(old: RunningServer, store: AsyncStore) -> None:
    await store.put("key", BLOCK)
    async with running_server(taking_over(old, allocator="slab")):
        assert await store.get("key") == BLOCK


async def test_views_of_a_lease_stay_until_their_client_is_gone(old: RunningServer, mapping: AsyncStore) -> None:
    await mapping.put("leased", BLOCK)
    async with mapping.lease(["leased"]) as views, running_server(taking_over(old)) as new:
        await old.finished.wait()
        assert new.core.statistics().quarantined_bytes > 0
        await mapping.delete(["leased"])
        await fill_twice(mapping, new.core.pool.capacity_bytes, bytes(len(BLOCK)))
        assert bytes(views[0] or b"") == BLOCK


async def test_a_hold_goes_on_and_its_owner_may_end_it(old: RunningServer, store: AsyncStore) -> None:
    await store.put("key", BLOCK)
    match = await store.match_prefix(["key"], hold_s=60)
    async with running_server(taking_over(old)) as new:
        await old.finished.wait()
        assert new.core.statistics().held_bytes > 0
        assert await store.release_hold(match.hold) is True
        assert new.core.statistics().held_bytes == 0
        assert await store.release_hold(match.hold) is False


async def test_views_of_a_lease_outlive_any_number_of_servers(old: RunningServer, mapping: AsyncStore) -> None:
    await mapping.put("leased", BLOCK)
    lease = AsyncExitStack()
    views = await lease.enter_async_context(mapping.lease(["leased"]))
    async with running_server(taking_over(old)) as second, lease:
        await old.finished.wait()
        async with running_server(taking_over(old)) as new:
            await second.finished.wait()
            await trio.testing.wait_all_tasks_blocked()  # whatever is to be seen of its end
            assert new.core.statistics().quarantined_bytes > 0
            await mapping.delete(["leased"])
            await fill_twice(mapping, new.core.pool.capacity_bytes, bytes(len(BLOCK)))
            assert bytes(views[0] or b"") == BLOCK
            await lease.aclose()
            while new.core.statistics().quarantined_bytes:
                await mapping.put("next", BLOCK)


async def test_room_of_a_client_that_nobody_sees_any_more_is_never_used_again(old: RunningServer) -> None:
    lost = old.core.open_client("lost by an internal error")
    old.core.reserve(lost, [5000])
    old.core.quarantine(lost)
    async with running_server(taking_over(old)) as new:
        await old.finished.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert new.core.statistics().quarantined_bytes > 0


async def test_a_server_without_descriptors_serves_on(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with running_server(config) as old, open_store(f"unix://{old.unix_path}") as store:
        await store.put("key", BLOCK)
        with ExitStack() as resources, monkeypatch.context() as patch:
            taking = await begun(taking_over(old), resources)
            patch.setattr(os, "memfd_create", refuse)
            with pytest.raises(ConfigError, match="Too many open files"):
                await taking.take(OneStore(old.core), resources)
        await until_over(old)
        assert await store.get("key") == BLOCK
        assert not old.ended


async def test_requests_that_do_not_end_keep_the_server_although_each_is_told_to_end(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = attrs.evolve(config, drain_timeout_s=0.05)
    monkeypatch.setattr(server_module, "LAST_WRITES_S", 0.05)
    told: set[Session] = set()
    async with running_server(impatient) as old, open_store(f"unix://{old.unix_path}") as store:
        await store.put("key", BLOCK)
        for _ in range(2):
            await begin_put(old)
        with monkeypatch.context() as patch, ExitStack() as resources:
            # as if they waited for a thread
            patch.setattr(Session, "cut", property(lambda session: partial(told.add, session)))
            taking = await begun(taking_over(old), resources)
            with pytest.raises(ConfigError, match="does not end; try again"):
                await taking.take(OneStore(old.core), resources)
        assert len(told) == 3  # that of the store as well
        await until_over(old)
        assert await store.get("key") == BLOCK
        assert not old.ended
