"""Percentiles from a histogram: between two bounds by interpolation, beyond the last one as a bound."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import attrs

from infinistore.statistics import LATENCY_BOUNDS_S

__all__ = ["Quantile", "quantile"]


@attrs.frozen
class Quantile:
    """The time that a part of the requests took at most.

    `bound` is "" for a value interpolated between two bounds of the histogram. "<": all that is known is that it is at
    most `value_s`, because it lies in the first bucket. ">": it is more than `value_s`, because it lies beyond the
    last.
    """

    value_s: float
    bound: Literal["", "<", ">"] = ""


def quantile(counts: Sequence[int], part: float) -> Quantile | None:
    """Return the quantile `part` (0 to 1) of a histogram over `LATENCY_BOUNDS_S`; None if nothing was counted.

    `counts` has one number for each bound and one more, as in `OperationStatistics.latency_counts`. A value lies
    anywhere in its bucket; they are taken as evenly spread there.
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
