"""The blocking client, for programs with threads and no event loop, with a server.

    infinistore --prealloc-size 512MiB &
    python examples/blocking_client.py tcp://127.0.0.1:22345

Any number of threads can use a store. Each call has a deadline: 5 seconds here, 30 by
default.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from infinistore import blocking

THREADS = 4
BLOCKS = 32
BLOCK_BYTES = 256 * 1024


def main(url: str | None) -> None:
    data = bytes(range(256)) * (BLOCK_BYTES // 256)
    with blocking.open_store(url, deadline_s=5) as store:

        def write_and_read(thread: int) -> None:
            keys = [f"example/{thread}/{number}" for number in range(BLOCKS)]
            store.put_many(dict.fromkeys(keys, data))
            memory = [bytearray(BLOCK_BYTES) for _ in keys]
            store.get_many_into(zip(keys, memory, strict=True))
            assert all(block == data for block in memory)
            store.delete(keys)

        started = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(write_and_read, range(THREADS)))
        megabytes = 2 * THREADS * BLOCKS * BLOCK_BYTES / 1e6
        print(f"{THREADS} threads wrote and read {megabytes:.0f} MB in {time.perf_counter() - started:.3f} s")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
