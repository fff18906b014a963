"""Movers of a server: which of them answers a request, and those that other packages
bring.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from trio.testing import MockClock

from infinistore.allocators import create_allocator
from infinistore.answers import ANSWERS
from infinistore.config import ServerConfig
from infinistore.core import Pool, StoreCore, create_arena
from infinistore.disk.tiers import Tiers
from infinistore.errors import ConfigError, ProtocolError, TransferFailed
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import (
    ONE_WAY,
    REPLIES,
    Commit,
    Get,
    Hello,
    Keys,
    Message,
    Put,
    PutReply,
    RdmaConnect,
    Reserve,
    ReserveReply,
)
from infinistore.protocol.packed_offsets import offset_of
from infinistore.protocol.server_connection import Received, ServerConnection
from infinistore.server import serve
from infinistore.server.connection import Conversation, Holdings, SessionLimits
from infinistore.server.environment import Environment
from infinistore.server.movers.base import ConnectionMover, Mover
from infinistore.server.movers.inline import InlineMover
from infinistore.server.movers.rdma import RdmaMover
from infinistore.server.movers.shm import LivenessPipe, ShmMover
from infinistore.server.session.session import Session, open_movers
from infinistore.transports import Transport
from tests.installing import install
from tests.server.running import (
    KIB,
    RunningServer,
    let_linger,
    make_config,
    running_server,
    simulated_server,
    until,
)
from tests.transports.memory_network import MemoryListener, whole

BLOCK = bytes(range(256)) * 4


# Which mover answers


class Recording(Mover):
    """A mover for the test: it notes what it was asked."""

    name: ClassVar = "recording"

    def __init__(self, requests: Sequence[type[Message]], available: bool = True) -> None:
        self.requests = tuple(requests)  # type: ignore[misc]
        self.available = available
        self.opened: list[RecordingConnection] = []

    def unavailable(self, conversation: Conversation) -> str:
        return "" if self.available else "the test says no"

    def open(self, conversation: Conversation, holdings: Holdings) -> "RecordingConnection":
        self.opened.append(RecordingConnection(self))
        return self.opened[-1]


class RecordingConnection(ConnectionMover):
    def __init__(self, mover: Recording) -> None:
        self.handlers = dict.fromkeys(mover.requests, self._answer)
        self.asked: list[Message] = []
        self.closed = 0

    async def _answer(self, message: Message, received: Received) -> None:
        self.asked.append(message)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def conversation() -> Iterator[Conversation]:
    pool = Pool(create_allocator("bitmap", KIB))
    pool.add_arena(create_arena(0, 64 * KIB))
    core = StoreCore(pool, clock=lambda: 0.0)
    limits = SessionLimits(max_body_bytes=KIB, max_payload_bytes=64 * KIB)
    listener = MemoryListener(whole, capacity_bytes=KIB)
    stream = listener.connect_stream()
    connection = ServerConnection(max_body_bytes=KIB, max_payload_bytes=KIB)
    client = core.open_client("test")
    yield Conversation(stream, connection, Tiers(core), client, transport="tcp", limits=limits, growth=None)
    stream.close()
    listener.close()
    pool.close()


async def ask(movers: Sequence[Mover], conversation: Conversation, message: Message) -> None:
    _, handlers, _ = open_movers(movers, conversation, Holdings(conversation))
    await handlers[type(message)](message, Received(message, 1, 0, 0))


async def test_the_first_mover_in_the_list_answers(conversation: Conversation) -> None:
    first, second = Recording([Get]), Recording([Get, Put])
    get, put = Get(Keys(["a"]), pack_u64()), Put(Keys(["a"]), pack_u64([1]))
    await ask([first, second], conversation, get)
    await ask([first, second], conversation, put)
    assert [one.asked for one in first.opened] == [[get], []]
    assert [one.asked for one in second.opened] == [[], [put]]


async def test_a_mover_that_is_not_available_leaves_its_requests_to_the_next(conversation: Conversation) -> None:
    absent, present = Recording([Get, Put], available=False), Recording([Get])
    get = Get(Keys(["a"]), pack_u64())
    await ask([absent, present], conversation, get)
    assert (absent.opened, present.opened[0].asked) == ([], [get])
    with pytest.raises(TransferFailed, match="Put: the test says no"):
        await ask([absent, present], conversation, Put(Keys(["a"]), pack_u64([1])))


async def test_what_was_opened_is_closed_if_the_next_mover_cannot_be(conversation: Conversation) -> None:
    class Faulty(Recording):
        def open(self, conversation: Conversation, holdings: Holdings) -> RecordingConnection:
            raise RuntimeError("planned")

    first = Recording([Get])
    with pytest.raises(RuntimeError, match="planned"):
        open_movers([first, Faulty([Put])], conversation, Holdings(conversation))
    assert [one.closed for one in first.opened] == [1]


async def test_every_request_of_the_protocol_is_answered_or_refused_on_every_connection() -> None:
    """A request without a handler would end in an internal error."""
    liveness = LivenessPipe()
    movers = [ShmMover(liveness), RdmaMover(None), InlineMover()]
    async with simulated_server() as server:
        await server.peer()
        (session,) = server.server.sessions
        assert handled(session) == {*REPLIES, *ONE_WAY} - {Hello}
    liveness.close()
    known = {kind for mover in movers for kind in mover.requests}
    assert known <= {*REPLIES, *ONE_WAY}
    assert not known & set(ANSWERS)


def handled(session: Session) -> set[type[Message]]:
    return set(session.requests)


async def test_a_refusal_names_the_request_and_the_reason() -> None:
    async with simulated_server() as server:
        peer = await server.peer()
        with pytest.raises(TransferFailed, match=r"RdmaConnect: this server has no RDMA; its log says why"):
            await peer.ask(RdmaConnect(1, 0, "0" * 32))
        with pytest.raises(ProtocolError, match=r"Reserve: shared memory needs the server's Unix socket"):
            await peer.ask(Reserve(pack_u64([1])))


# Movers of other packages

LOOPBACK = '''
from infinistore.protocol.messages import Abort, Commit, Release, Reserve
from infinistore.server.movers.base import ConnectionMover, Mover
from infinistore.transports import Transport

made = []


class LoopbackMover(Mover):
    """For a client in the server's process, which reaches the pool there."""

    name = "loopback"

    def __init__(self, config, core):
        self.core = core
        self.arenas = len(core.pool.arenas)
        self.closed = False
        made.append(self)

    def open(self, conversation, holdings):
        return LoopbackConnection(conversation, holdings)

    def announce(self, hello):
        return type(hello)(**{**vars_of(hello), "server_version": hello.server_version + "+loopback"})

    def add_arena(self, arena):
        self.arenas += 1

    def close(self):
        self.closed = True


def vars_of(message):
    return {field.name: getattr(message, field.name) for field in type(message).__attrs_attrs__}


class LoopbackConnection(ConnectionMover):
    client_touches_pool = True

    def __init__(self, conversation, holdings):
        self._conversation = conversation
        self._holdings = holdings
        self.handlers = {Reserve: self._reserve}
        self.quick = {Commit: holdings.commit, Abort: holdings.abort, Release: holdings.release}

    async def _reserve(self, reserve, received):
        self._conversation.transport = "loopback"
        await self._conversation.reply(await self._holdings.reserve(reserve.sizes, received))


LOOPBACK = Transport("loopback", server_mover=LoopbackMover)
CLIENT_ONLY = Transport("client_only", client_mover=dict)
NO_MOVER = Transport("no_mover", server_mover=lambda config, core: "a string")
'''


def install_movers(folder: Path, monkeypatch: pytest.MonkeyPatch, **entries: str) -> None:
    """Install a package with these transports."""
    module = "package_with_a_mover"
    install(folder, monkeypatch, "infinistore.transports", entries, module=module, source=LOOPBACK)
    monkeypatch.delitem(__import__("sys").modules, "package_with_a_mover", raising=False)


async def test_a_mover_of_another_package_serves_a_request_by_its_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_movers(
        tmp_path,
        monkeypatch,
        loopback="package_with_a_mover:LOOPBACK",
        client_only="package_with_a_mover:CLIENT_ONLY",
    )
    async with running_server() as server:
        from package_with_a_mover import made  # type: ignore[import-not-found]

        (mover,) = made
        assert mover.core is server.core
        assert server.server.context.hello.server_version.endswith("+loopback")
        peer = await server.peer()
        room = await peer.ask(Reserve(pack_u64([len(BLOCK)])))
        assert isinstance(room, ReserveReply)
        write(server, room, BLOCK)
        assert await peer.ask(Commit(room.reservation, Keys(["a"]), pack_u64())) == PutReply(pack_u64())
        await peer.ask(Get(Keys(["a"]), pack_u64()))
        assert await peer.payload() == BLOCK
        assert [client.transport for client in server.server.telemetry.clients()] == ["loopback"]
        peer.close()
        await server.quiet()
        assert not mover.closed
    assert mover.closed


async def test_what_a_lost_client_of_such_a_mover_may_write_to_stays_in_quarantine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    install_movers(tmp_path, monkeypatch, loopback="package_with_a_mover:LOOPBACK")
    async with running_server() as server:
        peer = await server.peer()
        await peer.ask(Reserve(pack_u64([len(BLOCK)])))
        await peer.send(b"not a frame" * 10)  # which ends the session, but not the client
        await let_linger(peer, mock_clock)
        await until(lambda: server.core.statistics().quarantined_bytes)
        peer.close()
        await server.quiet()
        assert server.core.statistics().quarantined_bytes == 0


async def test_an_arena_by_which_the_pool_grows_is_shown_to_every_mover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_movers(tmp_path, monkeypatch, loopback="package_with_a_mover:LOOPBACK")
    config = make_config(auto_increase=True, prealloc_bytes=64 * KIB, max_pool_bytes=128 * KIB)
    async with running_server(config) as server:
        from package_with_a_mover import made

        peer, other = await server.peer(), await server.peer()
        assert made[0].arenas == 1
        await peer.ask(Reserve(pack_u64([60 * KIB])))
        await other.ask(Put(Keys(["a"]), pack_u64([60 * KIB]), checksums=False), bytes(60 * KIB))
        assert made[0].arenas == len(server.core.pool.arenas) == 2


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("module_that_is_not_there:ANYTHING", "module_that_is_not_there"),
        ("package_with_a_mover:NO_MOVER", "returned no Mover: 'a string'"),
    ],
)
async def test_a_server_does_not_start_with_a_transport_that_it_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, reason: str
) -> None:
    install_movers(tmp_path, monkeypatch, no_mover=value)
    with pytest.raises(ConfigError, match=f"the (server_mover of the )?transport 'no_mover'.*{reason}"):
        await serve(make_config())


async def test_a_server_takes_the_transports_that_its_environment_names() -> None:
    made: list[Recording] = []

    def make(config: ServerConfig, core: StoreCore) -> Mover:
        made.append(Recording([]))
        return made[0]

    environment = Environment(installed_transports=lambda: [Transport("it", None, make)])
    async with running_server(environment=environment) as server:
        movers = server.server.context.movers
        assert movers[0] is made[0]
        assert [mover.name for mover in movers] == ["recording", "shm", "rdma", "inline"]


def write(server: RunningServer, room: ReserveReply, data: bytes) -> None:
    (place,) = room.places
    first = offset_of(place)
    server.core.pool.arenas[0].memory[first : first + len(data)] = data
