"""The library in one minute: an embedded store on Trio.

    python examples/quickstart.py

With a URL, it uses a server: python examples/quickstart.py tcp://127.0.0.1:22345
"""

import sys

import trio

import infinistore


async def main(url: str | None) -> None:
    async with infinistore.open_store(url) as store:
        # One block under one key. A block is any object with the buffer protocol.
        await store.put("greeting", b"hello")
        print("greeting:", bytes(await store.get("greeting")).decode())

        # A KV cache moves in batches: one request, visible in one step.
        blocks = {f"prompt/chunk{number}": bytes([number]) * 65536 for number in range(8)}
        await store.put_many(blocks)

        # How much of a prompt is stored? The number of leading keys without a gap.
        wanted = [*blocks, "prompt/chunk8", "prompt/chunk9"]
        found = await store.match_prefix(wanted)
        print(f"longest prefix: {int(found)} of {len(wanted)} keys")

        # Read into existing memory: nothing is allocated for the payload.
        memory = [bytearray(65536) for _ in range(found)]
        lengths = await store.get_many_into(zip(wanted[:found], memory, strict=True))
        assert lengths == [65536] * found
        assert memory == list(blocks.values())

        # `get` raises for a missing key, `get_many` returns None.
        try:
            await store.get("nothing here")
        except infinistore.KeyNotFound as error:
            print("KeyNotFound:", error)

        statistics = await store.stats()
        print(f"the bytes went by: {statistics.transport} ({statistics.transport_reason})")
        await store.delete(["greeting", *blocks])


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
