"""Allocation strategies by name.

The built-in strategies are listed here, so that they work in a source tree without
package metadata. Other packages add strategies with an entry point:

    [project.entry-points."infinistore.allocators"]
    buddy = "some_package:BuddyAllocator"

The class is a subclass of `infinistore.allocators.Allocator` that is created with one
argument, `unit_bytes`. Built-in names cannot be overridden. A module is imported only
when its strategy is used.
"""

from infinistore.allocators.base import Allocator
from infinistore.named_classes import NamedClasses

ENTRY_POINT_GROUP = "infinistore.allocators"

_ALLOCATORS = NamedClasses(
    kind="allocator",
    group=ENTRY_POINT_GROUP,
    base=Allocator,
    public="infinistore.allocators.Allocator",
    built_in={
        "bitmap": "infinistore.allocators.bitmap:BitmapAllocator",
        "slab": "infinistore.allocators.slab:SlabAllocator",
        "jemalloc": "infinistore.allocators.jemalloc:JemallocAllocator",
    },
)


def allocator_names() -> list[str]:
    """Return the names of all strategies: built-in ones first, then others, sorted."""
    return _ALLOCATORS.names()


def allocator_class(name: str) -> type[Allocator]:
    """Return the strategy `name`, or raise `ConfigError`."""
    return _ALLOCATORS.load(name)


def create_allocator(name: str, unit_bytes: int) -> Allocator:
    """Return a new allocator of the strategy `name`, without arenas.

    `unit_bytes` is the smallest allocation, a multiple of 64. Raises `ConfigError` for
    an unknown name, a strategy that cannot be loaded or cannot run in this process, and
    an invalid unit.
    """
    return allocator_class(name)(unit_bytes)


def prepare_process(name: str) -> None:
    """Prepare this process for the strategy `name`.

    Call it first in `main`, before opening anything: it may re-execute the process with
    another environment (jemalloc does, once). Raises `ConfigError` if the strategy is
    unknown or cannot run on this machine.
    """
    allocator_class(name).prepare_process()
