"""How statistics cross the wire: as nested maps and lists of plain values.

The records are in `infinistore.statistics`. What a peer sent is checked here; what it
means is left to whoever reads the records.
"""

import math
from typing import Any, NamedTuple

from cattrs import Converter
from cattrs.errors import BaseValidationError

from infinistore.errors import ProtocolError
from infinistore.protocol.fields import Tree
from infinistore.statistics import DiskTierStatistics, DrainStatistics, ServerDetails, ServerStatistics, StoreStatistics

__all__ = ["StatisticsTree", "statistics_from_tree", "statistics_to_tree"]


class StatisticsTree(NamedTuple):
    """What a server sends."""

    server: ServerStatistics
    store: StoreStatistics
    details: ServerDetails | None
    disk: DiskTierStatistics | None = None
    drain: DrainStatistics | None = None


def _structure_float(value: Any, _: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no measure of anything")
    return number


_converter = Converter()
_converter.register_structure_hook(float, _structure_float)


def statistics_to_tree(
    server: ServerStatistics,
    store: StoreStatistics,
    details: ServerDetails | None = None,
    disk: DiskTierStatistics | None = None,
    drain: DrainStatistics | None = None,
) -> Tree:
    """Turn statistics into nested maps and lists of plain values."""
    parts = {"server": server, "store": store, "details": details, "disk": disk, "drain": drain}
    return Tree({name: _converter.unstructure(part) for name, part in parts.items() if part is not None})


def statistics_from_tree(tree: Tree) -> StatisticsTree:
    """Turn nested maps and lists back into statistics.

    Raises:
        ProtocolError: they are none.
    """
    try:
        return StatisticsTree(
            _converter.structure(tree["server"], ServerStatistics),
            _converter.structure(tree["store"], StoreStatistics),
            _converter.structure(tree["details"], ServerDetails) if "details" in tree else None,
            _converter.structure(tree["disk"], DiskTierStatistics) if "disk" in tree else None,
            _converter.structure(tree["drain"], DrainStatistics) if "drain" in tree else None,
        )
    except (LookupError, TypeError, ValueError, ArithmeticError, BaseValidationError) as error:
        raise ProtocolError(f"the server's statistics are not those of this release: {error!r:.300}") from None
