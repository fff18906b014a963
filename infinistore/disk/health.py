"""The health of one disk: what its errors mean for it. The log has what it becomes.

A single error costs what it hit. Repeated ones make a disk read-only, then turn it off;
so does at once what cannot pass, such as a device that is gone. It stays so until the
store is opened again, because somebody has to look at it: `alarm` says so.
"""

import errno
import logging
from collections import deque
from typing import Final, Literal, TypeAlias

__all__ = ["DiskState", "Health"]

_log: Final = logging.getLogger("infinistore.disk")

DiskState: TypeAlias = Literal["healthy", "read-only", "off"]

_WINDOW_S = 60.0
_MOST_WRITE_ERRORS = 3
_MOST_READ_ERRORS = 8
_MOST_HANGS = 3
_GONE = {errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN}
_REMOVED = {errno.ENOENT, errno.ESTALE}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_FAULT = {*_FULL, errno.ENOMEM}
_LOOK = "check it, replace it if need be"


class Health:
    """Counts the errors of one disk, which the log calls by its name."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self.state: DiskState = "healthy"
        self.alarm = ""
        """Why the state is not healthy, or the disk has less room than it was given,
        and what to do; else empty."""
        self.read_errors = 0
        self.write_errors = 0
        self._recent: dict[str, deque[float]] = {kind: deque() for kind in ("read", "write", "hang")}

    def read_failed(self, code: int, now: float) -> None:
        """Note a read that ended with this errno."""
        self.read_errors += 1
        if code in _GONE:
            self._become("off", f"its device is gone ({errno.errorcode[code]})")
        elif self._often("read", _MOST_READ_ERRORS, now):
            self._become("off", f"{_MOST_READ_ERRORS} reads failed within {_WINDOW_S:g} s")

    def write_failed(self, code: int, now: float) -> None:
        """Note a batch that was lost because of this errno."""
        self.write_errors += 1
        if code in _GONE:
            self._become("off", f"its device is gone ({errno.errorcode[code]})")
        elif code == errno.EROFS:
            self._become("read-only", "its file system is read-only")
        elif code in _REMOVED:
            self._become("read-only", "its files were removed from its folder")
        elif code not in _NO_FAULT and self._often("write", _MOST_WRITE_ERRORS, now):
            self._become("read-only", f"{_MOST_WRITE_ERRORS} batches could not be written within {_WINDOW_S:g} s")

    def refused(self, code: int) -> None:
        """Note that a volume stopped to write because of this errno."""
        if code in _FULL:
            self._become("read-only", f"its file system is full ({errno.errorcode[code]})", "free some room")
        else:
            self._become("read-only", f"it refused to be written ({errno.errorcode.get(code, code)})")

    def shrank(self, code: int) -> None:
        """Note that the disk gave no room for another segment."""
        if self.state == "healthy":
            name = errno.errorcode.get(code, code)
            why = f"its file system is full ({name}); free some room" if code in _FULL else f"it gave no more ({name})"
            self._alarm("the disk has less room than it was given", f"{why}, and start the store again to get the rest")

    def hung(self, now: float) -> None:
        """Note a time at which jobs hang."""
        if self._often("hang", _MOST_HANGS, now):
            self._become("off", f"it hung {_MOST_HANGS} times within {_WINDOW_S:g} s")

    def failed(self, error: Exception) -> None:
        """Note an error of the store itself."""
        self._become("off", f"an internal error ({type(error).__name__}: {error}), which the log has")

    def _often(self, kind: str, most: int, now: float) -> bool:
        recent = self._recent[kind]
        recent.append(now)
        while recent[0] < now - _WINDOW_S:
            recent.popleft()
        return len(recent) >= most

    def _become(self, state: DiskState, why: str, remedy: str = _LOOK) -> None:
        order = ("healthy", "read-only", "off")
        if order.index(state) > order.index(self.state):
            self.state = state
            self._alarm(f"the disk is {state}", f"{why}; {remedy}, and start the store again")

    def _alarm(self, what: str, why: str) -> None:
        self.alarm = f"{what}: {why}"
        _log.warning(what, extra={"disk": self._name, "problem": why})
