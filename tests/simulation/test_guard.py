"""Nothing inside of a simulation can ask for time, chance or threads of the process."""

import _random
import _thread
import datetime
import os
import random
import secrets
import sys
import threading
import time
import uuid
from operator import attrgetter
from typing import Any, NamedTuple

import pytest
import trio

from tests.simulation.guard import guarded
from tests.simulation.kinds import KINDS
from tests.simulation.scenario import Scenario
from tests.simulation.simulate import Outcome, simulate
from tests.simulation.world import Plug, World

CLOCKS = {
    getattr(time, name)
    for clock in ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
    for name in (clock, f"{clock}_ns")
}
DATES = {datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today, datetime.date.today}
CHANCE = {os.urandom, os.getrandom, random.random, random.getrandbits}
OF_THE_PROCESS = {*CLOCKS, *DATES, *CHANCE, time.sleep, _thread.start_new_thread}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((time, clock.__name__) for clock in sorted(CLOCKS, key=lambda clock: clock.__name__)),
        *((time, name) for name in ("sleep", "localtime", "gmtime", "ctime", "asctime", "strftime")),
        *((datetime, f"datetime.{name}") for name in ("now", "utcnow", "today")),
        (datetime, "date.today"),
        *((random, name) for name in random.__all__ if name != "SystemRandom"),
        *((random.SystemRandom(), name) for name in ("random", "getrandbits", "randbytes")),
        *((secrets, name) for name in secrets.__all__ if name not in ("SystemRandom", "compare_digest")),
        (os, "urandom"),
        (os, "getrandom"),
        (uuid, "uuid1"),
        (uuid, "uuid4"),
        (_thread, "start_new_thread"),
        (threading.Thread, "start"),
        (trio.to_thread, "run_sync"),
    ],
)
def test_what_differs_between_runs_is_refused(owner: Any, name: str) -> None:
    with guarded(random.Random(1)), pytest.raises(RuntimeError, match="inside of a simulation"):
        attrgetter(name)(owner)()
    assert random.Random(7).random() == random.Random(7).random()


def test_what_says_nothing_of_the_process_is_as_it_is_elsewhere() -> None:
    before = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)
    with guarded(random.Random(1)):
        assert isinstance(before, datetime.datetime)
        assert datetime.datetime.fromtimestamp(before.timestamp(), datetime.UTC) == before
        assert isinstance(before.date(), datetime.date)
        assert secrets.compare_digest("a", "a")
        assert uuid.uuid5(uuid.NAMESPACE_DNS, "a").version == 5


class Watched(NamedTuple):
    """A run."""

    outcome: Outcome
    used: set[str]
    """What it has used of the process by names that were bound before it, such as the
    default of an argument. These cannot be refused.
    """


def watch(scenario: Scenario, *plugs: Plug) -> Watched:
    """Run a scenario."""
    used: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event != "c_call" or frame.f_code.co_name == "gc_callback":  # Hypothesis's
            return
        seeds = argument.__name__ == "seed" and isinstance(argument.__self__, _random.Random)
        if argument in OF_THE_PROCESS or (seeds and frame.f_locals["a"] is None):
            used.add(f"{argument.__name__} in {frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        outcome = simulate(scenario, plugs)
    finally:
        sys.setprofile(None)
    return Watched(outcome, used)


def test_what_is_used_by_a_name_that_was_bound_before_the_run_is_seen() -> None:
    class Unguarded(Plug):
        monotonic, now, sample, Random = time.monotonic, datetime.datetime.now, random.sample, random.Random

        def start(self, world: World) -> None:
            """Use what a world must not use."""
            cls = type(self)
            cls.monotonic(), cls.now(), cls.sample(range(9), 3), cls.Random()

    used = watch(Scenario.from_seed(KINDS[0]).shortened(15), Unguarded()).used
    assert used == {"monotonic in start", "now in start", "getrandbits in _randbelow_with_getrandbits", "seed in seed"}
