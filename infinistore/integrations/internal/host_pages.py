"""The pages of one of SGLang's host pools, as buffers that a store reads and writes.

Most pools say where the parts of a page lie in memory; these are read and written in
place. Others copy a whole page, by an index, from and to a flat tensor.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

__all__ = ["HostPages", "bytes_of"]

_GEOMETRY = (
    *("layout", "dtype", "layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim"),
    *("num_mamba_layers", "temporal_dtype", "temporal_state_shape", "conv_dtype", "conv_state_shapes"),
)
"""Attributes of host pools that describe a page's layout; each kind has some."""


class HostPages:
    """Where a pool's pages lie. `reason` is empty if they are read in place, and else
    says why not.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)
        self.reason = ""
        self.sizes: list[int] = []
        try:
            _, self.sizes = _flat(*pool.get_page_buffer_meta(torch.arange(self.page_tokens)))
        except (AttributeError, NotImplementedError, ValueError) as error:
            self.reason = str(error)

    @property
    def parts(self) -> list[str]:
        """The names of a page's parts."""
        return ["page"] if self.reason else [str(part) for part in range(len(self.sizes))]

    @property
    def geometry(self) -> dict[str, Any]:
        """What describes a page's layout."""
        return {name: getattr(self.pool, name, None) for name in _GEOMETRY}

    def tensors(self) -> list[torch.Tensor]:
        """The memory of the pool, as far as it is contiguous, for RDMA."""
        names = ("kv_buffer", "k_buffer", "v_buffer", "temporal_buffer", "conv_buffer")
        found = [getattr(self.pool, name, None) for name in names]
        flat = [each for one in found for each in (one if isinstance(one, list | tuple) else [one])]
        return [each for each in flat if isinstance(each, torch.Tensor) and each.is_contiguous() and each.nbytes]

    def sources(self, keys: Sequence[str], indices: torch.Tensor) -> list[memoryview]:
        """Return the parts of pages, to be stored; ValueError if `indices`, of tokens,
        do not fit the keys.
        """
        if not self.reason:
            return self._in_place(keys, indices)
        return [bytes_of(self.pool.get_data_page(index, flat=True)) for index in self._first_tokens(keys, indices)]

    def targets(self, keys: Sequence[str], indices: torch.Tensor) -> "Targets":
        """Return buffers to load pages into; ValueError as `sources`."""
        if not self.reason:
            return Targets(self.pool, self._in_place(keys, indices), [], [])
        pages = [self.pool.get_dummy_flat_data_page() for _ in keys]
        return Targets(self.pool, list(map(bytes_of, pages)), pages, self._first_tokens(keys, indices))

    def _in_place(self, keys: Sequence[str], indices: torch.Tensor) -> list[memoryview]:
        pointers, sizes = _flat(*self.pool.get_page_buffer_meta(indices)) if len(indices) else ([], [])
        if len(pointers) != len(keys) * len(self.sizes):
            raise ValueError(f"the host pool has {len(pointers)} buffers for {len(keys)} pages of {len(self.sizes)}")
        return list(map(_memory, pointers, sizes))

    def _first_tokens(self, keys: Sequence[str], indices: torch.Tensor) -> list[int]:
        if len(indices) != len(keys) * self.page_tokens:
            raise ValueError(f"{len(indices)} indices for {len(keys)} pages of {self.page_tokens} tokens")
        first: list[int] = indices[:: self.page_tokens].tolist()
        return first


class Targets:
    """Buffers that pages are loaded into."""

    def __init__(
        self, pool: Any, buffers: list[memoryview], pages: list[torch.Tensor], first_tokens: list[int]
    ) -> None:
        self.buffers = buffers
        self._pool = pool
        self._pages = pages
        self._first_tokens = first_tokens

    def keep(self, loaded: Sequence[bool]) -> None:
        """Copy the pages that were loaded into the pool, unless they are there."""
        for page, index, is_loaded in zip(self._pages, self._first_tokens, loaded, strict=False):
            if is_loaded:
                self._pool.set_from_flat_data_page(index, page)


def bytes_of(tensor: Any) -> memoryview:
    """Return the memory of a tensor; ValueError if it is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError("a page that is not contiguous cannot be moved as it is")
    view: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return view


def _flat(pointers: Sequence[Any], sizes: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Flatten: some pools return a list of pieces for each part of a page."""
    if not any(isinstance(pointer, list | tuple) for pointer in pointers):
        return list(pointers), list(sizes)
    return [piece for part in pointers for piece in part], [size for part in sizes for size in part]


@lru_cache(maxsize=256)
def _array_type(size: int) -> Any:  # ctypes makes a new type each time, and keeps it
    return ctypes.c_ubyte * size


def _memory(pointer: int, size: int) -> memoryview:
    return memoryview(_array_type(size).from_address(pointer)).cast("B")
