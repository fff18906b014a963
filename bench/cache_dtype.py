"""What an fp8 KV cache is to a store: how much of a pool the blocks of a prompt take,
and how long they take over TCP, in bf16 and in fp8.

    python bench/cache_dtype.py [--rounds N]

A value is what vLLM's connector stores: a layer of a block of 16 tokens. The bytes are
random; neither the pool nor the link looks at them. Each round writes and reads the
same prompt in both dtypes, one after the other; the least time of each counts.
"""

import argparse
import os
import time

from infinistore.blocking import BlockingStore, open_store
from one_server import serving

BLOCK_TOKENS = 16
LAYERS, HEADS, HEAD_SIZE = 32, 8, 128  # of Llama 3.1 8B
PROMPT_TOKENS = 1024
POOL = "512MiB"
ELEMENT_BYTES = {"bf16": 2, "fp8": 1}


def value_bytes(dtype: str) -> int:
    """Return the length of a value: keys and values of one layer of one block."""
    return 2 * BLOCK_TOKENS * HEADS * HEAD_SIZE * ELEMENT_BYTES[dtype]


def timed(store: BlockingStore, blocks: dict[str, bytes]) -> tuple[float, float, int]:
    """Return the seconds of a put and of a get, and what the blocks take of the pool.

    As in the connector, a request has one layer of all blocks of the prompt.
    """
    store.purge()
    keys = list(blocks)
    count = PROMPT_TOKENS // BLOCK_TOKENS
    start = time.perf_counter()
    for first in range(0, len(keys), count):
        store.put_many({key: blocks[key] for key in keys[first : first + count]})
    put_s = time.perf_counter() - start
    start = time.perf_counter()
    read: list[bytearray | None] = []
    for first in range(0, len(keys), count):
        read += store.get_many(keys[first : first + count])
    get_s = time.perf_counter() - start
    for value, block in zip(read, blocks.values(), strict=True):
        assert value is not None
        assert bytes(value) == block
    return put_s, get_s, store.stats().store.used_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each dtype has its turn")
    rounds = parser.parse_args().rounds
    values = LAYERS * PROMPT_TOKENS // BLOCK_TOKENS
    prompts = {
        dtype: {f"{dtype}/{number}": os.urandom(value_bytes(dtype)) for number in range(values)}
        for dtype in ELEMENT_BYTES
    }
    print("| unit | dtype | a value | a prompt | of the pool | put | get |\n|---|---|---|---|---|---|---|")
    for unit in ("64KiB", "32KiB", "4KiB"):
        found: dict[str, list[tuple[float, float, int]]] = {dtype: [] for dtype in prompts}
        with (
            serving("--prealloc-size", POOL, "--minimal-allocate-size", unit) as address,
            open_store(f"infinistore://{address}", transport="inline") as store,
        ):
            for _ in range(rounds):
                for dtype, blocks in prompts.items():
                    found[dtype].append(timed(store, blocks))
        for dtype, times in found.items():
            put_s, get_s, used = map(min, zip(*times, strict=True))
            size = value_bytes(dtype)
            print(
                f"| {unit} | {dtype} | {size >> 10} KiB | {size * values >> 20} MiB | {used >> 20} MiB"
                f" | {put_s * 1000:.0f} ms | {get_s * 1000:.0f} ms |"
            )


if __name__ == "__main__":
    main()
