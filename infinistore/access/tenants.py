"""The tenants of a server, as its tenants file describes them."""

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from infinistore.access.identity import DEFAULT_ROLES, Role
from infinistore.tenant_limits import TenantLimits

__all__ = ["MOST_TOKENS", "Tenant", "Tenants"]

MOST_TOKENS = 2
"""How many tokens of a tenant can be live: the new one, and the one that it replaces.
"""


@attrs.frozen
class Tenant:
    """One tenant."""

    limits: TenantLimits
    """What it may take. `limits.tenant` is its id."""
    digests: tuple[str, ...] = ()
    """The hashes of its live tokens, the oldest first: see `access.tokens.digest_of`.
    """
    roles: frozenset[Role] = DEFAULT_ROLES
    operator: bool = False
    """Whether its roles monitor and admin are for the whole server, by the management
    API.
    """
    certificates: tuple[str, ...] = ()
    """The names in client certificates that stand for it: `DNS:worker.example`."""
    uids: tuple[int, ...] = ()
    """The users of this machine that are this tenant when they connect to the Unix
    socket.
    """
    require_tls: bool = False
    """Whether what it says and gets must be encrypted wherever it leaves the machine.
    """

    @property
    def id(self) -> str:
        """Its name."""
        return self.limits.tenant


def _frozen(given: Mapping[str, object]) -> Mapping[str, object]:
    return MappingProxyType(dict(given))


@attrs.frozen
class Tenants:
    """All tenants of a server, by their ids. No two of them have a proof in common."""

    tenants: Mapping[str, Tenant] = attrs.field(factory=dict, converter=_frozen)
    groups: Mapping[str, int] = attrs.field(factory=dict, converter=_frozen)
    """The trust groups that the file names, and how many bytes the pool of each has."""
    by_certificate: Mapping[str, str] = attrs.field(init=False)
    """The id of a tenant by a name in certificates."""
    by_uid: Mapping[int, str] = attrs.field(init=False)
    """The id of a tenant by a user of this machine."""

    @by_certificate.default
    def _by_certificate(self) -> Mapping[str, str]:
        return {name: tenant.id for tenant in self.tenants.values() for name in tenant.certificates}

    @by_uid.default
    def _by_uid(self) -> Mapping[int, str]:
        return {uid: tenant.id for tenant in self.tenants.values() for uid in tenant.uids}

    @property
    def demanding(self) -> bool:
        """Whether a tenant demands TLS."""
        return any(tenant.require_tls for tenant in self.tenants.values())

    @property
    def limits(self) -> list[TenantLimits]:
        """The limits of each tenant."""
        return [tenant.limits for tenant in self.tenants.values()]
