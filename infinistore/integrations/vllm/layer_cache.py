"""How a worker sees the KV cache of one layer: as blocks of bytes."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from infinistore.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["LayerCache"]


@attrs.frozen
class LayerCache:
    """The KV cache of one layer as bytes: block i is contiguous at i *
    `stride_bytes`.
    """

    label: str
    memory: "torch.Tensor"
    view: memoryview | None
    """The same, if it is host memory."""
    block_bytes: int
    stride_bytes: int

    def block(self, number: int) -> memoryview:
        """Return one block in host memory."""
        assert self.view is not None
        return self.view[number * self.stride_bytes : number * self.stride_bytes + self.block_bytes]

    def copy(self, numbers: Sequence[int]) -> "torch.Tensor":
        """Return a copy of some blocks, one behind the other."""
        import torch

        starts = [number * self.stride_bytes for number in numbers]
        return torch.cat([self.memory[start : start + self.block_bytes] for start in starts])

    @classmethod
    def of(cls, name: str, label: str, cache: "torch.Tensor | None", num_blocks: int) -> "LayerCache":
        """View a layer's tensor, whose first dimension counts blocks, as blocks.

        Raises:
            ConfigError: a block is not contiguous.
        """
        import torch

        if not isinstance(cache, torch.Tensor) or cache.shape[0] == 0 or cache.shape[0] % num_blocks:
            raise ConfigError(f"the KV cache of {name} does not consist of {num_blocks} blocks; it cannot be stored")
        cache = cache.view(num_blocks, -1, *cache.shape[1:])  # a kernel may cut a block into several
        size = cache.element_size()
        block_bytes = math.prod(cache.shape[1:]) * size
        spanned = 1 + sum((n - 1) * stride for n, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True))
        if spanned * size != block_bytes:
            raise ConfigError(
                f"a block of {name} is scattered over memory; choose a KV cache layout in which it is not, by the"
                " environment variable VLLM_KV_CACHE_LAYOUT=LBHNC"
            )
        stride_bytes = cache.stride(0) * size
        length = (num_blocks - 1) * stride_bytes + block_bytes
        memory = torch.empty(0, dtype=torch.uint8, device=cache.device)
        memory.set_(cache.untyped_storage(), cache.storage_offset() * size, (length,), (1,))
        array: Any = memory.numpy() if memory.device.type == "cpu" else None
        view = None if array is None else memoryview(array)
        return cls(label, memory, view, block_bytes, stride_bytes)
