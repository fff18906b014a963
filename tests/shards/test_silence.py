"""When a shard counts as hanging, in a virtual clock: a loop that stands still for the
bound is found, one that is busy for less never, whatever happens to the supervisor.
"""

from math import inf

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from infinistore.server.shards.shard import Silence, beat_of

BOUND_S = 30.0
BEAT_S = beat_of(BOUND_S)


class World:
    """A shard, and the supervisor's count of its silence. Both may begin at any time
    within a beat."""

    def __init__(self) -> None:
        self.silence = Silence(BEAT_S)
        self.busy_from_s = self.busy_to_s = inf
        self.hung_at_s = inf

    async def shard(self, phase_s: float) -> None:
        await trio.sleep(phase_s)
        while True:
            self.silence.heard()
            wakes_s = trio.current_time() + BEAT_S
            if self.busy_from_s <= wakes_s < self.busy_to_s:
                wakes_s = self.busy_to_s
            await trio.sleep_until(wakes_s)

    async def supervisor(self) -> None:
        await self.silence.wait()
        self.hung_at_s = trio.current_time()


def run(*, busy_s: float, phase_s: float, busy_from_s: float, sleeps_s: float = 0) -> World:
    """A shard whose loop stands still for a time. Before that, the machine sleeps."""
    made = World()
    clock = trio.testing.MockClock(autojump_threshold=0)

    async def main() -> None:
        start_s = trio.current_time()
        made.busy_from_s = start_s + busy_from_s + sleeps_s
        made.busy_to_s = made.busy_from_s + busy_s
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.supervisor)
            nursery.start_soon(made.shard, phase_s)
            if sleeps_s:
                await trio.sleep(busy_from_s / 2)
                clock.jump(sleeps_s)
            await trio.sleep_until(made.busy_from_s + 1.5 * BOUND_S)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)
    return made


phases = st.floats(0, BEAT_S, exclude_max=True)
starts = st.floats(BEAT_S, 3 * BEAT_S)


@given(st.floats(0, BOUND_S, exclude_max=True), phases, starts)
def test_a_loop_that_is_busy_for_less_than_the_bound_is_left_alone(busy_s: float, phase_s: float, at_s: float) -> None:
    assert run(busy_s=busy_s, phase_s=phase_s, busy_from_s=at_s).hung_at_s == inf


@given(phases, starts)
def test_a_loop_that_hangs_is_found_in_time(phase_s: float, at_s: float) -> None:
    found = run(busy_s=inf, phase_s=phase_s, busy_from_s=at_s)
    assert BOUND_S <= found.hung_at_s - found.busy_from_s <= 1.5 * BOUND_S


@given(phases, starts, st.floats(BEAT_S, 1e6))
def test_while_the_machine_sleeps_nobody_is_silent(phase_s: float, at_s: float, sleeps_s: float) -> None:
    assert run(busy_s=0, phase_s=phase_s, busy_from_s=at_s, sleeps_s=sleeps_s).hung_at_s == inf


@pytest.mark.parametrize("late_s", [BEAT_S, 10 * BOUND_S])
async def test_a_supervisor_that_is_late_as_often_as_the_shard_blames_nobody(
    autojump_clock: trio.testing.MockClock, late_s: float
) -> None:
    """Both get the processor again and again, and each time too late."""
    silence = Silence(BEAT_S)
    with trio.move_on_after(100 * late_s):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(silence.wait)
            while True:
                silence.heard()
                await trio.sleep(BEAT_S / 2)
                autojump_clock.jump(late_s)
    assert trio.current_time() >= 100 * late_s


async def test_before_its_first_sign_a_process_is_not_silent(autojump_clock: trio.testing.MockClock) -> None:
    silence = Silence(BEAT_S)
    with trio.move_on_after(100 * BOUND_S) as waited:
        await silence.wait()
    assert waited.cancelled_caught
