"""LMCache's own cache engine on a CPU: tokens in, KV cache out, by the plugin and by
the built-in connector.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch

pytest.importorskip("lmcache", reason="needs LMCache: make test-integrations")

from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.gpu_connector import GPUConnectorInterface

from tests.bad_days.servers import ServerProcess
from tests.integrations.lmcache.engine import CHUNK_TOKENS, PLUGIN, engine_config, engine_metadata

pytestmark = pytest.mark.filterwarnings("ignore:.LoggingHandler. in .opentelemetry-sdk.:DeprecationWarning")
TOKENS = torch.arange(5 * CHUNK_TOKENS + 7)
STORED = len(TOKENS) // CHUNK_TOKENS * CHUNK_TOKENS
"""How many of them LMCache stores: full chunks."""
_names = (f"engine-{number}" for number in itertools.count())


class HostMemory(GPUConnectorInterface):  # type: ignore[misc, unused-ignore]
    """An engine's KV cache in plain memory, where LMCache expects a GPU: [2, layers,
    tokens, heads x head size].
    """

    def __init__(self) -> None:
        self.kv = torch.zeros(2, 4, len(TOKENS), 16, dtype=torch.bfloat16)

    def from_gpu(self, memory_obj: Any, start: int, end: int, **_: Any) -> None:
        memory_obj.tensor.copy_(self.kv[:, :, start:end])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **_: Any) -> None:
        self.kv[:, :, start:end] = memory_obj.tensor

    def batched_from_gpu(self, memory_objs: Any, starts: list[int], ends: list[int], **_: Any) -> None:
        for block, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(block, start, end)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **_: Any) -> None:
        for block, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(block, start, end)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, 4, num_tokens, 16])


@attrs.frozen
class Engine:
    lmcache: Any
    memory: HostMemory

    def fill(self) -> None:
        self.memory.kv.copy_(torch.randn(self.memory.kv.shape, generator=torch.Generator().manual_seed(1)))

    def store(self) -> None:
        """Store the prompt, and wait until the backend, which works in the background,
        has stored it.
        """
        self.lmcache.store(TOKENS)
        while self.lmcache.lookup(TOKENS) < STORED:
            pass

    def retrieve(self) -> int:
        retrieved: torch.Tensor = self.lmcache.retrieve(TOKENS)
        return int(retrieved.sum())


@contextmanager
def running_engine(config: Any) -> Iterator[Engine]:
    name = next(_names)
    memory = HostMemory()
    lmcache = LMCacheEngineBuilder.get_or_create(
        name, config, engine_metadata(), memory, lambda tensor, source: None, lambda value, source: value
    )
    lmcache.post_init()
    try:
        yield Engine(lmcache, memory)
    finally:
        LMCacheEngineBuilder.destroy(name)
        lmcache.storage_manager.loop.close()  # LMCache only stops it


def plugin(url: str) -> Any:
    return engine_config("plugin.yaml", extra={PLUGIN + "url": url}, py_enable_gc=True)


def builtin(url: str) -> Any:
    url = url.replace("tcp://", "infinistore://") + "?device=mlx5_0"
    return engine_config("builtin.yaml", remote_url=url, py_enable_gc=True)


@pytest.mark.parametrize("configure", [plugin, builtin])
def test_one_engine_finds_the_prompt_that_another_one_stored(configure: Any, server: ServerProcess) -> None:
    with running_engine(configure(server.url)) as writer:
        writer.fill()
        writer.store()
        with running_engine(configure(server.url)) as reader:
            assert reader.lmcache.lookup(TOKENS) == STORED
            assert reader.retrieve() == STORED
            assert torch.equal(reader.memory.kv[:, :, :STORED], writer.memory.kv[:, :, :STORED])


@pytest.mark.usefixtures("no_pause")
def test_the_engine_goes_on_when_the_store_is_killed_and_when_it_is_back(mortal_server: ServerProcess) -> None:
    with running_engine(plugin(mortal_server.url)) as engine:
        engine.fill()
        engine.store()
        assert engine.retrieve() == STORED
        mortal_server.kill()
        assert engine.lmcache.lookup(TOKENS) == 0
        assert engine.retrieve() == 0
        engine.lmcache.store(TOKENS)
        mortal_server.start()
        while not engine.retrieve():
            engine.lmcache.store(TOKENS)
        assert engine.retrieve() == STORED


def test_an_engine_starts_without_its_store(mortal_server: ServerProcess) -> None:
    mortal_server.kill()
    with running_engine(plugin(mortal_server.url)) as engine:
        engine.fill()
        engine.lmcache.store(TOKENS)
        assert engine.lmcache.lookup(TOKENS) == 0
        assert engine.retrieve() == 0
