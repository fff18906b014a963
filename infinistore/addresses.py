"""Where a server is reached: hosts and ports as they are written, which hosts are this
machine alone, and where its Unix socket is.

Opening sockets is left to others.
"""

import ipaddress
import os
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from infinistore.errors import ConfigError
from infinistore.settings import FALSE_WORDS, TRUE_WORDS, Kind, path

DEFAULT_SERVICE_PORT: Final = 22345
_MAX_SOCKET_PATH_BYTES: Final = 107  # sun_path of Linux, less its final zero


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on `host`. A name other than
    localhost counts as beyond.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def refuse_password(url: str) -> None:
    """Raise `ConfigError`, without showing it, if a URL has a user or a password, which
    may have signs that end the host, too."""
    if re.match("[^/](?:[^?]*|[^=]*)@", url.partition("://")[2]):
        raise ConfigError(
            "the URL of a store has no user and no password before its host: give a token as ?token_file=FILE, and"
            " those of etcd as ?etcd_user=USER&etcd_password_file=FILE"
        )


def without_password(text: str) -> str:
    """Return the text without what stands before an `@`, and without the values of
    options that are called passwords or tokens."""
    text = re.sub(r"(^|[\s='\"])([\w+.-]*://)?[^\s='\"]+@", r"\1\2...@", text)
    return re.sub(r"(password|token)=[^&\s'\"]+", r"\1=...", text)


def in_brackets(written: str) -> str:
    """Return a hint for an IPv6 address, or part of one, that lacks its brackets."""
    bare = written.count(":") > 1 and "[" not in written
    return f"; write an IPv6 address in brackets, as [::1]:{DEFAULT_SERVICE_PORT}" if bare else ""


def host_and_port(written: str, default_port: int) -> tuple[str, int]:
    """Read HOST or HOST:PORT; an IPv6 address with a port stands in brackets.

    Raises:
        ValueError: it is neither. The message is half a sentence that follows it.
    """
    try:
        parts = urlsplit(f"//{written}")
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # else looking it up raises that
    except ValueError as error:
        raise ValueError(f"must be HOST:PORT: {error}{in_brackets(written)}") from None
    if not host or not host.isprintable() or parts.netloc != written or parts.username is not None or port == 0:
        raise ValueError("must be HOST:PORT, such as 10.0.0.7:22345")
    return host, default_port if port is None else port


ROUTER_STATUS_PATH: Final = "/infinistore/engines"
"""Where a router says what its engines do, for the monitor."""


def with_port(host: str, port: int) -> str:
    """Write HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address(host: str) -> str:
    """Return the address at which this machine reaches its own server on `host`, an
    address: loopback for one that listens everywhere.
    """
    address = ipaddress.ip_address(host)
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def default_socket_path(service_port: int) -> Path:
    """Where the Unix socket of this user's server on `service_port` is, unless it was
    put elsewhere.

    The folder must be this user's with mode 0700; who makes or opens the socket checks
    that.
    """
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime_folder, "infinistore") if runtime_folder else Path(f"/tmp/infinistore-{os.getuid()}")
    return folder / f"{service_port}.sock"


def socket_place() -> Kind:
    """Where the Unix socket of a server is: a path, auto, or off."""

    def parse(raw: Any) -> str:
        word = str(raw).strip().lower()
        if word in FALSE_WORDS:  # YAML reads a bare `off` as false
            return "off"
        if word in TRUE_WORDS or word == "auto":
            return "auto"
        try:
            return str(path().parse(raw.strip() if isinstance(raw, str) else raw))
        except ValueError as error:
            raise ValueError(f"{error}, or auto, or off") from None

    def check(value: str) -> None:
        if len(os.fsencode(value)) > _MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"is too long for a Unix socket; at most {_MAX_SOCKET_PATH_BYTES} bytes")

    return Kind("PATH|auto|off", parse, check)
