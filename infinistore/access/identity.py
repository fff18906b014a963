"""Who somebody is: what a connection presents, and what that proves."""

import enum
from typing import Final

import attrs

from infinistore.access.roles import ALL_ROLES, BLOCK_ROLES, Role, in_words
from infinistore.errors import PermissionDenied
from infinistore.tenant_limits import DEFAULT_GROUP, TenantLimits

__all__ = ["DEFAULT_IDENTITY", "DEFAULT_TENANT", "Credentials", "Identity", "Proof"]

DEFAULT_TENANT: Final = "default"
"""The only tenant of a server without a tenants file."""


class Proof(enum.Enum):
    """How it is known who somebody is."""

    NONE = "none"
    """It is not: the server lets in anybody."""
    TOKEN = "token"
    CERTIFICATE = "certificate"
    UNIX_USER = "unix-user"
    SUCCESSOR = "successor"
    """It is a process of the server's own user, which takes the server's place, and may
    do nothing else."""


@attrs.frozen
class Credentials:
    """What a connection presents. Its own name for itself is not part of it."""

    token: str = attrs.field(default="", repr=False)
    certificate: tuple[str, ...] = ()
    """The names in a client's certificate that was verified: `DNS:worker.example`."""
    uid: int | None = None
    """The user at the other end of a Unix socket, as the kernel says."""
    private: bool = False
    """Whether nobody on the way reads it: it is encrypted, or stays on this machine."""


@attrs.frozen
class Identity:
    """Who a session is of, and what it may do."""

    tenant: str
    """The id of the tenant."""
    roles: frozenset[Role]
    limits: TenantLimits
    proof: Proof
    operator: bool = False
    """Whether roles monitor and admin are for the whole server, by the management API.
    """
    evidence: str = attrs.field(default="", repr=False)
    """What proved it: the hash of the token, the name in the certificate, or the uid.
    """
    require_tls: bool = False
    """Whether nothing of it may leave the machine unencrypted."""
    private: bool = False
    """Whether nobody on the way reads what it says; see `Credentials`."""

    def can_follow(self, before: "Identity", *, maps: bool) -> bool:
        """Whether a session goes on as this that was another; `maps`: with memory of
        the server, where nobody asks for roles. One that must be encrypted from now on
        begins anew, without the ways that are not.
        """
        return (not maps or BLOCK_ROLES & before.roles <= self.roles) and self.require_tls <= before.require_tls

    def check(self, role: Role, what: str) -> None:
        """Refuse what needs a role that this tenant does not have.

        Raises:
            PermissionDenied: it does not have it.
        """
        if role not in self.roles:
            raise PermissionDenied(
                f"{what} needs the role {role.value}, and tenant {self.tenant} has {in_words(self.roles) or 'none'}; "
                "the operator of the server adds it to roles in the tenants file"
            )


DEFAULT_IDENTITY: Final = Identity(
    DEFAULT_TENANT, ALL_ROLES, TenantLimits(DEFAULT_TENANT, DEFAULT_GROUP), Proof.NONE, operator=True
)
"""Who everybody is that a server without tenants lets in."""
