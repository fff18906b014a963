"""The sessions of a server: those that are open, and what the earlier ones moved."""

from collections.abc import Iterator

import attrs

from infinistore.errors import LimitExceeded
from infinistore.server.connection.conversation import Traffic
from infinistore.server.session.session import Session
from infinistore.statistics import ClientStatistics

__all__ = ["SessionRegistry"]


class SessionRegistry:
    """Knows every open session. At most `most` are open; `advice` ends the refusal of
    the next one.
    """

    def __init__(self, most: int, advice: str) -> None:
        self.most = most
        self._advice = advice
        self._open: dict[Session, None] = {}  # a set, in the order in which they came
        self._past = Traffic()
        self.refused = 0
        """How many connections were refused because the server had its most."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the sessions that are open now."""
        return iter(list(self._open))

    def check_free(self) -> None:
        """Count a refusal if there is no place for another session.

        Raises:
            LimitExceeded: the server has its most.
        """
        if len(self._open) >= self.most:
            self.refused += 1
            raise LimitExceeded(f"the server has its {self.most} connections; {self._advice}")

    def add(self, session: Session) -> None:
        """Note that a session has begun."""
        self._open[session] = None

    def remove(self, session: Session) -> None:
        """Note that a session is over."""
        self._open.pop(session, None)
        self._past.add(session.traffic)

    def traffic(self) -> Traffic:
        """What all sessions have moved so far."""
        total = attrs.evolve(self._past)
        for session in self._open:
            total.add(session.traffic)
        return total

    def statistics(self) -> Iterator[ClientStatistics]:
        """The figures of each open session."""
        return (session.statistics() for session in self)
