"""What both worker processes have: the frame, in which orders come in on standard input
and events go out on standard output, and the load of a prompt's longest stored prefix.

A worker ends with exit status 0 when its input ends, and with 1 after a `Failed` event.
It does not act on Ctrl-C, which a terminal sends to all its processes: the
demonstration hears it too and ends its workers in an orderly way.

A prefix is loaded layer by layer, and every byte is checked. Decode needs all of it;
prefill needs it because the computed tokens attend to the found ones.
"""

import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import trio
from attrs import frozen

import infinistore
from infinistore.demo.layout import KVLayout, block_content, block_key, block_keys, first_difference
from infinistore.demo.messages import (
    DemoError,
    Failed,
    Finished,
    Job,
    LayerDone,
    LineReader,
    Matched,
    Ready,
    Setup,
    decode_order,
    expected_error,
    send_event,
)

if TYPE_CHECKING:
    from infinistore.client import AsyncStore, PrefixMatch


_HOLD_S = 60.0  # an upper bound; the hold is released as soon as the prefix is loaded


@frozen
class LoadedPrefix:
    """The number of found chunks, and the cost of loading them."""

    chunks: int
    disk_blocks: int
    """How many blocks were on disk only when the prefix was looked up."""
    loaded_bytes: int
    load_s: float


@frozen
class PrefixLoader:
    """Loads and checks chunks of one prompt; its name is part of the events."""

    store: "AsyncStore"
    layout: KVLayout
    prompt: str
    may_miss: bool = False
    """Whether a block may be gone between looking it up and loading it."""

    async def load(self, tokens: int, names: Sequence[bytes]) -> LoadedPrefix:
        """Load and check the leading chunks of `names` that are completely stored.

        Sends `Matched` and two `LayerDone` events per layer. Memory: one layer of all
        found chunks.

        Raises `DemoError`, which names the block and the byte, if a byte is wrong or a
        held block is missing.
        """
        layout = self.layout
        match = await self._match(block_keys(layout, names))
        try:
            found = names[: int(match) // layout.layers]
            blocks = len(found) * layout.layers
            disk_blocks = max(0, blocks - match.in_memory)
            send_event(Matched(self.prompt, tokens, len(found) * layout.chunk_tokens, blocks, disk_blocks))
            load_s, loaded_bytes = 0.0, 0
            if found:
                # One buffer for all layers: its memory is touched once, and an engine
                # loads into pages it has, too.
                memory = memoryview(bytearray(len(found) * layout.block_bytes))
                for layer in range(layout.layers):
                    took_s, of_layer = await self._load_and_check_layer(found, layer, memory)
                    load_s, loaded_bytes = load_s + took_s, loaded_bytes + of_layer
        finally:
            if match.hold:
                with trio.CancelScope(shield=True):
                    await self.store.release_hold(match.hold)
        return LoadedPrefix(len(found), disk_blocks, loaded_bytes, load_s)

    async def _match(self, keys: list[str]) -> "PrefixMatch":
        """Count the leading keys, and hold them until they are read."""
        try:
            return await self.store.match_prefix(keys, hold_s=_HOLD_S)
        except infinistore.LimitExceeded:
            # A server holds no more than a part of its pool. Without a hold a block may
            # be gone when we come to load it: an engine computes it then, and this
            # demonstration reports it.
            return await self.store.match_prefix(keys)

    async def _load_and_check_layer(self, names: Sequence[bytes], layer: int, memory: memoryview) -> tuple[float, int]:
        """Load one layer of all chunks in one call, then check it. Returns the load
        time, and how many bytes were loaded.

        The time does not include the check. The check does not overlap with loading the
        next layer, because it would distort the measurement.
        """
        size = self.layout.block_bytes
        blocks = [memory[size * number : size * (number + 1)] for number in range(len(names))]
        items = [(block_key(name, layer), block) for name, block in zip(names, blocks, strict=True)]
        started = time.perf_counter()
        lengths = await self.store.get_many_into(items)
        loaded = time.perf_counter()
        send_event(LayerDone(self.prompt, "loaded", layer, len(memory), loaded - started))
        for chunk, (name, block, length) in enumerate(zip(names, blocks, lengths, strict=True)):
            where = f"layer {layer} of chunk {chunk} (key {block_key(name, layer)})"
            if length is None and self.may_miss:
                continue
            if length is None:
                raise DemoError(f"{where} was there a moment ago and is missing now")
            expected = block_content(self.layout, name, layer)
            _check(where, expected, block[:length])
            await trio.lowlevel.checkpoint()
        send_event(LayerDone(self.prompt, "checked", layer, len(memory), time.perf_counter() - loaded))
        return loaded - started, sum(length for length in lengths if length is not None)


def _check(where: str, expected: bytes, found: memoryview) -> None:
    """Raise `DemoError` unless `found` is `expected`, to the last byte."""
    place = first_difference(expected, found)
    if place is not None:
        got = f"is {found[place]:#04x}" if place < len(found) else "is missing"
        raise DemoError(f"{where} is wrong: byte {place} {got} and should be {expected[place]:#04x}")


Work = Callable[["AsyncStore", Setup, Job], Awaitable[Finished]]


def run_worker(work: Work) -> None:
    """Be a worker that does `work` for every job, until there are no more; does not
    return.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trio.run(_serve_orders, work)
    except BaseExceptionGroup as group:
        if (error := expected_error(group)) is None:
            raise
        _fail(error)
    except (DemoError, infinistore.InfiniStoreException) as error:
        _fail(error)
    sys.exit(0)


async def _serve_orders(work: Work) -> None:
    # trio.lowlevel.FdStream closes what it is given, and standard input is not ours to
    # close.
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as standard_input:
        orders = LineReader(standard_input)
        setup = await _next_order(orders)
        if not isinstance(setup, Setup):
            raise DemoError("the first order of a worker must be its setup")
        async with infinistore.open_store(setup.url) as store:
            statistics = await store.stats()
            send_event(Ready(os.getpid(), statistics.transport))
            while isinstance(job := await _next_order(orders), Job):
                send_event(await work(store, setup, job))


async def _next_order(orders: LineReader) -> Setup | Job | None:
    line = await orders.next_line()
    return None if line is None else decode_order(line)


def _fail(error: BaseException) -> None:
    send_event(Failed(" ".join(str(error).split()) or type(error).__name__))
    sys.exit(1)
