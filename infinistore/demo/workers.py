"""The two workers, each a process: prefill computes a prompt's KV cache and writes it
layer by layer; decode loads a prompt's longest stored prefix, and checks every byte.

Run as `python -m infinistore.demo.workers prefill` or `decode`. Orders come in on
standard input and events go out on standard output; `messages.py` defines them. A
worker ends with exit status 0 when its input ends, and with 1 after a `Failed` event.
It does not act on Ctrl-C, which a terminal sends to all its processes: the
demonstration hears it too and ends its workers in an orderly way.

Both load the stored prefix, layer by layer, and check every byte. Decode needs all of
it; prefill needs it because the computed tokens attend to the found ones.

Two tasks in a Trio nursery share prefill's work, with a channel between them. The first
task creates the bytes of a layer in a thread, and then waits until the simulated model
would have finished the layer. The second task writes the layers that it receives. The
channel holds at most one layer, which applies backpressure: a slow store delays the
model, and prefill never contains more than three layers of the prompt. If a task fails,
the nursery cancels the other.

Decode uses Trio because it shares the load with prefill. An engine with its own threads
would use `infinistore.blocking.open_store`; see `examples/blocking_client.py`.
"""

import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import trio
from attrs import evolve, frozen

import infinistore
from infinistore.demo.layout import KVLayout, block_content, block_key, block_keys, chunk_names, first_difference
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
class PrefixLoader:
    """Loads and checks chunks of one prompt. If the job says so, a block may be gone
    between looking it up and loading it.
    """

    store: "AsyncStore"
    layout: KVLayout
    job: Job

    async def load(self, names: Sequence[bytes]) -> Finished:
        """Load and check the leading chunks of `names` that are completely stored;
        return what that was, and took.

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
            tokens, hit_tokens = len(self.job.tokens), len(found) * layout.chunk_tokens
            send_event(Matched(self.job.prompt, tokens, hit_tokens, blocks, disk_blocks))
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
        return Finished(self.job.prompt, tokens, hit_tokens, loaded_bytes, load_s, disk_blocks)

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
        send_event(LayerDone(self.job.prompt, "loaded", layer, len(memory), loaded - started))
        for chunk, (name, block, length) in enumerate(zip(names, blocks, lengths, strict=True)):
            where = f"layer {layer} of chunk {chunk} (key {block_key(name, layer)})"
            if length is None and self.job.may_miss:
                continue
            if length is None:
                raise DemoError(f"{where} was there a moment ago and is missing now")
            expected = block_content(self.layout, name, layer)
            _check(where, expected, block[:length])
            await trio.lowlevel.checkpoint()
        send_event(LayerDone(self.job.prompt, "checked", layer, len(memory), time.perf_counter() - loaded))
        return loaded - started, sum(length for length in lengths if length is not None)


def _check(where: str, expected: bytes, found: memoryview) -> None:
    """Raise `DemoError` unless `found` is `expected`, to the last byte."""
    place = first_difference(expected, found)
    if place is not None:
        got = f"is {found[place]:#04x}" if place < len(found) else "is missing"
        raise DemoError(f"{where} is wrong: byte {place} {got} and should be {expected[place]:#04x}")


Layer = list[tuple[str, bytes]]
"""One layer of all new chunks: keys and blocks for `put_many`."""


async def prefill(store: "AsyncStore", setup: Setup, job: Job) -> Finished:
    """Load the stored prefix of the prompt, compute the rest, and store it."""
    layout = setup.layout
    names = chunk_names(layout, job.tokens)
    loaded = await PrefixLoader(store, layout, job).load(names)
    new_names = names[loaded.hit_tokens // layout.chunk_tokens :]
    computed_tokens = loaded.tokens - loaded.hit_tokens
    compute_s = computed_tokens / setup.prefill_tokens_per_s

    started = time.perf_counter()
    write_s, unstored = 0.0, 0
    to_write, computed = trio.open_memory_channel[Layer](1)  # one layer may wait while another is being written
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(_compute, setup, job.prompt, new_names, to_write, layer_s=compute_s / layout.layers))
        layer = 0
        async for blocks in computed:
            took_s, refused = await _write(store, job.prompt, layer, blocks)
            write_s, unstored, layer = write_s + took_s, unstored + refused, layer + 1
    return evolve(
        loaded,
        computed_tokens=computed_tokens,
        compute_s=compute_s,
        written_bytes=len(new_names) * layout.chunk_bytes,
        write_s=write_s,
        compute_and_write_s=time.perf_counter() - started,
        unstored_blocks=unstored,
    )


async def _compute(
    setup: Setup, prompt: str, names: Sequence[bytes], to_write: trio.MemorySendChannel[Layer], *, layer_s: float
) -> None:
    """Create the layers in order, at the speed of the simulated model."""
    async with to_write:
        for number in range(setup.layout.layers):
            started, deadline = time.perf_counter(), trio.current_time() + layer_s
            layer = await trio.to_thread.run_sync(_make_layer, setup.layout, names, number)
            await trio.sleep_until(deadline)
            send_event(LayerDone(prompt, "computed", number, _payload_bytes(layer), time.perf_counter() - started))
            await to_write.send(layer)


def _make_layer(layout: KVLayout, names: Sequence[bytes], layer: int) -> Layer:
    return [(block_key(name, layer), block_content(layout, name, layer)) for name in names]


async def _write(store: "AsyncStore", prompt: str, number: int, layer: Layer) -> tuple[float, int]:
    """Store one layer of all new chunks in one call. Returns the time in seconds, and
    how many blocks had no node to take them.
    """
    if not layer:  # everything was found, and what is left fills no chunk
        return 0.0, 0
    started, refused = time.perf_counter(), 0
    try:
        await store.put_many(layer)
    except infinistore.PartialPut as error:  # a node was lost, and its part is computed again next time
        refused = len(layer) - len(error.stored)
    took_s = time.perf_counter() - started
    send_event(LayerDone(prompt, "written", number, _payload_bytes(layer), took_s))
    return took_s, refused


def _payload_bytes(layer: Layer) -> int:
    return sum(len(block) for _, block in layer)


async def decode(store: "AsyncStore", setup: Setup, job: Job) -> Finished:
    """Load and check the prompt's full chunks. All must exist, as prefill has
    stored them, unless the job says otherwise.
    """
    layout = setup.layout
    names = chunk_names(layout, job.tokens)
    loaded = await PrefixLoader(store, layout, job).load(names)
    found = loaded.hit_tokens // layout.chunk_tokens
    if found < len(names) and not job.may_miss:
        raise DemoError(
            f"prefill stored {len(names)} chunks of prompt {job.prompt}, but only the first {found} are still "
            "there: others write to this store, or its pool or its disk has no room for them"
        )
    return loaded


_Work = Callable[["AsyncStore", Setup, Job], Awaitable[Finished]]
_WORK: Final[dict[str, _Work]] = {"prefill": prefill, "decode": decode}


def run_worker(work: _Work) -> None:
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


async def _serve_orders(work: _Work) -> None:
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


if __name__ == "__main__":
    run_worker(_WORK[sys.argv[1]])
