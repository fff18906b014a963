"""A late part against the other copies of its blocks, under asyncio."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from infinistore.client.connection.effects import Outcome, Part
from infinistore.kept_errors import KeptError

__all__ = ["asyncio_race"]


async def asyncio_race(
    part: Part,
    carry_out: Callable[[Part], Awaitable[Outcome]],
    at_once: Callable[[Sequence[Part]], Awaitable[list[Outcome]]],
) -> Outcome:
    """Carry out a part that has a hedge. Nothing of it runs on afterwards."""
    hedge = part.hedge
    assert hedge is not None
    loop = asyncio.get_running_loop()
    waiting = asyncio.timeout(None)
    asking: list[asyncio.Task[list[Outcome]]] = []

    async def ask(late: Sequence[Part]) -> list[Outcome]:
        found = await at_once(late)
        if hedge.is_full(found) and not over:
            waiting.reschedule(loop.time())
        return found

    def begin() -> None:
        if late := hedge.begin():
            asking.append(loop.create_task(ask(late)))

    over = False
    first: Outcome | None = None
    timer = loop.call_later(hedge.after_s, begin)
    try:
        try:
            async with waiting:
                try:
                    first = await carry_out(part)
                finally:
                    over = True
        except TimeoutError:
            if not waiting.expired():
                raise
        timer.cancel()
        late = asking[0] if asking else None
        others = None
        if late is not None and (late.done() or isinstance(first, KeptError)):
            others = await late
    finally:
        timer.cancel()
        for task in asking:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # which is raised where its answer is wanted
    return hedge.settle(first, others)
