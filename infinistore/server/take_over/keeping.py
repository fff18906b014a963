"""The end of a server that its service manager starts again: the service manager keeps
the memory of the pool, and what is in it, for the next run (`kept`).

It gets descriptors: those of the arenas, of the sockets that the server listens on
unless they are the service manager's, of the connections whose clients may still touch
the pool, and at last that of the state. Without a state, the others are worth nothing:
so a server that ends in any other way leaves nothing behind that anybody would believe.

Leaves to others: to end the service (`infinistore.server.server`).
"""

import hashlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from infinistore.config import ServerConfig
from infinistore.server.take_over.giving import Giving
from infinistore.server.take_over.memory import Ended, can_adopt, write_state
from infinistore.service_manager import ServiceManager
from infinistore.transports.sockets.unix_listener import UnixListener

__all__ = ["SOCKET", "Keeping", "make_keeping", "name_of_sockets"]

SOCKET = "socket-"
"""How the names of sockets begin that the server listens on."""
_log = logging.getLogger("infinistore.server")


def make_keeping(config: ServerConfig, manager: ServiceManager, giving: Giving) -> "Keeping | None":
    """Return what keeps the cache for the next run; None if there is nobody to keep it,
    or this server has what no next run could go on with: the log says so."""
    if not manager.most_kept:
        return None
    why = ""
    if not can_adopt(config):
        why = f"the allocator {config.allocator} cannot go on with what another process has placed"
    elif config.shm_writes == "off" and config.tenants is None:
        why = "nobody may map the pool to write any more (--shm-writes off)"
    keeping = Keeping(manager, giving, config)
    if why:
        keeping.refuse(why)
        return None
    return keeping


class Keeping:
    """Gives what a server has to its service manager."""

    def __init__(self, manager: ServiceManager, giving: Giving, config: ServerConfig) -> None:
        self._manager = manager
        self._giving = giving
        self._config = config

    def refuse(self, why: str) -> None:
        """Say that the next run starts empty, and why."""
        _log.warning("the cache is not kept for the next run", extra={"reason": why})

    async def keep(self, instance: str, ended: Sequence[Ended], run_in_thread: Callable[..., Awaitable[Any]]) -> None:
        """Give it what the server has. The service is over: nobody changes it any more.
        The descriptors of `ended` belong to this object now."""
        watched, state = self._giving.whole.export(instance, [*ended, *self._giving.inherited()])
        streams = [(f"stream-{n}", one) for n, one in enumerate(watched)]
        try:
            await self._keep(streams, state, run_in_thread)
        finally:
            for one in watched:
                if one.descriptor is not None:
                    with suppress(OSError):
                        os.close(one.descriptor)

    async def _keep(
        self,
        streams: Sequence[tuple[str, Ended]],
        state: list[bytes],
        run_in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        whole = self._giving.whole
        arenas = [(f"arena-{number}", arena.fd) for number, arena in enumerate(whole.arenas)]
        sockets = self._sockets()
        room = self._manager.most_kept - len(arenas) - len(sockets) - 2
        if room < 0:
            self.refuse(f"FileDescriptorStoreMax={self._manager.most_kept} is {-room} too few; raise it")
            return
        # First those that still touch the pool: without its stream, what a client could
        # touch stays in quarantine for ever.
        order = sorted(streams, key=lambda stream: stream[1].client is None)
        kept = [(name, one.descriptor) for name, one in order if one.descriptor is not None][:room]
        try:
            descriptor = write_state(state)
            try:
                everything = [*arenas, *((name, sock.fileno()) for name, sock in sockets), *kept]
                lifeline = ("lifeline", self._giving.lifeline)
                await run_in_thread(self._manager.keep, [*everything, lifeline, ("state", descriptor)])
            finally:
                os.close(descriptor)
        except OSError as error:
            self.refuse(f"the service manager cannot be told: {error.strerror or error}")
            return
        for _, sock in sockets:
            if isinstance(sock, UnixListener):
                sock.leave_path()
        _log.info("the service manager keeps the cache", extra={"keys": len(whole), "connections": len(kept)})

    def _sockets(self) -> list[tuple[str, socket.socket]]:
        listeners = self._giving.listeners
        if listeners is None or self._manager.listeners:  # it has them
            return []
        name = name_of_sockets(self._config)
        return [(f"{name}-{n}", sock) for n, sock in enumerate(listeners.clients)]


def name_of_sockets(config: ServerConfig) -> str:
    """Return how the sockets are named that a server with these settings listens on:
    another one must not get them."""
    path = (config.unix_socket, config.unix_socket_access, config.unix_socket_group)
    settings = (config.host, config.service_port, *path)
    return f"{SOCKET}{hashlib.sha256(repr(settings).encode()).hexdigest()[:16]}"
