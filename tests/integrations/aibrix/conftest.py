"""AIBrix's KV cache itself, where it is installed: `make test-integrations` brings an
environment that has it.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from infinistore.dropin.registered_server import RegisteredServer
from tests.server.running import KIB, MIB, make_config

if find_spec("aibrix_kvcache") is not None:
    with warnings.catch_warnings():  # what AIBrix and its dependencies warn of while they are imported
        warnings.simplefilter("ignore")
        import aibrix_kvcache.cache_manager
        import aibrix_kvcache.l2.connectors.infinistore  # noqa: F401

NewManager: TypeAlias = Callable[..., Any]


def run_server(unix_socket: str) -> RegisteredServer:
    return RegisteredServer(make_config(prealloc_bytes=32 * MIB, minimal_allocate_bytes=KIB, unix_socket=unix_socket))


BOTH = [("shm", "RDMA"), ("tcp", "TCP")]
CROSSED = [("shm", "TCP"), ("tcp", "RDMA")]


@pytest.fixture(params=[*BOTH, *(pytest.param(ways, marks=pytest.mark.nightly) for ways in CROSSED)], ids="-".join)
def ways(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The best path that a server offers, and what AIBrix is told to use."""
    chosen: tuple[str, str] = request.param
    return chosen


@pytest.fixture
def server(ways: tuple[str, str]) -> Iterator[RegisteredServer]:
    """A server to which the best path is by shared memory, and one to which it
    is TCP.
    """
    with tempfile.TemporaryDirectory(prefix="infinistore-") as folder:
        running = run_server(str(Path(folder, "s")) if ways[0] == "shm" else "off")
        yield running
        running.stop()


@pytest.fixture
def new_manager(
    ways: tuple[str, str], server: RegisteredServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NewManager]:
    """Makes cache managers as an engine does, by the environment, with the store as
    their only cache.
    """
    settings = {
        "L1_CACHE_ENABLED": "0",
        "L2_CACHE_BACKEND": "INFINISTORE",
        "L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS": "0",  # a put has ended when it returns
        "CHUNK_SIZE": "64",
        "INFINISTORE_HOST_ADDR": "127.0.0.1",
        "INFINISTORE_SERVICE_PORT": str(server.addresses.port),
        "INFINISTORE_CONNECTION_TYPE": ways[1],
        "INFINISTORE_VISIBLE_DEV_LIST": "mlx5_0:3",  # there is none; 3 is its GID
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"AIBRIX_KV_CACHE_OL_{name}", value)
    # AIBrix chooses a device by the number of the GPU, of which it takes one to be
    # there, and pins memory for it.
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("aibrix_kvcache.cache_manager.TESTING_DISABLE_PIN_MEMORY", True)

    with ExitStack() as stack:

        def new_manager(*, heads: int = 2) -> Any:
            manager = make_manager(heads)
            stack.callback(manager.close)
            return manager

        yield new_manager


def make_manager(heads: int) -> Any:
    import torch
    from aibrix_kvcache import BaseKVCacheManager, KVCacheConfig
    from aibrix_kvcache.spec import KVCacheBlockLayout, KVCacheBlockSpec, KVCacheTensorSpec, ModelSpec

    block = KVCacheBlockSpec(
        block_ntokens=16,
        block_dtype=torch.float32,
        block_layout=KVCacheBlockLayout.LCND,
        tensor_spec=KVCacheTensorSpec(heads=list(range(heads)), layers=[0, 1], head_size=32),
    )
    return BaseKVCacheManager(KVCacheConfig(block_spec=block, model_spec=ModelSpec(max_model_len=256)))
