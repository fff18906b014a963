"""The sessions of a server: those that are open, and what the earlier ones moved.

With tenants, half of the places are divided among them, and each tenant's share, at
least one place, is kept for it. The rest is for whoever comes first. So no tenant can
take all places.
"""

from collections import Counter
from collections.abc import Iterator

import attrs

from infinistore.errors import LimitExceeded
from infinistore.server.connection import Traffic
from infinistore.server.session.session import Session
from infinistore.statistics import ClientStatistics
from infinistore.tenant_limits import TenantLimits

__all__ = ["SessionRegistry"]


class SessionRegistry:
    """Knows every open session. At most `most` are open; `advice` ends the refusal of
    the next one.
    """

    def __init__(self, most: int, advice: str) -> None:
        self.most = most
        self._advice = advice
        self._open: dict[Session, None] = {}  # a set, in the order in which they came
        self._of_tenants: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()  # requests of sessions that are over, and connections, by tenant
        self._past = Traffic()
        self.refused = 0
        """How many connections were refused because the server had its most."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the sessions that are open now."""
        return iter(list(self._open))

    def check_free(self, limits: TenantLimits, tenants: int = 1) -> None:
        """Count a refusal if there is no place for another session of the tenant with
        these limits, one of so many.

        Raises:
            LimitExceeded: the server, or the tenant, has its most.
        """
        try:
            if len(self._open) >= self.most:
                raise LimitExceeded(f"the server has its {self.most} connections; {self._advice}")
            self._check_share(limits, tenants)
        except LimitExceeded:
            self.refused += 1
            self._refused[limits.tenant] += 1
            raise

    def _check_share(self, limits: TenantLimits, tenants: int) -> None:
        has, most = self._of_tenants[limits.tenant], limits.max_connections
        if most is not None and has >= most:
            raise LimitExceeded(
                f"tenant {limits.tenant!r} has its max_connections={most} connections; close some, or raise "
                "max_connections in the tenants file"
            )
        share = max(1, self.most // 2 // max(1, tenants))
        if tenants > 1 and has >= share:
            kept = share * tenants - sum(min(share, one) for one in self._of_tenants.values())
            if len(self._open) + kept >= self.most:
                raise LimitExceeded(
                    f"tenant {limits.tenant!r} has {has} of the server's {self.most} connections, and the {kept} that "
                    f"are left are kept for other tenants; {self._advice}"
                )

    def add(self, session: Session) -> None:
        """Note that a session has begun."""
        self._open[session] = None
        self._of_tenants[session.identity.tenant] += 1

    def remove(self, session: Session) -> None:
        """Note that a session is over."""
        del self._open[session]
        tenant = session.identity.tenant
        self._of_tenants[tenant] -= 1
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]
        self._refused[tenant] += session.traffic.errors
        self._past.add(session.traffic)

    def of_tenants(self) -> tuple[Counter[str], Counter[str]]:
        """Return how many connections each tenant has open, and how many connections
        and requests of it were refused.
        """
        refused = self._refused.copy()
        for session in self._open:
            refused[session.identity.tenant] += session.traffic.errors
        return self._of_tenants.copy(), refused

    def traffic(self) -> Traffic:
        """What all sessions have moved so far."""
        total = attrs.evolve(self._past)
        for session in self._open:
            total.add(session.traffic)
        return total

    def statistics(self) -> Iterator[ClientStatistics]:
        """The figures of each open session."""
        return (session.statistics() for session in self)
