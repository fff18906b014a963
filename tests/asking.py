"""Waiting for what nobody tells: it is asked for again and again, in one place."""

import time
from collections.abc import Callable

__all__ = ["until"]


def until(holds: Callable[[], bool]) -> None:
    """Ask until this holds. The time that a test may take is the limit."""
    while not holds():
        time.sleep(0.01)  # real time: a pause between two questions, however long
