"""TCP and Unix sockets as Trio streams.

A stream tries the system call first, and waits only if the call would block;
`trio.SocketStream` costs a quarter of the throughput here. One call moves a whole list
of views. After a bounded number of bytes the stream yields to the scheduler, so that
one busy connection cannot starve the others.

`ReadySockets` is for many sockets at once, without a task for each: Trio wakes a task
for each socket that can be read, which takes as long as a short request does. So tasks
that wait for the next request of a client let one task look at all their sockets. It
receives what has come and hands it to `react`, which answers what can be answered in
one step. A task is woken only for what cannot.
"""

import contextlib
import errno
import math
import select
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import outcome
import trio

from infinistore.errors import ConfigError, StoreUnavailable
from infinistore.host import no_linux
from infinistore.protocol.effects import Span
from infinistore.transports.base import React
from infinistore.transports.sockets.names import Dialer, Found
from infinistore.transports.sockets.raw_sockets import (
    BACKLOG,
    VANISHED_AFTER_MS,
    broken,
    cannot_connect,
    looks_stale,
    prepare,
    reason,
    receive_with_descriptors,
    send_at_once,
)
from infinistore.transports.sockets.spin import Spinner

_MOST_AT_ONCE: Final = 32
"""After so many receives, other tasks have their turn."""


class _Waiting:
    """A task that waits for a socket."""

    def __init__(self, sock: socket.socket, room: memoryview, react: React) -> None:
        self.task = trio.lowlevel.current_task()
        self.receive = sock.recv_into
        self.room = room
        self.react = react


class ReadySockets:
    """The sockets of one event loop whose tasks wait for bytes. `run` looks at them."""

    def __init__(self) -> None:
        self._epoll: Any = None  # the name of its type is known on Linux only
        self._waiting: dict[int, _Waiting] = {}

    @property
    def runs(self) -> bool:
        """Whether somebody looks at them."""
        return self._epoll is not None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look at them until it is cancelled."""
        if sys.platform != "linux":
            raise no_linux("epoll", "receive from each socket by itself")
        with select.epoll() as epoll:
            self._epoll = epoll
            task_status.started()
            try:
                while True:
                    await trio.lowlevel.wait_readable(epoll.fileno())
                    left = _MOST_AT_ONCE
                    while left > 0 and (ready := epoll.poll(0, left)):
                        for number, _ in ready:
                            self._look_at(number)
                        left -= len(ready)
            finally:
                self._epoll = None
                for number in list(self._waiting):
                    self.end(number)

    async def receive(self, sock: socket.socket, room: memoryview, react: React) -> int:
        """Wait until bytes have come, and `react` does not want more of them; return
        what it says, or 0 at the end of the stream.

        Raises:
            StoreUnavailable: the socket was closed meanwhile.
            OSError: it is broken.
        """
        assert self._epoll is not None, "nobody looks at the sockets"
        number = sock.fileno()
        self._epoll.register(number, select.POLLIN)  # EPOLLIN is the same
        self._waiting[number] = _Waiting(sock, room, react)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._forget(number)
            return trio.lowlevel.Abort.SUCCEEDED

        count: int = await trio.lowlevel.wait_task_rescheduled(abort)
        return count

    def end(self, number: int) -> None:
        """Let the task that waits for this socket, if one does, find it closed."""
        if number in self._waiting:
            self._wake(number, outcome.Error(StoreUnavailable("the connection was closed on this side")))

    def _look_at(self, number: int) -> None:
        waiting = self._waiting.get(number)
        if waiting is None:  # what came before it has ended this one
            return
        try:
            count = waiting.receive(waiting.room)
        except BlockingIOError:
            return
        except OSError as error:
            self._wake(number, outcome.Error(error))
            return
        try:
            answer = waiting.react(count) if count else 0
        except Exception as error:  # noqa: BLE001  # it is the affair of who waits for it, and nobody else's
            self._wake(number, outcome.Error(error))
        else:
            if answer is not None:
                self._wake(number, outcome.Value(answer))

    def _wake(self, number: int, result: outcome.Outcome[int]) -> None:
        trio.lowlevel.reschedule(self._forget(number).task, result)

    def _forget(self, number: int) -> _Waiting:
        if self._epoll is not None:
            self._epoll.unregister(number)
        return self._waiting.pop(number)


_YIELD_AFTER_BYTES = 4 * 1024 * 1024
_CALL_COST_BYTES = 32 * 1024  # what a system call counts for, however few bytes it moves
_SPIN_COST_BYTES = 512 * 1024
_AWAKE = -2
"""Says that what has come was dealt with, and more of it is to be waited for awake."""


class SocketStream:
    """A connected, non-blocking socket, as `infinistore.transports.base.Stream`."""

    def __init__(self, sock: socket.socket, spinner: Spinner | None = None) -> None:
        self.socket = sock
        self._spinner = spinner if spinner is not None and spinner.spins else None
        self._credit = _YIELD_AFTER_BYTES
        self._awake_until = 0.0
        self._drowsy = False
        self._has_sent = False
        self.ready: ReadySockets | None = None
        """What looks at the socket while `receive_or_react` waits, if anything does."""
        self.silence_s = math.inf
        self.ask: Callable[[], Awaitable[None]] | None = None
        """Awaited after each `silence_s` of a wait; raises if the peer is gone."""
        self.passes_descriptors = sock.family == socket.AF_UNIX
        sock.setblocking(False)
        prepare(sock)

    async def send_all(self, views: Sequence[memoryview], within_s: float = math.inf) -> None:
        """Send all of these views, in order."""
        views = send_at_once(self.socket, views)
        self._credit -= _CALL_COST_BYTES
        if views:
            await self._send_rest(Span(views), trio.current_time() + within_s)
        elif self._credit < 0:
            await self._yield()
        self._has_sent = True
        if self._spinner is not None:
            self._spinner.moved(self)

    async def _send_rest(self, span: Span, deadline: float) -> None:
        while span.remaining:
            try:
                sent = self.socket.sendmsg(span.next_views(_YIELD_AFTER_BYTES))
            except BlockingIOError:
                await self._wait(trio.lowlevel.wait_writable, deadline)
                continue
            except OSError as error:
                raise broken(error) from error
            span.advance(sent)
            self._credit -= sent + _CALL_COST_BYTES
            if self._credit < 0:
                await self._yield()

    async def receive_into(self, views: Sequence[memoryview], deadline: float = math.inf) -> int:
        """Wait for at least one byte; 0 is the end of the stream."""
        if self._credit < 0:  # before anything has moved, so that a cancelled receive loses no bytes
            await self._yield()
        while (count := self._receive_now(views)) is None:
            if self._awake_until and self._is_awake():
                await self._yield()
            else:
                await self._wait(trio.lowlevel.wait_readable, deadline)
        return count

    async def receive_or_react(self, views: Sequence[memoryview], react: React) -> int:
        """As `receive_into` of one view, and what comes goes to `react`. While other
        streams are busy, too, one task looks at all of them (`ready`).
        """

        def react_or_wake(count: int) -> int | None:
            spinner = self._spinner
            alone = spinner is not None and spinner.chance(self)
            if spinner is not None:
                spinner.moved(self)
            self._awake_until = 0.0
            self._drowsy = False
            answer = react(count)
            return _AWAKE if answer is None and alone else answer

        while True:
            if self._credit < 0:
                await self._yield()
            count = self._receive_now(views)
            if count is not None:
                answer = react(count) if count else 0
                if answer is not None:
                    return answer
            elif self._awake_until and self._is_awake():
                await self._yield()
            elif self.ready is None or not self.ready.runs:
                await self._wait(trio.lowlevel.wait_readable)
            else:
                try:
                    count = await self.ready.receive(self.socket, views[0], react_or_wake)
                except OSError as error:
                    raise broken(error) from error
                self._credit = _YIELD_AFTER_BYTES
                if count != _AWAKE:
                    return count

    def _receive_now(self, views: Sequence[memoryview]) -> int | None:
        """Receive what is there, or comes while it is worth spinning; else None."""
        count: int | None = None
        if self._has_sent:
            # The peer hardly has an answer to that already: to try would raise.
            self._has_sent = False
        else:
            try:
                count = self.socket.recv_into(views[0]) if len(views) == 1 else self.socket.recvmsg_into(views)[0]
            except BlockingIOError:
                pass
            except OSError as error:
                raise broken(error) from error
        if self._spinner is not None:
            if count is None and not self._drowsy:
                count = self._spin(self._spinner, views)
            if count is not None:
                self._spinner.moved(self)
        if count is not None:
            self._credit -= count + _CALL_COST_BYTES
            self._awake_until = 0.0
            self._drowsy = False
        return count

    def stay_awake(self, seconds: float) -> None:
        """Spin in short pieces for this time, if the stream may; 0: do not."""
        if self._spinner is not None:
            self._awake_until = self._spinner.clock() + seconds
            self._drowsy = not seconds

    def _is_awake(self) -> bool:
        return (
            self._spinner is not None
            and self._awake_until > self._spinner.clock()
            and self._spinner.may_spin(self, self._awake_until)
        )

    def _spin(self, spinner: Spinner, views: Sequence[memoryview]) -> int | None:
        # Others have to get their turn soon, or nobody would notice that they are
        # there.
        self._credit -= _SPIN_COST_BYTES
        try:
            return spinner.spin(self, self.socket, views, until=self._awake_until)
        except OSError as error:
            raise broken(error) from error

    async def send_descriptors(
        self, views: Sequence[memoryview], descriptors: Sequence[int], within_s: float = math.inf
    ) -> None:
        """Send all of these views, with descriptors attached to the first byte."""
        deadline = trio.current_time() + within_s
        sent = 0
        while not sent:
            try:
                sent = socket.send_fds(self.socket, [views[0]], list(descriptors))
            except BlockingIOError:
                await self._wait(trio.lowlevel.wait_writable, deadline)
            except OSError as error:
                raise broken(error) from error
        await self.send_all([views[0][sent:], *views[1:]], deadline - trio.current_time())

    async def receive_descriptors(
        self, views: Sequence[memoryview], descriptors: list[int], deadline: float = math.inf
    ) -> int:
        """Receive at least one byte, and descriptors with it; 0 at the end."""
        while True:
            try:
                return receive_with_descriptors(self.socket, views, descriptors)
            except BlockingIOError:
                await self._wait(trio.lowlevel.wait_readable, deadline)
            except OSError as error:
                raise broken(error) from error

    async def send_eof(self) -> None:
        """Shut the sending side down."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise broken(error) from error
        await trio.lowlevel.checkpoint()

    def send_now(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        """Send of a short message what needs no waiting; return what is left."""
        views = send_at_once(self.socket, views)
        self._has_sent = True
        if self._spinner is not None:
            self._spinner.moved(self)
        return views

    def close(self) -> None:
        """Close the socket."""
        if (number := self.socket.fileno()) != -1:
            if self.ready is not None:
                self.ready.end(number)
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()

    def is_stale(self) -> bool:
        """Whether the peer of an idle connection has closed it, or sent something."""
        return looks_stale(self.socket)

    async def _wait(self, until_ready: Callable[[socket.socket], Awaitable[None]], deadline: float = math.inf) -> None:
        try:
            if deadline == math.inf and self.ask is None:
                await until_ready(self.socket)
            else:
                await self._wait_and_ask(until_ready, deadline)
        except trio.ClosedResourceError:
            raise StoreUnavailable("the connection was closed on this side") from None
        self._credit = _YIELD_AFTER_BYTES

    async def _wait_and_ask(self, until_ready: Callable[[socket.socket], Awaitable[None]], deadline: float) -> None:
        while True:
            with trio.CancelScope(deadline=min(deadline, trio.current_time() + self.silence_s)) as scope:
                await until_ready(self.socket)
            if not scope.cancelled_caught:
                return
            if self.ask is None or trio.current_time() >= deadline:
                raise TimeoutError
            await self.ask()

    async def _yield(self) -> None:
        """Let other tasks run after many bytes without a wait."""
        self._credit = _YIELD_AFTER_BYTES
        await trio.lowlevel.checkpoint()


async def connect_tcp(host: str, port: int, dialer: Dialer | None = None) -> SocketStream:
    """Connect to the first address of the host that answers. With a `dialer`, what was
    begun goes on if this is cancelled.

    Raises:
        StoreUnavailable: no address answers.
    """
    dialer = dialer or Dialer(keeps=False)
    try:
        found = await _result(dialer.look_up(host, port, trio.current_time()))
        with dialer.dial(found, trio.current_time()) as dial:
            while (sock := dial.connected(trio.current_time())) is None:
                await _any_writable(dial.sockets, dial.next_at)
    except (OSError, UnicodeError) as error:  # UnicodeError: what no host can be called
        raise cannot_connect(f"{host}:{port}", error) from error
    return SocketStream(sock)


async def _result(answer: Future[Found]) -> Found:
    await trio.lowlevel.checkpoint()
    if not answer.done():
        done = trio.Event()
        token = trio.lowlevel.current_trio_token()

        def wake(_: object) -> None:
            with contextlib.suppress(trio.RunFinishedError):  # nobody waits any more
                token.run_sync_soon(done.set)

        answer.add_done_callback(wake)
        await done.wait()
    return answer.result()


async def _any_writable(sockets: Sequence[socket.socket], until: float) -> None:
    async def wait(sock: socket.socket) -> None:
        await trio.lowlevel.wait_writable(sock)
        nursery.cancel_scope.cancel()

    with trio.move_on_at(until):
        async with trio.open_nursery() as nursery:
            for sock in sockets:
                nursery.start_soon(wait, sock)


async def connect_unix(path: str) -> SocketStream:
    """Connect to a Unix socket.

    Raises:
        StoreUnavailable: no server listens there.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise cannot_connect(path, error) from error
    try:
        sock.setblocking(False)
        sock.connect(path)  # a Unix socket connects at once, or refuses
        await trio.lowlevel.checkpoint()
    except OSError as error:
        sock.close()
        raise cannot_connect(path, error) from error
    except BaseException:
        sock.close()
        raise
    return SocketStream(sock)


def listen_tcp(
    host: str, port: int, *, host_flag: str = "--host", port_flag: str = "--service-port"
) -> list[socket.socket]:
    """Listen on every address of the host name. Port 0 takes a free one, the same for
    all of them.

    Errors name the flags.

    Raises:
        ConfigError: the name is unknown, the address is not of this machine, or the
            port is taken.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{host_flag} {host}: {reason(error)}; give an address or a name of this machine") from None
    listeners: list[socket.socket] = []
    chooses = not port
    with contextlib.ExitStack() as undo:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sock = undo.enter_context(socket.socket(family, kind, protocol))
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind((address[0], port, *address[2:]))
                sock.listen(BACKLOG)
            except OSError as error:
                if chooses and listeners and error.errno == errno.EADDRINUSE:  # free at some of the addresses only
                    return listen_tcp(host, 0, host_flag=host_flag, port_flag=port_flag)
                raise ConfigError(_cannot_listen(host, port, error, host_flag, port_flag)) from None
            port = sock.getsockname()[1]
            listeners.append(sock)
        undo.pop_all()
    return listeners


async def accept(listener: socket.socket, spinner: Spinner | None = None) -> SocketStream:
    """Wait for the next connection.

    Raises:
        OSError: the process is out of descriptors or memory; the listener is still
            good.
        trio.ClosedResourceError: the listener was closed.
    """
    while True:
        await trio.lowlevel.checkpoint()  # while nothing is accepted yet that would be lost
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            await trio.lowlevel.wait_readable(listener)
        except OSError as error:
            if listener.fileno() == -1:
                raise trio.ClosedResourceError from error
            if error.errno not in _LOST_BEFORE_ACCEPT:
                raise
        else:
            if sock.family != socket.AF_UNIX and sys.platform == "linux":
                # What a client holds goes with it, and what was sent to it last may
                # never be acknowledged: the probes of `prepare` are not sent then.
                # Callers have deadlines of their own; nobody waits for them here.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_AFTER_MS)
            return SocketStream(sock, spinner)


_LOST_BEFORE_ACCEPT = {
    errno.ECONNABORTED,
    errno.EPERM,
    errno.EPROTO,
    errno.ENETDOWN,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
}


def _cannot_listen(host: str, port: int, error: OSError, host_flag: str, port_flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what listens there, or give another {port_flag} (0: any)"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host_flag} {host}: not an address of this machine"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; give a {port_flag} above 1023"
    return f"cannot listen on {host}:{port}: {reason(error)}"
