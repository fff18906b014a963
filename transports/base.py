"""The stream interface of the Trio server and client: a reliable, ordered run of bytes
in both directions.

A stream moves views of the caller's memory and has no buffer, so a payload is copied
once between the kernel and its destination.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias, TypeGuard, TypeVar, cast

import trio

from infinistore.errors import DeadlineExceeded, StoreUnavailable
from infinistore.protocol.effects import Exchange, Fill, LongBody, Receive, ReceiveDescriptors, Send, SendDescriptors

_T = TypeVar("_T")
React: TypeAlias = Callable[[int], int | None]
"""Does something about so many bytes that have come, in one step. Returns None to have
more of them, or what the task that waits for them is to get.
"""


class Stream(Protocol):
    """A byte stream under Trio. One task may send while another receives; two tasks may
    not do the same.

    Every method is a checkpoint at least once per bounded number of bytes, and may be
    cancelled; so is the first receive after each send. A cancelled send may have sent
    any part of its bytes. After that, the stream can only be closed.

    A wait ends at `deadline`, on Trio's clock, or after `within_s` seconds. A cancel
    scope around each call would cost more than most calls do, which need not wait.
    """

    passes_descriptors: bool
    """Whether it is a `DescriptorStream`."""

    async def send_all(self, views: Sequence[memoryview], within_s: float = math.inf) -> None:
        """Send all of these views, in order.

        Raises:
            StoreUnavailable: the stream is broken.
            TimeoutError: the time is over; some bytes may have been sent.
        """

    async def receive_into(self, views: Sequence[memoryview], deadline: float = math.inf) -> int:
        """Wait for at least one byte, fill the views from the front, and return the
        number of bytes; 0 is the end.

        Raises:
            StoreUnavailable: the stream is broken.
            TimeoutError: the deadline has passed.
        """

    async def send_eof(self) -> None:
        """Tell the peer that nothing more will be sent. Receiving goes on.

        Raises:
            StoreUnavailable: the stream is broken.
        """

    def close(self) -> None:
        """Close the stream at once; tasks that wait on it fail. Idempotent."""


class ReactingStream(Stream, Protocol):
    """A stream for whose bytes no task need be woken."""

    async def receive_or_react(self, views: Sequence[memoryview], react: React) -> int:
        """Do as `receive_into`, and give what comes to `react`, if that suits. Return
        what that says, then. What it raises is raised here.

        Raises:
            StoreUnavailable: the stream is broken.
        """

    def send_now(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        """Send what can be sent without waiting; return what is left.

        Raises:
            StoreUnavailable: the stream is broken.
        """


def can_react(stream: Stream) -> TypeGuard[ReactingStream]:
    """Whether a stream is a `ReactingStream`, perhaps by another one behind it."""
    return hasattr(stream, "receive_or_react")


class DescriptorStream(Stream, Protocol):
    """A stream that can pass file descriptors to a peer on this host: a Unix socket."""

    def stay_awake(self, seconds: float) -> None:
        """Announce that the peer will send within this time, so that the next receive
        polls before it sleeps, if that is allowed.

        Other tasks run meanwhile. With 0, the next receive does not poll.
        """

    async def send_descriptors(
        self, views: Sequence[memoryview], descriptors: Sequence[int], within_s: float = math.inf
    ) -> None:
        """Do as `send_all`, with descriptors attached to the first byte.

        Raises:
            StoreUnavailable: the stream is broken.
            TimeoutError: the time is over; some bytes may have been sent.
        """

    async def receive_descriptors(
        self, views: Sequence[memoryview], descriptors: list[int], deadline: float = math.inf
    ) -> int:
        """Do as `receive_into`, and append the descriptors that come with the bytes.
        The caller closes them.

        Raises:
            StoreUnavailable: the stream is broken.
            TimeoutError: the deadline has passed.
        """


async def drive(
    exchange: Exchange[_T],
    stream: Stream,
    *,
    within_s: float = math.inf,
    stall_s: float = math.inf,
    admit_body: Callable[[LongBody], Awaitable[None]] | None = None,
) -> _T:
    """Run an exchange over a stream, and return its result. A broken stream raises
    inside the exchange.

    `admit_body` waits until a long body may be received; without it, the body may be
    received at once.

    Raises:
        TimeoutError: it was not done within `within_s` seconds.
        DeadlineExceeded: the peer began a message, and then sent nothing for `stall_s`
            seconds.
    """
    deadline = trio.current_time() + within_s

    def receive(views: Sequence[memoryview]) -> Awaitable[int]:
        if stall_s == math.inf:
            return stream.receive_into(views, deadline)
        return _receive_soon(views, stream, stall_s)

    try:
        effect = exchange.send(None)
        while True:
            try:
                count = 0
                if isinstance(effect, Receive):
                    views = effect.views
                    count = await (stream.receive_into(views, deadline) if effect.idle else receive(views))
                elif isinstance(effect, Fill):
                    await effect.receive_by(receive)
                elif isinstance(effect, Send):
                    await stream.send_all(effect.views, deadline - trio.current_time())
                elif isinstance(effect, SendDescriptors):
                    left_s = deadline - trio.current_time()
                    await cast(DescriptorStream, stream).send_descriptors(effect.views, effect.descriptors, left_s)
                elif isinstance(effect, ReceiveDescriptors):
                    found = effect.descriptors
                    count = await cast(DescriptorStream, stream).receive_descriptors(effect.views, found, deadline)
                else:
                    await _wait(effect, admit_body)
            except StoreUnavailable as error:
                effect = exchange.throw(error)
            else:
                effect = exchange.send(count)
    except StopIteration as stop:
        result: _T = stop.value
        return result
    finally:
        exchange.close()


async def _wait(effect: object, admit_body: Callable[[LongBody], Awaitable[None]] | None) -> None:
    if isinstance(effect, LongBody) and admit_body is not None:
        await admit_body(effect)
    else:
        await trio.lowlevel.checkpoint()


async def _receive_soon(views: Sequence[memoryview], stream: Stream, stall_s: float) -> int:
    try:
        return await stream.receive_into(views, trio.current_time() + stall_s)
    except TimeoutError:
        raise DeadlineExceeded(f"a message was begun, and then nothing came for {stall_s:g} s") from None
