"""What `import infinistore` offers, and what it costs."""

import subprocess
import sys

import pytest

import infinistore
from infinistore import errors

PUBLIC_NAMES = [
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


def test_the_public_names_are_these_and_no_others() -> None:
    assert infinistore.__all__ == PUBLIC_NAMES


def test_a_public_name_is_there_when_it_is_asked_for() -> None:
    for name in PUBLIC_NAMES:
        assert getattr(infinistore, name) is getattr(infinistore, name)
    assert set(PUBLIC_NAMES) <= set(dir(infinistore))


def test_every_error_is_public() -> None:
    raised = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert raised <= set(PUBLIC_NAMES)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'infinistore' has no attribute 'open_shop'"):
        getattr(infinistore, "open_shop")  # noqa: B009 - mypy knows that the name does not exist


def test_importing_the_package_or_the_blocking_client_brings_in_no_heavy_module() -> None:
    """Of the package, none at all; the client has what it needs, but no more."""
    source = (
        "import sys, infinistore\n"
        "print(*{name.partition('.')[0] for name in sys.modules})\n"
        "infinistore.blocking\n"
        "print(*{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)

    package, client = done.stdout.splitlines()
    heavy = {"torch", "numpy", "rich", "rich_click", "click", "trio", "asyncio", "yaml", "cattrs", "msgpack"}
    assert heavy & set(package.split()) == set()
    assert {"torch", "numpy", "rich"} & set(client.split()) == set()
