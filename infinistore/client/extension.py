"""What packages that extend the client need beyond `infinistore.client` and
`infinistore.blocking`.

`infinistore.tensors` and `infinistore.dropin` need no more of the client than this
module and the public methods of a store, among them `mapped_arenas`, `has_registered`,
`put_batch` and `get_batch_into`, which exist for such packages. It may change in a
minor release.
"""

from infinistore.client.drivers.asyncio_driver import ClusterAsyncioStore, RemoteAsyncioStore
from infinistore.client.drivers.blocking_driver import ClusterBlockingStore, RemoteBlockingStore
from infinistore.client.environment import Environment
from infinistore.client.memory.buffers import DeviceBatch
from infinistore.client.options import Options, StoreUrl, make_options, parse_url
from infinistore.client.requests import Batch
from infinistore.client.worker_threads import in_thread
from infinistore.cluster.locate import ClusterUrl, is_cluster_url, parse_cluster_url
from infinistore.transports import cuda as cuda_driver
from infinistore.transports.cuda import DeviceMemory

__all__ = [
    "Batch",
    "DeviceBatch",
    "DeviceMemory",
    "Environment",
    "cuda_driver",
    "in_thread",
    "is_cluster_url",
    "make_asyncio_store",
    "make_blocking_store",
    "make_options",
    "parse_cluster_url",
    "parse_url",
]


def make_asyncio_store(address: StoreUrl | ClusterUrl, options: Options) -> RemoteAsyncioStore | ClusterAsyncioStore:
    """Return a store of a server or of a cluster, without a `with` statement.

    `connect` connects it, and `close` ends it.
    """
    if isinstance(address, ClusterUrl):
        return ClusterAsyncioStore(address, options, Environment(), RemoteAsyncioStore)
    return RemoteAsyncioStore(address, options)


def make_blocking_store(address: StoreUrl | ClusterUrl, options: Options) -> RemoteBlockingStore | ClusterBlockingStore:
    """Return such a store for threads."""
    if isinstance(address, ClusterUrl):
        return ClusterBlockingStore(address, options, Environment(), RemoteBlockingStore)
    return RemoteBlockingStore(address, options)
