"""Starts threads, which the system may refuse because of its limits.

A refusal is a regular error of a call instead of Python's RuntimeError. A caller that
can do without the thread catches it.
"""

import threading

from infinistore.errors import StoreUnavailable

__all__ = ["NO_THREAD", "no_thread", "start_thread"]

NO_THREAD = (RuntimeError, MemoryError)
"""What Python raises if the system refuses a thread."""


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        StoreUnavailable: the system refused it.
    """
    try:
        thread.start()
    except NO_THREAD as error:
        raise no_thread(error) from error


def no_thread(error: Exception) -> StoreUnavailable:
    """Return the error for a thread that the system refused with one of `NO_THREAD`."""
    return StoreUnavailable(f"this process gets no more threads: {error}")
