"""What follows which keys a store removes: the request, and what it finds.

`AsyncStore.removals` and its blocking twin iterate over what it finds
(`infinistore.client.api.removals`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import attrs

from infinistore.client.requests import Request

if TYPE_CHECKING:
    from infinistore.cluster.membership import View

__all__ = ["Followed", "Place", "Removed", "RemovedKeys"]

Place: TypeAlias = tuple[int, int]
"""The id of a log of removals, and the number to go on from."""


@attrs.frozen
class RemovedKeys:
    """Keys that a store has removed, and whether others may have been missed.

    A key is in it if a read did not find it when the store answered. The first batch
    has no keys: what is removed from then on is told.
    """

    keys: list[str] = attrs.field(factory=list)
    missed: int | None = 0
    """How many removals are not told, because more happened than the store keeps; None
    if nobody knows how many: the server is another one, or was restarted or purged, or
    reads of a cluster do not look any more wherever they did."""
    problem: str = ""
    """Why the store could not be asked; empty if it was."""

    @property
    def gap(self) -> bool:
        """Whether removals were missed. Ask the store which keys are there still."""
        return self.missed != 0


@attrs.frozen
class Followed:
    """What was found, and from where to go on, by the ids of nodes. A cluster has the
    view in which that is so.
    """

    places: Mapping[str, Place]
    removed: RemovedKeys
    view: "View | None" = None


@attrs.define
class Removed(Request[Followed]):
    """Ask which keys were removed since `places`, which are those of a `view`, and wait
    for one at most `wait_s`.

    Without places it begins. The place of a server by itself is that of the node "".
    """

    places: Mapping[str, Place]
    wait_s: float
    view: "View | None" = None
    waits: ClassVar[bool] = True

    def at(self, node: str) -> "Removed":
        """Return the request for one node, as if it were all there is."""
        place: Any = self.places.get(node)
        return Removed({} if place is None else {"": place}, self.wait_s)
