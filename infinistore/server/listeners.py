"""The sockets that a server listens on, and the addresses where clients find it."""

import logging
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

import attrs

from infinistore.access.identity import UnixAccess
from infinistore.addresses import is_loopback, with_port
from infinistore.config import ServerConfig
from infinistore.errors import ConfigError
from infinistore.transports.sockets.trio_streams import listen_tcp
from infinistore.transports.sockets.unix_listener import (
    MODES,
    Access,
    UnixListener,
    listen_unix,
    make_private,
    make_private_folder,
)

_log = logging.getLogger("infinistore.server")
NO_DESCRIPTORS_PAUSE_S = 0.1
"""How long who accepts connections waits if the process has no descriptors left."""


@attrs.frozen
class ServerAddresses:
    """Where a server can be reached."""

    tcp: tuple[tuple[str, int], ...]
    unix_socket: Path | None
    management: tuple[tuple[str, int], ...] = ()
    """Where the management API is; empty if it is off."""
    unix_access: UnixAccess | None = None
    """Who may open the Unix socket; None if nobody but the kernel decides that."""
    pool_bytes: int = 0
    """The size of the pool that is served there."""

    @property
    def port(self) -> int:
        """The TCP port, the same on every address."""
        return self.tcp[0][1]


@attrs.frozen
class Listeners:
    """The listening sockets: those for clients, and those for the management API."""

    clients: list[socket.socket]
    management: list[socket.socket]
    addresses: ServerAddresses


def open_listeners(config: ServerConfig, resources: ExitStack, given: Sequence[socket.socket] = ()) -> Listeners:
    """Listen where the settings say. `resources` closes the sockets.

    `given` listen already: TCP sockets among them replace those of the settings, and so
    does a Unix socket, whose path is not this server's to remove.

    Raises:
        ConfigError: an address, a port or a path cannot be used.
    """
    for sock in given:
        resources.enter_context(sock)
    clients = [sock for sock in given if sock.family != socket.AF_UNIX]
    _check_reach(config, clients)
    if not clients:
        clients = [resources.enter_context(sock) for sock in listen_tcp(config.host, config.service_port)]
    tcp = tuple(sock.getsockname()[:2] for sock in clients)
    access = cast(Access, config.unix_socket_access)
    unix = [sock for sock in given if sock.family == socket.AF_UNIX]
    unix_path = _given_path(unix)
    if unix_path is not None:
        clients += unix
    else:
        unix_path = config.socket_path(tcp[0][1])
        if unix_path is not None:
            if config.unix_socket == "auto" and not make_private(unix_path.parent):
                # Another user may have made the folder, to keep this server from
                # starting. Clients ask over TCP where the socket is.
                folder = make_private_folder()
                resources.callback(_remove_folder, folder)
                extra = {"folder": str(unix_path.parent), "instead": str(folder)}
                _log.warning("the folder of the Unix socket is not private", extra=extra)
                unix_path = folder / unix_path.name
            unix = [listen_unix(unix_path, access, config.unix_socket_group)]
            clients.append(resources.enter_context(unix[0]))
    management: list[socket.socket] = []
    if config.manage_port is not None:
        found = listen_tcp(config.manage_host, config.manage_port, host_flag="--manage-host", port_flag="--manage-port")
        management = [resources.enter_context(sock) for sock in found]
    managed = tuple(sock.getsockname()[:2] for sock in management)
    allowed = None if unix_path is None else _who_may_open(unix_path, unix[0], access)
    return Listeners(clients, management, ServerAddresses(tcp, unix_path, managed, allowed))


def _who_may_open(path: Path, listener: socket.socket, access: Access) -> UnixAccess | None:
    """Return who may open a Unix socket, as it was made by a server or by others."""
    try:
        found = path.stat()
    except OSError:  # it was removed, or cannot be seen from here
        return None
    if isinstance(listener, UnixListener):
        return UnixAccess(os.geteuid(), found.st_gid, MODES[access][1])
    return UnixAccess(found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode))


def _check_reach(config: ServerConfig, given: Sequence[socket.socket]) -> None:
    """Check that a given socket beyond loopback has a token, as --host does."""
    if config.token_file is not None or config.tenants is not None or config.insecure:
        return
    for host, port in (sock.getsockname()[:2] for sock in given):
        if not is_loopback(host):
            raise ConfigError(
                f"the given socket {with_port(host, port)}: other machines could read and write everything; "
                "add --token-file FILE or --tenants FILE, or --insecure to allow that"
            )


def _given_path(given: Sequence[socket.socket]) -> Path | None:
    if not given:
        return None
    paths = [sock.getsockname() for sock in given]
    if len(paths) > 1 or not isinstance(paths[0], str) or not paths[0].startswith("/"):
        raise ConfigError("the given sockets: clients need one Unix socket with an absolute path, not more")
    return Path(paths[0])


def _remove_folder(folder: Path) -> None:
    with suppress(OSError):  # another process has put something there
        folder.rmdir()
