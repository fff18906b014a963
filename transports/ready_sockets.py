"""Many sockets at once, and what is done about what comes over them, without a task for
each.

Trio wakes a task for each socket that can be read, which takes as long as a short
request does. So tasks that wait for the next request of a client let one task look at
all their sockets. It receives what has come and hands it to `react`, which answers what
can be answered in one step. A task is woken only for what cannot.
"""

import select
import socket
from typing import Final

import outcome
import trio

from infinistore.errors import StoreUnavailable
from infinistore.transports.base import React

__all__ = ["ReadySockets"]

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
        self._epoll: select.epoll | None = None
        self._waiting: dict[int, _Waiting] = {}

    @property
    def runs(self) -> bool:
        """Whether somebody looks at them."""
        return self._epoll is not None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look at them until it is cancelled."""
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
        self._epoll.register(number, select.EPOLLIN)
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
