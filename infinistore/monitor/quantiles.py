"""Percentiles of a histogram, interpolated; beyond the outer bounds only a bound."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import attrs

from infinistore.statistics import LATENCY_BOUNDS_S

__all__ = ["Quantile", "quantile"]


@attrs.frozen
class Quantile:
    """A quantile of latencies.

    `bound` is "" for a value interpolated between two bounds of the histogram, "<" for
    a value in the first bucket (at most `value_s`), and ">" for a value beyond the last
    bound (more than `value_s`).
    """

    value_s: float
    bound: Literal["", "<", ">"] = ""


def quantile(counts: Sequence[int], part: float) -> Quantile | None:
    """Return the quantile `part` (0 to 1) of a histogram; None if it is empty.

    `counts` has one number per bound in `LATENCY_BOUNDS_S` and one more, as in
    `OperationStatistics.latency_counts`. Values are assumed to be evenly distributed in
    their bucket.
    """
    rank = part * sum(counts)
    below = 0
    edges = (0.0, *LATENCY_BOUNDS_S)
    for index, (low_s, high_s) in enumerate(pairwise(edges)):
        count = counts[index] if index < len(counts) else 0
        if count and below + count >= rank:
            if index == 0:
                return Quantile(high_s, "<")
            share = (rank - below) / count
            return Quantile(min(max(low_s, low_s + share * (high_s - low_s)), high_s))
        below += count
    return Quantile(edges[-1], ">") if sum(counts) > 0 else None
