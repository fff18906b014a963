"""LMCache's RemoteBackend on a store, by the plugin and by LMCache's own connector,
against the store's own client.

    make .venvs/lmcache/.installed && .venvs/lmcache/bin/python bench/lmcache_engine.py [--quick] [--json]

Each figure is a rate as a part of the blocking client's for the same bytes, by the same
path, in the same run. What LMCache adds is in it: a memory object for each block, its
loop in another thread, a serializer that does nothing.
"""

import argparse
import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch

import dropin
from infinistore import blocking
from infinistore.blocking import BlockingStore
from rounds import interleaved

EXAMPLES = Path(__file__).parents[1] / "examples" / "lmcache"
CHUNK_TOKENS = 256
CASES = ((8, 4), (32, 1))
"""Chunks, and MiB of each: 2,048 tokens of 16 KiB and of 4 KiB."""
GIB = 1 << 30


def config_of(file: str, url: str) -> Any:
    """Return the configuration in the file, for the server at this URL."""
    from lmcache.v1.config import load_engine_config_with_overrides

    config = load_engine_config_with_overrides(
        str(EXAMPLES / file), {"max_local_cpu_size": 0.3, "local_cpu": False, "chunk_size": CHUNK_TOKENS}
    )
    if config.remote_url:
        config.remote_url = url
    else:
        config.extra_config["remote_storage_plugin.infinistore.url"] = url
        config.extra_config["remote_storage_plugin.infinistore.key_prefix"] = "bench/"  # its model has no files
    return config


@contextmanager
def backend(file: str, url: str, chunk_mib: int) -> Iterator[Any]:
    """LMCache's remote backend, and its loop."""
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

    config = config_of(file, url)
    heads = (chunk_mib << 20) // (CHUNK_TOKENS * 2 * 4 * 64 * 2)  # of 64 numbers of 2 bytes, in 4 layers, K and V
    shape = (4, 2, CHUNK_TOKENS, heads, 64)
    metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=CHUNK_TOKENS)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    memory = LocalCPUBackend(config, metadata, dst_device="cpu")
    plugin = None if config.remote_url else "infinistore"
    running = RemoteBackend(config, metadata, loop, memory, dst_device="cpu", plugin_name=plugin)
    try:
        yield running
    finally:
        running.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        memory.close()


class ThroughLMCache:
    """The calls that an engine makes, with blocks that are its own."""

    def __init__(self, running: Any, chunks: int, store: BlockingStore, prefix: str) -> None:
        self._backend = running
        self._store = store
        self._prefix = prefix
        self._metadata = running.metadata
        self._blocks = [self._allocate() for _ in range(chunks)]
        self._next = count()
        self.keys = self.new_keys()
        self.store(self.keys)

    def _allocate(self) -> Any:
        block = self._backend.local_cpu_backend.allocate(self._metadata.get_shapes(), self._metadata.get_dtypes())
        block.tensor.normal_()
        return block

    def new_keys(self) -> list[Any]:
        """Keys that nothing is stored under."""
        from lmcache.utils import CacheEngineKey

        return [CacheEngineKey("bench", 1, 0, 1_000_000 + next(self._next), torch.bfloat16) for _ in self._blocks]

    def store(self, keys: list[Any]) -> None:
        """Store the blocks, and wait for the end of it."""
        stored = threading.Semaphore(0)
        self._backend.batched_submit_put_task(keys, self._blocks, on_complete_callback=lambda _: stored.release())
        for _ in keys:
            stored.acquire()

    def put(self) -> None:
        """Store the blocks under new keys, and delete them, so that the pool never
        fills.
        """
        keys = self.new_keys()
        self.store(keys)
        self._store.delete([self._prefix + key.to_string() for key in keys])

    def get(self) -> None:
        """Load the blocks into new memory objects, and drop those."""
        for block in self._backend.batched_get_blocking(self.keys):
            block.ref_count_down()

    def close(self) -> None:
        """Give the memory back."""
        for block in self._blocks:
            block.ref_count_down()


class Direct:
    """The same with the blocking client, into memory that is there."""

    def __init__(self, store: BlockingStore, chunks: int, chunk_mib: int) -> None:
        self._store = store
        self._source = torch.randn(chunks, (chunk_mib << 20) // 4)
        self._target = torch.empty_like(self._source)
        self._next = count()
        self._items = [(f"direct/{number}", row) for number, row in enumerate(self._target.unbind())]
        store.put_many(list(zip([key for key, _ in self._items], self._source.unbind(), strict=True)))

    def put(self) -> None:
        """Store the blocks under new keys, and delete them."""
        new = {f"new/{next(self._next)}": row for row in self._source.unbind()}
        self._store.put_many(new)
        self._store.delete(new)

    def get(self) -> None:
        """Load the blocks."""
        self._store.get_many_into(self._items)


def measure(url: str, chunks: int, chunk_mib: int, rounds: int) -> dict[str, float]:
    """Return medians in seconds of one batch, by client and method."""
    things: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        store = stack.enter_context(blocking.open_store(url))
        direct = Direct(store, chunks, chunk_mib)
        things |= {"direct put": direct.put, "direct get": direct.get}
        for name, file, prefix in (("plugin", "plugin.yaml", "lmcache/kv/"), ("built-in", "builtin.yaml", "")):
            running = stack.enter_context(backend(file, url, chunk_mib))
            if running.connection is None:
                print(f"{name}: no connection by {url}")
                continue
            lmcache = ThroughLMCache(running, chunks, store, prefix)
            stack.callback(lmcache.close)
            things |= {f"{name} put": lmcache.put, f"{name} get": lmcache.get}
        return interleaved(things, rounds=rounds, calls=2)


def main() -> None:
    """Run, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)  # LMCache tells of each step
    rounds = 6 if arguments.quick else 30
    results: dict[str, float] = {}
    for chunks, chunk_mib in CASES:
        with dropin.server() as port:
            medians = measure(f"infinistore://127.0.0.1:{port}", chunks, chunk_mib, rounds)
        case = f"{chunks} x {chunk_mib} MiB"
        for kind in ("get", "put"):
            rate = (chunks * chunk_mib << 20) / medians[f"direct {kind}"] / GIB
            results[f"{kind} {case}: the blocking client, GiB/s"] = rate
            for name in ("plugin", "built-in"):
                if f"{name} {kind}" in medians:
                    ratio = medians[f"direct {kind}"] / medians[f"{name} {kind}"]
                    results[f"{kind} {case}: {name} / blocking client"] = ratio
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        for name, value in results.items():
            print(f"{name:52} {value:6.2f}")


if __name__ == "__main__":
    main()
