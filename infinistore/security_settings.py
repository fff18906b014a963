"""The settings of a server that say who may reach it, and what does not go together
with them.
"""

import re
from pathlib import Path
from typing import Any, Final, Protocol

from infinistore.addresses import is_loopback
from infinistore.cluster_settings import registers_in_etcd
from infinistore.settings import Kind, declare, path, switch, text

__all__ = [
    "conflicts_of_security",
]

_SECURITY: Final = "Security"
_REMEDY: Final = "add --token-file FILE or --tenants FILE, or --insecure to allow that"
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")


def _token_file() -> Any:
    """Where the token is."""
    help_text = "File whose first line is the token that every client must present"
    return declare("token_file", path(), None, help_text, group=_SECURITY, default_text="no token")


def _tenants() -> Any:
    """Who the tenants are."""
    help_text = (
        "YAML file with the tenants of this server, their roles, limits and the hashes of their tokens, which "
        "`infinistore tenant` edits. SIGHUP reads it again. Not together with --token-file"
    )
    return declare("tenants", path(), None, help_text, group=_SECURITY, default_text="one tenant")


def _audit_log() -> Any:
    """Where it is noted who came."""
    help_text = "File to which one line of JSON is added for each login, refusal and administrative act; - is stderr"
    return declare("audit_log", text("FILE|-"), None, help_text, group=_SECURITY, default_text="no file")


def _unix_socket_group() -> Any:
    """Whose members may open the Unix socket."""
    help_text = (
        "Group whose members may open the Unix socket, by name or number, with --unix-socket-access group. The server "
        "must be in it, or be root"
    )
    return declare("unix_socket_group", text("GROUP"), None, help_text, group=_SECURITY, default_text="its own group")


def _insecure() -> Any:
    """Whether anyone may do anything."""
    help_text = "Let anyone who reaches the port read and write, also beyond loopback"
    return declare("insecure", switch(), "off", help_text, group=_SECURITY)


def _manage_allowed_hosts() -> Any:
    """The names of the management API."""

    def parse(raw: Any) -> tuple[str, ...]:
        names = raw.split(",") if isinstance(raw, str) else raw
        return tuple(name.strip() for name in names)

    def check(value: Any) -> None:
        if not all(isinstance(name, str) and _HOST_NAME.fullmatch(name) for name in value):
            raise ValueError("must be names of hosts without ports, with commas between them")

    help_text = (
        "Names by which the management API of a server without a token is asked, with commas between them. IP "
        "addresses, localhost and the name of the machine are always allowed"
    )
    return declare(
        "manage_allowed_hosts", Kind("NAME,NAME", parse, check), tuple, help_text, group=_SECURITY, default_text="none"
    )


def _tls_cert() -> Any:
    """The certificate."""
    help_text = (
        "File with the certificate of this server and those of its issuers, in PEM: with it, clients that connect "
        "over TCP need TLS, and so does the management API. SIGHUP reads the files of TLS again"
    )
    return declare("tls_cert", path(), None, help_text, group=_SECURITY, default_text="no TLS")


def _tls_key() -> Any:
    """Its key."""
    help_text = "File with the key of --tls-cert, in PEM, without a passphrase"
    return declare("tls_key", path(), None, help_text, group=_SECURITY, default_text="the file of --tls-cert")


def _tls_client_ca() -> Any:
    """Who vouches for clients."""
    help_text = (
        "File with authorities, in PEM: a client that connects over TCP must show a certificate that one of them has "
        "signed"
    )
    return declare("tls_client_ca", path(), None, help_text, group=_SECURITY, default_text="clients need none")


def _tls_peer_ca() -> Any:
    """Who vouches for the other nodes of a cluster."""
    help_text = (
        "File with authorities, in PEM, that have signed the certificates of the other nodes of the cluster, besides "
        "those of the system and of --tls-client-ca: this server asks them who they are, and passes blocks on to them"
    )
    return declare("tls_peer_ca", path(), None, help_text, group=_SECURITY, default_text="no others")


def _peer_token_file() -> Any:
    """Where the token is that this server presents to other nodes."""
    help_text = (
        "With --tenants and --cluster: file whose first line is the token of a tenant, with which this server asks the "
        "other nodes who they are; SIGHUP reads it again"
    )
    return declare(
        "peer_token_file", path(), None, help_text, group=_SECURITY, default_text="that of --token-file, or none"
    )


class _Settings(Protocol):
    @property
    def cluster(self) -> str | None: ...
    @property
    def peer_token_file(self) -> Path | None: ...
    @property
    def host(self) -> str: ...
    @property
    def manage_host(self) -> str: ...
    @property
    def manage_port(self) -> int | None: ...
    @property
    def token_file(self) -> Path | None: ...
    @property
    def tenants(self) -> Path | None: ...
    @property
    def insecure(self) -> bool: ...
    @property
    def tls_cert(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...
    @property
    def tls_client_ca(self) -> Path | None: ...
    @property
    def tls_peer_ca(self) -> Path | None: ...


def conflicts_of_security(config: _Settings) -> list[tuple[tuple[str, ...], str]]:
    """Return what does not go together, as (keys of settings, problem)."""
    found: list[tuple[tuple[str, ...], str]] = []
    known = config.token_file is not None or config.tenants is not None or config.insecure
    if config.tenants is not None and config.token_file is not None:
        problem = "does not go together with --token-file: each tenant has tokens of its own; leave one of them out"
        found.append((("tenants", "token_file"), problem))
    if config.peer_token_file is not None and (config.tenants is None or config.cluster is None):
        problem = "goes with --tenants and --cluster; nodes without tenants ask each other with --token-file"
        found.append((("peer_token_file",), problem))
    if (
        config.tenants is not None
        and registers_in_etcd(config.cluster)
        and config.peer_token_file is None
        and config.tls_cert is None
    ):
        problem = (
            "in a cluster need --peer-token-file FILE, the token of a tenant, with which nodes ask each other who "
            "they are; or --tls-cert, if a tenant has that certificate"
        )
        found.append((("tenants", "cluster"), problem))
    if not is_loopback(config.host) and not known and config.tls_client_ca is None:
        problem = "other machines could read and write everything; " + _REMEDY
        found.append((("host",), problem))
    if not is_loopback(config.manage_host) and config.manage_port is not None and not known:
        problem = "other machines could delete everything; " + _REMEDY
        found.append((("manage_host",), problem))
    if config.tls_cert is None:
        found += [
            ((key,), "needs --tls-cert FILE, the certificate of this server")
            for key, file in (
                ("tls_key", config.tls_key),
                ("tls_client_ca", config.tls_client_ca),
                ("tls_peer_ca", config.tls_peer_ca),
            )
            if file is not None
        ]
    return found
