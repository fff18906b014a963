"""Simulate servers and clients, with everything that goes wrong, from seeds.

    python -m tests.simulation --seed 7
    python -m tests.simulation --minutes 10 [--first-seed 1]
    python -m tests.simulation --seeds 700 [--first-seed 1]
    python -m tests.simulation --found 3
    python -m tests.simulation --scenario JSON
    python -m tests.simulation --mutants [--first-seed 1]

One seed is run and reported; many are run on all cores until the time is over, or all
of them have run, or one fails. Then it is shrunk, reported, and added to
tests/simulation/found.json, which `make test` replays: commit it with what mends the
fault. `--found` runs one of that file, and `--scenario` one that a report has printed;
these are not shrunk again. Ends with 0 if nothing was found, and with 1 otherwise.
docs/testing.md says what is simulated and what is not.

With `--mutants`, bugs are put into the product, and it ends with 0 if they are found.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from tests.simulation.found import add_found, from_json, load_found
from tests.simulation.many import Tally, run_many
from tests.simulation.points import LEAST_FIRED, SEEDS, seldom_fired
from tests.simulation.report import again, console, counts, failure, summary
from tests.simulation.scenario import Scenario
from tests.simulation.shrink import shrink
from tests.simulation.trial import Trial, try_scenario


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description="Simulate servers and clients, with everything that goes wrong, from seeds.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="run one seed, and say what it came to")
    what.add_argument("--minutes", type=float, help="run seeds on all cores for so long, or until one fails")
    what.add_argument("--seeds", type=int, metavar="N", help="run so many seeds on all cores, or until one fails")
    what.add_argument("--found", type=_found, metavar="N", help="run the Nth scenario of found.json; the first is 1")
    what.add_argument("--scenario", type=from_json, metavar="JSON", help="run a scenario that a report has printed")
    what.add_argument("--mutants", action="store_true", help="see whether bugs are found, a minute of a core each")
    parser.add_argument("--first-seed", type=int, default=1, help="where seeds begin, and what draws mutants (1)")
    given = parser.parse_args()
    if given.mutants:
        return _find_mutants(given.first_seed)
    shrunk = given.found or given.scenario
    if given.minutes is not None:
        seconds, began = given.minutes * 60, time.monotonic()
        tally = _run_many(count(given.first_seed), seconds, lambda _: time.monotonic() - began)
    elif given.seeds is not None:
        seeds = range(given.first_seed, given.first_seed + given.seeds)
        tally = _run_many(iter(seeds), given.seeds, lambda tally: tally.seeds)
    else:
        tally = Tally()
        tally.add(try_scenario(shrunk or Scenario.from_seed(given.seed)))
    out = console()
    out.print(summary(tally))
    out.print(counts("Faults", tally.faults))
    out.print(counts("What the product seldom does", tally.points))
    if tally.failed is not None:
        if shrunk is not None:
            out.print(failure(tally.failed, tally.failed, 0))
        else:
            _report(tally.failed)
        return 1
    seldom = seldom_fired(tally.points, tally.seeds)
    if seldom:
        out.print(f"Fired less than {LEAST_FIRED} times in {SEEDS} seeds: {', '.join(seldom)}", style="bold red")
    return 1 if seldom else 0


def _found(number: str) -> Scenario:
    """Return what has this number in found.json."""
    found = load_found()
    if not number.isdecimal() or not 0 < int(number) <= len(found):
        raise argparse.ArgumentTypeError(f"found.json has the numbers 1 to {len(found)}, and not {number}")
    return found[int(number) - 1][1]


def _run_many(seeds: Iterator[int], total: float, done: Callable[[Tally], float]) -> Tally:
    """Run seeds until there are no more or `done` has reached `total`, behind a bar of
    progress.
    """
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console()) as progress:
        task = progress.add_task("", total=total)

        def show(tally: Tally) -> None:
            text = f"{tally.seeds:,} seeds, {tally.calls:,} calls"
            progress.update(task, completed=done(tally), description=text)

        return run_many(seeds, lambda tally: done(tally) >= total, show)


def _find_mutants(seed: int) -> int:
    """Plant bugs and draw others, and see whether all, or enough of them, are found."""
    from tests.simulation import mutants  # late: mutmut has an environment of its own

    out = console()

    def show(result: mutants.Result) -> None:
        out.print(f"{'found' if result.found else 'NOT FOUND'} after {result.hunt.seconds:.1f} s: {result.name}")

    planted = mutants.run_planted(seed, mutants.MOST_S, show)
    drawn, results = mutants.run_drawn(seed, mutants.MOST_S, show)
    out.print(mutants.table("Planted bugs", planted))
    out.print(mutants.table(f"Mutants drawn by seed {seed}", results))
    out.print(f"Left out of the draw: {drawn.same} that change nothing, {drawn.not_run} in lines that are not run.")
    found = sum(one.found for one in results)
    out.print(
        f"Found {sum(one.found for one in planted)} of {len(planted)} planted, and {found} of {len(results)} drawn."
    )
    return 0 if all(one.found for one in planted) and found >= mutants.LEAST_FOUND else 1


def _report(failed: Trial) -> None:
    """Shrink a scenario that fails, keep it, and say all there is to know."""
    out = console()
    out.print("shrinking what failed...")
    smallest = failed

    def fails(scenario: Scenario) -> bool:
        nonlocal smallest
        trial = try_scenario(scenario)
        if trial.fails_as(failed):
            smallest = trial
            return True
        return False

    _, runs = shrink(failed.scenario, fails)
    number = add_found(smallest.problems[0].strip().splitlines()[-1], smallest.scenario)
    out.print(failure(failed, smallest, runs))
    for line in again(failed.scenario.seed, smallest.scenario, number):
        out.print(Text(line), soft_wrap=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
