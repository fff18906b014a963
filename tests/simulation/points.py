"""Whether the product did everything that it seldom does often enough, in many runs."""

from collections import Counter

from infinistore.buggify import Point

__all__ = ["LEAST_FIRED", "seldom_fired"]

LEAST_FIRED = 100
"""How often each point has to fire in five minutes."""


def seldom_fired(fired: Counter[str]) -> list[str]:
    """Return the points that have fired too seldom for a run of five minutes."""
    return [point.name for point in Point if fired[point.name] < LEAST_FIRED]
