"""How long a test may take: what is stuck fails, and then ends.

pytest-timeout raises an error in a test that takes longer than its limit. That is not
enough. The error can be raised inside `infinistore.cli.failures.answered`, which
answers for every error, so that the test goes on; and once a test has failed, its
fixtures may take for ever. Here the clock runs until the whole test is over. `GRACE_S`
after its error the process ends, with the stack of each thread. pytest-xdist then names
the test, and starts another process for the rest.

A test that works on a machine that is busy with other things is not stuck. So what
counts is processor time, that of the processes it started included; and a test that
used none of it, while the clock ran once, waits for something that does not come. At
the latest, it fails when the clock has run ten times.
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

__all__ = ["GRACE_S", "Limits", "descendants", "fields_of", "used_s"]

GRACE_S: Final = 60.0
"""What a test has, after the error, to clean up; and a process, to end."""
_AT_WORK: Final = 0.02
"""The share of a processor below which a process only waits."""
_MOST_ROUNDS: Final = 10


def descendants(pid: int) -> Iterator[int]:
    """The processes that this one has started, and those that they have."""
    with suppress(OSError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from descendants(child)


def fields_of(pid: int) -> list[int]:
    """What /proc/PID/stat has after the state of a process, each a number; OSError if
    it has just ended.
    """
    return [*map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1:])]


def used_s() -> float:
    """Return the processor time of this process and of those that it has started."""
    used = sum(os.times()[:4])
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            used += sum(fields_of(pid)[10:14]) / os.sysconf("SC_CLK_TCK")
    return used


class Limits:
    """A plugin of pytest, in place of the timer of pytest-timeout."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._stderr = os.dup(2)  # which pytest captures

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, settings: Any) -> bool:
        """Start the clock of a test."""
        limit_s: float = settings.timeout
        is_over = False
        seen = began = used_s()
        rounds = 0

        def ring(number: int, frame: FrameType | None) -> None:
            nonlocal is_over, seen, rounds
            before, seen, rounds = seen, used_s(), rounds + 1
            at_work = seen - before > _AT_WORK * limit_s
            if not is_over and at_work and rounds < _MOST_ROUNDS and seen - began < limit_s:
                signal.setitimer(signal.ITIMER_REAL, limit_s, self._grace_s)
                return
            faulthandler.dump_traceback(self._stderr)
            if is_over:
                os._exit(1)
            is_over = True
            pytest.fail(f"took more than {limit_s:g} s")

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, limit_s, self._grace_s)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self) -> bool:
        """Go on: pytest-timeout asks for this as soon as a test fails."""
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Stop the clock when all is over."""
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def pytest_enter_pdb(self) -> None:
        """Let somebody look."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """See that this process ends, and that what it has to say is read before."""
        sys.stdout.flush()
        faulthandler.dump_traceback_later(self._grace_s, exit=True, file=self._stderr)
