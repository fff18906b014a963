"""Eviction strategies by name.

Other packages add strategies with an entry point:

    [project.entry-points."infinistore.eviction"]
    clock = "some_package:Clock"

The class is a subclass of `infinistore.eviction.Eviction`. Built-in names cannot be
overridden. A module is imported only when its strategy is used.
"""

from infinistore.eviction.base import Eviction
from infinistore.named_classes import NamedClasses

ENTRY_POINT_GROUP = "infinistore.eviction"

_STRATEGIES = NamedClasses(
    kind="eviction strategy",
    group=ENTRY_POINT_GROUP,
    base=Eviction,
    public="infinistore.eviction.Eviction",
    built_in={
        "adaptive": "infinistore.eviction.adaptive:Adaptive",
        "lru": "infinistore.eviction.base:LeastRecentlyUsed",
    },
)


def eviction_names() -> list[str]:
    """Return the names of all strategies: built-in ones first, then others, sorted."""
    return _STRATEGIES.names()


def eviction_class(name: str) -> type[Eviction]:
    """Return the strategy `name`.

    Raises:
        ConfigError: there is none of this name, or it cannot be loaded.
    """
    return _STRATEGIES.load(name)
