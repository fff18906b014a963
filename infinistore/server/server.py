"""A running server: it accepts connections, runs a session for each, and drains.

`Server` makes none of its parts; `infinistore.server.composition` composes them.
"""

import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import trio

from infinistore.access.identity import Identity
from infinistore.core.store import StoreCore
from infinistore.errors import ConfigError
from infinistore.protocol.messages import Hello
from infinistore.protocol.server_connection import ServerConnection
from infinistore.server.environment import Environment
from infinistore.server.listeners import NO_DESCRIPTORS_PAUSE_S, ServerAddresses
from infinistore.server.security import AuditLog, Reloads
from infinistore.server.session.handshake import Handshakes
from infinistore.server.session.session import ServerContext, Session, SessionRegistry
from infinistore.server.take_over.kept import refuse_to_keep
from infinistore.server.take_over.memory import Ended
from infinistore.server.telemetry import Telemetry
from infinistore.tenant_limits import TenantLimits, why_no_places
from infinistore.transports.base import Stream
from infinistore.transports.sockets.spin import Spinner
from infinistore.transports.sockets.trio_streams import ReadySockets, SocketStream

if TYPE_CHECKING:
    from infinistore.server.certificates import Certificates
    from infinistore.server.tenancy import Tenancy

_log = logging.getLogger("infinistore.server")
LAST_WRITES_S = 1.0
"""What disks have at least to end cleanly, however long sessions took to."""


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
        reloads: Reloads | None = None,
        tenancy: "Tenancy | None" = None,
    ) -> None:
        self.context = context
        self.addresses = addresses
        self.sessions = sessions
        self.telemetry = telemetry
        self.drain_timeout_s = drain_timeout_s
        self.tls = tls
        """What connections over TCP are encrypted with, if they are."""
        self.reloads = reloads or Reloads()
        """What SIGHUP reads again."""
        self.policy = handshakes.policy
        """Who is let in."""
        self.tenancy = tenancy
        """The tenants and their pools, if it has tenants."""
        self._handshakes = handshakes
        self._spinner = spinner
        self._environment = environment
        self._background = background
        self._drain = trio.Event()
        self._ready = ReadySockets()
        self._purges = 0
        """How many are under way."""
        self._stays = trio.Event()
        """Set while no other process takes over."""
        self._stays.set()
        self._has_ended = False

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
        disks = self.context.disks
        async with trio.open_nursery() as background:
            if isinstance(self.policy.audit, AuditLog):
                background.start_soon(self.policy.audit.run)
            for task in self._background:
                background.start_soon(task)
            background.start_soon(disks.run)
            if self.tenancy is not None:
                background.start_soon(self.tenancy.run)
            if before is not None:
                await before()
            async with trio.open_nursery() as nursery:
                if any(isinstance(listener, socket.socket) for listener in listeners):  # none are, in a simulation
                    await nursery.start(self._ready.run)
                on_listening()
                if await self._serve_until_replaced(listeners, nursery) or await self._keep():
                    background.cancel_scope.cancel()
                    nursery.cancel_scope.cancel()
                    return
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
            self._has_ended = True
            await disks.finish(max(LAST_WRITES_S, drain.deadline - trio.current_time()))
            background.cancel_scope.cancel()

    async def _serve_until_replaced(self, listeners: Sequence[socket.socket], nursery: trio.Nursery) -> bool:
        """Accept until a drain or a take-over; return whether it was the latter."""
        giving = self.context.giving
        while True:
            async with trio.open_nursery() as accepting:
                for listener in listeners:
                    accepting.start_soon(self._accept, listener, nursery)
                if giving is None:
                    await self._drain.wait()
                else:
                    await _first(self._drain, giving.wanted)
                accepting.cancel_scope.cancel()
            if giving is None or not giving.wanted.is_set():
                return False
            ended = None
            if self._purges:
                giving.fail("the store is being purged")
            else:
                self._stays = trio.Event()
                ended = await self._end_service()
                if ended is None:
                    giving.fail("a request under way does not end")
                else:
                    giving.hand_over(self.telemetry.instance, ended)
            if await giving.decide() or self.context.disks.closed:
                self._has_ended = True
                return True
            self._stays.set()
            self._handshakes.reopen()

    async def _keep(self) -> bool:
        """Give the pool to whoever keeps it for the next run; False if nobody does."""
        keeping = self.context.keeping
        if keeping is None or not keeping.wanted:
            return False
        self._has_ended = True
        ended = await self._end_service()
        if ended is None:
            refuse_to_keep("a request under way does not end")
            return False
        await keeping.keep(self.telemetry.instance, ended, self._environment.run_in_thread)
        return True

    async def _end_service(self) -> list[Ended] | None:
        """End all sessions but that of a process that takes over: nobody changes the
        pool any more. Return their connections; None if one does not end."""
        self._handshakes.close()
        sessions = [session for session in self.sessions if not session.takes_over]
        copies = [_copy_of(session.socket) for session in sessions]
        for session in sessions:
            session.replace()
        for within_s in (self.drain_timeout_s, LAST_WRITES_S):
            with trio.move_on_after(within_s):
                for session in sessions:
                    await session.over.wait()
            for session in sessions:  # all of them, also those behind one that does not end
                session.cut()
        if not all(session.over.is_set() for session in sessions):
            for copy in copies:
                if copy is not None:
                    os.close(copy)
            return None
        await self.context.disks.finish(self.drain_timeout_s)
        await self.context.disks.close()
        return [
            Ended(copy, session.touching)
            for copy, session in zip(copies, sessions, strict=True)
            if copy is not None or session.touching is not None
        ]

    async def purge(self) -> int:
        """Delete everything, and return how many keys there were in memory. Waits while
        another process takes over, which none can in the middle of a purge; and waits
        for ever once the service has ended: what the next process goes on with may have
        been written down before. A purge that has returned cannot be undone.

        Raises:
            DiskFailed: some of what is on a disk may come back.
        """
        purged = 0
        while not self._stays.is_set():  # asked again: others have their turn before a wait returns
            await self._stays.wait()
        if not self._has_ended:
            self._purges += 1
            try:
                purged = await self.context.disks.purge()
            finally:
                self._purges -= 1
        if self._has_ended:
            await trio.sleep_forever()
        return purged

    def drain(self) -> None:
        """Stop once requests under way have finished, within the drain timeout."""
        if not self.draining:
            self.policy.audit.note("drain")
        self._drain.set()
        self.telemetry.draining = True
        if self.context.giving is not None:
            self.context.giving.stop()

    async def apply_limits(self, limits: list[TenantLimits]) -> None:
        """Let these limits of tenants hold.

        Raises:
            ConfigError: they cannot. Nothing has changed.
        """
        if problem := why_no_places(len(limits), self.sessions.most):
            raise ConfigError(problem)
        if self.tenancy is not None:
            await self.tenancy.apply(limits)

    async def drain_on_signal(
        self, everything: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Drain on SIGTERM or SIGINT; on another one, cancel `everything`."""
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                name = signal.Signals(number).name
                if self.draining:
                    _log.info("not waiting for requests under way", extra={"signal": name})
                    everything.cancel()
                _log.info("draining", extra={"signal": name, "at_most_s": self.drain_timeout_s})
                self.drain()

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
                await trio.sleep(NO_DESCRIPTORS_PAUSE_S)
                continue
            self.telemetry.connections_total += 1
            if isinstance(stream, SocketStream):
                stream.ready = self._ready
            if secure is not None:
                stream = secure(stream)
            nursery.start_soon(self._serve, stream, transport, self.telemetry.connections_total)

    async def _serve(self, stream: Stream, transport: str, number: int) -> None:
        name = f"client-{number}"

        def admit(connection: ServerConnection, hello: Hello, identity: Identity) -> Session:
            self.sessions.check_free(identity.limits, 1 if self.tenancy is None else len(self.tenancy))
            context = self.context if self.tenancy is None else self.tenancy.context(self.context, identity)
            session = Session(
                *(stream, connection, context, hello.name or name, transport),
                number=number,
                identity=identity,
                audit=self.policy.audit,
            )
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
                if self.tenancy is not None:
                    self.tenancy.left(session.identity)


async def _first(*events: trio.Event) -> None:
    """Wait until one of these events has happened."""
    async with trio.open_nursery() as nursery:

        async def wait(event: trio.Event) -> None:
            await event.wait()
            nursery.cancel_scope.cancel()

        for event in events:
            nursery.start_soon(wait, event)


def _copy_of(sock: socket.socket | None) -> int | None:
    """Copy the descriptor of a socket; None if there is no descriptor left."""
    try:
        return None if sock is None or sock.fileno() < 0 else os.dup(sock.fileno())
    except OSError:
        return None
