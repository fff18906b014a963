"""Many seeds, on all cores, until all have run, the time is over or one fails.

Each worker is a process of its own that runs one seed after the other; none shares
anything with another. Seeds are taken in order, so that the same commit meets the same
seeds.
"""

import gc
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice

import attrs

from tests.simulation.scenario import Scenario
from tests.simulation.trial import Trial, try_scenario

__all__ = ["Tally", "run_many"]

_SEEDS_AT_A_TIME = 4


@attrs.define
class Tally:
    """What the seeds came to."""

    seeds: int = 0
    calls: int = 0
    key_operations: int = 0
    cpu_s: float = 0.0
    virtual_s: float = 0.0
    faults: Counter[str] = attrs.field(factory=Counter)
    points: Counter[str] = attrs.field(factory=Counter)
    failed: Trial | None = None
    """The first trial that failed, by seed."""

    def add(self, trial: Trial) -> None:
        """Count one more."""
        self.seeds += 1
        self.calls += trial.calls
        self.key_operations += trial.key_operations
        self.cpu_s += trial.cpu_s
        self.virtual_s += trial.virtual_s
        self.faults += trial.faults
        self.points += trial.points
        if trial.problems and (self.failed is None or trial.scenario.seed < self.failed.scenario.seed):
            self.failed = trial


def run_many(seeds: Iterator[int], is_over: Callable[[Tally], bool], on_progress: Callable[[Tally], object]) -> Tally:
    """Run seeds until there are no more, it is over, or one has failed."""
    tally = Tally()
    workers = os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin) as pool:
        waiting: set[Future[list[Trial]]] = set()
        while not is_over(tally) and tally.failed is None:
            while len(waiting) < 2 * workers and (some := list(islice(seeds, _SEEDS_AT_A_TIME))):
                waiting.add(pool.submit(_run_seeds, some))
            if not waiting:
                break
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                for trial in future.result():
                    tally.add(trial)
            on_progress(tally)
        pool.shutdown(wait=True, cancel_futures=True)
    return tally


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent's
    gc.freeze()  # so that no run has what was imported collected


def _run_seeds(seeds: list[int]) -> list[Trial]:
    return [try_scenario(Scenario.from_seed(seed)) for seed in seeds]
