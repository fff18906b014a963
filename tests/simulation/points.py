"""Whether the product did everything that it seldom does often enough, in many runs."""

from collections import Counter

from tests.simulation.buggify import Point

__all__ = ["LEAST_FIRED", "SEEDS", "seldom_fired"]

LEAST_FIRED = 100
"""How often each point has to fire"""
SEEDS = 700
"""in so many seeds: not in so many minutes, in which a busy machine runs fewer."""


def seldom_fired(fired: Counter[str], seeds: int) -> list[str]:
    """Return the points that have fired too seldom for so many seeds."""
    least = seeds // SEEDS * LEAST_FIRED
    return [point.name for point in Point if fired[point.name] < least]
