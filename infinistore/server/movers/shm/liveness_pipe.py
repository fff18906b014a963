"""What tells clients on this host that the server has ended, however it ended.

They have the pool mapped, and its memory goes back to the machine only when they unmap
it, too. An idle client sends no request, so no reply tells it. But it can wait for a
pipe that nobody writes to: the kernel closes the server's end with the process.
"""

import os

__all__ = ["LivenessPipe"]


class LivenessPipe:
    """The pipe, until `close`. OSError: there are no descriptors for it."""

    def __init__(self) -> None:
        self._clients_end, self._own_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closed = False

    def share(self) -> int:
        """Return the descriptor of the clients' end, which the pipe closes."""
        return self._clients_end

    def close(self) -> None:
        """Hang up. Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self._clients_end)
            os.close(self._own_end)
