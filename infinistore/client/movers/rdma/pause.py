"""Why RDMA is left alone, and for how long: of a device, and of each server."""

from collections.abc import Callable
from typing import Final

from infinistore.transports.rdma.verbs import NoRdma

__all__ = ["RdmaPause"]

FIRST_PAUSE_S: Final = 1.0
"""How long something is left alone after a failure; twice as long after the next."""
_LONGEST_PAUSE_S: Final = 60.0


class RdmaPause:
    """What follows a failure. Any thread may use it: of two failures at the same time,
    one counts.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reason = ""
        self._over_at = 0.0
        self.pause_s = 0.0
        """The pause after the last failure; 0 once it has worked."""

    def begin(self, reason: str) -> None:
        """Note a failure."""
        self._reason = reason
        self.pause_s = min(_LONGEST_PAUSE_S, self.pause_s * 2 or FIRST_PAUSE_S)
        self._over_at = self._clock() + self.pause_s

    def end(self) -> None:
        """Note that it works."""
        self.pause_s = 0.0
        self._reason = ""

    @property
    def resting(self) -> bool:
        """Whether it failed, and is left alone for now."""
        return bool(self._reason) and self._clock() < self._over_at

    def check(self) -> None:
        """Raise NoRdma, with the reason, if it is not the time to try."""
        if self.resting:
            raise NoRdma(f"{self._reason}; tried again in {self._over_at - self._clock():.0f} s")
