"""LMCache's own classes, put together as its engine does: a loop in a thread, memory, a
remote backend.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import load_engine_config_with_overrides
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from infinistore.integrations.lmcache import InfiniStoreConnector

__all__ = ["Worker", "engine_config", "engine_metadata", "keys_of", "loop_in_thread", "running_worker"]

EXAMPLES = Path(__file__).parents[3] / "examples" / "lmcache"
CHUNK_TOKENS = 16
PLUGIN = "remote_storage_plugin.infinistore."


def engine_config(file: str, *, extra: dict[str, Any] | None = None, **overrides: Any) -> Any:
    """A configuration as LMCache reads it, from a file in examples/ and what a test
    needs otherwise. Its model has no files.
    """
    small = {"chunk_size": CHUNK_TOKENS, "max_local_cpu_size": 0.03, "local_cpu": False}
    config = load_engine_config_with_overrides(str(EXAMPLES / file), {**small, **overrides})
    given = {name.rpartition(".")[0] + ".key_prefix": "lmcache/tests/" for name in extra or () if name.endswith(".url")}
    config.extra_config = {**(config.extra_config or {}), **given, **(extra or {})}
    return config


def engine_metadata(model: str = "llama", *, layers: int = 4, worker: int = 0, role: str = "worker") -> Any:
    return LMCacheMetadata(
        model_name=model,
        world_size=1,
        local_world_size=1,
        worker_id=worker,
        local_worker_id=worker,
        kv_dtype=torch.bfloat16,
        kv_shape=(layers, 2, CHUNK_TOKENS, 2, 8),
        chunk_size=CHUNK_TOKENS,
        role=role,
    )


def keys_of(count: int, model: str = "llama", dtype: torch.dtype = torch.bfloat16, first: int = 0) -> list[Any]:
    return [CacheEngineKey(model, 1, 0, 0xABC000 + first + number, dtype) for number in range(count)]


@contextmanager
def loop_in_thread(make: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop) -> Iterator[Any]:
    """The loop that LMCache's storage manager runs."""
    loop = make()
    thread = threading.Thread(target=loop.run_forever, name="lmcache-loop")
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@attrs.frozen
class Worker:
    """What a worker has of LMCache, for storage: memory of its own, and the remote
    backend.
    """

    memory: Any
    backend: Any
    loop: asyncio.AbstractEventLoop
    metadata: Any
    blocks: list[Any] = attrs.field(factory=list)

    @property
    def connector(self) -> InfiniStoreConnector:
        connector: InfiniStoreConnector = self.backend.connection.getWrappedConnector()
        return connector

    def make_block(
        self,
        seed: int,
        *,
        tokens: int = CHUNK_TOKENS,
        shapes: Sequence[torch.Size] | None = None,
        dtypes: Sequence[torch.dtype] | None = None,
        format: MemoryFormat = MemoryFormat.KV_2LTD,  # noqa: A002 - LMCache's word
    ) -> MemoryObj:
        """A memory object with bytes that are its own."""
        block = self.memory.allocate(
            list(shapes or self.metadata.get_shapes(tokens)), list(dtypes or self.metadata.get_dtypes()), format
        )
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randint(0, 256, (block.get_size(),), dtype=torch.uint8, generator=generator)
        memoryview(block.byte_array).cast("B")[:] = noise.numpy().data
        self.blocks.append(block)
        return block

    def put(self, keys: Sequence[Any], blocks: Sequence[MemoryObj]) -> None:
        """Store as the engine does, and wait for the end of it."""
        stored = threading.Semaphore(0)
        self.backend.batched_submit_put_task(keys, list(blocks), on_complete_callback=lambda _: stored.release())
        for _ in keys:
            assert stored.acquire(timeout=100)

    def get(self, keys: Sequence[Any]) -> list[MemoryObj | None]:
        blocks: list[MemoryObj | None] = self.backend.batched_get_blocking(list(keys))
        self.blocks.extend(filter(None, blocks))
        return blocks

    def release(self) -> None:
        """Let go of the memory objects that were made or loaded, as an engine does when
        it is done with them.
        """
        for block in self.blocks:
            while block.get_ref_count():
                block.ref_count_down()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def bytes_in_use(self) -> int:
        allocated: int = self.memory.memory_allocator.pin_allocator.total_allocated_size
        return allocated


@contextmanager
def running_worker(
    config: Any, metadata: Any, plugin: str | None = "infinistore", make: Any = asyncio.new_event_loop
) -> Iterator[Worker]:
    with loop_in_thread(make) as loop:
        memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        backend = RemoteBackend(config, metadata, loop, memory, dst_device="cpu", plugin_name=plugin)
        try:
            worker = Worker(memory, backend, loop, metadata)
            yield worker
            worker.release()
        finally:
            if backend.connection is not None:
                backend.close()
            memory.close()
