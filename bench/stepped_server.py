"""A server that runs in the thread of a blocking client: when the client has sent
something, or waits for it.

So a call takes the same steps each time: no thread wakes another, and nothing is done
at a time that the kernel chose. Server, client and the Unix socket between them are the
real ones.
"""

import select
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import outcome
import trio

from infinistore.config import ServerConfig
from infinistore.server import serve
from infinistore.transports.sockets.blocking_streams import BlockingSocketStream

__all__ = ["stepped_server"]


class _SteppedRun:
    """A run of Trio whose steps are made when somebody asks for them: a guest, without
    the thread that waits for it.
    """

    def __init__(self) -> None:
        self._steps: deque[Callable[[], object]] = deque()
        self._wait: tuple[Callable[[], Any], Callable[[Any], object]] | None = None
        self.result: Any = None

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        trio.lowlevel.start_guest_run(
            function,
            *arguments,
            run_sync_soon_threadsafe=self._steps.append,
            done_callback=self._done,
            host_uses_signal_set_wakeup_fd=True,
        )

    def wait_later(self, wait: Callable[[], Any], deliver: Callable[[Any], object]) -> None:
        """What Trio calls to have a thread wait for events."""
        self._wait = wait, deliver

    def run_until(self, condition: Callable[[], object]) -> None:
        """Do what there is to do, then wait for more, until this holds when there is
        nothing to do.
        """
        self._run_steps()
        while not condition():
            self.run_on()

    def run_on(self) -> None:
        """Wait for something to do, and do it."""
        assert self._wait is not None
        wait, deliver = self._wait
        self._wait = None
        deliver(outcome.capture(wait))
        self._run_steps()

    def _run_steps(self) -> None:
        while self._steps:
            self._steps.popleft()()

    def _done(self, result: Any) -> None:
        self.result = result


@contextmanager
def stepped_server(config: ServerConfig) -> Iterator[None]:
    """Run a server inside this block, whenever a blocking client of this thread has
    sent something or waits for it.
    """
    run = _SteppedRun()
    scopes: list[trio.CancelScope] = []

    async def serve_until_cancelled() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, config)
            scopes.append(nursery.cancel_scope)

    def send_stepping(stream: BlockingSocketStream, views: Sequence[memoryview]) -> None:
        send(stream, views)
        run.run_on()

    def stepping(receive: Callable[..., int]) -> Callable[..., int]:
        def receive_stepping(stream: BlockingSocketStream, *arguments: Any) -> int:
            run.run_until(lambda: _is_readable(stream.socket))
            return receive(stream, *arguments)

        return receive_stepping

    stream = BlockingSocketStream
    send = stream.send_all
    with ExitStack() as patches:
        patches.enter_context(mock.patch("trio._core._run.start_thread_soon", run.wait_later))
        run.start(serve_until_cancelled)
        run.run_until(lambda: scopes)
        patches.enter_context(mock.patch.object(stream, "send_all", send_stepping))
        for name in ("receive_into", "receive_descriptors"):
            patches.enter_context(mock.patch.object(stream, name, stepping(getattr(stream, name))))
        yield
        scopes[0].cancel()
        run.run_until(lambda: run.result)
        run.result.unwrap()


def _is_readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], (), (), 0)[0])
