"""The start of a server whose service manager has kept what the last run had
(`keeping`).

What was kept is believed once: before this server serves, it empties the file with the
state, so that after a crash nobody goes on with a state that holds no longer. Whatever
is missing or does not fit is `PoolLost`: the server starts empty, and the service
manager forgets all.
"""

import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import trio

from infinistore.config import ServerConfig
from infinistore.core.group_states import GroupStates, encode_groups
from infinistore.core.pool_state import PoolState
from infinistore.errors import ConfigError
from infinistore.server.listeners import Listeners, open_listeners
from infinistore.server.take_over.keeping import SOCKET, name_of_sockets
from infinistore.server.take_over.memory import Adopting, PoolLost, Whole, decode, read_all
from infinistore.service_manager import ServiceManager
from infinistore.transports.sockets.unix_listener import UnixListener

__all__ = ["Kept", "forget_kept", "open_kept"]

_log = logging.getLogger("infinistore.server")


async def open_kept(config: ServerConfig, manager: ServiceManager, resources: ExitStack) -> "Kept":
    """Look at what the service manager has kept. `resources` closes what is not used.

    Raises:
        PoolLost: this server cannot go on with it.
    """
    kept = Kept(config, manager)
    resources.callback(kept.close)
    kept.read()
    if not kept.take_sockets(resources):  # nobody listens there any more, so that this server can
        await trio.to_thread.run_sync(manager.forget, SOCKET)
    return kept


def forget_kept(manager: ServiceManager) -> None:
    """See to it that nobody goes on any more with what was kept, even if the service
    manager does not hear that it is to forget it. Blocking."""
    descriptor = manager.look_at("state")
    if descriptor is not None:
        os.ftruncate(descriptor, 0)
    manager.forget()


class Kept(Adopting):
    """What the service manager has kept."""

    serves = False
    """Whether the earlier server answers until `end`."""

    def __init__(self, config: ServerConfig, manager: ServiceManager) -> None:
        super().__init__(config)
        self._manager = manager
        self._state: PoolState | GroupStates | None = None
        self._sockets: list[socket.socket] = []

    def read(self) -> None:
        """Read the state, and look for all that it names.

        Raises:
            PoolLost: this server cannot go on with it.
        """
        descriptor = self._manager.look_at("state")
        if descriptor is None:
            raise PoolLost("the last run of the service did not end in order")
        try:
            data = read_all(os.dup(descriptor))
            if not data:
                raise PoolLost("the last run of the service did not end in order")
            state = decode(data)
        except (OSError, ValueError) as error:
            raise PoolLost(f"what the last run said of its pool cannot be read: {error}") from None
        if isinstance(state, GroupStates):
            lengths = [length for group in state.groups for length in group.arenas]
            described = b"".join(encode_groups(GroupStates(state.groups, [])))
            connections = state.quiet + sum(len(one.state.pins) - 1 for one in state.tenants)
        else:
            lengths, described, connections = state.arenas, None, len(state.pins) - 1
        problem = self.accept(lengths, described)
        if problem:
            raise PoolLost(problem)
        found = [self._manager.take(f"arena-{index}") for index in range(len(lengths))]
        self.give_arenas([(arena, length) for arena, length in zip(found, lengths, strict=True) if arena is not None])
        if None in found:
            raise PoolLost(f"arena {found.index(None)} was not kept; raise FileDescriptorStoreMax=")
        lifeline = self._manager.take("lifeline")
        if lifeline is None or connections < 0:
            raise PoolLost("the end of the last run cannot be seen")
        self.lifeline = lifeline
        self.streams = [self._manager.take(f"stream-{n}") for n in range(connections)]
        self.open.update(one for one in (lifeline, *self.streams) if one is not None)
        self._state = state

    def take_sockets(self, resources: ExitStack) -> bool:
        """Take the sockets that the last run listened on; False if this one listens on
        others."""
        if self._manager.listeners:
            return False
        name = name_of_sockets(self.config)
        while (descriptor := self._manager.take(f"{name}-{len(self._sockets)}")) is not None:
            sock = _listener_of(descriptor)
            if sock is None:
                for other in self._sockets:
                    other.close()
                self._sockets.clear()
                return False
            self._sockets.append(resources.enter_context(sock))
        return bool(self._sockets)

    def open_listeners(self, config: ServerConfig, resources: ExitStack) -> Listeners:
        """Listen where the settings say, and go on with the sockets of the last run if
        it had the same settings."""
        given = self._sockets or [sock.dup() for sock in self._manager.listeners]
        return open_listeners(config, resources, given=given)

    async def take(self, whole: Whole, resources: ExitStack) -> list[Callable[[], Awaitable[None]]]:
        """Take the blocks over; return what is to run in the background from now on.

        Raises:
            PoolLost: they have no place in this pool.
        """
        await trio.lowlevel.checkpoint()
        assert self._state is not None
        try:
            return self.adopt(whole, self._state)
        except ConfigError as error:
            raise PoolLost(str(error)) from None

    async def end(self) -> None:
        """Nobody can go on any more with what was kept: from now on this server changes
        it."""
        await trio.to_thread.run_sync(forget_kept, self._manager)


def _listener_of(descriptor: int) -> socket.socket | None:
    """Return the socket of a descriptor; None if nobody can connect to it any more."""
    sock: socket.socket = socket.socket(fileno=descriptor)
    if sock.family == socket.AF_UNIX:
        sock = UnixListener(fileno=sock.detach())
    sock.setblocking(False)
    try:
        if isinstance(sock, UnixListener):
            sock.own_path()
    except OSError:
        sock.close()
        return None
    return sock
