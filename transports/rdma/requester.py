"""The requester of a queue pair, under Trio: it keeps the queue full, waits on its
descriptor, and notices failures.

When `move` returns or raises, the device no longer touches the memory of either side
for it. Either all of the transfer was completed, or the queue pair has been destroyed.
Everything above relies on that.
"""

from collections.abc import Sequence
from itertools import count

import trio

from infinistore.errors import TransferFailed
from infinistore.transports.rdma.plan import Piece, Window
from infinistore.transports.rdma.verbs import Operation, Queue, describe_status

BATCH = 64
"""How many work requests share one completion."""
_YIELD_AFTER = 16  # completions that came without waiting: then others have their turn
_POLLS = 4  # before it goes to sleep: on real hardware a small batch is done by then


class Requester:
    """A connected queue pair of the side that posts. It moves one batch at a time."""

    def __init__(self, queue: Queue, depth: int, place: str) -> None:
        self._queue = queue
        self._depth = depth
        self._place = place
        self._numbers = count(1)
        self.broken = ""
        """Why it moves nothing any more; empty while it works."""

    async def move(self, operation: Operation, pieces: Sequence[Piece]) -> None:
        """Carry out these pieces, and return when all are done. Any other way out
        destroys the queue pair.

        Raises:
            TransferFailed: a piece failed, or the queue pair failed earlier.
        """
        if self.broken:
            raise TransferFailed(self.broken)
        window = Window(pieces, depth=self._depth, batch=min(BATCH, self._depth))
        try:
            await self._drive(operation, window)
        except TransferFailed as error:
            self.close(str(error))
            raise
        except BaseException:
            if window.in_flight:
                self.close("an earlier transfer was given up")
            raise

    async def _drive(self, operation: Operation, window: Window) -> None:
        await trio.lowlevel.checkpoint()
        queue = self._queue
        expected: list[int] = []
        idle = done = 0
        while not window.done:
            while batch := window.next_batch():
                number = next(self._numbers)
                queue.post(operation, batch, number)
                expected.append(number)
            completions = queue.poll()
            if not completions:
                idle += 1
                if idle <= _POLLS:
                    continue
                queue.arm()
                completions = queue.poll()  # what came before it was armed makes no event
                if not completions:
                    await self._wait()
                    done = 0
            for number, status in completions:
                idle = 0
                if status:
                    raise TransferFailed(f"RDMA over {self._place}: {describe_status(status)}")
                assert number == expected.pop(0), "a reliable connection completes in order"
                window.complete()
                done += 1
            if done >= _YIELD_AFTER:
                done = 0
                await trio.lowlevel.checkpoint()

    async def _wait(self) -> None:
        try:
            await trio.lowlevel.wait_readable(self._queue.fd)
        except trio.ClosedResourceError:
            raise TransferFailed("the queue pair was closed on this side") from None
        self._queue.take_events()

    def close(self, why: str = "the connection is closed") -> None:
        """Destroy the queue pair: nothing moves for it afterwards. Idempotent."""
        if not self.broken:
            self.broken = why
            trio.lowlevel.notify_closing(self._queue.fd)
            self._queue.close()
