"""One shard: a server that a supervisor has started, and that ends with it.

It is a plain server, but for three things: it takes no memory before all shards have
their ports, its management API is on a Unix socket of the supervisor, and it obeys the
supervisor's link instead of Ctrl-C. SIGTERM drains it alone, and at SIGHUP it alone
reads its files again.
"""

import os
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from infinistore.config import ServerConfig
from infinistore.errors import ConfigError, OutOfMemory
from infinistore.protocol.messages import Shard
from infinistore.server.composition import run_server
from infinistore.server.environment import Environment
from infinistore.server.listeners import Listeners, ServerAddresses, open_listeners
from infinistore.server.security import Reloads, reload_on_signal
from infinistore.server.server import Server
from infinistore.server.shards.link import (
    Alive,
    Drain,
    Link,
    Listening,
    Met,
    Refused,
    Reload,
    Serving,
    Start,
    receive_start,
)
from infinistore.transports.sockets.unix_listener import listen_unix

__all__ = ["ShardProcess"]


class ShardProcess:
    """The process of a shard, at its end of the link. Until `run`, nothing of it runs
    in Trio.

    EOFError: its supervisor is gone already.
    """

    def __init__(self, descriptor: int) -> None:
        self._sock = socket.socket(fileno=descriptor)
        start = receive_start(self._sock)
        if start is None:
            raise EOFError
        self.start: Start = start
        """What it is."""

    async def run(self, on_serving: Callable[[], None]) -> None:
        """Serve until the supervisor or SIGTERM says otherwise. A refusal to start goes
        to the supervisor.
        """
        link = Link(self._sock)
        refused: Refused | None = None
        async with trio.open_nursery() as nursery:
            served = _Served(link, self.start, on_serving, nursery.cancel_scope)
            nursery.start_soon(served.obey)
            nursery.start_soon(served.beat)
            await nursery.start(served.drain_on_signal)
            await nursery.start(reload_on_signal, served.reloads)
            refused = await served.run()
            nursery.cancel_scope.cancel()
        if refused is not None:
            await link.send(refused)
        link.close()


class _Served:
    def __init__(self, link: Link, start: Start, on_serving: Callable[[], None], scope: trio.CancelScope) -> None:
        self._link = link
        self._start = start
        self._on_serving = on_serving
        self._scope = scope
        self._server: Server | None = None
        self._met: trio.Event = trio.Event()
        self._shards: Sequence[Shard] = ()
        self.reloads = Reloads()
        self.reloads.add(self._reload)

    async def run(self) -> Refused | None:
        """Serve. Return why it cannot, if it cannot."""
        start = self._start
        refused = None
        environment = Environment(
            open_listeners=partial(_listen, start.management_socket),
            meet_shards=self._meet,
            run_in_thread=partial(_run_on_any_core, frozenset(os.sched_getaffinity(0))),
        )
        async with trio.open_nursery() as nursery:
            serving = trio.Event()

            def listening(server: Server) -> None:
                self._server = server
                serving.set()

            nursery.start_soon(self._tell_when, serving)
            try:
                await run_server(start.config, environment=environment, on_listening=listening)
            except (ConfigError, OutOfMemory) as error:
                refused = Refused(type(error), str(error))
            nursery.cancel_scope.cancel()
        return refused

    async def _tell_when(self, serving: trio.Event) -> None:
        await serving.wait()
        if self._start.core is not None:
            with suppress(OSError):  # the core has been taken away since
                os.sched_setaffinity(0, [self._start.core])
        self._on_serving()
        await self._link.send(Serving())

    async def _meet(self, addresses: ServerAddresses) -> Sequence[Shard]:
        await self._link.send(Listening(addresses))
        await self._met.wait()
        return self._shards

    async def beat(self) -> None:
        """Tell the supervisor again and again that the event loop runs."""
        while True:
            await self._link.send(Alive())
            await trio.sleep(self._start.beat_s)

    async def obey(self) -> None:
        """Do as the supervisor says; end when it is gone."""
        while (message := await self._link.receive()) is not None:
            if isinstance(message, Met):
                self._shards = message.shards
                self._met.set()
            elif isinstance(message, Drain):
                self._drain()
            elif isinstance(message, Reload):
                await self.reloads.run()
        self._scope.cancel()

    async def drain_on_signal(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Drain on SIGTERM; end on another one."""
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                if self._server is not None and self._server.draining:
                    self._scope.cancel()
                self._drain()

    async def _reload(self) -> str:
        problems = [] if self._server is None else await self._server.reloads.run()  # without: it has just read all
        return "; ".join(problems)

    def _drain(self) -> None:
        if self._server is None:
            self._scope.cancel()
        else:
            self._server.drain()


def _listen(management_socket: Path | None, config: ServerConfig, resources: ExitStack) -> Listeners:
    """Listen as a server does, but for the management API."""
    found = open_listeners(attrs.evolve(config, manage_port=None), resources)
    if management_socket is None:
        return found
    return attrs.evolve(found, management=[resources.enter_context(listen_unix(management_socket))])


async def _run_on_any_core(cores: frozenset[int], function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a blocking function in a thread, which may use other cores than the server
    does: it prefaults memory, or waits for a disk.
    """

    def run() -> Any:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)
        return function(*arguments)

    run_sync: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync
    return await run_sync(run)
