"""The URL of a store: where its server is, and over which transport to reach it.

Options follow a question mark: `?token_file=/etc/infinistore.token&deadline_s=5`.
"""

from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

import attrs

from infinistore.addresses import DEFAULT_SERVICE_PORT
from infinistore.errors import ConfigError
from infinistore.settings import near, url_options

__all__ = ["SCHEMES", "Scheme", "StoreUrl", "parse_url"]


class Scheme(NamedTuple):
    """How URLs with one scheme look, and over which transport they reach the server."""

    form: str
    meaning: str


SCHEMES: Final = {
    "infinistore": Scheme(
        "infinistore://HOST:PORT",
        "shared memory on the server's host; elsewhere RDMA if both sides have a device, or else TCP",
    ),
    "infinistores": Scheme(
        "infinistores://HOST:PORT",
        "shared memory on the server's host; elsewhere TCP with TLS. No RDMA, which does not encrypt blocks",
    ),
    "tcp": Scheme("tcp://HOST:PORT", "TCP only"),
    "unix": Scheme("unix:///PATH", "the server's Unix socket on this host, without shared memory"),
    "shm": Scheme(
        "shm:///PATH",
        "shared memory only, through the server's Unix socket; with shm://HOST:PORT, the client asks for its path",
    ),
    "rdma": Scheme("rdma://HOST:PORT", "RDMA only"),
}


@attrs.frozen
class StoreUrl:
    """A parsed URL: the `path` of a Unix socket, or `host` and `port`.

    `options` are texts, which are not checked yet.
    """

    scheme: str
    host: str
    port: int
    path: str
    options: dict[str, str]

    def __str__(self) -> str:
        if self.path:
            return f"{self.scheme}://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse_url(url: str) -> StoreUrl:
    """Parse the URL of a store.

    Raises:
        ConfigError: it is not one. The message says how to write it.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise ConfigError(f"{url!r} is no URL of a store; write infinistore://{url or 'HOST'}")
    if scheme not in SCHEMES:
        from infinistore.cluster.locate import CLUSTER_SCHEMES  # late: few stores are clusters

        known = [*SCHEMES, *CLUSTER_SCHEMES]
        hint = near(scheme, known) or f"; known are {', '.join(known)}"
        raise ConfigError(f"unknown scheme {scheme!r} in {url!r}{hint}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL of a store: {error}") from None
    options = url_options(url)
    if scheme == "unix" or (scheme == "shm" and not parts.netloc):
        if parts.netloc or not parts.path:
            raise ConfigError(f"{url!r} names no socket; write {scheme}:///path/to/socket, with three slashes")
        return StoreUrl(scheme, "", 0, unquote(parts.path), options)
    if not parts.hostname:
        raise ConfigError(f"{url!r} names no host; write {scheme}://HOST:{DEFAULT_SERVICE_PORT}")
    if parts.path not in ("", "/") or parts.username is not None:
        raise ConfigError(f"{url!r} has more than host, port and options; write {scheme}://HOST:PORT?option=value")
    return StoreUrl(scheme, parts.hostname, DEFAULT_SERVICE_PORT if port is None else port, "", options)
