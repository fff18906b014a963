"""What a server that is a node of a cluster takes from its machine for that. A test
passes another one.
"""

import socket
from collections.abc import Callable

import attrs

from infinistore.cluster_io.etcd import Connect, connect
from infinistore.cluster_io.probing import ConnectNode
from infinistore.transports.sockets.trio_streams import connect_tcp

__all__ = ["ClusterEnvironment"]


@attrs.frozen
class ClusterEnvironment:
    """The functions by which a node reaches etcd and the other nodes."""

    connect_etcd: Connect = connect
    connect_node: ConnectNode = connect_tcp
    """Connects to a node that is asked who it is."""
    host_name: Callable[[], str] = socket.gethostname
