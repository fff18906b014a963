"""The audit log: events as lines of JSON in a file, and for the logger
`infinistore.audit`, if an application has given it handlers.

No request waits for it, or fails because of it. Lines wait in memory for a thread that
writes them; what finds no place there, or on the disk, is counted, and the count is
written when there is room again. SIGHUP opens the file anew, for programs that rotate
logs.
"""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import trio

from infinistore.access.audit import Audit, Fields
from infinistore.errors import ConfigError
from infinistore.host import NO_THREAD

__all__ = ["AUDIT_LOGGER", "AuditLog"]

_log = logging.getLogger("infinistore.server")
AUDIT_LOGGER: Final = logging.getLogger("infinistore.audit")
"""It passes nothing on to the log of the server: events have their own handlers."""
AUDIT_LOGGER.propagate = False
AUDIT_LOGGER.setLevel(logging.INFO)
_MOST_LINES: Final = 10_000
_SUM_UP_AFTER_S: Final = 10.0
_SLOWEST_WRITE_S: Final = 5.0
_STDERR: Final = 2


class AuditLog(Audit):
    """Writes the events of one server, while `run` runs. `path` is a file, `-` for
    standard error, or None for handlers of the logger alone.
    """

    def __init__(self, path: str | None, now: Callable[[], float] = time.time) -> None:
        """Raises ConfigError if the file cannot be opened."""
        super().__init__(self._take, time.monotonic)
        self._path = path
        self._now = now
        self._lines: deque[bytes] = deque()
        self.writer = trio.CapacityLimiter(1)
        """The one thread that writes. One that hangs takes none from others."""
        self.lost = 0
        self._torn = False
        self._warned = False
        self._something = trio.Event()
        self._suppressed = trio.Event()
        self._descriptor = -1
        if path is not None:
            try:
                self._descriptor = _open(path)
            except OSError as error:
                raise ConfigError(f"--audit-log {path}: {error.strerror}; give a file that can be written") from None

    @property
    def path(self) -> str | None:
        """Where lines are written."""
        return self._path

    async def run(self) -> None:
        """Write what is noted, until cancelled; then what is left, for a moment."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sum_up_now_and_then)
                while True:
                    await self._something.wait()
                    self._something = trio.Event()
                    await self._write_lines()
        finally:
            self.sum_up()
            await self._write_lines()
            self._close()

    @property
    def listens(self) -> bool:
        """Whether there is a file, or a handler of the logger."""
        return self._path is not None or bool(AUDIT_LOGGER.handlers)

    async def reopen(self) -> str:
        """Open the file again: it may have been renamed. Return the problem, if there
        is one; then the open file stays.
        """
        if self._path is None:
            return ""
        try:
            new = _open(self._path)
        except OSError as error:
            problem = f"--audit-log {self._path}: {error.strerror}"
            _log.error("the audit log stays as it was", extra={"problem": problem})
            return problem
        old, self._descriptor = self._descriptor, new
        if old > _STDERR:
            os.close(old)
        return ""

    def _take(self, fields: Fields) -> None:
        if AUDIT_LOGGER.handlers:
            AUDIT_LOGGER.info(fields["event"], extra={"audit": dict(fields)})
        if self._path is None:
            return
        if len(self._lines) >= _MOST_LINES:
            self.lost += 1
            return
        time_ = datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds")
        self._lines.append(json.dumps({"time": time_, **fields}, default=str).encode() + b"\n")
        self._something.set()

    def _left_out(self) -> None:
        self._suppressed.set()

    async def _sum_up_now_and_then(self) -> None:
        while True:
            await self._suppressed.wait()
            await trio.sleep(_SUM_UP_AFTER_S)
            self._suppressed = trio.Event()
            self.sum_up()

    async def _write_lines(self) -> None:
        while self._lines and self._descriptor >= 0:
            lines, self._lines = self._lines, deque()
            lost = self.lost
            if lost:
                lines.appendleft(json.dumps({"event": "lost", "count": lost}).encode() + b"\n")
            waiting = len(lines)
            try:
                if self.writer.borrowed_tokens:
                    raise OSError("an earlier line is still being written")
                descriptor = os.dup(self._descriptor)
                # Even at the end: what is being written comes before what is left.
                with trio.CancelScope(deadline=trio.current_time() + _SLOWEST_WRITE_S, shield=True) as scope:
                    await trio.to_thread.run_sync(
                        self._write_all, descriptor, lines, abandon_on_cancel=True, limiter=self.writer
                    )
                if scope.cancelled_caught:
                    raise OSError("it takes too long")
            except (OSError, *NO_THREAD) as error:
                told = lost if len(lines) < waiting else 0
                self.lost += len(lines) - bool(lost and not told) - told
                if not self._warned:
                    self._warned = True
                    _log.warning("the audit log cannot be written", extra={"problem": str(error)})
                return
            self.lost -= lost
            self._warned = False

    def _write_all(self, descriptor: int, lines: deque[bytes]) -> None:
        """Write lines, and take each from the deque that was written whole."""
        try:
            while lines:
                line = b"\n" + lines[0] if self._torn else lines[0]
                done = os.write(descriptor, line)
                self._torn = done < len(line) and (done > 0 or self._torn)
                if done == len(line):
                    lines.popleft()
        finally:
            os.close(descriptor)

    def _close(self) -> None:
        if self._descriptor > _STDERR:
            os.close(self._descriptor)
        self._descriptor = -1


def _open(path: str) -> int:
    if path == "-":
        return _STDERR
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
