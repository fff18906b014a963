"""Asks a server who it is."""

import functools
from typing import TYPE_CHECKING

import trio

from infinistore.addresses import DEFAULT_SERVICE_PORT, host_and_port
from infinistore.cluster.view import Node
from infinistore.cluster_io.flows import AskInstance
from infinistore.errors import InfiniStoreException
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.messages import Hello, HelloReply
from infinistore.transports.base import Stream, drive
from infinistore.transports.sockets.trio_streams import connect_tcp

if TYPE_CHECKING:
    from ssl import SSLContext

__all__ = ["instance_asker"]


def instance_asker(token: str, tls: "SSLContext | None" = None) -> AskInstance:
    """Return a function that asks a node for its instance, over TCP: with TLS if `tls`
    is given, or the node says that it speaks TLS.
    """

    @functools.cache
    def systems() -> "SSLContext":  # loading all authorities of the system takes a while
        from infinistore.transports.tls.contexts import client_context

        return client_context()

    async def ask(node: Node) -> str:
        scheme, _, written = node.address.partition("://")
        try:
            host, port = host_and_port(written, DEFAULT_SERVICE_PORT)
            stream: Stream = await connect_tcp(host, port)
            if tls is not None or scheme == "infinistores":
                stream = _over_tls(stream, host, tls or systems())
        except InfiniStoreException:
            await trio.lowlevel.checkpoint()
            return ""
        try:
            reply = await drive(ClientConnection().request(Hello("cluster view", token)), stream)
        except InfiniStoreException:
            return ""
        finally:
            stream.close()
        return reply.instance if isinstance(reply, HelloReply) else ""

    return ask


def _over_tls(stream: Stream, host: str, tls: "SSLContext") -> Stream:
    from infinistore.transports.tls.session import TlsSession  # late: few need it
    from infinistore.transports.tls.trio_stream import TlsStream

    return TlsStream(stream, TlsSession(tls, host, host_name=host))
