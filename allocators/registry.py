"""Allocation strategies by name.

The built-in strategies are listed here, so that they work in a source tree without
package metadata. Other packages add strategies with an entry point:

    [project.entry-points."infinistore.allocators"]
    buddy = "some_package:BuddyAllocator"

The class is a subclass of `infinistore.allocators.Allocator` that is created with one
argument, `unit_bytes`. Built-in names cannot be overridden. A module is imported only
when its strategy is used.
"""

import difflib
from importlib.metadata import EntryPoint, entry_points

from infinistore.allocators.base import Allocator
from infinistore.errors import ConfigError

ENTRY_POINT_GROUP = "infinistore.allocators"

_BUILT_IN = {
    "bitmap": "infinistore.allocators.bitmap:BitmapAllocator",
    "slab": "infinistore.allocators.slab:SlabAllocator",
    "jemalloc": "infinistore.allocators.jemalloc:JemallocAllocator",
}


def _entry_points() -> dict[str, EntryPoint]:
    found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    for name, value in _BUILT_IN.items():
        found[name] = EntryPoint(name=name, value=value, group=ENTRY_POINT_GROUP)
    return found


def allocator_names() -> list[str]:
    """Return the names of all strategies: built-in ones first, then others, sorted."""
    return [*_BUILT_IN, *sorted(set(_entry_points()) - set(_BUILT_IN))]


def allocator_class(name: str) -> type[Allocator]:
    """Return the strategy `name`, or raise `ConfigError`."""
    point = _entry_points().get(name)
    if point is None:
        names = allocator_names()
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"there is no allocator called {name!r}.{hint} Known are: {', '.join(names)}.")
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the allocator {name!r} ({point.value}) cannot be loaded: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Allocator)):
        raise ConfigError(
            f"the allocator {name!r} ({point.value}) is not a subclass of infinistore.allocators.Allocator"
        )
    return loaded


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
