"""How a store is opened: the URL, and the options of `open_store`, each described once.

The URL says where the server is, and over which transport to reach it. Options follow a
question mark: `?token_file=/etc/infinistore.token&deadline_s=5`. An option is an
argument or part of the URL. From the descriptions derive the checks, the parsing of
URLs, the keyword arguments that type checkers know (`StoreOptions`), their texts in its
docstring, and the tables in `docs/opening-a-store.md`. `make generate` writes the last
three.
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import attrs

from infinistore.addresses import DEFAULT_SERVICE_PORT, in_brackets, refuse_password, without_password
from infinistore.client.store_options import StoreOptions
from infinistore.cluster.locate import CLUSTER_SCHEMES, ClusterUrl, is_cluster_url, parse_cluster_url
from infinistore.disk_settings import ADMISSIONS, DiskPlace, disk_places
from infinistore.errors import ConfigError
from infinistore.secret_files import MAX_TOKEN_BYTES, clean_token, read_token
from infinistore.settings import (
    ADAPTIVE,
    Kind,
    Setting,
    choice,
    declare,
    integer,
    near,
    number,
    path,
    settings_of,
    spinning,
    switch,
    url_options,
)

if TYPE_CHECKING:
    import ssl
    from ssl import SSLContext

_OpenStore = TypeVar("_OpenStore", bound=Callable[..., Any])


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
        shown = without_password(url)
        raise ConfigError(f"{shown!r} is no URL of a store; write infinistore://{shown or 'HOST'}")
    if scheme not in SCHEMES:
        known = [*SCHEMES, *CLUSTER_SCHEMES]
        hint = near(scheme, known) or f"; known are {', '.join(known)}"
        raise ConfigError(f"unknown scheme {scheme!r} in {without_password(url)!r}{hint}")
    refuse_password(url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        host = url.partition("://")[2].partition("?")[0]
        raise ConfigError(f"{url!r} is no URL of a store: {error}{in_brackets(host)}") from None
    options = url_options(url)
    if scheme == "unix" or (scheme == "shm" and not parts.netloc):
        if parts.netloc or not parts.path:
            raise ConfigError(f"{url!r} names no socket; write {scheme}:///path/to/socket, with three slashes")
        return StoreUrl(scheme, "", 0, unquote(parts.path), options)
    if not parts.hostname:
        raise ConfigError(f"{url!r} names no host; write {scheme}://HOST:{DEFAULT_SERVICE_PORT}")
    if parts.path not in ("", "/"):
        raise ConfigError(f"{url!r} has more than host, port and options; write {scheme}://HOST:PORT?option=value")
    return StoreUrl(scheme, parts.hostname, DEFAULT_SERVICE_PORT if port is None else port, "", options)


_FILES: Final = ("ca", "cert", "key")


def tls_kind() -> Kind:
    """A context for TLS of a client."""

    def check(value: Any) -> None:
        import ssl  # late, here and below: few clients need it

        if not isinstance(value, ssl.SSLContext) or value.protocol is ssl.PROTOCOL_TLS_SERVER:
            raise ValueError("must be an ssl.SSLContext for a client, such as that of ssl.create_default_context()")

    return Kind("CONTEXT", lambda raw: raw, check)


def tls_context(url: str, *, by_socket: bool, found: Mapping[str, Any]) -> "ssl.SSLContext | None":
    """Return what the options `found` and the scheme of the URL ask for; None if they
    ask for no TLS. `by_socket` says that the URL names a Unix socket.

    Raises:
        ConfigError: they contradict each other, or a file cannot be used.
    """
    files = {name: found[name] for name in _FILES if found.get(name) is not None}
    given: ssl.SSLContext | None = found.get("tls")
    if given is None and not files and not url.startswith("infinistores"):
        return None
    if by_socket:
        raise ConfigError(f"a Unix socket has no TLS, and needs none; leave {', '.join(files) or 'tls'} out of {url}")
    if given is not None:
        if files:
            raise ConfigError(f"give either tls or {', '.join(files)}")
        return given
    if "key" in files and "cert" not in files:
        raise ConfigError("key is that of cert, which is missing; give both")
    from infinistore.transports.tls.session import client_context

    return client_context(**files)


def tls_of_node(address: StoreUrl, given: "ssl.SSLContext | None") -> "ssl.SSLContext | None":
    """Return what connections use to a server, or a node that says it speaks TLS."""
    if given is None and address.scheme == "infinistores":
        from infinistore.transports.tls.session import client_context

        return client_context()
    return given


_LONGEST_DEADLINE_S: Final = 1e9  # 31 years; the timeouts of sockets and locks cannot be much longer
_MAX_TEXT_BYTES: Final = MAX_TOKEN_BYTES
_CONNECTIONS_OF_NODE: Final = 2

ANY_STORE: Final = "Every store"
SERVER: Final = "With a server"
SHARED_MEMORY: Final = "Over shared memory"
RDMA: Final = "Over RDMA"
CLUSTER: Final = "With a cluster, or a server with shards"
EMBEDDED: Final = "Embedded"


def _text(metavar: str) -> Kind:
    def check(value: Any) -> None:
        if not isinstance(value, str):
            raise ValueError("must be text")
        if len(value.encode(errors="surrogatepass")) > _MAX_TEXT_BYTES:
            raise ValueError(f"must have at most {_MAX_TEXT_BYTES} bytes")

    return Kind(metavar, str, check)


def _disks() -> Kind:
    places = disk_places()

    def check(value: Any) -> None:
        places.check(places.parse(value))

    return attrs.evolve(places, check=check)


def _switch() -> Kind:
    def check(value: Any) -> None:
        if not isinstance(value, bool):
            raise ValueError("must be True or False")

    return attrs.evolve(switch(), check=check)


@attrs.frozen(kw_only=True)
class Options:
    """The options of a store. Sizes are in bytes; suffixes of names are units."""

    deadline_s: float = declare(
        number(0, _LONGEST_DEADLINE_S, "SECONDS", "seconds", above=True),
        "30",
        "How long one call may take, retries included, in seconds",
        group=ANY_STORE,
    )
    verify: Literal["always", "never"] = declare(
        choice("always", "never"),
        "always",
        "With always, writes compute checksums and reads verify them; with never, neither",
        group=ANY_STORE,
    )
    token: str = declare(
        _text("TEXT"),
        "",
        "The token of a server with --token-file. Without it, that of token_file in the URL, or else of the variable "
        "INFINISTORE_TOKEN",
        group=SERVER,
        default_text="none",
        secret=True,
    )
    tls: "SSLContext | None" = declare(
        tls_kind(),
        None,
        "The SSLContext that encrypts connections over TCP, instead of ca, cert and key. With any of these four, the "
        "server must speak TLS, whatever the scheme of the URL is",
        group=SERVER,
        default_text="TLS only with infinistores://",
    )
    ca: Path | None = declare(
        path("FILE"),
        None,
        "A file with the authorities to trust, in PEM. One of them must have signed the server's certificate, for the "
        "host in the URL",
        group=SERVER,
        default_text="those of the system",
    )
    cert: Path | None = declare(
        path("FILE"),
        None,
        "A file with the certificate of this client, in PEM, for a server with --tls-client-ca",
        group=SERVER,
        default_text="none",
    )
    key: Path | None = declare(
        path("FILE"), None, "A file with the key of cert, in PEM", group=SERVER, default_text="the file of cert"
    )
    unencrypted_rdma: bool = declare(
        _switch(), "False", "Allow RDMA together with TLS: requests are encrypted then, blocks are not", group=SERVER
    )
    max_connections: int = declare(
        integer(1, None),
        "8",
        "How many connections may carry blocks at a time; in a cluster 2 to each node, unless given. Two more carry "
        "lookups",
        group=SERVER,
    )
    transport: str = declare(
        _text("NAME"),
        "",
        "The only transport to use: inline, shm, rdma, or one of another package. Without it, the URL decides",
        group=SERVER,
        default_text="the best one",
    )
    spin_us: int | Literal["adaptive", "off"] = declare(
        spinning(None),
        ADAPTIVE,
        "How long to spin for the reply of a fast server before sleeping, in microseconds; 0 or off: never. Adaptive: "
        "up to 400, while that pays and takes the processor from nobody. The Trio client never spins",
        group=SERVER,
    )
    name: str = declare(
        _text("TEXT"),
        lambda: f"{socket.gethostname()}:{os.getpid()}",
        "What the server's statistics call this client",
        group=SERVER,
        default_text="HOST:PID",
    )
    lazy: bool = declare(
        _switch(),
        "False",
        "Connect with the first call instead of at once. While the server is down, calls raise StoreUnavailable",
        group=SERVER,
    )
    inline_bytes: int = declare(
        integer(0, None, "BYTES"),
        "65536",
        "The largest batch, in bytes, that goes over the control stream, in one round trip instead of two, although "
        "there is shared memory or RDMA",
        group=SERVER,
        default_text="65536 (64 KiB)",
    )
    copy_threads: int = declare(
        integer(1, None),
        "2",
        "How many threads, at most one for each core, may copy and hash a batch of 8 MiB or more with blocks of 256 "
        "KiB or more on average. More than the caller's own need numpy",
        group=SHARED_MEMORY,
    )
    known_blocks: int = declare(
        integer(0, None),
        "65536",
        "About how many locations of blocks to remember. Such a block is read again without a request to the server; "
        "0 sends one for each read",
        group=SHARED_MEMORY,
    )
    device: str = declare(
        _text("DEVICE"),
        "",
        "The RDMA device to use, such as mlx5_0. With one, RDMA comes before shared memory",
        group=RDMA,
        default_text="the best one",
    )
    ib_port: int = declare(integer(1, None), "1", "The port of the device", group=RDMA)
    gid_index: int = declare(
        integer(-1, None, "INDEX"), "-1", "The GID to prefer if it is usable; -1 means no preference", group=RDMA
    )
    staging_bytes: int = declare(
        integer(1, None, "BYTES"),
        "16777216",
        "The size of a buffer of registered memory, in bytes, for blocks that lie elsewhere",
        group=RDMA,
        default_text="16777216 (16 MiB)",
    )
    lookup_deadline_s: float = declare(
        number(0, _LONGEST_DEADLINE_S, "SECONDS", "seconds", above=True),
        "0.4",
        "How long a node may take to answer a lookup, in seconds. Then its keys count as missing, and after the second "
        "time in a row the node counts as lost. If a node sends no part of a block for this long, the client pings it",
        group=CLUSTER,
    )
    hedged_reads: bool = declare(
        _switch(),
        "True",
        "Whether a read asks the other copies, if there are any, when a node is late. At most one key in twenty is "
        "asked for twice",
        group=CLUSTER,
    )
    zone: str = declare(
        _text("NAME"),
        "",
        "The zone that this client is in. Of the copies of a block, it reads those of its machine first, then those of "
        "this zone, as --node-zone of the servers names it",
        group=CLUSTER,
        default_text="none",
    )
    pool_bytes: int = declare(
        integer(1, None, "BYTES"),
        "268435456",
        "The size of the pool, in bytes",
        group=EMBEDDED,
        default_text="268435456 (256 MiB)",
    )
    minimal_allocate_bytes: int = declare(
        integer(1, None, "BYTES"),
        "65536",
        "The unit of allocation, in bytes: a block takes a multiple of it",
        group=EMBEDDED,
        default_text="65536 (64 KiB)",
    )
    allocator: str = declare(_text("NAME"), "bitmap", "The name of the allocator", group=EMBEDDED)
    eviction: str = declare(
        _text("NAME"), "lru", "The strategy that decides which blocks leave a full pool first", group=EMBEDDED
    )
    huge_pages: bool = declare(
        _switch(), "false", "Use huge pages, which the machine must have reserved", group=EMBEDDED, default_text="False"
    )
    numa_node: int = declare(
        integer(-1, None, "NODE"),
        "-1",
        "The NUMA node that the pool is on, as far as it has memory; -1 for any",
        group=EMBEDDED,
    )
    disk: str | Sequence[str] = declare(
        _disks(),
        tuple,
        "A folder for blocks that memory has no room for, and its size, as PATH:SIZE; a list for several disks",
        group=EMBEDDED,
        default_text="none",
    )
    disk_admission: Literal["lazy", "eager", "second-use"] = declare(
        choice(*ADMISSIONS),
        "lazy",
        "When a block is written to disk: lazy once a quarter of the pool has been put after it, eager at once, "
        "second-use when it was read once",
        group=EMBEDDED,
    )
    disk_wait_s: float = declare(
        number(0, _LONGEST_DEADLINE_S, "SECONDS", "seconds", above=True),
        "5",
        "How long a read waits for blocks on disk, in seconds; then they count as missing",
        group=EMBEDDED,
    )

    @property
    def disks(self) -> tuple[DiskPlace, ...]:
        """The disks, parsed."""
        parsed: tuple[DiskPlace, ...] = disk_places().parse(self.disk)
        return parsed


_TOKEN_FILE: Final = Setting(
    "token_file", path("FILE"), SERVER, "A file with the token on its first line. Only in the URL", "none"
)


def explained(open_store: _OpenStore) -> _OpenStore:
    """Describe the keys of `StoreOptions` as the `Args` of an `open_store`."""
    if open_store.__doc__ and StoreOptions.__doc__:  # python -OO has neither
        arguments = cleandoc(StoreOptions.__doc__).partition("\n\n")[2].replace("Attributes:", "Args:", 1)
        open_store.__doc__ = cleandoc(open_store.__doc__).replace("Raises:", f"{arguments}\n\nRaises:")
    return open_store


def option_settings() -> tuple[Setting, ...]:
    """Return the descriptions of the arguments of `open_store`."""
    return settings_of(Options)


def url_settings() -> tuple[Setting, ...]:
    """Return the descriptions of the options that a URL may have."""
    not_there = ("token", "lazy", "tls")
    allowed = [one for one in option_settings() if one.group != EMBEDDED and one.key not in not_there]
    return (*allowed, _TOKEN_FILE)


def make_options(url: str | None, given: StoreOptions) -> tuple[StoreUrl | ClusterUrl | None, Options]:
    """Combine arguments and URL; arguments win. Without a URL the store is embedded.

    Raises:
        ConfigError: a URL or an option that cannot be used, or one that means nothing
            here.
    """
    if url is None:
        return None, _options(given)
    for setting in option_settings():
        if setting.group == EMBEDDED and setting.key in given:
            raise ConfigError(
                f"{setting.key} is for an embedded store; that of {url} was chosen when its server was started"
            )
    parsed: StoreUrl | ClusterUrl
    if is_cluster_url(url):
        parsed = parse_cluster_url(url)
        found = {"max_connections": _CONNECTIONS_OF_NODE, **_from_url(url, parsed), **given}
    else:
        parsed = parse_url(url)
        found = {**_from_url(url, parsed), **given}
    options = _options(found)
    tls = tls_context(url, by_socket=isinstance(parsed, StoreUrl) and bool(parsed.path), found=found)
    return parsed, options if tls is None else attrs.evolve(options, tls=tls, ca=None, cert=None, key=None)


def _from_url(url: str, parsed: StoreUrl | ClusterUrl) -> dict[str, Any]:
    known = {setting.key: setting for setting in url_settings()}
    options: dict[str, Any] = {}
    if "token_file" not in parsed.options and "INFINISTORE_TOKEN" in os.environ:
        options["token"] = clean_token(os.environ["INFINISTORE_TOKEN"], "INFINISTORE_TOKEN")
    for name, text in parsed.options.items():
        if name not in known:
            raise ConfigError(f"unknown option {name!r} in {without_password(url)!r}{_near(name, tuple(known))}")
        if name == "token_file":
            options["token"] = read_token(text)
            continue
        try:
            options[name] = known[name].kind.parse(text)
        except ValueError as error:
            raise ConfigError(f"the option {name}={text} in {url} {error}") from None
    return options


def _options(given: Mapping[str, Any]) -> Options:
    known = attrs.fields_dict(Options)
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}{_near(name, tuple(known))}")
    token = given.get("token")
    return Options(**{**given, "token": clean_token(token, "token")} if isinstance(token, str) else given)


def _near(name: str, known: tuple[str, ...]) -> str:
    return near(name, known) or f"; known are {', '.join(known)}"
