"""A rate limit for log lines that strangers can cause as often as they like."""

import logging

import trio

__all__ = ["LogBudget"]

_log = logging.getLogger("infinistore.server")
_BURST = 20
_EVERY_S = 1.0


class LogBudget:
    """A token bucket: a burst of lines, then one line per second. A line says how many
    were dropped before it.
    """

    def __init__(self) -> None:
        self._credit = float(_BURST)
        self._counted_at = trio.current_time()
        self._left_out = 0

    def log(self, level: int, message: str, **fields: object) -> None:
        """Write a line, or count it as dropped."""
        now = trio.current_time()
        self._credit = min(_BURST, self._credit + (now - self._counted_at) / _EVERY_S)
        self._counted_at = now
        if self._credit < 1:
            self._left_out += 1
            return
        self._credit -= 1
        _log.log(level, message, extra=fields | ({"left_out": self._left_out} if self._left_out else {}))
        self._left_out = 0
