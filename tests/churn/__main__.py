"""Clusters in virtual time whose servers come, go and change, from seeds.

    python -m tests.churn --seed 7 [--nodes 1000]
    python -m tests.churn --minutes 10 [--first-seed 1] [--nodes 1000]

Ends with 1 if anything was wrong; then it prints the seed and the command that runs it
again. docs/testing.md says what is checked.
"""

import argparse
import itertools
import logging
import statistics
import sys
import time
from collections import Counter

from tests.churn.churn import Outcome, Settings, run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.churn", description="Clusters in virtual time whose servers come, go and change."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="run one seed")
    what.add_argument("--minutes", type=float, help="run seeds for so long, or until one fails")
    parser.add_argument("--first-seed", type=int, default=1, help="where seeds begin (1)")
    parser.add_argument("--nodes", type=int, help="with how many servers to begin; else the seed chooses")
    given = parser.parse_args()
    if given.nodes is not None and given.nodes < 3:
        parser.error("--nodes must be at least 3")
    logging.getLogger("infinistore").setLevel(logging.CRITICAL)  # that views change is no news here
    until = time.monotonic() + 60 * (given.minutes or 0)
    seeds = itertools.count(given.first_seed) if given.seed is None else [given.seed]
    outcomes: list[Outcome] = []
    for seed in seeds:
        outcome = run(Settings.choose(seed, given.nodes))
        outcomes.append(outcome)
        if outcome.problems or (given.seed is None and time.monotonic() >= until):
            break
    _report(outcomes)
    failed = outcomes[-1]
    if not failed.problems:
        return 0
    sys.stdout.write(f"\nSeed {failed.settings.seed} breaks a promise, with {failed.settings}:\n")
    for problem in failed.problems[:10]:
        sys.stdout.write(f"  - {problem}\n")
    nodes = "" if given.nodes is None else f" --nodes {given.nodes}"
    sys.stdout.write(f"\nTo run it again: python -m tests.churn --seed {failed.settings.seed}{nodes}\n")
    return 1


def _report(outcomes: list[Outcome]) -> None:
    events: Counter[str] = sum((one.events for one in outcomes), Counter())
    sys.stdout.write(
        f"{len(outcomes)} seeds, {sum(one.calls for one in outcomes):,} calls,"
        f" {sum(one.views for one in outcomes):,} views\n"
        f"events: {', '.join(f'{name} {count}' for name, count in events.most_common())}\n"
    )
    by_size: dict[int, list[Outcome]] = {}
    for one in outcomes:
        by_size.setdefault(one.settings.nodes, []).append(one)
    for nodes, some in sorted(by_size.items()):
        moved, balance, usable = (
            statistics.median(getattr(one, name) for one in some) for name in ("moved", "balance", "usable")
        )
        sys.stdout.write(
            f"{nodes} servers at first: {len(some)} seeds, to one more moved {moved:.2f} of its share of"
            f" {some[0].settings.keys} keys, most keys {balance:.2f} of a node's share,"
            f" usable prefix after a loss {usable:.2f} (medians)\n"
        )


if __name__ == "__main__":
    sys.exit(main())
