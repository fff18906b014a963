"""The tenants of a server, as its tenants file describes them, and their tokens:
`ID.SECRET`, where SECRET has 256 random bits.

A server stores only the SHA-256 of a token. That suffices because nobody can guess 256
random bits: a slow hash, as for passwords, would cost every connection and add nothing.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import attrs

from infinistore.access.identity import DEFAULT_ROLES, Role
from infinistore.tenant_limits import TenantLimits, check_tenant_name

_SECRET_BYTES: Final = 32
_DIGEST_PREFIX: Final = "sha256:"
"""What a stored hash begins with."""
SUCCESSOR: Final = ".take-over"
"""What a process presents that takes the server's place: no token of a tenant, which
has a name. It proves nothing; the user of the process has to be the server's."""
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]{20,}")


def make_token(tenant: str, random_bytes: Callable[[int], bytes]) -> str:
    """Return a new token of a tenant. `random_bytes` returns so many unpredictable
    bytes (`os.urandom`).

    Raises:
        ValueError: this cannot be the name of a tenant.
    """
    check_tenant_name(tenant)
    secret = base64.urlsafe_b64encode(random_bytes(_SECRET_BYTES)).rstrip(b"=").decode()
    return f"{tenant}.{secret}"


def tenant_of(token: str) -> str:
    """Return the tenant that a token says it is of."""
    return token.partition(".")[0]


def digest_of(token: str) -> str:
    """Return the hash under which a token is stored: `sha256:` and 64 hex digits."""
    return _DIGEST_PREFIX + hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def read_digest(text: str) -> str | None:
    """Return a stored hash as `digest_of` writes it; None if this is none."""
    return text if _DIGEST.fullmatch(text) else None


def looks_like_token(text: str) -> bool:
    """Whether somebody may have written a token where its hash belongs."""
    return bool(_TOKEN.fullmatch(text))


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
