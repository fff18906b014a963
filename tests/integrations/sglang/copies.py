"""SGLang's kernels that copy between a device's pools and a host's, in Python."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["use_copies"]


class Places(NamedTuple):
    """Where items lie: the address of the first, the distance from one to the next, in
    bytes, and which of them.
    """

    address: int
    stride: int
    indices: torch.Tensor


def copy_items(source: Places, target: Places, size: int) -> None:
    """Copy items of `size` bytes."""
    for there, here in zip(source.indices.tolist(), target.indices.tolist(), strict=True):
        ctypes.memmove(target.address + here * target.stride, source.address + there * source.stride, size)


def to_pages(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], given: Mapping[str, Any]) -> None:
    """From layers, whose addresses are given, to pools whose pages hold all layers."""
    size = given["item_size"]
    for layers, pool in pairs:
        for number, layer in enumerate(layers.tolist()[: given["num_layers"]]):
            source = Places(layer, size, given["src_indices"])
            page = Places(pool.data_ptr() + number * size, given["dst_layout_dim"], given["dst_indices"])
            copy_items(source, page, size)


def from_pages(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], given: Mapping[str, Any]) -> None:
    """From pools whose pages hold all layers to one layer."""
    size = given["item_size"]
    for pool, layer in pairs:
        page = Places(pool.data_ptr() + given["layer_id"] * size, given["src_layout_dim"], given["src_indices"])
        copy_items(page, Places(layer.data_ptr(), size, given["dst_indices"]), size)


def keys_and_values_to_pages(**given: Any) -> None:
    to_pages([(given["src_k_layers"], given["dst_k"]), (given["src_v_layers"], given["dst_v"])], given)


def pages_to_keys_and_values(**given: Any) -> None:
    from_pages([(given["src_k"], given["dst_k"]), (given["src_v"], given["dst_v"])], given)


def states_to_pages(**given: Any) -> None:
    to_pages([(given["src_ptrs"], given["dst"])], given)


def pages_to_states(**given: Any) -> None:
    from_pages([(given["src"], given["dst"])], given)


def use_copies() -> None:
    """Give SGLang's host pools these in place of the kernels, which a CPU lacks; memory
    is not pinned.
    """
    from sglang.srt.mem_cache.pool_host import common, mamba, mha

    mha.transfer_kv_all_layer_lf_pf = keys_and_values_to_pages
    mha.transfer_kv_per_layer_pf_lf = pages_to_keys_and_values
    mamba.transfer_kv_mamba_lf_pf = states_to_pages
    mamba.transfer_kv_mamba_pf_lf = pages_to_states
    common._cuda_host_register = mha._cuda_host_unregister = lambda *arguments: None
