"""The URL of a store: where it is, and what to know before connecting.

    infinistore://host:22345        the best path there is; with ?device=mlx5_0, RDMA by that device if it works
    rdma://host:22345               RDMA or nothing
    tcp://host:22345                TCP, whatever else there may be
    unix:///run/infinistore.sock    a Unix socket on this host, without shared memory
    shm:///run/infinistore.sock     shared memory, by the server's Unix socket; shm://localhost:22345 asks where that is

Options stand behind a question mark: `?token_file=/etc/infinistore.token&deadline_s=5`.
"""

import difflib
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import attrs

from infinistore.errors import ConfigError

__all__ = ["DEFAULT_PORT", "Address", "near", "parse_address", "read_token_file"]

DEFAULT_PORT = 22345
_SCHEMES = ("infinistore", "tcp", "unix", "shm", "rdma")
_OPTIONS = (
    "deadline_s",
    "token_file",
    "verify",
    "max_connections",
    "spin_us",
    "inline_bytes",
    "copy_threads",
    "known_blocks",
    "name",
    "device",
    "ib_port",
    "gid_index",
    "staging_bytes",
)


@attrs.frozen
class Address:
    """A parsed URL. Either `path` of a Unix socket is set, or `host` and `port` are. `options` are texts, unchecked."""

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


def parse_address(url: str) -> Address:
    """Parse the URL of a store.

    Raises:
        ConfigError: it is none; the message names what comes near.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise ConfigError(f"{url!r} is no URL of a store; write infinistore://{url or 'HOST'}")
    if scheme not in _SCHEMES:
        raise ConfigError(f"unknown scheme {scheme!r} in {url!r}{near(scheme, _SCHEMES)}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL of a store: {error}") from None
    options = _options(url, parts.query)
    if scheme == "unix" or (scheme == "shm" and not parts.netloc):
        if parts.netloc or not parts.path:
            raise ConfigError(f"{url!r} names no socket; write {scheme}:///path/to/socket, with three slashes")
        return Address(scheme, "", 0, unquote(parts.path), options)
    if not parts.hostname:
        raise ConfigError(f"{url!r} names no host; write {scheme}://HOST:{DEFAULT_PORT}")
    if parts.path not in ("", "/") or parts.username is not None:
        raise ConfigError(f"{url!r} has more than host, port and options; write {scheme}://HOST:PORT?option=value")
    return Address(scheme, parts.hostname, DEFAULT_PORT if port is None else port, "", options)


def read_token_file(path: str) -> str:
    """Return the token in a file: its first line."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file {path}: {error}") from None


def _options(url: str, query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise ConfigError(f"the options in {url!r} cannot be read; write ?option=value&option=value") from None
    for name, _ in pairs:
        if name not in _OPTIONS:
            raise ConfigError(f"unknown option {name!r} in {url!r}{near(name, _OPTIONS)}")
    return dict(pairs)


def near(word: str, known: tuple[str, ...]) -> str:
    """Return the end of a message about an unknown word: what was meant, or what there is."""
    close = difflib.get_close_matches(word, known, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else f"; known are {', '.join(known)}"
