"""Asks a server who it is."""

import trio

from infinistore.addresses import DEFAULT_SERVICE_PORT, host_and_port
from infinistore.cluster.view import Node
from infinistore.cluster_io.flows import AskInstance
from infinistore.errors import InfiniStoreException
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.messages import Hello, HelloReply
from infinistore.transports.base import drive
from infinistore.transports.sockets.trio_streams import connect_tcp

__all__ = ["instance_asker"]


def instance_asker(token: str) -> AskInstance:
    """Return a function that asks a node for its instance, over TCP."""

    async def ask(node: Node) -> str:
        try:
            stream = await connect_tcp(*host_and_port(node.address.partition("://")[2], DEFAULT_SERVICE_PORT))
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
