"""An etcd of several members, which speak HTTP over a network of the world.

What it knows and how it answers is `tests.cluster.etcd.fake_etcd`, which answers as
etcd was seen to. Here are its members and what becomes of them: without a quorum,
nothing is answered, no lease runs out and every watch is silent; a new leader gives all
leases their whole time again; a member that is apart from the others still creates
watches, and tells nothing. A watch from a revision that is compacted is created, then
canceled, and its stream stays open.
"""

import json
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import attrs
import h11
import trio

from infinistore.cluster.etcd.session import Exchange
from infinistore.errors import StoreUnavailable
from infinistore.protocol.effects import Span
from tests.cluster.etcd.fake_etcd import FakeEtcd
from tests.simulation.clock import Timer
from tests.simulation.network import Listener, Network, NetworkSettings
from tests.simulation.streams import Pipe, SimulatedStream
from tests.simulation.world import World

__all__ = ["MEMBERS", "EtcdNetwork", "SimulatedEtcd"]

MEMBERS = ("etcd-1", "etcd-2", "etcd-3")
_RECEIVE_BYTES = 64 * 1024
_LATE_S = 0.5
"""How late etcd finds that a lease has run out, at most."""


class _Bytes(SimulatedStream):
    """One end of a connection over which no messages of a store go."""

    def _begin_message(self, pipe: Pipe, span: Span) -> bool:
        pipe.frame_left = span.remaining
        return True


class _Stream(trio.abc.Stream):
    """Such an end as a stream of Trio's."""

    def __init__(self, end: SimulatedStream) -> None:
        self._end = end
        self._room = bytearray(_RECEIVE_BYTES)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        try:
            await self._end.send_all([memoryview(data)])
        except StoreUnavailable as error:
            raise self._error(error) from None

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        view = memoryview(self._room)[:max_bytes]
        try:
            return bytes(view[: await self._end.receive_into([view])])
        except StoreUnavailable as error:
            raise self._error(error) from None

    async def aclose(self) -> None:
        self._end.close()
        await trio.lowlevel.checkpoint()

    def _error(self, error: StoreUnavailable) -> Exception:
        return trio.ClosedResourceError() if self._end.closed else trio.BrokenResourceError(str(error))


class EtcdNetwork(Network):
    """The ways between the members of etcd and those who ask them."""

    stream_class = _Bytes

    def __init__(self, world: World, settings: NetworkSettings) -> None:
        super().__init__(world, attrs.evolve(settings, buffers=(8192, 65536)))

    def connector(self, node: str) -> Callable[[str, int, ssl.SSLContext | None], Awaitable[trio.abc.Stream]]:
        """Return how a node connects to etcd."""

        async def connect(host: str, port: int, context: ssl.SSLContext | None) -> trio.abc.Stream:
            try:
                return _Stream(await self.connect(node, host))
            except StoreUnavailable as error:
                raise ConnectionRefusedError(str(error)) from None

        return connect


class _Memory(FakeEtcd):
    """What all members know together. Leases run out only while there is a leader."""

    def __init__(self, clock: Callable[[], float], may_expire: Callable[[int], bool]) -> None:
        super().__init__(clock)
        self._may_expire = may_expire

    def expire(self) -> None:
        for lease in [lease for lease, (_, ends) in self.leases.items() if ends <= self._clock()]:
            if self._may_expire(lease):
                self.revoke(lease)


class SimulatedEtcd:
    """All members. `on_expired` is told the keys of each lease that runs out, and
    `on_change` that what is there may have changed.
    """

    def __init__(
        self,
        world: World,
        network: EtcdNetwork,
        *,
        on_expired: Callable[[Sequence[str]], None] = lambda keys: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.world = world
        self.network = network
        self.memory = _Memory(lambda: world.clock.now, self._expires)
        self.apart: set[str] = set()
        """The members that do not reach the others."""
        self.loses_answers = 0
        """How many of the next transactions are carried out and not answered."""
        self.compacts_before_watches = False
        """Whether somebody else writes, and compacts, before the next watch begins."""
        self._on_expired = on_expired
        self._on_change = on_change
        self._random = world.generator("etcd")
        self._silent_until = 0.0
        self._election = Timer(lambda: None)
        self.changed = trio.lowlevel.ParkingLot()
        """Where tasks wait until something may have changed."""
        self._seen = -1
        self._listeners: list[Listener] = []
        self._listens = True
        """Whether anybody can connect to its members."""

    # Its state

    @property
    def has_leader(self) -> bool:
        """Whether most members work together, and have agreed on a leader."""
        return self.world.clock.now >= self._silent_until

    def lose_leader(self, seconds: float) -> None:
        """Let nobody be answered for so long; then leases have their whole time."""
        clock = self.world.clock
        self._silent_until = max(self._silent_until, clock.now + seconds)
        self._election.cancel()
        self._election = clock.at(self._silent_until, self._elected)

    def _elected(self) -> None:
        if self.has_leader:
            self._listens = True
            self.memory.refill_leases()
            self._expire_later()
            self.told()

    def restart(self, seconds: float, *, empty: bool = False) -> None:
        """Lose all connections, and be away for so long; perhaps with all data."""
        for connection in list(self.network.connections.values()):
            connection.cut("etcd has ended")
        self.lose_leader(seconds)
        if empty:
            self.memory.empty()
        self.told()

    def leave(self, seconds: float) -> None:
        """End all members, which come back after so long, with all data. Meanwhile,
        nobody can connect to them.
        """
        self._listens = False
        for listener in self._listeners:
            listener.close()
        self.restart(seconds)

    def compact(self) -> None:
        """Forget all revisions but the last."""
        self.memory.compact()
        self.told()

    def told(self) -> None:
        """Something may have changed."""
        if self.memory.revision != self._seen:
            self._seen = self.memory.revision
            self._on_change()
        self.changed.unpark_all()

    def heal(self) -> None:
        """All members are there, and work together."""
        self.apart.clear()
        self.loses_answers = 0
        self.compacts_before_watches = False
        if not self.has_leader:
            self._election.cancel()
            self._silent_until = self.world.clock.now
            self._elected()
        self.changed.unpark_all()

    def _expires(self, lease: int) -> bool:
        """Whether a lease that has run out is found to have."""
        if not self.has_leader:
            return False
        self._on_expired([key for key, kv in self.memory.kvs.items() if kv.lease == lease])
        return True

    def _expire_later(self) -> None:
        def expire() -> None:
            self.memory.expire()
            self.told()

        for _, ends in self.memory.leases.values():
            self.world.clock.at(ends + _LATE_S * self._random.random(), expire)

    # Its members

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be there until cancelled."""
        async with trio.open_nursery() as nursery:
            for member in MEMBERS:
                nursery.start_soon(self._listen, member, nursery)
            task_status.started()

    async def _listen(self, member: str, nursery: trio.Nursery) -> None:
        while True:
            listener = self.network.listen(member, member)
            self._listeners.append(listener)
            try:
                while True:
                    stream = _Stream(await listener.accept())
                    nursery.start_soon(self._serve, member, stream)
            except trio.ClosedResourceError:
                self._listeners.remove(listener)
            finally:
                listener.close()
            while not self._listens:
                await self.changed.park()

    async def _serve(self, member: str, stream: _Stream) -> None:
        """Answer what comes over one connection, one after the other."""
        http = h11.Connection(h11.SERVER)
        try:
            while True:
                asked = await _next_request(http, stream)
                if asked is None:
                    break
                path, body = asked
                if path == "/v3/watch":
                    await self._watch(member, stream, http, int(json.loads(body)["create_request"]["start_revision"]))
                    break
                if not await self._answer(member, stream, http, path, body):
                    break
        except trio.BrokenResourceError:
            pass
        finally:
            with trio.CancelScope(shield=True):
                await stream.aclose()

    async def _answer(self, member: str, stream: _Stream, http: h11.Connection, path: str, body: bytes) -> bool:
        """Answer a request once there is a leader; return whether to expect another."""
        await trio.sleep(0.001 * self._random.random())
        while member in self.apart or not self.has_leader:
            await self.changed.park()
        answer = self.memory.answer(Exchange(MEMBERS.index(member), path, body, "", 0.0))
        self._expire_later() if path in ("/v3/lease/grant", "/v3/lease/keepalive") else None
        self.told()
        if path == "/v3/kv/txn" and self.loses_answers:
            self.loses_answers -= 1
            self.world.fault("ETCD_ANSWER_LOST", member)
            return False
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(answer.body)))]
        parts = [h11.Response(status_code=answer.status, headers=headers), h11.Data(answer.body), h11.EndOfMessage()]
        await stream.send_all(b"".join(http.send(part) or b"" for part in parts))
        http.start_next_cycle()
        return True

    async def _watch(self, member: str, stream: _Stream, http: h11.Connection, start: int) -> None:
        """Tell of each change from a revision on, until the other end goes."""
        memory = self.memory
        if self.compacts_before_watches and self.has_leader and member not in self.apart:
            self.compacts_before_watches = False
            self.world.fault("ETCD_COMPACTED_BEFORE_WATCH", member)
            for value in ("1", "2"):
                memory.put("/somebody/else", value)
            self.compact()
        head = h11.Response(status_code=200, headers=[("Transfer-Encoding", "chunked")])
        await stream.send_all(http.send(head) or b"")

        async def say(**result: Any) -> None:
            line = json.dumps({"result": {"header": {"revision": str(memory.revision)}, **result}}).encode() + b"\n"
            await stream.send_all(http.send(h11.Data(line)) or b"")

        async def tell() -> None:
            nonlocal start
            await say(created=True)
            while True:
                if member not in self.apart and self.has_leader:
                    if start <= memory.compacted:
                        await say(canceled=True, compact_revision=str(memory.compacted))
                        return
                    events = [event for revision, event in memory.events if revision >= start]
                    if events:
                        start = memory.revision + 1
                        await say(events=events)
                        continue
                await self.changed.park()

        async def listen() -> None:
            while await stream.receive_some():
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_until_broken, tell)
            await _until_broken(listen)
            nursery.cancel_scope.cancel()


async def _until_broken(work: Callable[[], Awaitable[None]]) -> None:
    with suppress(trio.BrokenResourceError):
        await work()


async def _next_request(http: h11.Connection, stream: _Stream) -> tuple[str, bytes] | None:
    """Receive a request: its path and its body. None if the other end has closed."""
    path, body = "", bytearray()
    while True:
        event = http.next_event()
        if isinstance(event, h11.Request):
            path = event.target.decode()
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return path, bytes(body)
        elif event is h11.NEED_DATA:
            data = await stream.receive_some()
            if not data:
                return None
            http.receive_data(data)
        else:
            return None
