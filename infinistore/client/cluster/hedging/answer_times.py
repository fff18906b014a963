"""How long the answers of a node took lately, so that a late one is known as late.

By the size of the request, for a batch of a thousand keys takes longer than one key.
The mean and the mean deviation are those of TCP's retransmission timer (RFC 6298),
which follows a change within a few answers.
"""

from typing import Any, Final

__all__ = ["AnswerTimes"]

_MEAN_GAIN: Final = 1 / 8
_DEVIATION_GAIN: Final = 1 / 4
_DEVIATIONS: Final = 4


class AnswerTimes:
    """Of one node. Any thread may use it; a lost update changes little."""

    def __init__(self) -> None:
        self._known: dict[tuple[type[Any], int], tuple[float, float]] = {}

    def note(self, kind: type[Any], count: int, seconds: float) -> None:
        """Note how long an answer to a request for so many keys took, at least."""
        size = kind, count.bit_length()
        known = self._known.get(size)
        if known is None:
            self._known[size] = seconds, seconds / 2
            return
        mean, deviation = known
        off = seconds - mean
        self._known[size] = mean + _MEAN_GAIN * off, deviation + _DEVIATION_GAIN * (abs(off) - deviation)

    def usual_s(self, kind: type[Any], count: int) -> float:
        """Return the mean time of an answer; 0 if nothing is known."""
        known = self._of(kind, count)
        return 0.0 if known is None else known[0]

    def late_s(self, kind: type[Any], count: int) -> float | None:
        """Return after how long an answer is late; None if nothing is known."""
        known = self._of(kind, count)
        return None if known is None else known[0] + _DEVIATIONS * known[1]

    def _of(self, kind: type[Any], count: int) -> tuple[float, float] | None:
        """Return what is known of requests for so many keys, or of the next larger
        ones, whose answers take longer.
        """
        size = count.bit_length()
        if (known := self._known.get((kind, size))) is not None:
            return known
        larger = [(bits, known) for (one, bits), known in list(self._known.items()) if one is kind and bits > size]
        return min(larger)[1] if larger else None
