"""Asks a server who it is; and what a server that is a node of a cluster takes from its
machine to reach etcd and the other nodes (a test passes another one).
"""

import functools
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import attrs
import trio

from infinistore.addresses import DEFAULT_SERVICE_PORT, host_and_port
from infinistore.cluster.membership import Node
from infinistore.cluster_io.etcd import AskInstance, Connect, connect
from infinistore.errors import InfiniStoreException
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.messages import Hello, HelloReply
from infinistore.secret_files import clean_token, read_token
from infinistore.transports.base import Stream, drive
from infinistore.transports.sockets.trio_streams import connect_tcp

if TYPE_CHECKING:
    from ssl import SSLContext


ConnectNode: TypeAlias = Callable[[str, int], Awaitable[Stream]]
"""Connects to host and port. Raises StoreUnavailable if nobody accepts."""
NodeTls: TypeAlias = "SSLContext | Callable[[], SSLContext] | None"
"""What nodes are asked with: a function returns what holds now."""
Token: TypeAlias = str | Callable[[], str]
"""What servers are asked with, or what returns that."""


def _ignore(node: Node, error: InfiniStoreException | None) -> None:
    """Tell nobody."""


def credentials(options: Mapping[str, str], token: str | None = None) -> "tuple[str, SSLContext | None]":
    """Return the token and the TLS that the options of a cluster's URL name. A token
    that is given comes first, and the variable INFINISTORE_TOKEN last.

    Raises:
        ConfigError: a file cannot be used.
    """
    if token is None:
        file = options.get("token_file")
        given = os.environ.get("INFINISTORE_TOKEN", "")
        token = clean_token(given, "INFINISTORE_TOKEN") if file is None else read_token(file)
    files = {name: Path(options[name]) for name in ("ca", "cert", "key") if name in options}
    if not files:
        return token, None
    from infinistore.transports.tls.session import client_context  # late: few need it

    return token, client_context(**files)


def instance_asker(
    token: Token,
    tls: "NodeTls" = None,
    *,
    connect: ConnectNode = connect_tcp,
    on_answer: Callable[[Node, InfiniStoreException | None], object] = _ignore,
) -> AskInstance:
    """Return a function that asks a node for its instance, over TCP: with TLS if `tls`
    is given, or the node says that it speaks TLS. A `tls` that changes is a function.
    `on_answer` is told of a node that answers, and why it refused, if it did.
    """

    @functools.cache
    def systems() -> "SSLContext":  # loading all authorities of the system takes a while
        from infinistore.transports.tls.session import client_context

        return client_context()

    async def ask(node: Node) -> str:
        scheme, _, written = node.address.partition("://")
        try:
            host, port = host_and_port(written, DEFAULT_SERVICE_PORT)
            stream: Stream = await connect(host, port)
            if tls is not None or scheme == "infinistores":
                context = tls() if callable(tls) else tls
                stream = _over_tls(stream, host, context or systems())
        except InfiniStoreException:
            await trio.lowlevel.checkpoint()
            return ""
        try:
            presented = token if isinstance(token, str) else token()
            reply = await drive(ClientConnection().request(Hello("cluster view", presented)), stream)
        except InfiniStoreException as error:
            on_answer(node, error)
            return ""
        finally:
            stream.close()
        on_answer(node, None)
        return reply.instance if isinstance(reply, HelloReply) else ""

    return ask


def _over_tls(stream: Stream, host: str, tls: "SSLContext") -> Stream:
    from infinistore.transports.tls.session import TlsSession  # late: few need it
    from infinistore.transports.tls.trio_stream import TlsStream

    return TlsStream(stream, TlsSession(tls, host, host_name=host))


@attrs.frozen
class ClusterEnvironment:
    """The functions by which a node reaches etcd and the other nodes."""

    connect_etcd: Connect = connect
    connect_node: ConnectNode = connect_tcp
    """Connects to a node that is asked who it is."""
    host_name: Callable[[], str] = socket.gethostname
