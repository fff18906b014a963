"""Store a prompt's KV cache layer by layer, during computation.

    python examples/layer_by_layer.py                          # embedded
    python examples/layer_by_layer.py tcp://127.0.0.1:22345    # against a server

The model computes in a thread, like a real one on a GPU. A channel of length 1 between
the two tasks applies backpressure: a slow store delays the model instead of filling the
memory with layers.
"""

import sys
import time

import trio

import infinistore

LAYERS = 12
CHUNKS = 4
BLOCK_BYTES = 512 * 1024
LAYER_S = 0.02  # time that the simulated model takes per layer

Layer = list[tuple[str, bytes]]


def compute_layer(layer: int) -> Layer:
    """Simulate a layer: one block per chunk of the prompt."""
    time.sleep(LAYER_S)
    return [(f"example/chunk{chunk}/L{layer:02d}", bytes([layer]) * BLOCK_BYTES) for chunk in range(CHUNKS)]


async def compute(layers: trio.MemorySendChannel[Layer]) -> None:
    async with layers:
        for number in range(LAYERS):
            await layers.send(await trio.to_thread.run_sync(compute_layer, number))


async def main(url: str | None) -> None:
    async with infinistore.open_store(url) as store:
        started = time.perf_counter()
        to_write, computed = trio.open_memory_channel[Layer](1)
        keys = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(compute, to_write)
            async for layer in computed:
                await store.put_many(layer)  # while the next layer is computed
                keys += [key for key, _ in layer]
        took_s = time.perf_counter() - started
        print(f"computing alone: {LAYERS * LAYER_S:.2f} s; computing and storing {len(keys)} blocks: {took_s:.2f} s")

        # Layers are also read one by one: a decoder can start with layer 0 while
        # layer 1 is loaded.
        memory = [bytearray(BLOCK_BYTES) for _ in range(CHUNKS)]
        for number in range(LAYERS):
            layer_keys = [f"example/chunk{chunk}/L{number:02d}" for chunk in range(CHUNKS)]
            await store.get_many_into(zip(layer_keys, memory, strict=True))
            assert all(block == bytes([number]) * BLOCK_BYTES for block in memory)
        print("read back layer by layer, every byte is right")
        await store.delete(keys)


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
