"""What a stream is to the Trio server and client: a reliable, ordered run of bytes, either way.

A stream moves views of the caller's memory. It buffers nothing, so that a payload is copied once: from the kernel to
where it belongs, or back.
"""

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar, cast

import trio

from infinistore.errors import DeadlineExceeded, StoreUnavailable
from infinistore.protocol.effects import Exchange, Receive, ReceiveDescriptors, Send, SendDescriptors

__all__ = ["DescriptorStream", "Stream", "drive"]

_T = TypeVar("_T")


class Stream(Protocol):
    """A byte stream under Trio. One task may send while another receives; no two may do the same.

    Every method is a checkpoint at least once per bounded number of bytes, and may be cancelled. A cancelled send may
    have sent any part of its bytes: after that, all that can be done with the stream is to close it.

    A wait is given up at `deadline`, on Trio's clock, or after `within_s` seconds: a cancel scope around each call, or
    a look at the clock, would cost more than most calls do, which need not wait.
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
        """Wait for at least one byte, fill the views from the front, and return how many bytes came; 0 is the end.

        Raises:
            StoreUnavailable: the stream is broken.
            TimeoutError: the deadline has passed.
        """

    async def send_eof(self) -> None:
        """Tell the peer that nothing more will be sent, and go on receiving.

        Raises:
            StoreUnavailable: the stream is broken.
        """

    def close(self) -> None:
        """Close the stream, at once. May be called twice. Whoever waits on it gets `StoreUnavailable`."""


class DescriptorStream(Stream, Protocol):
    """A stream whose peer is on this host and can be handed descriptors: a Unix socket."""

    def stay_awake(self, seconds: float) -> None:
        """Say that the peer will be heard of within this time: the next receive waits awake for it, if it may.

        Others have their turn meanwhile. 0: not soon, so the next receive does not wait awake at all.
        """

    async def send_descriptors(self, views: Sequence[memoryview], descriptors: Sequence[int]) -> None:
        """As `send_all`, with descriptors beside the first byte.

        Raises:
            StoreUnavailable: the stream is broken.
        """

    async def receive_descriptors(self, views: Sequence[memoryview], descriptors: list[int]) -> int:
        """As `receive_into`, and append the descriptors that come beside the bytes; they are the caller's to close.

        Raises:
            StoreUnavailable: the stream is broken.
        """


async def drive(exchange: Exchange[_T], stream: Stream, *, within_s: float = math.inf, stall_s: float = math.inf) -> _T:
    """Run an exchange over a stream, and return what it returns. A broken stream is raised inside the exchange.

    Raises:
        TimeoutError: it was not done within `within_s` seconds.
        DeadlineExceeded: the peer has begun something, and then sent nothing for `stall_s` seconds.
    """
    deadline = math.inf if within_s == math.inf else trio.current_time() + within_s
    try:
        effect = next(exchange)
        while True:
            try:
                count = 0
                if isinstance(effect, Receive):
                    if effect.idle or stall_s == math.inf:
                        count = await stream.receive_into(effect.views, deadline)
                    else:
                        count = await _receive_soon(effect.views, stream, stall_s)
                elif isinstance(effect, Send):
                    left_s = math.inf if deadline == math.inf else deadline - trio.current_time()
                    await stream.send_all(effect.views, left_s)
                elif isinstance(effect, SendDescriptors):
                    await cast(DescriptorStream, stream).send_descriptors(effect.views, effect.descriptors)
                elif isinstance(effect, ReceiveDescriptors):
                    count = await cast(DescriptorStream, stream).receive_descriptors(effect.views, effect.descriptors)
                else:
                    await trio.lowlevel.checkpoint()
            except StoreUnavailable as error:
                effect = exchange.throw(error)
            else:
                effect = exchange.send(count)
    except StopIteration as stop:
        result: _T = stop.value
        return result
    finally:
        exchange.close()


async def _receive_soon(views: Sequence[memoryview], stream: Stream, stall_s: float) -> int:
    try:
        return await stream.receive_into(views, trio.current_time() + stall_s)
    except TimeoutError:
        raise DeadlineExceeded(f"a message was begun, and then nothing came for {stall_s:g} s") from None
