"""How a server that is told to stop before it serves ends: at once, and in good order.

Once it serves, it takes the signals itself, and drains.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from infinistore.cli.failures import INTERRUPTED

if TYPE_CHECKING:
    from types import FrameType

    import trio

__all__ = ["ending_at_sigterm", "stop_at_signal"]

_END_S: Final = 3.0
"""What a start has to end in good order. A thread that takes a large pool does not
listen; then the process ends without.
"""


@contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """While nothing runs in Trio, and nothing is held, end this process at SIGTERM
    without an error. Main thread only.
    """

    def end(number: int, frame: "FrameType | None") -> None:
        os._exit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def stop_at_signal(
    starting: "trio.CancelScope", interrupts: list[int], *, task_status: "trio.TaskStatus[None]"
) -> None:
    """Cancel a start at SIGTERM or SIGINT, which is added to `interrupts`. Another
    signal, or a start that does not end in time, ends the process as it is.

    What takes the signals later, as a server that serves, has them.
    """
    import trio

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        number = await anext(signals)
        if number == signal.SIGINT:
            interrupts.append(number)
        starting.cancel()
        with trio.move_on_after(_END_S):
            await anext(signals)
        os._exit(INTERRUPTED if interrupts else 0)
