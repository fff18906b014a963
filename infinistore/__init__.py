"""A KV-cache store for large language model inference.

    import infinistore

    async with infinistore.open_store() as store:  # embedded, without a server
        await store.put("layer0/block7", data)

This module lists the public names and contains no other code. The errors are imported
at once. Everything else is imported on first use, so that `import infinistore` is cheap
and loads neither torch nor numpy nor an event loop. Names that are not in `__all__` may
change without notice.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from infinistore.errors import (
    AuthenticationFailed,
    BufferTooSmall,
    ChecksumMismatch,
    ConfigError,
    DeadlineExceeded,
    DeviceMemoryUnreachable,
    DiskFailed,
    InfiniStoreException,
    InfiniStoreKeyNotFound,
    InvalidRequest,
    KeyNotFound,
    LeaseStillInUse,
    LimitExceeded,
    OutOfMemory,
    PartialPut,
    PermissionDenied,
    ProtocolError,
    ServerReplaced,
    StoreUnavailable,
    TlsFailed,
    TransferFailed,
    UnknownReservation,
    ValueTooLarge,
    VersionMismatch,
)
from infinistore.version import __version__

if TYPE_CHECKING:  # the same names, where a type checker and an editor look for them
    from infinistore import aio, blocking
    from infinistore.client import connect, open_store
    from infinistore.dropin.config import (
        LINK_ETHERNET,
        LINK_IB,
        TYPE_RDMA,
        TYPE_TCP,
        ClientConfig,
        Logger,
        ServerConfig,
    )
    from infinistore.dropin.connection import Desc, InfinityConnection
    from infinistore.dropin.registered_server import evict_cache, get_kvmap_len, purge_kv_map, register_server
    from infinistore.server import serve

__all__ = [
    "LINK_ETHERNET",
    "LINK_IB",
    "TYPE_RDMA",
    "TYPE_TCP",
    "AuthenticationFailed",
    "BufferTooSmall",
    "ChecksumMismatch",
    "ClientConfig",
    "ConfigError",
    "DeadlineExceeded",
    "Desc",
    "DeviceMemoryUnreachable",
    "DiskFailed",
    "InfiniStoreException",
    "InfiniStoreKeyNotFound",
    "InfinityConnection",
    "InvalidRequest",
    "KeyNotFound",
    "LeaseStillInUse",
    "LimitExceeded",
    "Logger",
    "OutOfMemory",
    "PartialPut",
    "PermissionDenied",
    "ProtocolError",
    "ServerConfig",
    "ServerReplaced",
    "StoreUnavailable",
    "TlsFailed",
    "TransferFailed",
    "UnknownReservation",
    "ValueTooLarge",
    "VersionMismatch",
    "__version__",
    "aio",
    "blocking",
    "connect",
    "evict_cache",
    "get_kvmap_len",
    "open_store",
    "purge_kv_map",
    "register_server",
    "serve",
]

_LAZY_NAMES = {
    "LINK_ETHERNET": "infinistore.dropin.config",
    "LINK_IB": "infinistore.dropin.config",
    "TYPE_RDMA": "infinistore.dropin.config",
    "TYPE_TCP": "infinistore.dropin.config",
    "ClientConfig": "infinistore.dropin.config",
    "Desc": "infinistore.dropin.connection",
    "InfinityConnection": "infinistore.dropin.connection",
    "Logger": "infinistore.dropin.config",
    "ServerConfig": "infinistore.dropin.config",
    "connect": "infinistore.client",
    "evict_cache": "infinistore.dropin.registered_server",
    "get_kvmap_len": "infinistore.dropin.registered_server",
    "open_store": "infinistore.client",
    "purge_kv_map": "infinistore.dropin.registered_server",
    "register_server": "infinistore.dropin.registered_server",
    "serve": "infinistore.server",
}
_LAZY_MODULES = frozenset({"aio", "blocking"})


if not TYPE_CHECKING:  # a checker that saw this would believe in every name

    def __getattr__(name: str) -> object:
        if name in _LAZY_MODULES:
            return import_module(f"infinistore.{name}")  # the import itself sets the attribute
        if name not in _LAZY_NAMES:
            raise AttributeError(f"module 'infinistore' has no attribute {name!r}")
        value: object = getattr(import_module(_LAZY_NAMES[name]), name)
        globals()[name] = value  # asked for once; from now on an ordinary attribute
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
