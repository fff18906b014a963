"""The prefill process: computes a prompt's KV cache, and writes it layer by layer.

Run as `python -m infinistore.demo.prefill`; `messages.py` defines its input and output.

Two tasks in a Trio nursery share the work, with a channel between them. The first task
creates the bytes of a layer in a thread, and then waits until the simulated model would
have finished the layer. The second task writes the layers that it receives. The channel
holds at most one layer, which applies backpressure: a slow store delays the model, and
this process never contains more than three layers of the prompt. If a task fails, the
nursery cancels the other.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import trio

import infinistore
from infinistore.demo.layout import KVLayout, block_content, block_key, chunk_names
from infinistore.demo.messages import Finished, Job, LayerDone, Setup, send_event
from infinistore.demo.worker import PrefixLoader, run_worker

if TYPE_CHECKING:
    from infinistore.client import AsyncStore

Layer = list[tuple[str, bytes]]
"""One layer of all new chunks: keys and blocks for `put_many`."""


async def prefill(store: "AsyncStore", setup: Setup, job: Job) -> Finished:
    """Load the stored prefix of the prompt, compute the rest, and store it."""
    layout, tokens = setup.layout, len(job.tokens)
    names = chunk_names(layout, job.tokens)
    prefix = await PrefixLoader(store, layout, job.prompt).load(tokens, names)
    new_names = names[prefix.chunks :]
    hit_tokens = prefix.chunks * layout.chunk_tokens
    compute_s = (tokens - hit_tokens) / setup.prefill_tokens_per_s

    started = time.perf_counter()
    write_s, unstored = 0.0, 0
    to_write, computed = trio.open_memory_channel[Layer](1)  # one layer may wait while another is being written
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(_compute, setup, job.prompt, new_names, to_write, layer_s=compute_s / layout.layers))
        layer = 0
        async for blocks in computed:
            took_s, refused = await _write(store, job.prompt, layer, blocks)
            write_s, unstored, layer = write_s + took_s, unstored + refused, layer + 1
    return Finished(
        prompt=job.prompt,
        tokens=tokens,
        hit_tokens=hit_tokens,
        loaded_bytes=prefix.loaded_bytes,
        load_s=prefix.load_s,
        disk_blocks=prefix.disk_blocks,
        computed_tokens=tokens - hit_tokens,
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


if __name__ == "__main__":
    run_worker(prefill)
