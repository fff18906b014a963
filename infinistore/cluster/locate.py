"""The URL of a cluster: where to hear who is in it.

`infinistore+static://a:22345,b:22345` lists the nodes, `infinistore+file:///path` names
a file that lists them, and `infinistore+etcd://h1:2379,h2:2379/CLUSTER` names etcd.
With `infinistores+`, the nodes are reached by TLS.

Options follow a question mark: those of the membership, which are known here, and those
of the stores that the cluster consists of, which are only passed on.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import attrs

from infinistore.addresses import DEFAULT_SERVICE_PORT, host_and_port, refuse_password, with_port, without_password
from infinistore.cluster.membership import MOST_COPIES, Node
from infinistore.errors import ConfigError
from infinistore.settings import Kind, integer, near, path, switch, text, url_options

CLUSTER_SCHEMES: Final = {
    "infinistore+static": "infinistore+static://HOST:PORT,HOST:PORT",
    "infinistore+file": "infinistore+file:///PATH",
    "infinistore+etcd": "infinistore+etcd://HOST:PORT,HOST:PORT/CLUSTER",
}
"""How URLs with each scheme are written."""
_ETCD_PORT: Final = 2379
_CLUSTER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@attrs.frozen
class StaticPlace:
    """A cluster whose nodes are in its URL."""

    nodes: tuple[Node, ...]
    copies: int = 1


@attrs.frozen
class FilePlace:
    """A cluster whose nodes are in a file."""

    path: Path


@attrs.frozen(kw_only=True)
class EtcdPlace:
    """A cluster that registers in etcd. Without a user, etcd is not asked for one."""

    endpoints: tuple[tuple[str, int], ...]
    """Host and port of each member of etcd."""
    cluster: str
    user: str = ""
    password_file: Path | None = None
    tls: bool = False
    ca_file: Path | None = None
    """The authorities to trust; None for those of the system."""
    cert_file: Path | None = None
    key_file: Path | None = None
    copies: int = 1
    """For the server that is the first of a cluster; then etcd says it."""


Place: TypeAlias = StaticPlace | FilePlace | EtcdPlace


@attrs.frozen
class ClusterUrl:
    """A parsed URL. `options` are those of the stores, not checked yet."""

    url: str
    place: Place
    options: dict[str, str]

    def __str__(self) -> str:
        """The URL without options, which may name files with secrets."""
        return self.url.partition("?")[0]


_OPTIONS: Final[Mapping[str, Mapping[str, Kind]]] = {
    "infinistore+static": {"copies": integer(1, MOST_COPIES)},
    "infinistore+file": {},
    "infinistore+etcd": {
        "etcd_user": text(),
        "etcd_password_file": path(),
        "etcd_tls": switch(),
        "etcd_ca_file": path(),
        "etcd_cert_file": path(),
        "etcd_key_file": path(),
        "copies": integer(1, MOST_COPIES),
    },
}
"""The options of each kind of membership."""


def is_cluster_url(url: str) -> bool:
    """Whether this is the URL of a cluster, well written or not."""
    return _plain(url.partition("://")[0]) in CLUSTER_SCHEMES


def _plain(scheme: str) -> str:
    """Return the scheme without the sign that the nodes are reached by TLS, which is
    the stores' business: infinistores+static.
    """
    return scheme.replace("infinistores+", "infinistore+", 1)


def parse_cluster_url(url: str) -> ClusterUrl:
    """Parse the URL of a cluster.

    Raises:
        ConfigError: it is not one. The message says how to write it.
    """
    scheme, separator, _ = url.partition("://")
    scheme = _plain(scheme)
    if not separator or scheme not in CLUSTER_SCHEMES:
        hint = near(scheme, CLUSTER_SCHEMES) or f"; write {', or '.join(CLUSTER_SCHEMES.values())}"
        raise ConfigError(f"{without_password(url)!r} names no cluster{hint}")
    refuse_password(url)
    options = url_options(url)
    given = _own_options(url, scheme, options)
    rest = url.partition("://")[2].partition("?")[0]
    place = _READERS[scheme](url, scheme, rest, given)
    return ClusterUrl(url, place, {name: value for name, value in options.items() if name not in _OPTIONS[scheme]})


def _own_options(url: str, scheme: str, options: Mapping[str, str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, kind in _OPTIONS[scheme].items():
        if name in options:
            try:
                given[name] = kind.parse(options[name])
                kind.check(given[name])
            except ValueError as error:
                raise ConfigError(f"the option {name}={options[name]} in {url} {error}") from None
    for name in options:
        if name.startswith("etcd_") and name not in given:
            known = _OPTIONS["infinistore+etcd"]
            if name in known:
                hint = f"; it is for {CLUSTER_SCHEMES['infinistore+etcd']}"
            else:
                hint = near(name, known) or f"; known are {', '.join(known)}"
            raise ConfigError(f"unknown option {name!r} in {without_password(url)!r}{hint}")
    return given


def _addresses(url: str, scheme: str, written: str, default_port: int) -> tuple[tuple[str, int], ...]:
    found: dict[tuple[str, int], None] = {}
    for one in written.split(","):
        if not one:
            raise ConfigError(f"{url!r} lacks a host; write {CLUSTER_SCHEMES[scheme]}")
        try:
            address = host_and_port(one, default_port)
        except ValueError as error:
            raise ConfigError(f"{one!r} in {url!r} {error}") from None
        if address in found:
            raise ConfigError(f"{url!r} names {with_port(*address)} twice; give each once")
        found[address] = None
    return tuple(found)


def _static(url: str, scheme: str, rest: str, given: dict[str, Any]) -> StaticPlace:
    addresses = _addresses(url, scheme, rest.removesuffix("/"), DEFAULT_SERVICE_PORT)
    names = [with_port(*address) for address in addresses]
    nodes = tuple(Node(id=name, address=f"infinistore://{name}") for name in sorted(names))
    return StaticPlace(nodes, given.get("copies", 1))


def _file(url: str, scheme: str, rest: str, given: dict[str, Any]) -> FilePlace:
    if not rest.startswith("/") or rest.endswith("/"):
        raise ConfigError(f"{url!r} names no file; write {CLUSTER_SCHEMES[scheme]}, with three slashes")
    return FilePlace(Path(unquote(rest)))


def _etcd(url: str, scheme: str, rest: str, given: dict[str, Any]) -> EtcdPlace:
    hosts, _, cluster = rest.partition("/")
    if not _CLUSTER_NAME.fullmatch(cluster):
        what = f"{cluster!r} cannot name a cluster" if cluster else f"{url!r} names no cluster"
        raise ConfigError(
            f"{what}; write {CLUSTER_SCHEMES[scheme]}, where CLUSTER is at most 64 letters, digits, dots and dashes"
        )
    place = EtcdPlace(
        endpoints=_addresses(url, scheme, hosts, _ETCD_PORT),
        cluster=cluster,
        **{name.removeprefix("etcd_"): value for name, value in given.items()},
    )
    if (place.user == "") != (place.password_file is None):
        raise ConfigError(f"{url!r} must have both etcd_user and etcd_password_file, or neither")
    if (place.cert_file is None) != (place.key_file is None):
        raise ConfigError(f"{url!r} must have both etcd_cert_file and etcd_key_file, or neither")
    if not place.tls and (place.ca_file or place.cert_file):
        raise ConfigError(f"{url!r} has files for TLS without etcd_tls=on")
    return place


_READERS: Final[Mapping[str, Callable[[str, str, str, dict[str, Any]], Place]]] = {
    "infinistore+static": _static,
    "infinistore+file": _file,
    "infinistore+etcd": _etcd,
}
