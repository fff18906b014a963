"""The programming interface of the original InfiniStore (bytedance/InfiniStore, up to 0.2.42), on this package.

A program that was written for it finds the same names at the top of `infinistore`, with the same arguments, units and
answers; what was a crash or a hang there is an error here. `config.py` has the settings of both ends, `connection.py`
the client, `memory.py` the caller's memory by address, `registered_server.py` a server inside the caller's process.
New programs are better served by `open_store`.
"""

from infinistore.dropin.config import LINK_ETHERNET, LINK_IB, TYPE_RDMA, TYPE_TCP, ClientConfig, ServerConfig
from infinistore.dropin.connection import InfinityConnection
from infinistore.dropin.logger import Logger
from infinistore.dropin.registered_server import evict_cache, get_kvmap_len, purge_kv_map, register_server

__all__ = [
    "LINK_ETHERNET",
    "LINK_IB",
    "TYPE_RDMA",
    "TYPE_TCP",
    "ClientConfig",
    "InfinityConnection",
    "Logger",
    "ServerConfig",
    "evict_cache",
    "get_kvmap_len",
    "purge_kv_map",
    "register_server",
]
