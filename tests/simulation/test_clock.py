"""Virtual time."""

import trio

from tests.simulation.clock import VirtualClock


def test_a_wait_that_is_lost_in_rounding_comes_to_an_end() -> None:
    async def wait() -> None:
        await trio.sleep(1000.0)
        while trio.current_time() == 1000.0:
            with trio.move_on_after(1e-20):
                await trio.sleep_forever()

    clock = VirtualClock()
    trio.run(wait, clock=clock)
    assert 1000.0 < clock.now < 1000.001
