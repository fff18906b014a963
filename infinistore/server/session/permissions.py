"""Which roles each request needs."""

from collections.abc import Mapping
from typing import Final

from infinistore.access.identity import ALL_ROLES, Identity, Proof, Role
from infinistore.errors import PermissionDenied
from infinistore.protocol import messages
from infinistore.protocol.messages import ONE_WAY, Message
from infinistore.protocol.server_connection import Received
from infinistore.server.movers.base import Handler

__all__ = ["OF_OPERATORS", "ROLES", "refusals"]

_READ: Final = frozenset((Role.READ,))
_WRITE: Final = frozenset((Role.WRITE,))
_EITHER: Final = _READ | _WRITE
_MONITOR: Final = frozenset((Role.MONITOR,))
_ADMIN: Final = frozenset((Role.ADMIN,))

ROLES: Final[Mapping[type[Message], frozenset[Role]]] = {
    messages.Hello: ALL_ROLES,
    messages.Put: _WRITE,
    messages.Get: _READ,
    messages.Exists: _READ,
    messages.MatchPrefix: _READ,
    messages.ReleaseHold: _READ,
    messages.Delete: _WRITE,
    messages.ListKeys: _READ,
    messages.Purge: _ADMIN,
    messages.Evict: _ADMIN,
    messages.Statistics: _MONITOR,
    messages.Verify: _READ,
    messages.Flush: _WRITE,
    messages.Prefetch: _READ,
    messages.Pin: _WRITE,  # it takes room from everybody
    messages.TimesLeft: _READ,
    messages.Removed: _READ,
    messages.Mark: _WRITE,
    messages.MapArenas: ALL_ROLES,  # for writing only with WRITE, and none without READ
    messages.MapTables: _EITHER,
    messages.Reserve: _WRITE,
    messages.Commit: _WRITE,
    messages.Prepare: _WRITE,
    messages.Lease: _READ,
    messages.Release: ALL_ROLES,  # giving back needs no role: one may have been taken away meanwhile
    messages.Abort: ALL_ROLES,
    messages.Touch: _READ,
    messages.TakeOver: _ADMIN,
    messages.RdmaConnect: _EITHER,
    messages.RdmaPut: _WRITE,
    messages.RdmaGet: _READ,
    messages.RdmaFill: _WRITE,
    messages.RdmaFetch: _READ,
}
"""The roles for each request; one of them suffices."""


OF_OPERATORS: Final = frozenset((messages.TakeOver,))
"""The requests that concern the whole server, whatever the role: for operators only."""
_OF_SUCCESSORS: Final = frozenset((messages.Hello, messages.TakeOver))


def refusals(identity: Identity) -> dict[type[Message], Handler]:
    """Return a handler for each request that somebody may not make."""
    if identity.proof is Proof.SUCCESSOR:
        refused = ROLES.keys() - _OF_SUCCESSORS
    else:
        refused = {
            kind
            for kind, roles in ROLES.items()
            if not roles & identity.roles or (kind in OF_OPERATORS and not identity.operator)
        }
    return {kind: _ignore if kind in ONE_WAY else _refusal(identity, kind) for kind in refused}


def _refusal(identity: Identity, kind: type[Message]) -> Handler:
    role = min(ROLES[kind], key=lambda role: role.value)

    async def refuse(message: Message, received: Received) -> None:
        identity.check(role, kind.__name__)
        raise PermissionDenied(
            f"{kind.__name__} is for operators, and tenant {identity.tenant} is none; the operator of the server adds "
            "operator: true in the tenants file"
        )

    return refuse


async def _ignore(message: Message, received: Received) -> None:
    """What has no reply can be refused only by doing nothing."""
