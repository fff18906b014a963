"""How a server that is told to stop before it serves ends: at once, and in good order.

Once it serves, it takes the signals itself, and drains.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from infinistore.cli.failures import innermost

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["stopped_by_sigterm"]

_END_S: Final = 3.0
"""What a start has to end in good order. A thread that takes a large pool does not
listen; then the process ends without.
"""


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """End what runs inside at SIGTERM as Ctrl-C does, but without an error.

    Main thread only. What takes the signal itself, as a server that serves, is left
    alone.
    """
    told: list[int] = []

    def stop(number: int, frame: "FrameType | None") -> None:
        if not told:
            last = threading.Timer(_END_S, os._exit, [0])
            last.daemon = True
            last.start()
        told.append(number)
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt):
            interrupt(signal.SIGINT, frame)  # of Trio, while it runs: it knows where it may raise

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; a server that serves takes it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException as error:
        if not (told and isinstance(innermost(error), KeyboardInterrupt)):
            raise
