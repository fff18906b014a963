"""A late part against the other copies of its blocks, under Trio."""

from collections.abc import Awaitable, Callable, Sequence

import trio

from infinistore.client.connection.effects import Outcome, Part
from infinistore.kept_errors import KeptError

__all__ = ["trio_race"]


async def trio_race(
    part: Part,
    carry_out: Callable[[Part], Awaitable[Outcome]],
    at_once: Callable[[Sequence[Part]], Awaitable[list[Outcome]]],
) -> Outcome:
    """Carry out a part that has a hedge. Nothing of it runs on afterwards."""
    hedge = part.hedge
    assert hedge is not None
    first: Outcome | None = None
    others: list[Outcome] | None = None
    unexpected: KeptError | None = None
    asks = False

    async def ask_others() -> None:
        nonlocal asks, others
        await trio.sleep(hedge.after_s)
        if late := hedge.begin():
            asks = True
            others = await at_once(late)
            asks = False
            if hedge.is_full(others):
                waiting.cancel()

    async with trio.open_nursery() as nursery:
        waiting = trio.CancelScope()
        nursery.start_soon(ask_others)
        with waiting:
            try:
                first = await carry_out(part)
            except Exception as error:  # noqa: BLE001 - raised below: the nursery would wrap it in a group
                unexpected = KeptError(error)
        if not (asks and isinstance(first, KeptError)):
            nursery.cancel_scope.cancel()
    if unexpected is not None:
        raise unexpected.again()
    return hedge.settle(first, others)
