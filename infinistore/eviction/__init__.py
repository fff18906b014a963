"""Which blocks leave a full pool first: the interface, and the strategies by name."""

from infinistore.eviction.base import Eviction
from infinistore.eviction.registry import ENTRY_POINT_GROUP, eviction_class, eviction_names
from infinistore.eviction.reuse import Reuse, WantedPool

__all__ = ["ENTRY_POINT_GROUP", "Eviction", "Reuse", "WantedPool", "eviction_class", "eviction_names"]
