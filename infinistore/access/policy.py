"""Decides who somebody is.

A server without a tenants file has one tenant, and perhaps one token. With one, a
tenant is proven by a token, else by a client certificate, else by the user at the other
end of the Unix socket. A token that is given decides alone: if it is wrong, nothing
else counts. Nothing that a client calls itself counts at all.

A stranger cannot tell a token that is wrong from one of a tenant that does not exist,
neither by the answer nor by the time that it takes.
"""

import hmac
from collections.abc import Callable
from typing import Final, Protocol

import attrs

from infinistore.access.audit import Audit
from infinistore.access.identity import DEFAULT_IDENTITY, DEFAULT_TENANT, Credentials, Identity, Proof
from infinistore.access.tenants import MOST_TOKENS, SUCCESSOR, Tenant, Tenants, digest_of, tenant_of
from infinistore.errors import AuthenticationFailed, PermissionDenied
from infinistore.tenant_limits import TenantLimits

_NO_DIGESTS: Final = (digest_of(""),) * MOST_TOKENS
"""What no token has: the empty one is none."""
_WRONG: Final = (
    "the token given is none of this server's: it is wrong, was revoked, or its tenant was removed; ask for a new one "
    "(infinistore tenant rotate)"
)
_REMEDY: Final = "give the token of a tenant"
_MOST_NAMES: Final = 5
_NO_SUCCESSOR: Final = (
    "--take-over: only a process on the server's Unix socket may take its place, and only of the server's user; start "
    "it as that user"
)
_SUCCESSOR: Final = Identity(DEFAULT_TENANT, frozenset(), TenantLimits(DEFAULT_TENANT), Proof.SUCCESSOR)


class Policy(Protocol):
    """Says who somebody is."""

    @property
    def audit(self) -> Audit:
        """Where it is noted who came."""

    @property
    def wants_token(self) -> bool:
        """Whether the management API needs a token."""

    @property
    def looks_beyond_token(self) -> bool:
        """Whether certificates and users matter: else nobody has to look at them."""

    def identify(self, presented: Credentials) -> Identity:
        """Return who presents this.

        Raises:
            AuthenticationFailed: nobody that is known here.
            PermissionDenied: somebody who must not come over this connection.
        """

    def renew(self, identity: Identity) -> Identity | None:
        """Return who somebody is by now that was identified earlier; None if what
        proved it proves nothing any more.
        """


@attrs.frozen
class OneTenant:
    """The policy of a server without tenants. `token` is empty if none is needed."""

    token: str = attrs.field(default="", repr=False)
    audit: Audit = attrs.field(factory=Audit, eq=False, repr=False)
    looks_beyond_token = False

    @property
    def wants_token(self) -> bool:
        """Whether it has one."""
        return bool(self.token)

    def identify(self, presented: Credentials) -> Identity:
        """Compare the token."""
        if not self.token:
            return DEFAULT_IDENTITY
        if not _equal(self.token, presented.token):
            problem = "the token given is wrong" if presented.token else "this server wants a token, and none was given"
            raise AuthenticationFailed(f"{problem}; the right one is in the file of the server's --token-file")
        return attrs.evolve(DEFAULT_IDENTITY, proof=Proof.TOKEN)

    def renew(self, identity: Identity) -> Identity | None:
        """Nothing changes while the server runs."""
        return identity


@attrs.frozen
class TenantChanges:
    """How two sets of tenants differ, by ids."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


class TenantPolicy:
    """The policy of a server with tenants, which can be replaced while it runs. Only a
    process of the user `own_uid` may take the server's place."""

    wants_token = True

    def __init__(self, tenants: Tenants, audit: Audit | None = None, own_uid: int | None = None) -> None:
        self.tenants = tenants
        self.audit = audit or Audit()
        self._own_uid = own_uid
        self.on_change: list[Callable[[Tenants], None]] = []
        """Called with the new tenants after each `replace`."""

    @property
    def looks_beyond_token(self) -> bool:
        """Whether a tenant is named by certificates or users."""
        return bool(self.tenants.by_certificate or self.tenants.by_uid)

    def identify(self, presented: Credentials) -> Identity:
        """Find the tenant of a token, a certificate or a user, in this order.

        Raises:
            AuthenticationFailed: there is none.
            PermissionDenied: it must not come over this connection.
        """
        found = attrs.evolve(self._identify(presented), private=presented.private)
        if found.require_tls and not found.private:
            raise PermissionDenied(
                f"tenant {found.tenant} must come over TLS (require_tls in the tenants file), and this connection has "
                "none: connect with infinistores://HOST:PORT?ca=FILE, for which the server needs --tls-cert, or on its "
                "machine by its Unix socket"
            )
        return found

    def _identify(self, presented: Credentials) -> Identity:
        if presented.token == SUCCESSOR:
            if presented.uid is None or presented.uid != self._own_uid:
                raise AuthenticationFailed(_NO_SUCCESSOR)
            return _SUCCESSOR
        if presented.token:
            return self._by_token(presented.token)
        named = {name: self.tenants.by_certificate.get(name) for name in presented.certificate}
        found = {tenant: name for name, tenant in named.items() if tenant is not None}
        if len(found) > 1:
            raise AuthenticationFailed(
                f"the certificate given stands for {len(found)} tenants of this server; use one for each, or a token"
            )
        for tenant, name in found.items():
            return _identity(self.tenants.tenants[tenant], Proof.CERTIFICATE, name)
        owner = None if presented.uid is None else self.tenants.by_uid.get(presented.uid)
        if owner is not None:
            return _identity(self.tenants.tenants[owner], Proof.UNIX_USER, str(presented.uid))
        raise AuthenticationFailed(_unknown(presented))

    def renew(self, identity: Identity) -> Identity | None:
        """Look whether what proved somebody is still in the file, for the same
        tenant.
        """
        if identity.proof is Proof.SUCCESSOR:
            return identity
        tenant = self.tenants.tenants.get(identity.tenant)
        if tenant is None:
            return None
        still_there: bool
        if identity.proof is Proof.TOKEN:
            still_there = identity.evidence in tenant.digests
        elif identity.proof is Proof.CERTIFICATE:
            still_there = identity.evidence in tenant.certificates
        else:
            still_there = identity.evidence in map(str, tenant.uids)
        if not still_there or (tenant.require_tls and not identity.private):
            return None
        return attrs.evolve(_identity(tenant, identity.proof, identity.evidence), private=identity.private)

    def replace(self, tenants: Tenants) -> TenantChanges:
        """Decide by these tenants from now on, and return what is different."""
        before, self.tenants = self.tenants.tenants, tenants
        now = tenants.tenants
        for listener in self.on_change:
            listener(tenants)
        return TenantChanges(
            added=tuple(sorted(now.keys() - before.keys())),
            removed=tuple(sorted(before.keys() - now.keys())),
            changed=tuple(sorted(name for name in now.keys() & before.keys() if now[name] != before[name])),
        )

    def _by_token(self, token: str) -> Identity:
        digest = digest_of(token)
        tenant = self.tenants.tenants.get(tenant_of(token))
        live = () if tenant is None else tenant.digests
        compared = (*live, *_NO_DIGESTS)[:MOST_TOKENS]  # as many, whoever it is
        matches = [hmac.compare_digest(one, digest) for one in compared]
        if tenant is None or not any(matches):
            raise AuthenticationFailed(_WRONG)
        return _identity(tenant, Proof.TOKEN, digest)


def _identity(tenant: Tenant, proof: Proof, evidence: str) -> Identity:
    return Identity(
        tenant.id, tenant.roles, tenant.limits, proof, tenant.operator, evidence, require_tls=tenant.require_tls
    )


def _unknown(presented: Credentials) -> str:
    """Say what was presented and proves nobody: whoever reads this has it himself."""
    if presented.certificate:
        names = ", ".join(presented.certificate[:_MOST_NAMES])
        return f"this server has tenants, and the certificate given ({names:.200}) is that of none; {_REMEDY}"
    if presented.uid is not None:
        return f"this server has tenants, and user {presented.uid} of its machine is none; {_REMEDY}"
    return f"this server has tenants, and nothing says which one this is; {_REMEDY}"


def _equal(right: str, given: str) -> bool:
    return hmac.compare_digest(right.encode(), given.encode("utf-8", "surrogatepass"))
