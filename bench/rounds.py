"""Measuring two or more things against each other on a noisy machine.

Every round runs each thing once, in an order that changes, so that a neighbour's load
falls on all of them. What is reported is the ratio of medians; a figure on its own says
little on a shared machine.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

__all__ = ["add_common_arguments", "interleaved", "interleaved_times", "taking_turns"]


def add_common_arguments(parser: argparse.ArgumentParser, *, quick: str, check: str) -> None:
    """Add how long a benchmark measures, how it shows what it found, and whether it
    judges that: `quick` and `check` say what these two do.
    """
    parser.add_argument("--quick", action="store_true", help=quick)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print tables for a page")
    parser.add_argument("--check", action="store_true", help=check)


def interleaved(
    things: Mapping[str, Callable[[], object]], *, rounds: int, calls: int, seed: int = 1, warm_up: int = 2
) -> dict[str, float]:
    """Return the median time of one call of each thing, in seconds; the arguments are
    those of `interleaved_times`.
    """
    times = interleaved_times(things, rounds=rounds, calls=calls, seed=seed, warm_up=warm_up)
    return {name: statistics.median(of_one) for name, of_one in times.items()}


def interleaved_times(
    things: Mapping[str, Callable[[], object]], *, rounds: int, calls: int, seed: int = 1, warm_up: int = 2
) -> dict[str, list[float]]:
    """Return for each thing the time of one call in each round, in seconds.

    In each of `rounds` rounds each thing is called `calls` times in a row; the first
    `warm_up` rounds do not count.
    """
    generator = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in things}
    names = list(things)
    for number in range(rounds + warm_up):
        generator.shuffle(names)
        for name in names:
            call = things[name]
            start = time.perf_counter()
            for _ in range(calls):
                call()
            elapsed = time.perf_counter() - start
            if number >= warm_up:
                times[name].append(elapsed / calls)
    return times


def taking_turns(call: Callable[[Any], object], batches: Sequence[Any]) -> Callable[[], object]:
    """Return what calls `call` with the next batch."""
    turns = cycle(batches)
    return lambda: call(next(turns))
