"""Who may ask the management API.

If the server has a token, or tenants, everything wants a token except the probes. A
tenant must be an operator, because what is here concerns the whole server, and have the
role that the operation needs. Without a token, the API is for this machine, or for a
network that is trusted; but a browser there reaches it, whatever page it shows. So
nothing that a page sends changes the store, and a name that the page's owner may have
led here (DNS rebinding) is not answered.
"""

import ipaddress
import socket
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

import attrs
from starlette.exceptions import HTTPException
from starlette.requests import Request

from infinistore.access.identity import Credentials, Identity, Role
from infinistore.access.policy import OneTenant, Policy, TenantPolicy
from infinistore.errors import AuthenticationFailed, PermissionDenied
from infinistore.server.security.peers import ORIGIN, PRIVATE

__all__ = ["PROBES", "Access", "token_of"]

PROBES: Final = frozenset(("/healthz", "/readyz"))
"""The probes, which an orchestrator asks before it restarts a server or sends clients
to it. They are answered to anybody, however busy the API is.
"""
_MISDIRECTED: Final = 421


@attrs.frozen
class Access:
    """Who may ask. `hosts` are names of the server, besides addresses, localhost and
    what the machine calls itself. They matter without a token.
    """

    policy: Policy = attrs.field(factory=OneTenant)
    hosts: Collection[str] = ()

    def check(self, request: Request, role: Role) -> None:
        """Refuse a request that may not be answered. The state of the request has the
        `identity` of who made it, except for probes.

        Raises:
            HTTPException: it may not.
        """
        path = request.scope["path"]  # that of `request.url` may be made of the Host header
        if path in PROBES:
            return
        if request.method == "POST" and "origin" in request.headers:
            raise HTTPException(403, "a web page may not change the store; send the request without Origin")
        if not self.policy.wants_token:
            self._check_host(request.headers.get("host", ""))
        request.state.identity = identity = self._identify(request)
        try:
            if not identity.operator:
                raise PermissionDenied(
                    f"the management API is for operators, and tenant {identity.tenant} is none; the operator of the "
                    "server adds operator: true in the tenants file"
                )
            identity.check(role, f"{request.method} {path}")
            if role is Role.ADMIN:
                self._note("administration", request, tenant=identity.tenant)
        except PermissionDenied as error:
            self._note("denied", request, tenant=identity.tenant)
            raise HTTPException(403, str(error)) from None

    def _identify(self, request: Request) -> Identity:
        try:
            return self.policy.identify(Credentials(token_of(request), private=request.scope.get(PRIVATE, False)))
        except PermissionDenied as error:
            self._note("refused", request, reason=f"PermissionDenied: {error}")
            raise HTTPException(403, f"{error}; here, ask with https://") from None
        except AuthenticationFailed as error:
            self._note("refused", request, reason=f"AuthenticationFailed: {error}")
            given = request.headers.get("authorization", "").partition(" ")[2]
            wanted = "of an operator" if isinstance(self.policy, TenantPolicy) else "of the server"
            problem = "the token given is wrong" if given else f"this needs the token {wanted}"
            raise HTTPException(
                401,
                f"{problem}: send Authorization: Bearer TOKEN",
                headers={"WWW-Authenticate": 'Bearer realm="infinistore"'},
            ) from None

    def _note(self, event: str, request: Request, **fields: object) -> None:
        what = f"{request.method} {request.scope['path']}"
        origin = request.scope.get(ORIGIN, "unknown")
        self.policy.audit.note(event, **fields, origin=origin, transport="management", request=what)

    def _check_host(self, written: str) -> None:
        try:
            host = urlsplit(f"//{written}").hostname or ""
        except ValueError:
            host = "?"
        if not host or _is_address(host) or host == "localhost" or host.endswith(".localhost"):
            return
        if host not in {name.lower() for name in (*self.hosts, *_own_names())}:
            raise HTTPException(
                _MISDIRECTED,
                "the Host of this request is no name of this server; ask by its address, or add the name to "
                "--manage-allowed-hosts",
            )


def token_of(request: Request) -> str:
    """Return the token that a request bears; empty if it has none."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return ""
    # Headers come as Latin-1; tokens are UTF-8.
    return given.strip().encode("latin-1").decode("utf-8", "surrogateescape")


def _own_names() -> tuple[str, str]:
    name = socket.gethostname()
    return name, name.partition(".")[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
