"""The sockets that a server listens on, and the addresses where clients find it."""

import logging
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

import attrs

from infinistore.config import ServerConfig
from infinistore.transports.sockets.trio_streams import listen_tcp
from infinistore.transports.sockets.unix_listener import Access, listen_unix, make_private, make_private_folder

__all__ = ["Listeners", "ServerAddresses", "open_listeners"]

_log = logging.getLogger("infinistore.server")


@attrs.frozen
class ServerAddresses:
    """Where a server can be reached."""

    tcp: tuple[tuple[str, int], ...]
    unix_socket: Path | None
    management: tuple[tuple[str, int], ...] = ()
    """Where the management API is; empty if it is off."""

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


def open_listeners(config: ServerConfig, resources: ExitStack) -> Listeners:
    """Listen where the settings say. `resources` closes the sockets.

    Raises:
        ConfigError: an address, a port or a path cannot be used.
    """
    clients = [resources.enter_context(sock) for sock in listen_tcp(config.host, config.service_port)]
    tcp = tuple(sock.getsockname()[:2] for sock in clients)
    unix_path = config.socket_path(tcp[0][1])
    if unix_path is not None:
        if config.unix_socket == "auto" and not make_private(unix_path.parent):
            # Another user may have made the folder, to keep this server from starting.
            # Clients ask over TCP where the socket is.
            folder = make_private_folder()
            resources.callback(_remove_folder, folder)
            extra = {"folder": str(unix_path.parent), "instead": str(folder)}
            _log.warning("the folder of the Unix socket is not private", extra=extra)
            unix_path = folder / unix_path.name
        access = cast(Access, config.unix_socket_access)
        clients.append(resources.enter_context(listen_unix(unix_path, access)))
    management: list[socket.socket] = []
    if config.manage_port is not None:
        found = listen_tcp(config.manage_host, config.manage_port, host_flag="--manage-host", port_flag="--manage-port")
        management = [resources.enter_context(sock) for sock in found]
    managed = tuple(sock.getsockname()[:2] for sock in management)
    return Listeners(clients, management, ServerAddresses(tcp, unix_path, managed))


def _remove_folder(folder: Path) -> None:
    with suppress(OSError):  # another process has put something there
        folder.rmdir()
