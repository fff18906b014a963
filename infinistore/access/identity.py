"""Who somebody is and what they may do: what a connection presents, what that proves,
the roles, and who may open a Unix socket by the user and the groups that the kernel
tells.
"""

import enum
from collections.abc import Collection, Iterable
from typing import Final

import attrs

from infinistore.errors import AuthenticationFailed, PermissionDenied
from infinistore.tenant_limits import DEFAULT_GROUP, TenantLimits


class Role(enum.Enum):
    """A permission. A tenant has it for what is its own."""

    READ = "read"
    """Look keys up, list them, and read blocks."""
    WRITE = "write"
    """Put and delete blocks, and make them durable."""
    MONITOR = "monitor"
    """See statistics."""
    ADMIN = "admin"
    """Purge and evict."""


ALL_ROLES: Final = frozenset(Role)
BLOCK_ROLES: Final = frozenset((Role.READ, Role.WRITE))
"""The roles that concern blocks."""
DEFAULT_ROLES: Final = BLOCK_ROLES
"""The roles of a tenant whose entry names none."""


def in_words(roles: Iterable[Role], between: str = ", ") -> str:
    """Return the names of roles, always in the same order."""
    named = frozenset(roles)
    return between.join(role.value for role in Role if role in named)


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


_ROOT: Final = 0
_OF_OWNER, _OF_GROUP, _OF_OTHERS = 0o200, 0o020, 0o002  # who may write may connect: unix(7)


@attrs.frozen
class UnixAccess:
    """Lets in whom a socket file with this owner, group and mode lets in. A mode that
    is changed later changes nothing here.
    """

    uid: int
    gid: int
    mode: int

    def check(self, uid: int, groups: Collection[int]) -> None:
        """Refuse a user with these groups who may not be here.

        Raises:
            AuthenticationFailed: this one may not.
        """
        needed = _OF_OWNER if uid == self.uid else _OF_GROUP if self.gid in groups else _OF_OTHERS
        if uid != _ROOT and not self.mode & needed:
            group = f" and group {self.gid}" if self.mode & _OF_GROUP else ""
            raise AuthenticationFailed(
                f"this Unix socket is for user {self.uid}{group}, and user {uid} has connected; connect as one of "
                "them, or by TCP, or start the server with another --unix-socket-access"
            )
