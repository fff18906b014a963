"""A rate limit for log lines that others can cause as often as they like."""

import logging

import attrs
import trio

__all__ = ["LogBudget"]

_log = logging.getLogger("infinistore.server")
_BURST = 20
_EVERY_S = 1.0


@attrs.define
class _Bucket:
    counted_at: float
    credit: float = _BURST
    left_out: int = 0


class LogBudget:
    """A token bucket for each tenant, and one for strangers: a burst of lines, then one
    line per second. A line says how many were dropped before it.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def log(self, level: int, message: str, *, tenant: str = "", **fields: object) -> None:
        """Write a line that a tenant has caused, or a stranger, or count it as
        dropped."""
        now = trio.current_time()
        bucket = self._buckets.get(tenant)
        if bucket is None:
            bucket = self._buckets[tenant] = _Bucket(now)
        bucket.credit = min(_BURST, bucket.credit + (now - bucket.counted_at) / _EVERY_S)
        bucket.counted_at = now
        if bucket.credit < 1:
            bucket.left_out += 1
            return
        bucket.credit -= 1
        if tenant:
            fields["tenant"] = tenant
        _log.log(level, message, extra=fields | ({"left_out": bucket.left_out} if bucket.left_out else {}))
        bucket.left_out = 0
