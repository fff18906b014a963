"""LMCache's storage in the memory of its own process (`local_cpu`), for the cache of a
model of transformers: chunks of tokens, copied by PyTorch.
"""

from collections.abc import Iterator
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

__all__ = ["LocalStorage"]


class LocalStorage:
    """Room for `room_bytes` of caches of this model."""

    def __init__(self, model: Any, chunk_tokens: int, room_bytes: int) -> None:
        config = model.config
        self._model = model
        self._chunk = chunk_tokens
        self._heads, self._size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        self._shape = (config.num_hidden_layers, 2, chunk_tokens, self._heads, self._size)
        settings = LMCacheEngineConfig.from_defaults(
            chunk_size=chunk_tokens, local_cpu=True, max_local_cpu_size=room_bytes / 2**30 + 0.1
        )
        self._metadata = LMCacheMetadata("bench", 1, 1, 0, 0, model.dtype, self._shape, chunk_size=chunk_tokens)
        self._backend = LocalCPUBackend(settings, self._metadata, dst_device=str(model.device))

    def save(self, prompt: int, cache: Any) -> None:
        """Store the full chunks of a cache."""
        for number, part in self._parts(cache):
            block = self._backend.allocate(self._metadata.get_shapes(), self._metadata.get_dtypes())
            target = block.tensor.view(2, len(cache.layers), self._chunk, self._heads, self._size)
            for layer, tensors in enumerate(cache.layers):
                for which, tensor in enumerate((tensors.keys, tensors.values)):
                    target[which, layer].copy_(tensor[0, :, part].transpose(0, 1))
            self._backend.submit_put_task(self._key(prompt, number), block)
            block.ref_count_down()

    def load(self, prompt: int, tokens: int) -> tuple[Any, int]:
        """Return a cache of all chunks before a prompt's last token, and its length."""
        from transformers import DynamicCache

        count = (tokens - 1) // self._chunk
        layers = self._model.config.num_hidden_layers
        shape = (2, layers, count, self._chunk, self._heads, self._size)
        found = torch.empty(shape, dtype=self._model.dtype, device=self._model.device)
        blocks = []
        for number in range(count):
            block = self._backend.get_blocking(self._key(prompt, number))
            blocks.append(block)
            found[:, :, number].copy_(block.tensor.view(found[:, :, number].shape), non_blocking=True)
        heads = found.flatten(2, 3).transpose(2, 3)
        cache = DynamicCache(config=self._model.config)
        for layer in range(layers):
            cache.update(heads[0, layer][None], heads[1, layer][None], layer)
        if self._model.device.type != "cpu":
            torch.cuda.synchronize()  # before the blocks go
        for block in blocks:
            block.ref_count_down()
        return cache, count * self._chunk

    def clear(self) -> None:
        """Forget all caches."""
        self._backend.clear()

    def close(self) -> None:
        """Give the memory back."""
        self._backend.close()

    def _parts(self, cache: Any) -> Iterator[tuple[int, slice]]:
        for number in range(cache.get_seq_length() // self._chunk):
            yield number, slice(number * self._chunk, (number + 1) * self._chunk)

    def _key(self, prompt: int, number: int) -> CacheEngineKey:
        return CacheEngineKey("bench", 1, 0, prompt * 1_000_000 + number, self._model.dtype)
