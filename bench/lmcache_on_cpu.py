"""LMCache 0.5.6 inside vLLM on a CPU: what copies between the KV cache and LMCache's memory, which LMCache has for GPUs
only.

On a GPU none of this is needed. Here, a chunk of LMCache is a number of whole blocks of vLLM, and is copied as such,
without a look at how keys and values lie in them. So a chunk must be a multiple of a block.
"""

from typing import Any

import torch
from lmcache.integration.vllm import vllm_service_factory
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface

__all__ = ["let_lmcache_use_host_memory"]


class HostMemoryConnector(GPUConnectorInterface):  # type: ignore[misc, unused-ignore]
    """Copies blocks of `kvcaches`, one tensor [blocks, heads, tokens, content] a layer, to and from chunks."""

    def __init__(self, metadata: Any) -> None:
        layers, two, _, heads, head_size = metadata.kv_shape
        self._layers, self._hidden = layers, heads * head_size
        assert two == 2, "this copies keys and values, not a latent"

    def from_gpu(self, memory_obj: Any, start: int, end: int, **given: Any) -> None:
        self.batched_from_gpu([memory_obj], [start], [end], **given)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **given: Any) -> None:
        self.batched_to_gpu([memory_obj], [start], [end], **given)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **given: Any) -> None:
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            for part, cache, blocks in self._parts(chunk, start, end, **given):
                part.copy_(cache[blocks])

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **given: Any) -> None:
        for chunk, start, end in zip(memory_objs, starts, ends, strict=True):
            for part, cache, blocks in self._parts(chunk, start, end, **given):
                cache[blocks] = part

    def get_shape(self, num_tokens: int) -> Any:
        return torch.Size([2, self._layers, num_tokens, self._hidden])

    def _parts(self, chunk: Any, start: int, end: int, *, kvcaches: Any, slot_mapping: Any, **_: Any) -> Any:
        tokens = kvcaches[0].shape[2]
        if (end - start) % tokens:
            raise ValueError(f"a chunk of {end - start} tokens is no multiple of a block of {tokens}")
        blocks = slot_mapping[start:end:tokens] // tokens
        parts = chunk.tensor.view(-1).view(self._layers, len(blocks), *kvcaches[0].shape[1:])
        return zip(parts, kvcaches, [blocks] * self._layers, strict=True)


def let_lmcache_use_host_memory() -> None:
    """Give LMCache a connector for host memory where it looks for one."""
    vllm_service_factory.CreateGPUConnector = lambda config, metadata, *_, **__: HostMemoryConnector(metadata)
