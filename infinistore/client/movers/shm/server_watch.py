"""Learning that a server has ended while nobody asks it anything.

With its arenas the server hands out one end of a pipe that nobody writes to; it keeps
the other end (`server/movers/shm.py`). A thread sleeps until the pipe
hangs up. That serves every kind of client, in or out of an event loop, takes no
connection, and looks at no clock.
"""

import os
import select
import threading
from collections.abc import Callable

from infinistore.host import start_thread

__all__ = ["ServerWatch"]


class ServerWatch:
    """Calls `ended` in its own thread when the server has ended, unless closed before.

    It takes over `lifeline`.

    Raises:
        OSError, StoreUnavailable: no descriptor or no thread is left; the caller keeps
            `lifeline`.
    """

    def __init__(self, lifeline: int, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._lifeline = lifeline
        self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._wait, name="infinistore-watch", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:
            os.close(self._closing)
            raise

    def close(self) -> None:
        """Stop watching; wait for the thread to end unless this is it. Call it once."""
        os.eventfd_write(self._closing, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.let_go()

    def let_go(self) -> None:
        """In a forked child, which lacks the thread: only close the descriptors."""
        os.close(self._lifeline)
        os.close(self._closing)

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._lifeline, 0)  # which is told of hanging up, whatever it asks for
        poll.register(self._closing, select.POLLIN)
        if self._closing not in dict(poll.poll()):
            self._ended()
