"""The part of a process that takes the place of a running server, and keeps its cache.

It connects to the server's Unix socket, and takes three steps (`TakeOverStep`). The
server serves on while this process maps its memory and gets ready, and serves again if
this process fails before it has taken the ownership of the pool. If the server dies
before it has told what its pool has, nobody knows what its clients still read:
`PoolLost`.

What clients of the server could still touch is kept for them until their connections
have ended.
"""

import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import trio

from infinistore.access.tenants import SUCCESSOR
from infinistore.config import ServerConfig
from infinistore.core.pool_state import GroupLayout, GroupStates
from infinistore.errors import ConfigError, InfiniStoreException, StoreUnavailable
from infinistore.protocol.client_connection import ClientConnection
from infinistore.protocol.messages import Hello, TakeOver, TakeOverReply, TakeOverStep
from infinistore.protocol.versions import Capability
from infinistore.server.listeners import Listeners, open_listeners
from infinistore.server.take_over.giving import ARENA_OF_GROUP
from infinistore.server.take_over.memory import (
    Adopting,
    PoolLost,
    ServerMemory,
    decode,
    has_more,
    read_all,
    take_ownership,
)
from infinistore.transports.base import drive
from infinistore.transports.sockets.raw_sockets import peer_user
from infinistore.transports.sockets.trio_streams import SocketStream, connect_unix
from infinistore.transports.sockets.unix_listener import UnixListener

_log = logging.getLogger("infinistore.server")
STEP_S = 60.0
"""Besides what the earlier server needs to finish what is under way."""
ENDS_S = 10.0
"""How long the end of an earlier server is waited for whose last answer was lost."""


@attrs.define
class _Received:
    """What came with one step; whoever uses a descriptor takes it out."""

    names: list[str]
    numbers: list[int]
    descriptors: list[int]

    def take(self, name: str) -> list[tuple[int, int]]:
        """Take the descriptors of this name, each with its number."""
        found = [i for i, other in enumerate(self.names) if other == name]
        taken = [(self.descriptors[i], self.numbers[i]) for i in found]
        for i in found:
            self.descriptors[i] = -1
        return taken

    def close(self) -> None:
        """Close what nobody has taken."""
        for descriptor in self.descriptors:
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptors.clear()


async def begin_taking(config: ServerConfig, token: str, resources: ExitStack) -> "HandoverClient | None":
    """Begin to take over the server on the Unix socket of the settings; None if none is
    there. `resources` closes everything that is not used.

    Raises:
        ConfigError: the server refuses.
        PoolLost: it has ended, and its pool does not fit these settings.
    """
    path = config.socket_path(config.service_port)
    assert path is not None
    try:
        stream = await connect_unix(str(path))
    except StoreUnavailable:
        _log.warning("no server to take over from; the cache starts empty", extra={"unix_socket": str(path)})
        return None
    resources.callback(stream.close)
    if peer_user(stream.socket) != os.geteuid():
        raise ConfigError(f"--take-over: the server on {path} belongs to another user")
    taking = HandoverClient(stream, path, config)
    await taking.begin(token, resources)
    return taking


class HandoverClient(Adopting):
    """Takes the place of the server at the other end of `stream`."""

    serves = True
    """Whether the earlier server answers until `end`."""

    def __init__(self, stream: SocketStream, path: Path, config: ServerConfig) -> None:
        super().__init__(config)
        self._stream = stream
        self._path = path
        self._connection = ClientConnection()
        self._listeners: list[tuple[str, socket.socket]] = []
        self.within_s = STEP_S + 2 * config.drain_timeout_s
        self._begun: list[int] | list[GroupLayout] = []
        self._ownership: int | None = None

    # First step

    async def begin(self, token: str, resources: ExitStack) -> None:
        """Get the sockets and the memory of the server, which serves on."""
        try:
            reply = await self._ask(Hello(name="take-over", token=SUCCESSOR if self.config.tenants else token))
        except StoreUnavailable as error:
            raise ConfigError(f"--take-over: {error}") from error
        if Capability.TAKE_OVER not in self._connection.peer.capabilities:
            raise ConfigError(f"--take-over: the server is of an older release ({reply.server_version}); restart it")
        received = await self._step(TakeOverStep.BEGIN, resources)
        ((self.lifeline, _),) = received.take("lifeline")
        resources.callback(self.close)
        self.open.add(self.lifeline)
        for name in ("tcp", "unix", "own-unix", "management"):
            for descriptor, _ in received.take(name):
                kind = UnixListener if name == "own-unix" else socket.socket
                sock = resources.enter_context(kind(fileno=descriptor))
                sock.setblocking(False)
                self._listeners.append((name, sock))
        described = [descriptor for descriptor, _ in received.take("groups")]
        arenas = ARENA_OF_GROUP if described else "arena"
        lengths = [length for length, name in zip(received.numbers, received.names, strict=True) if name == arenas]
        problem = self.accept(lengths, read_all(described[0]) if described else None)
        if problem:
            await self._end_without(resources)
            raise PoolLost(problem)
        self.give_arenas(received.take(arenas))
        self._begun = self.groups or lengths

    def open_listeners(self, config: ServerConfig, resources: ExitStack) -> Listeners:
        """Listen where the earlier server does."""
        clients = [sock for name, sock in self._listeners if name != "management"]
        management = [sock for name, sock in self._listeners if name == "management"]
        if config.manage_port is None or not management:
            return open_listeners(config, resources, given=clients)
        opened = open_listeners(attrs.evolve(config, manage_port=None), resources, given=clients)
        addresses = attrs.evolve(opened.addresses, management=tuple(sock.getsockname()[:2] for sock in management))
        return Listeners(opened.clients, management, addresses)

    def unusable(self, problem: str) -> Exception:
        """Return what to raise where an arena cannot be used. The server serves on."""
        return ConfigError(f"--take-over: {problem}; restart without it, and empty")

    # Second step

    async def take(self, whole: ServerMemory, resources: ExitStack) -> list[Callable[[], Awaitable[None]]]:
        """End the service of the server, and take its blocks over; return what is to
        run in the background from now on.

        Raises:
            ConfigError: the blocks cannot be taken over. The server serves on.
            PoolLost: the server died meanwhile.
        """
        received = await self._hand_over(resources)
        ((descriptor, _),) = received.take("state")
        try:
            state = decode(read_all(descriptor))
        except ValueError as error:
            raise ConfigError(
                f"--take-over: what the server says of its pool cannot be read: {error}. It serves on: stop it, and "
                "start without --take-over and empty"
            ) from None
        if (state.groups if isinstance(state, GroupStates) else state.arenas) != self._begun:
            raise ConfigError("--take-over: the pools of the server have changed meanwhile; try again")
        streams = received.take("stream")
        self.open.update(descriptor for descriptor, _ in streams)
        found = iter(streams)
        self.streams = [
            next(found)[0] if name == "stream" else None for name in received.names if name in {"stream", "no-stream"}
        ]
        return self.adopt(whole, state)

    async def _hand_over(self, resources: ExitStack) -> _Received:
        received = await self._step(TakeOverStep.HAND_OVER, resources)
        for descriptor, _ in received.take("ownership"):
            self._ownership = descriptor
            self.open.add(descriptor)
        return received

    # Third step

    async def end(self) -> None:
        """Take the ownership of the pool. From now on this process is the server.

        Raises:
            ConfigError: the server serves on, or did not say whether it does.
            PoolLost: it has ended, and nobody knows what its pool had then.
        """
        await self._take_ownership()
        for name, sock in self._listeners:
            if name == "own-unix" and isinstance(sock, UnixListener):
                sock.own_path()

    async def _take_ownership(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._ownership is None:  # the server is of an older release, and decides itself
            try:
                await self._ask(TakeOver(TakeOverStep.END))
            except StoreUnavailable as error:
                # It may have ended for this process, or for another one, or served on.
                if await self._predecessor_ended(ENDS_S):
                    raise PoolLost(
                        "the server, of an older release, has ended, and its last answer was lost"
                    ) from error
                raise ConfigError(f"--take-over: {error}; see whether it serves on, and try again") from error
        elif not take_ownership(self._ownership):
            raise ConfigError("--take-over: the server did not wait, and has served on; try again")
        self._stream.close()  # by which the server learns of it

    async def _end_without(self, resources: ExitStack) -> None:
        """Have the server end, and take nothing over."""
        (await self._hand_over(resources)).close()
        await self._take_ownership()
        if not await self._predecessor_ended(self.within_s):
            raise ConfigError("--take-over: the server has not ended; try again")

    async def _predecessor_ended(self, within_s: float) -> bool:
        with trio.move_on_after(within_s):
            while await has_more(self.lifeline):
                pass
            return True
        return False

    async def _ask(self, request: Any, descriptors: list[int] | None = None) -> Any:
        try:
            with trio.fail_after(self.within_s):
                return await drive(self._connection.request(request, descriptors=descriptors), self._stream)
        except trio.TooSlowError:
            raise StoreUnavailable(f"the server did not answer within {self.within_s:g} s") from None
        except StoreUnavailable:
            raise
        except InfiniStoreException as error:  # what the server refuses
            raise ConfigError(str(error)) from error

    async def _step(self, step: TakeOverStep, resources: ExitStack) -> _Received:
        """Take a step, and receive all of its descriptors."""
        received = _Received([], [], [])
        resources.callback(received.close)
        try:
            while not received.names or len(received.descriptors) < len(received.names):
                request = TakeOver(step, len(received.descriptors))
                before = len(received.descriptors)
                reply = await self._ask(request, received.descriptors)
                assert isinstance(reply, TakeOverReply)
                received.names, received.numbers = list(reply.names), list(reply.numbers)
                if len(received.descriptors) == before or len(received.numbers) != len(received.names):
                    raise ConfigError("--take-over: descriptors are missing; raise the limit on them (ulimit -n)")
        except StoreUnavailable as error:
            if step is TakeOverStep.HAND_OVER and await self._predecessor_ended(1.0):
                raise PoolLost("the server died before it had told what its pool has") from error
            raise ConfigError(f"--take-over: {error}") from error
        return received
