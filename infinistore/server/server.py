"""A running server: it accepts connections, runs a session for each, and drains.

`Server` makes none of its parts; `infinistore.server.composition` composes them.
"""

import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import trio

from infinistore.core.store import StoreCore
from infinistore.protocol.messages import Hello
from infinistore.protocol.server_connection import ServerConnection
from infinistore.server.environment import Environment
from infinistore.server.listeners import ServerAddresses
from infinistore.server.session.context import ServerContext
from infinistore.server.session.handshake import Handshakes
from infinistore.server.session.session import Session
from infinistore.server.session_registry import SessionRegistry
from infinistore.server.telemetry import Telemetry
from infinistore.transports.base import Stream
from infinistore.transports.sockets.spin import Spinner

if TYPE_CHECKING:
    from infinistore.server.security.certificates import Certificates

__all__ = ["Server"]

_log = logging.getLogger("infinistore.server")
_LAST_WRITES_S = 1.0
"""What disks have at least to end cleanly, however long sessions took to."""
_NO_DESCRIPTORS_PAUSE_S = 0.1


class Server:
    """A server that listens. `background` runs for as long as it serves.

    When it drains, requests under way have `drain_timeout_s` to finish.
    """

    def __init__(
        self,
        context: ServerContext,
        addresses: ServerAddresses,
        *,
        sessions: SessionRegistry,
        handshakes: Handshakes,
        telemetry: Telemetry,
        spinner: Spinner,
        environment: Environment,
        background: Sequence[Callable[[], Awaitable[None]]],
        drain_timeout_s: float,
        tls: "Certificates | None" = None,
    ) -> None:
        self.context = context
        self.addresses = addresses
        self.sessions = sessions
        self.telemetry = telemetry
        self.drain_timeout_s = drain_timeout_s
        self.tls = tls
        """What connections over TCP are encrypted with, if they are."""
        self._handshakes = handshakes
        self._spinner = spinner
        self._environment = environment
        self._background = background
        self._drain = trio.Event()

    @property
    def core(self) -> StoreCore:
        """The store that it serves."""
        return self.context.core

    async def run(
        self,
        listeners: Sequence[socket.socket],
        on_listening: Callable[[], None],
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Serve until `drain` is called and the last session is over. Everything else
        ends with it. Connections wait for `before`, which may use the disks.
        """
        disk = self.context.disk
        async with trio.open_nursery() as background:
            for task in self._background:
                background.start_soon(task)
            if disk is not None:
                background.start_soon(disk.run)
            if before is not None:
                await before()
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(self._accept, listener, nursery)
                on_listening()
                await self._drain.wait()
                for listener in listeners:
                    trio.lowlevel.notify_closing(listener)
                    listener.close()
                self._handshakes.close()
                for session in self.sessions:
                    session.finish()
                with trio.move_on_after(self.drain_timeout_s) as drain:
                    for session in self.sessions:
                        await session.over.wait()
                # What is left serves no request: silent clients that still hold room,
                # and goodbyes to connections without a hello.
                nursery.cancel_scope.cancel()
            if disk is not None:
                within_s = max(_LAST_WRITES_S, drain.deadline - trio.current_time())
                _log.info("writing what only memory has", extra={"at_most_s": round(within_s, 1)})
                if not await disk.finish(within_s):
                    _log.warning("a disk did not end in time")
            background.cancel_scope.cancel()

    def drain(self) -> None:
        """Accept no more connections, let requests under way finish within the drain
        timeout, and stop.
        """
        self._drain.set()
        self.telemetry.draining = True

    @property
    def draining(self) -> bool:
        """Whether `drain` has been called."""
        return self._drain.is_set()

    async def drain_begun(self) -> None:
        """Wait until `drain` is called."""
        await self._drain.wait()

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        transport, secure = ("unix" if listener.family == socket.AF_UNIX else "tcp"), None
        if transport == "tcp" and self.tls is not None:
            transport, secure = "tls", self.tls.secure
        while True:
            try:
                stream = await self._environment.accept(listener, self._spinner)
            except trio.ClosedResourceError:
                return
            except OSError as error:
                # Most likely the process is out of descriptors, although others than
                # this server took them. Clients stay, a connection without a hello is
                # closed, and the next connection waits a moment.
                self._handshakes.drop_oldest()
                self.context.log_budget.log(logging.WARNING, "cannot accept a connection", error=error.strerror)
                await trio.sleep(_NO_DESCRIPTORS_PAUSE_S)
                continue
            self.telemetry.connections_total += 1
            if secure is not None:
                stream = secure(stream)
            nursery.start_soon(self._serve, stream, transport, f"client-{self.telemetry.connections_total}")

    async def _serve(self, stream: Stream, transport: str, name: str) -> None:
        def admit(connection: ServerConnection, hello: Hello) -> Session:
            self.sessions.check_free()
            session = Session(stream, connection, self.context, hello.name or name, transport)
            self.sessions.add(session)
            return session

        session = None
        try:
            session = await self._handshakes.perform(stream, name, transport, admit)
            if session is not None:
                await session.run()
        except Exception:  # noqa: BLE001  # a fault of ours where one connection ends must not end all the others
            _log.exception("internal error", extra={"client": name, "transport": transport})
        finally:
            if session is not None:
                self.sessions.remove(session)
