"""How fast an engine is, as measured: seconds to compute a prompt, seconds to load one
from the store, and how busy it was lately.

All times are seconds of one clock, which the caller reads. Nothing here is a setting:
the first guess matters only until there are measurements.
"""

import math
from typing import Final

__all__ = ["BusyShare", "LinkRate", "PrefillRate"]

_KEPT_OF_PREFILL: Final = 0.98
"""How much of its weight a measurement keeps when the next one comes: the last 50 count
most.
"""
_FULL_TOKENS: Final = 256
"""Measurements of fewer tokens displace older ones by less."""
_KEPT_OF_LINK: Final = 0.9
"""How much of its weight a measurement keeps when the next one comes, and again for
each second until then: one of eight slow seconds does not outweigh, a minute later, one
that took a tenth of a second.
"""
_MOST_AT_ONCE: Final = 4.0
"""A measurement counts as at most so many times what was expected."""
_SHRINKAGE: Final = 0.005
"""Where all prompts are about as long, they cannot tell `a` from `q`, and noise must
not be taken for attention: `q` is the smaller, the less their positions differ.
"""


class PrefillRate:
    """The seconds that an engine takes to compute tokens `first` to `end` of a prompt.

    Most of the work is the same for each token. Attention adds some for each token
    before it, so that long prompts cost more than their length says:

        seconds = a * (end - first) + q * (end**2 - first**2) / 2

    `a` and `q` are the least-squares fit of what was measured, with weights that make
    the total right (each measurement's error grows with the root of its length). The
    latest 50 measurements count most. A single slow one after the first, such as a step
    in which something was compiled, hardly changes it.
    """

    def __init__(self, tokens_per_s: float) -> None:
        """`tokens_per_s` is a first guess; one measurement outweighs it.

        Raises:
            ValueError: it is not above 0.
        """
        if not 0 < tokens_per_s < math.inf:
            raise ValueError(f"tokens_per_s must be above 0, not {tokens_per_s}")
        self.measured_at: float | None = None
        """When it was last measured; None if it never was."""
        # Sums for the normal equations, with m for the mean position of a measurement:
        # tokens, tokens * m, tokens * m**2, seconds, seconds * m.
        self._sums = [0.0] * 5
        self._add(_FULL_TOKENS, _FULL_TOKENS / 2, _FULL_TOKENS / tokens_per_s)

    def seconds(self, first: int, end: int) -> float:
        """Return how long tokens `first` to `end` take. Tokens before `first` are there
        already.
        """
        return (end - first) * (self._per_token + self._per_token_before * (first + end) / 2)

    def measured(self, first: int, end: int, seconds: float, now: float) -> None:
        """Take into account that tokens `first` to `end` took `seconds`."""
        tokens = end - first
        if tokens <= 0 or seconds <= 0:
            return
        position = (first + end) / 2
        if self.measured_at is None:
            # The guess moves to this position: with two, it would make a slope.
            guess_s = self._sums[3]
            self._sums = [0.0] * 5
            self._add(_FULL_TOKENS, position, guess_s)
        else:
            seconds = min(seconds, _MOST_AT_ONCE * self.seconds(first, end))
            kept = _KEPT_OF_PREFILL ** min(1.0, tokens / _FULL_TOKENS)
            self._sums = [kept * value for value in self._sums]
        self._add(tokens, position, seconds)
        self.measured_at = now

    def _add(self, tokens: int, position: float, seconds: float) -> None:
        for index, value in enumerate((1, position, position * position)):
            self._sums[index] += tokens * value
        self._sums[3] += seconds
        self._sums[4] += seconds * position
        n, m, mm, s, sm = self._sums
        slope = (n * sm - m * s) / (n * mm - m * m + _SHRINKAGE * n * mm)
        self._per_token_before = min(max(0.0, slope), s / m)  # neither factor is below 0
        self._per_token = (s - self._per_token_before * m) / n


class LinkRate:
    """The bytes per second that one engine reads from the store, as measured."""

    def __init__(self, bytes_per_s: float) -> None:
        """`bytes_per_s` is what counts until something was measured.

        Raises:
            ValueError: it is not above 0.
        """
        if not 0 < bytes_per_s < math.inf:
            raise ValueError(f"bytes_per_s must be above 0, not {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        """The latest ten measurements, and those of the last ten seconds, count most,
        each by its duration."""
        self.measured_at: float | None = None
        """When it was last measured; None if it never was."""
        self._bytes = self._seconds = 0.0

    def measured(self, size_bytes: int, seconds: float, now: float) -> None:
        """Take into account that `size_bytes` took `seconds`, with the link in use all
        the time: reads that ran beside each other are one measurement.
        """
        if size_bytes < 0 or seconds <= 0:
            return
        kept = 0.0 if self.measured_at is None else _KEPT_OF_LINK ** (1 + max(0.0, now - self.measured_at))
        self._bytes = self._bytes * kept + size_bytes
        self._seconds = self._seconds * kept + seconds
        self.bytes_per_s = max(1.0, self._bytes / self._seconds)
        self.measured_at = now


class BusyShare:
    """The share of the last minute or so in which an engine computed prompts, 0 to 1.

    Older times count less, by a factor of e for each `window_s`.
    """

    def __init__(self, window_s: float = 60.0) -> None:
        self._window_s = window_s
        self._share = 0.0
        self._until = -math.inf

    def busy(self, began: float, ended: float) -> None:
        """Take into account that the engine computed from `began` to `ended`. Times
        that overlap an earlier call count once.
        """
        self._share = self.at(ended, busy_since=began)
        self._until = max(self._until, ended)

    def at(self, now: float, *, busy_since: float = math.inf) -> float:
        """Return the share at `now`. After the last call the engine was idle until
        `busy_since`, and has computed from then on.
        """
        since = min(max(busy_since, self._until), max(now, self._until))
        share = self._share * math.exp((self._until - since) / self._window_s)
        kept = math.exp(min(0.0, since - now) / self._window_s)
        return share * kept + 1 - kept
