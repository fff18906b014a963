"""Connections of which one direction has ended: what was whole counts, and what was not
is lost, however good the order in which it ended.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from ssl import SSLContext

import attrs
import pytest
import trio

from infinistore.errors import StoreUnavailable, TlsFailed
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import Exists, ExistsReply, Get, GetReply, Keys, Put
from infinistore.transports.base import Stream
from infinistore.transports.sockets.trio_streams import accept, connect_tcp, listen_tcp
from infinistore.transports.tls.session import TlsSession, client_context, server_context
from infinistore.transports.tls.trio_stream import TlsStream
from tests.clients.dresses import opened, serving
from tests.clients.stores import Loops
from tests.server.running import Peer, RunningServer, make_config, running_server
from tests.transports.certificates import Files, issue

VALUE = bytes(range(256)) * 400


@attrs.define
class Relay:
    """Passes on what goes over TLS to it, and ends replies early, in good order, after
    as many bytes as it is told to.
    """

    port: int
    upstream: int
    context: SSLContext
    ends_after: int | None = None
    passed: int = 0
    half_closed: int = 0

    async def serve(self, stream: Stream) -> None:
        front = TlsStream(stream, TlsSession(self.context, "the client"))
        back = await connect_tcp("127.0.0.1", self.upstream)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pass_requests, front, back)
                await self._pass_replies(front, back)
                nursery.cancel_scope.cancel()
        finally:
            front.close()
            back.close()

    async def _pass_requests(self, front: Stream, back: Stream) -> None:
        room = memoryview(bytearray(65536))
        try:
            while count := await front.receive_into([room]):
                await back.send_all([room[:count]])
            await back.send_eof()  # the other direction ends of it
        except StoreUnavailable:
            pass

    async def _pass_replies(self, front: Stream, back: Stream) -> None:
        room = memoryview(bytearray(65536))
        try:
            while count := await back.receive_into([room]):
                if self.ends_after is not None:
                    count = min(count, self.ends_after - self.passed)
                self.passed += count
                if count:
                    await front.send_all([room[:count]])
                if self.passed == self.ends_after:
                    await front.send_eof()
                    self.half_closed += 1
                    await trio.sleep_forever()  # this direction has ended, and the other has not
        except StoreUnavailable:
            pass


@asynccontextmanager
async def relaying(files: Files, upstream: int) -> AsyncGenerator[Relay, None]:
    (listener,) = listen_tcp("127.0.0.1", 0)
    relay = Relay(listener.getsockname()[1], upstream, server_context(files.cert, files.key))
    with listener:
        async with trio.open_nursery() as nursery:

            async def accept_all() -> None:
                while True:
                    nursery.start_soon(relay.serve, await accept(listener))

            nursery.start_soon(accept_all)
            yield relay
            nursery.cancel_scope.cancel()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return issue(tmp_path)


@pytest.fixture
def relay(loops: Loops, files: Files) -> Iterator[Relay]:
    with serving(loops, None) as server:
        port = server.server.addresses.port
        with loops.trio.entered(lambda: relaying(files, port)) as started:
            yield started


def test_a_reply_that_ends_early_in_good_order_is_no_reply(
    loops: Loops, dress: str, relay: Relay, files: Files
) -> None:
    """The server says that it sends nothing more, and listens on: nobody waits for the
    rest.
    """
    url = f"infinistores://127.0.0.1:{relay.port}?ca={files.ca}"
    with opened(loops, dress, url, verify="never") as store:
        store.put("key", VALUE)
        relay.passed = 0
        assert store.get("key") == VALUE
        length = relay.passed
    for ends_after in (0, 1, 23, length // 2, length - 1):
        before = relay.half_closed
        with opened(loops, dress, url, verify="never") as store:
            assert store.exists("key")
            relay.passed, relay.ends_after = 0, ends_after
            with pytest.raises(StoreUnavailable):
                store.get("key")
        assert relay.half_closed > before
        relay.ends_after = None
    with opened(loops, dress, url, verify="never") as store:
        assert store.get("key") == VALUE


async def connect(server: RunningServer, files: Files) -> Peer:
    plain = await connect_tcp("127.0.0.1", server.server.addresses.port)
    peer = Peer(TlsStream(plain, TlsSession(client_context(files.ca), "the server", host_name="127.0.0.1")))
    await peer.hello()
    return peer


async def is_over(peer: Peer) -> bool:
    """Whether nothing follows: the end, or what TLS says to who has left it out."""
    try:
        return await peer.is_closed()
    except TlsFailed:
        return True


async def end(peer: Peer, *, in_good_order: bool) -> None:
    stream = peer.stream
    assert isinstance(stream, TlsStream)
    await (stream if in_good_order else stream.inner).send_eof()


@pytest.mark.parametrize("in_good_order", [True, False], ids=["with close_notify", "without"])
async def test_a_client_that_sends_nothing_more_gets_its_reply(files: Files, in_good_order: bool) -> None:
    async with running_server(make_config(tls_cert=files.cert, tls_key=files.key)) as server:
        peer = await connect(server, files)
        await peer.ask(Put(Keys(["key"]), pack_u64([len(VALUE)]), checksums=False), VALUE)
        request = Get(Keys(["key"]), pack_u64())
        await peer.send_head(request)
        await end(peer, in_good_order=in_good_order)
        assert isinstance(await peer.reply_to_half(request), GetReply)
        assert await peer.payload() == VALUE
        assert await is_over(peer)
        peer.close()
        await server.quiet()


@pytest.mark.parametrize("in_good_order", [True, False], ids=["with close_notify", "without"])
async def test_a_put_that_ends_early_stores_nothing(files: Files, in_good_order: bool) -> None:
    async with running_server(make_config(tls_cert=files.cert, tls_key=files.key)) as server:
        peer, other = await connect(server, files), await connect(server, files)
        await peer.send_head(Put(Keys(["key"]), pack_u64([100]), checksums=False), payload_bytes=100)
        await peer.send(b"x" * 99)
        await end(peer, in_good_order=in_good_order)
        assert await is_over(peer)
        reply = await other.ask(Exists(Keys(["key"])))
        assert isinstance(reply, ExistsReply)
        assert not any(reply.present)
        peer.close()
        other.close()
        await server.quiet()
