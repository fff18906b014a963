"""What the stores of a cluster, and those of one server, have in common, whatever
drives them.

A server with shards is a cluster, too. The first connection tells where its shards are
(`ShardsFound`). From then on, a store goes on as that of a static cluster, until its
server says otherwise: it was started again with another number of shards.
"""

import posixpath
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

import attrs

from infinistore.client.cluster.calls import LOST, ClusterCalls
from infinistore.client.cluster.everywhere import HANDLERS
from infinistore.client.cluster.nodes import PING, Nodes, OpenStore
from infinistore.client.connection.calls import LOOKUP_CONNECTIONS, PLAIN, WAITING_CONNECTIONS, Calls, Terms
from infinistore.client.environment import Environment
from infinistore.client.memory.buffers import Registration
from infinistore.client.movers.rdma import StoreRdma
from infinistore.client.options import Options, StoreUrl
from infinistore.cluster.locate import ClusterUrl, StaticPlace
from infinistore.cluster.membership import Node
from infinistore.cluster.reading import Reader
from infinistore.errors import StoreUnavailable
from infinistore.host import let_go_in_child
from infinistore.protocol.messages import Shard
from infinistore.transports.cuda import DeviceMemory

_Cluster = TypeVar("_Cluster", bound="ClusterStore")
SILENT_AFTER: Final = 1.25
"""After how many times its deadline of a lookup a node that sends nothing is asked
whether it is there. A lookup gives up first, so that the question is never asked while
it is asked."""
_FAILURES_TO_OPEN: Final = 2
_LEAST_CONNECTIONS: Final = 2


class ClusterStore:
    """What the stores of a cluster have in common: under Trio, asyncio and threads.

    `make` makes the store of one node. `rdma` and `shard_ports` are given if the nodes
    are the shards of one server, whose store was open before.
    """

    is_cluster = True
    clock: Callable[[], float]
    """That of the deadlines, here and of the nodes' stores."""

    def __init__(
        self,
        url: ClusterUrl,
        options: Options,
        environment: Environment,
        make: Callable[..., Any],
        *,
        rdma: StoreRdma | None = None,
        shard_ports: tuple[int, ...] | None = None,
    ) -> None:
        self.verifies = options.verify == "always"
        self.place = str(url)
        self._owns_rdma = rdma is None
        self.rdma = shared = rdma or StoreRdma(options, self.clock, forced=options.transport == "rdma")
        if self._owns_rdma:
            let_go_in_child(self.rdma)

        def make_node(address: StoreUrl, instance: str) -> Any:
            terms = Terms(_FAILURES_TO_OPEN, instance, shared, shard_ports, options.lookup_deadline_s)
            return make(address, options, environment, terms=terms)

        if environment.membership is not None:
            membership = environment.membership(url)
        else:
            from infinistore.cluster_io.thread import open_membership  # late: etcd takes 20 ms to import

            membership = open_membership(url, options.token, options.tls)
        reader = Reader(options.name, environment.host_name(), options.zone)
        self.calls = ClusterCalls(Nodes(membership, make_node, reader), HANDLERS, options, self.clock)

    def close(self) -> None:
        """Close the stores of the nodes; their connections when the calls under way
        end. Any number of times, from any thread.
        """
        self.calls.nodes.close()
        if self._owns_rdma:
            self.rdma.close()

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Return the pools of the nodes if all of them are mapped into this process."""
        return self.calls.nodes.mapped_arenas()

    def _register(self, memory: memoryview | DeviceMemory) -> Registration:
        return self.calls.register(self.rdma, memory)

    def _rdma(self) -> StoreRdma:
        return self.rdma


async def ask_if_there(store: Any, patience_s: float) -> None:
    """Ask a node that is silent whether it is there, under Trio or asyncio.

    Raises:
        StoreUnavailable: it does not answer.
    """
    try:
        await store._call(PING, patience_s)
    except LOST as error:
        check_not_silent(store, error)


def check_not_silent(store: OpenStore, error: Exception) -> None:
    """Take this error of `PING`.

    Raises:
        StoreUnavailable: the node did not answer. Else too many others are asking.
    """
    if store.calls.breaker.failures:
        raise StoreUnavailable(f"{store.calls.address} is silent") from error


def cluster_of(address: StoreUrl, shards: Sequence[Shard]) -> ClusterUrl:
    """Return the cluster of these shards of the server at an address. They are reached
    as the address says: over TCP at the same host, or by sockets in the same folder.

    Raises:
        StoreUnavailable: a shard has no such socket.
    """
    nodes = [Node(f"shard-{index}", _place(address, shard)) for index, shard in enumerate(shards)]
    return ClusterUrl(str(address), StaticPlace(tuple(nodes)), {})


def _place(address: StoreUrl, shard: Shard) -> str:
    if not address.path:
        return str(attrs.evolve(address, port=shard.port))
    # Its folder is trusted, for the caller has named a socket there.
    if posixpath.dirname(shard.unix_socket) != posixpath.dirname(posixpath.abspath(address.path)):
        raise StoreUnavailable(
            f"a shard of the server at {address} has no socket in the same folder, but "
            f"{shard.unix_socket or 'none at all'}; use infinistore://HOST:PORT"
        )
    return f"{address.scheme}://{quote(shard.unix_socket)}"


def options_of_shard(options: Options, count: int) -> Options:
    """Return the options of one of `count` shards, which share the connections."""
    share = -(-options.max_connections // count)
    return attrs.evolve(options, max_connections=max(share, min(_LEAST_CONNECTIONS, options.max_connections)))


class RemoteStore(Generic[_Cluster]):
    """What the stores of one server have in common: under Trio, asyncio and threads. It
    connects when it is first used, or at once by `connect`.

    Look-ups have connections of their own, and never wait behind blocks. `environment`
    is that of this process, unless a simulation gives another.
    """

    clock: Callable[[], float]
    """That of the deadlines."""
    _make_cluster: Callable[..., _Cluster]
    """The class of the store that it goes on as if its server has shards."""
    _make_turns: Callable[[int], Any]
    _connect_sockets: Callable[..., Any]

    def __init__(
        self, address: StoreUrl, options: Options, environment: Environment | None = None, *, terms: Terms = PLAIN
    ) -> None:
        self.place = str(address)
        self.verifies = options.verify == "always"
        self._environment = environment = environment or Environment()
        self._connect = environment.connect or self._connect_sockets
        self.payload_turns = self._make_turns(options.max_connections)
        self.waiting_turns = self._make_turns(WAITING_CONNECTIONS)
        self.lookup_turns = self._make_turns(LOOKUP_CONNECTIONS)
        self.calls: Calls[Any] = Calls(
            address, options, self.clock, environment.random, environment.machine, terms=terms
        )
        self._sharded: _Cluster | None = None  # since its server was found to have shards
        self._going_on = threading.Lock()

    def close(self) -> None:
        """Close the connections, those of calls under way when they end."""
        if self._sharded is not None:
            self._sharded.close()
        self.calls.close()

    def mapped_arenas(self) -> list[tuple[memoryview, memoryview | None]]:
        """Return the server's pool as far as it is mapped into this process."""
        return (self._sharded or self.calls).mapped_arenas()

    def _register(self, memory: memoryview | DeviceMemory) -> Registration:
        return self.calls.register(memory)

    def _rdma(self) -> StoreRdma:
        return self.calls.rdma

    def _go_on(self, shards: Sequence[Shard], former: _Cluster | None) -> _Cluster | None:
        """Go on with these shards, or with none, if no other call has noticed yet. They
        use the device and the registered memory of this store.
        """
        with self._going_on:
            if self._sharded is former:
                self._sharded = self._open_shards(shards) if shards else None
                if former is not None:
                    former.close()
            return self._sharded

    def _open_shards(self, shards: Sequence[Shard]) -> _Cluster:
        calls = self.calls
        calls.pool.close_idle()
        return self._make_cluster(
            cluster_of(calls.address, shards),
            options_of_shard(calls.options, len(shards)),
            self._environment,
            type(self),
            rdma=calls.rdma,
            shard_ports=tuple(shard.port for shard in shards),
        )
