"""The end of a server that its service manager starts again, and the start of the next
run, which goes on with what the service manager has kept.

It keeps descriptors: those of the arenas, of the sockets that the server listens on
unless they are its own, of the connections whose clients may still touch the pool, and
at last that of the state. Without a state, the others are worth nothing: so a server
that ends in any other way leaves nothing that anybody would believe. What was kept is
believed once: before the next run serves, it empties the file with the state. Whatever
is missing or does not fit is `PoolLost`: that server starts empty.
"""

import hashlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import attrs
import trio

from infinistore.config import ServerConfig
from infinistore.core.pool_state import GroupStates, PoolState, encode_groups
from infinistore.errors import ConfigError
from infinistore.server.listeners import Listeners
from infinistore.server.take_over.giving import HandoverServer
from infinistore.server.take_over.memory import (
    Adopting,
    Ended,
    PoolLost,
    ServerMemory,
    can_adopt,
    decode,
    read_all,
    write_state,
)
from infinistore.service_manager import ServiceManager
from infinistore.sizes import DefaultSize
from infinistore.transports.sockets.unix_listener import UnixListener

SOCKET = "socket-"
"""How the names of sockets begin that the server listens on."""
_NOT_IN_ORDER = "the last run of the service did not end in order, or had another number of shards"
_log = logging.getLogger("infinistore.server")


def make_keeping(config: ServerConfig, manager: ServiceManager, giving: HandoverServer) -> "Keeping | None":
    """Return what keeps the cache for the next run; None if there is nobody to keep it,
    or this server has what no next run could go on with: the log says so."""
    if not manager.may_keep:
        return None
    if why := why_not_kept(config):
        if manager.most_kept:  # else a supervisor has said so
            refuse_to_keep(why)
        return None
    return Keeping(manager, giving, config)


def why_not_kept(config: ServerConfig) -> str:
    """Return why no next run could go on with the cache of a server with these
    settings; empty if one could.
    """
    if not can_adopt(config):
        return f"the allocator {config.allocator} cannot go on with what another process has placed"
    if config.shm_writes == "off" and config.tenants is None:
        return "nobody may map the pool to write any more (--shm-writes off)"
    return ""


def refuse_to_keep(why: str) -> None:
    """Say that the next run starts empty, and why."""
    _log.warning("the cache is not kept for the next run", extra={"reason": why})


class Keeping:
    """Gives what a server has to its service manager."""

    def __init__(self, manager: ServiceManager, giving: HandoverServer, config: ServerConfig) -> None:
        self._manager = manager
        self._giving = giving
        self._config = config

    @property
    def wanted(self) -> bool:
        """Whether there will be a next run: not where the other shards serve on."""
        return self._manager.most_kept > 0

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
            refuse_to_keep(f"FileDescriptorStoreMax={self._manager.most_kept} is {-room} too few; raise it")
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
            refuse_to_keep(f"the service manager cannot be told: {error.strerror or error}")
            return
        for _, sock in sockets:
            if isinstance(sock, UnixListener):
                sock.leave_path()
        _log.info("the service manager keeps the cache", extra={"keys": len(whole), "connections": len(kept)})

    def _sockets(self) -> list[tuple[str, socket.socket]]:
        listeners = self._giving.listeners
        if listeners is None or self._manager.listeners:  # it has them
            return []
        name = _name_of_sockets(self._config)
        return [(f"{name}-{n}", sock) for n, sock in enumerate(listeners.clients)]


def _name_of_sockets(config: ServerConfig) -> str:
    """Return under which name the sockets of a server with these settings are kept."""
    path = (config.unix_socket, config.unix_socket_access, config.unix_socket_group)
    settings = (config.host, config.service_port, *path)
    return f"{SOCKET}{hashlib.sha256(repr(settings).encode()).hexdigest()[:16]}"


async def open_kept(
    config: ServerConfig, manager: ServiceManager, listen: Callable[..., Listeners], resources: ExitStack
) -> "KeptMemory":
    """Look at what the service manager has kept; `listen` is `open_listeners`, or does
    the same. `resources` closes what is not used.

    Raises:
        PoolLost: this server cannot go on with it.
    """
    kept = KeptMemory(config, manager, listen)
    resources.callback(kept.close)
    kept.read()
    if not kept.take_sockets(resources):  # nobody listens there any more, so that this server can
        await trio.to_thread.run_sync(manager.forget, SOCKET)
    return kept


def forget_kept(manager: ServiceManager) -> None:
    """See to it that nobody goes on with what was kept, by one process or as many as
    there were. Blocking.
    """
    for name, descriptor in manager.kept.items():
        if name.endswith("state"):
            os.ftruncate(descriptor, 0)
    manager.forget()


def as_large_as_kept(config: ServerConfig, manager: ServiceManager) -> ServerConfig:
    """Return the settings with as much memory as was kept, unless they say how much:
    the default is a part of what is left.
    """
    arenas = [descriptor for name, descriptor in manager.kept.items() if "-arena-" in name]
    if not arenas or not isinstance(config.prealloc_bytes, DefaultSize):
        return config
    return attrs.evolve(config, prealloc_bytes=sum(os.fstat(arena).st_size for arena in arenas))


class KeptMemory(Adopting):
    """What the service manager has kept."""

    serves = False
    """Whether the earlier server answers until `end`."""

    def __init__(self, config: ServerConfig, manager: ServiceManager, listen: Callable[..., Listeners]) -> None:
        super().__init__(config)
        self._manager = manager
        self._listen = listen
        self._state: PoolState | GroupStates | None = None
        self._sockets: list[socket.socket] = []

    def read(self) -> None:
        """Read the state, and look for all that it names.

        Raises:
            PoolLost: this server cannot go on with it.
        """
        descriptor = self._manager.look_at("state")
        if descriptor is None:
            raise PoolLost(_NOT_IN_ORDER)
        try:
            data = read_all(os.dup(descriptor))
            if not data:
                raise PoolLost(_NOT_IN_ORDER)
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
        """Take the sockets of the last run; False if this one listens elsewhere."""
        if self._manager.listeners:
            return False
        name = _name_of_sockets(self.config)
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
        """Listen as the settings say, on the last run's sockets if they fit."""
        return self._listen(config, resources, self._sockets)

    async def take(self, whole: ServerMemory, resources: ExitStack) -> list[Callable[[], Awaitable[None]]]:
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
        """Have what was kept forgotten: from now on this server changes it."""
        for sock in self._sockets:
            if isinstance(sock, UnixListener):
                with suppress(OSError):  # the path has been removed, or replaced
                    sock.own_path()
        await trio.to_thread.run_sync(forget_kept, self._manager)


def _listener_of(descriptor: int) -> socket.socket | None:
    """Return the socket of a descriptor; None if nobody can connect to it any more."""
    sock: socket.socket = socket.socket(fileno=descriptor)
    if sock.family == socket.AF_UNIX:
        sock = UnixListener(fileno=sock.detach())
    sock.setblocking(False)
    if isinstance(sock, UnixListener) and not Path(sock.getsockname()).exists():
        sock.close()
        return None
    return sock
