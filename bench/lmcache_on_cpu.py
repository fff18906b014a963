"""LMCache 0.5.6 inside vLLM on a CPU: LMCache copies between its memory and a KV cache
on a GPU only.

On a GPU none of this is needed: the connector to name is vLLM's own,
`LMCacheConnectorV1`. Here, a chunk of LMCache is a number of whole blocks of vLLM, and
is copied as such, without a look at how keys and values lie in them. So a chunk must be
a multiple of a block.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

__all__ = ["LMCacheConnectorOnCpu"]


class LMCacheConnectorOnCpu(LMCacheConnectorV1):  # type: ignore[misc, unused-ignore]
    """vLLM's connector for LMCache."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        # Not before: vLLM looks through the modules that are there when it starts, and
        # stumbles over LMCache's.
        from lmcache.v1 import gpu_connector

        gpu_connector.CreateGPUConnector = lambda config, metadata, *_, **__: HostMemoryConnector(metadata)
        super().__init__(vllm_config, role, kv_cache_config)


class HostMemoryConnector:
    """What LMCache calls a GPU connector: copies blocks, [heads, tokens, content] in
    each layer.
    """

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
