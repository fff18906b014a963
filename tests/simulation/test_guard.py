"""Nothing inside of a simulation can ask for time, chance or threads of the process."""

import os
import random
import secrets
import sys
import threading
import time
import uuid
from typing import Any

import attrs
import pytest
import trio

from tests.simulation.guard import guarded
from tests.simulation.scenario import Scenario
from tests.simulation.simulate import simulate

CLOCKS_AND_CHANCE = {
    time.time, time.time_ns, time.monotonic, time.monotonic_ns, time.perf_counter, time.perf_counter_ns, time.sleep,
    os.urandom, os.getrandom,
}  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (time, "monotonic"),
        (time, "perf_counter"),
        (random, "random"),
        (random, "Random"),
        (secrets, "token_hex"),
        (os, "urandom"),
        (uuid, "uuid4"),
        (threading.Thread, "start"),
        (trio.to_thread, "run_sync"),
    ],
)
def test_what_differs_between_runs_is_refused(owner: Any, name: str) -> None:
    with guarded(random.Random(1)), pytest.raises(RuntimeError, match="inside of a simulation"):
        getattr(owner, name)()
    assert random.Random(7).random() == random.Random(7).random()


def test_no_clock_or_chance_of_the_system_is_used_by_whatever_name() -> None:
    """A name that was bound before the run, such as the default of an argument, cannot
    be refused.
    """
    used: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if (
            event == "c_call" and argument in CLOCKS_AND_CHANCE and frame.f_code.co_name != "gc_callback"
        ):  # Hypothesis's
            used.add(f"{argument.__name__} in {frame.f_code.co_qualname}")

    scenario = Scenario.from_seed(5)
    scenario = attrs.evolve(scenario, workload=attrs.evolve(scenario.workload, operations=30))
    sys.setprofile(note)
    try:
        simulate(scenario)
    finally:
        sys.setprofile(None)
    assert not used
