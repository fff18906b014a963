"""What is wanted of the figures of `serve_bench`, for 20 prompts of 2,048 tokens or
more.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["WANTED", "misses"]


class Wanted(NamedTuple):
    """The least that a figure may be, and how a smaller one is told."""

    figure: str
    least: float
    text: str


_WARM: Final = "the mean TTFT warm is 1/{figure:.1f} of that cold, and at most 1/{least:g} is wanted"
WANTED: Final[Mapping[str, Wanted]] = {
    "connector": Wanted("cold / warm", 12, _WARM),
    "lmcache": Wanted("cold / warm", 6, _WARM),
    "windows": Wanted("cold / warm", 5, _WARM),
    "overhead": Wanted(
        "ratio", 0.97, "with nothing to reuse, {figure:.3f} of the throughput is left, and at least {least:g} is wanted"
    ),
}
"""What is wanted of each way; nothing of the others."""


def misses(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for each figure that is worse than wanted; `figures` are those of
    the ways that were run, by their names.
    """
    lines = []
    for way, wanted in WANTED.items():
        if way in figures and not figures[way][wanted.figure] >= wanted.least:
            told = wanted.text.format(figure=figures[way][wanted.figure], least=wanted.least)
            lines.append(f"missed: {way}: {told}")
    return lines
