"""Who may ask the management API.

If the server has a token, everything wants it except the probes. Without one, the API
is for this machine, or for a network that is trusted; but a browser there reaches it,
whatever page it shows. So nothing that a page sends changes the store, and a name that
the page's owner may have led here (DNS rebinding) is not answered.
"""

import hmac
import ipaddress
import socket
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

import attrs
from starlette.exceptions import HTTPException
from starlette.requests import Request

__all__ = ["PROBES", "Access"]

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

    token: str = ""
    hosts: Collection[str] = ()

    def check(self, request: Request) -> None:
        """Refuse a request that may not be answered.

        Raises:
            HTTPException: it may not.
        """
        if request.url.path in PROBES:
            return
        if request.method == "POST" and "origin" in request.headers:
            raise HTTPException(403, "a web page may not change the store; send the request without Origin")
        if self.token:
            self._check_token(request)
        else:
            self._check_host(request.headers.get("host", ""))

    def _check_token(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _equal(given.strip(), self.token):
            return
        problem = "the token given is wrong" if given else "this needs the server's token"
        raise HTTPException(
            401,
            f"{problem}: send Authorization: Bearer TOKEN",
            headers={"WWW-Authenticate": 'Bearer realm="infinistore"'},
        )

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


def _own_names() -> tuple[str, str]:
    name = socket.gethostname()
    return name, name.partition(".")[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("latin-1"), token.encode())
