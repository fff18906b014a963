"""Placement of blocks: the allocator interface, and the strategies by name."""

from infinistore.allocators.base import MINIMUM_UNIT_BYTES, Allocator, AllocatorStatistics, Extent
from infinistore.allocators.registry import (
    ENTRY_POINT_GROUP,
    allocator_class,
    allocator_names,
    create_allocator,
    prepare_process,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "MINIMUM_UNIT_BYTES",
    "Allocator",
    "AllocatorStatistics",
    "Extent",
    "allocator_class",
    "allocator_names",
    "create_allocator",
    "prepare_process",
]

if __name__ != "infinistore.allocators":
    raise ImportError("import infinistore.allocators, not allocators: two names would make two sets of classes")
