"""Virtual time."""

import trio

from tests.simulation.clock import VirtualClock


def test_a_wait_that_is_lost_in_rounding_comes_to_an_end() -> None:
    async def wait() -> float:
        await trio.sleep(1000.0)
        while trio.current_time() == 1000.0:
            with trio.move_on_after(1e-20):
                await trio.sleep_forever()
        return trio.current_time()

    clock = VirtualClock()
    clock.at(2000.0, lambda: None)  # Trio's own tasks wait on
    assert 1000.0 < trio.run(wait, clock=clock) < 1000.001
