"""A mover for clients in the server's own process: it copies to and from the pool.

Its package registers it as the entry point `loopback = "loopback_mover:LOOPBACK"` in
the group `infinistore.transports`. A store asks for it by `transport="loopback"`.
"""

from typing import Any
from weakref import WeakValueDictionary

from infinistore.client.memory.copying import copy_blocks
from infinistore.client.movers.base import CannotMove, GetPart, Mover, MoverSource, PutPart
from infinistore.client.movers.channel import Channel, expect, present_in
from infinistore.client.movers.inline import skipped_keys
from infinistore.errors import StoreUnavailable
from infinistore.protocol import messages as m
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.packed_offsets import arena_of, offset_of, pack_offsets
from infinistore.server.movers import base as server
from infinistore.transports import Transport

_servers: WeakValueDictionary[str, "LoopbackServer"] = WeakValueDictionary()  # by instance
_clients: set[str] = set()  # the names of the stores in this process that use this mover


class LoopbackServer(server.Mover):
    name = "loopback"

    def __init__(self, config: Any, core: Any) -> None:
        self.core = core

    def unavailable(self, conversation: Any) -> str:
        here = conversation.client.name in _clients and not conversation.stream.passes_descriptors
        return "" if here else "the client asks for no loop-back"

    def announce(self, hello: m.HelloReply) -> m.HelloReply:
        _servers[hello.instance] = self
        return hello

    def open(self, conversation: Any, holdings: Any) -> "LoopbackConnection":
        return LoopbackConnection(conversation, holdings)


class LoopbackConnection(server.ConnectionMover):
    client_touches_pool = True

    def __init__(self, conversation: Any, holdings: Any) -> None:
        conversation.transport, self._conversation, self._holdings = "loopback", conversation, holdings
        self.handlers = {m.Reserve: self._reserve, m.Lease: self._lease}
        self.quick = {m.Commit: holdings.commit, m.Abort: holdings.abort, m.Release: holdings.release}

    async def _reserve(self, request: m.Reserve, received: Any) -> None:
        await self._conversation.reply(await self._holdings.reserve(request.sizes, received))

    async def _lease(self, request: m.Lease, received: Any) -> None:
        lease = await self._conversation.lease(request, received)
        sizes, places = [n or m.MISSING for n in lease.lengths], [entry or (0, 0) for entry in lease.entries]
        arrays = pack_u64(sizes), pack_u64(lease.checksums), pack_u64(pack_offsets(places))
        await self._conversation.reply(m.LeaseReply(self._holdings.keep(lease), *arrays, 0))


class LoopbackMover(Mover):
    name = "loopback"

    def __init__(self, channel: Channel, peer: LoopbackServer) -> None:
        self._channel, self._peer = channel, peer
        self.handlers = {PutPart: self.put, GetPart: self.get}

    def why_not(self, request: PutPart | GetPart) -> str:
        return "memory of GPUs is out of reach" if request.on_device else ""

    async def put(self, part: PutPart) -> list[str]:
        room = expect(m.ReserveReply, await self._channel.ask(m.Reserve(pack_u64(part.sizes))))
        self._channel.holding = True
        targets = self._pool(room.places, part.sizes, writable=True)
        hashes = pack_u64(await copy_blocks(part.views, targets, hash_targets=self._channel.verify))
        commit = m.Commit(room.reservation, m.Keys(part.keys), hashes, part.replace)
        reply = expect(m.PutReply, await self._channel.ask(commit))
        self._channel.holding = False
        return skipped_keys(part.keys, reply)

    async def get(self, part: GetPart) -> int:
        lease = m.Lease(part.keys, part.capacities)
        reply = expect(m.LeaseReply, await self._channel.ask(lease))
        self._channel.holding = True
        self._channel.check_reply(lease, reply)
        targets, there = part.destination(reply.sizes, part.first), present_in(reply)
        sources = self._pool([reply.places[i] for i in there], map(len, targets), writable=False)
        hashes = await copy_blocks(sources, targets, hash_targets=part.verify)
        await self._channel.connection.notify(m.Release(reply.lease))
        self._channel.holding = False
        pairs = zip(there, hashes, strict=False)
        bad = [part.keys[i] for i, found in pairs if reply.checksums[i] not in (m.NO_CHECKSUM, found)]
        if bad:
            await self._channel.report(bad, len(there))
        return len(reply.sizes)

    def _pool(self, places: Any, sizes: Any, *, writable: bool) -> list[memoryview]:
        extents = [(arena_of(place), offset_of(place), size) for place, size in zip(places, sizes, strict=True)]
        views = self._peer.core.pool.views(extents, writable=writable)  # they outlive the server
        if [len(view) for view in views] != [size for _, _, size in extents]:
            raise StoreUnavailable("the server has ended")
        return views  # type: ignore[no-any-return]


class LoopbackSource(MoverSource):
    name = "loopback"

    def __init__(self, options: Any, clock: Any) -> None:
        _clients.add(options.name)

    async def open(self, channel: Channel, stream: Any) -> LoopbackMover:
        if (peer := _servers.get(channel.hello.instance)) is None:
            raise CannotMove("the server is not in this process, or has no loop-back")
        return LoopbackMover(channel, peer)


LOOPBACK = Transport("loopback", client_mover=LoopbackSource, server_mover=LoopbackServer)
