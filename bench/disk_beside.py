"""The SSD tier beside other products: interleaved, each round in another order, past the
page cache.

    make .venvs/beside/.installed
    .venvs/beside/bin/python bench/disk_beside.py [--folder PATH] [--size-mib N] [--rounds N] [--json]

Each way writes the same number of bytes from memory, and reads them back into memory:
what an engine waits for in each product, without what is above. Reported are medians of
the rounds, and the median of the ratios of single rounds, because disks of virtual
machines swing.

- tier: the SSD tier below a store (`infinistore/disk`), as in `bench/disk.py`, from the
  first put until everything is durable, and back into an empty pool, each block hashed.
- lmcache: LMCache's LocalDiskBackend with its default settings: a file for each block,
  through the page cache, and no fsync. Written is until LMCache has said so of the last
  block; "and on disk" is until fsync(2) of all files has returned, too, four at a time,
  as a crash of the machine would need. Before it reads, the files are written back and
  dropped from the page cache.
- lmcache, direct: the same with `use_odirect`.
- mooncake, bucket and mooncake, file: Mooncake Store with its file back ends, as
  `bench/mooncake_engine.py` says: from the first put until its master knows of a copy on
  disk, no fsync, and back from disk alone. Its pages are dropped, too.

Files lie in a temporary folder below PATH, which should be on the disk to measure, and
are removed at the end.
"""

import argparse
import asyncio
import importlib.util
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch

from disk import Tier, in_turns
from infinistore.sizes import GIB, KIB, MIB

BLOCKS = (MIB, 256 * KIB)
CHUNK_TOKENS = 256
BASE = "tier"
FSYNCS_AT_A_TIME = 4
PATIENCE_S = 60.0


class Disk(Protocol):
    """One product with blocks of one size: both return bytes per second."""

    def write(self) -> float:
        """Write all blocks."""

    def read(self) -> float:
        """Read what was written last."""


class LMCacheDisk:
    """LMCache's local disk, as its storage manager calls it."""

    def __init__(self, backend: Any, *, size_bytes: int, block_bytes: int) -> None:
        self._backend = backend
        self._size_bytes = size_bytes
        self._next = count()
        metadata = backend.local_cpu_backend.metadata
        self._blocks = [
            backend.local_cpu_backend.allocate(metadata.get_shapes(), metadata.get_dtypes())
            for _ in range(size_bytes // block_bytes)
        ]
        if None in self._blocks or self._blocks[0].get_size() != block_bytes:
            raise SystemExit("LMCache's memory has no room for the blocks, or they have another size")
        for block in self._blocks:
            block.tensor.normal_()
        self._keys: list[Any] = []
        self.synced_rates: list[float] = []
        """Of each write, until everything was on disk."""

    def write(self) -> float:
        """Write all blocks under new keys; return bytes per second."""
        from lmcache.utils import CacheEngineKey

        for key in self._keys:
            self._backend.remove(key)
        self._keys = [CacheEngineKey("bench", 1, 0, 1_000_000 + next(self._next), torch.bfloat16) for _ in self._blocks]
        written = threading.Semaphore(0)
        start = time.perf_counter()
        self._backend.batched_submit_put_task(
            self._keys, self._blocks, on_complete_callback=lambda _: written.release()
        )
        for _ in self._keys:
            if not written.acquire(timeout=PATIENCE_S):
                raise SystemExit("LMCache did not write all blocks")
        elapsed_s = time.perf_counter() - start
        sync([self._backend.dict[key].path for key in self._keys])
        self.synced_rates.append(self._size_bytes / (time.perf_counter() - start))
        return self._size_bytes / elapsed_s

    def read(self) -> float:
        """Read all blocks; return bytes per second."""
        sync([self._backend.dict[key].path for key in self._keys], forget=True)
        start = time.perf_counter()
        found = self._backend.batched_get_blocking(self._keys)
        elapsed_s = time.perf_counter() - start
        if None in found:
            raise SystemExit("LMCache has lost blocks")
        for block in found:
            block.ref_count_down()
        return self._size_bytes / elapsed_s

    def close(self) -> None:
        """Give the memory back."""
        for block in self._blocks:
            block.ref_count_down()


class MooncakeDisk:
    """Mooncake Store, in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", size_bytes: int) -> None:
        self._process = process
        self._size_bytes = size_bytes
        if self._said() != "ready":
            raise SystemExit("Mooncake did not start")

    def write(self) -> float:
        """Write all blocks under new keys; return bytes per second."""
        return self._size_bytes / self._seconds("write")

    def read(self) -> float:
        """Read all blocks; return bytes per second."""
        return self._size_bytes / self._seconds("read")

    def _seconds(self, order: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        return float(self._said() or "nan")

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def sync(paths: Sequence[str], *, forget: bool = False) -> None:
    """Write files back to the disk; have their pages forgotten, too, if wanted."""

    def one(path: str) -> None:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        if forget:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)

    with ThreadPoolExecutor(FSYNCS_AT_A_TIME) as threads:
        list(threads.map(one, paths))


@contextmanager
def lmcache_disk(folder: Path, *, size_bytes: int, block_bytes: int, direct: bool) -> Iterator[LMCacheDisk]:
    """LMCache's local disk in a folder, and the loop that it needs."""
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS,
        local_cpu=False,
        max_local_cpu_size=(2 * size_bytes + 64 * MIB) / GIB,  # what is written, and what is read
        local_disk=str(folder),
        max_local_disk_size=1024,  # GiB: never full, although it goes on counting what was removed
        extra_config={"use_odirect": True} if direct else {},
    )
    shape = (4, 2, CHUNK_TOKENS, block_bytes // (CHUNK_TOKENS * 2 * 4 * 64 * 2), 64)  # of 2 bytes: 4 layers, K and V
    metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=CHUNK_TOKENS)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    memory = LocalCPUBackend(config, metadata, dst_device="cpu")
    backend = LocalDiskBackend(config, loop, memory, dst_device="cpu", metadata=metadata)
    try:
        disk = LMCacheDisk(backend, size_bytes=size_bytes, block_bytes=block_bytes)
        yield disk
        disk.close()
    finally:
        backend.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        memory.close()


@contextmanager
def mooncake_disk(folder: Path, *, size_bytes: int, block_bytes: int, backend: str) -> Iterator[MooncakeDisk]:
    """A Mooncake Store with its disk in a folder."""
    program = str(Path(__file__).with_name("mooncake_engine.py"))
    command = [sys.executable, program, backend, str(folder.absolute()), str(size_bytes), str(block_bytes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        yield MooncakeDisk(process, size_bytes)


class TierDisk:
    """The SSD tier with blocks of one size."""

    def __init__(self, tier: Tier, block_bytes: int) -> None:
        self._tier = tier
        self._block_bytes = block_bytes

    def write(self) -> float:
        """Write all blocks under new keys; return bytes per second."""
        return self._tier.write(self._block_bytes)

    def read(self) -> float:
        """Read all blocks; return bytes per second."""
        return self._tier.read(self._block_bytes)


def measure(folder: Path, tier: Tier, block_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the rates of all rounds, by direction and way."""
    sizes = {"size_bytes": tier.size_bytes, "block_bytes": block_bytes}
    with ExitStack() as stack:
        disks: dict[str, Disk] = {BASE: TierDisk(tier, block_bytes)}
        lmcaches: dict[str, LMCacheDisk] = {}
        for name, direct in (("lmcache", False), ("lmcache, direct", True)):
            place = folder / f"lmcache-{block_bytes}-{int(direct)}"  # a comma would make it two folders
            lmcaches[name] = disks[name] = stack.enter_context(lmcache_disk(place, direct=direct, **sizes))
        for name in ("bucket", "file_per_key") if has_mooncake() else ():
            backend = f"{name}_storage_backend"
            place = folder / f"mooncake-{block_bytes}-{name}"
            disk = mooncake_disk(place, backend=backend, **sizes)
            disks[f"mooncake, {name.partition('_')[0]}"] = stack.enter_context(disk)
        for one in disks.values():
            one.write()
        for lmcache in lmcaches.values():
            lmcache.synced_rates.clear()
        calls = {f"write: {name}": disk.write for name, disk in disks.items()}
        rates = in_turns(calls | {f"read: {name}": disk.read for name, disk in disks.items()}, rounds)
        for name, lmcache in lmcaches.items():
            rates[f"write: {name}, and on disk"] = lmcache.synced_rates
    return {f"{block_bytes // KIB} KiB, {name}": of_one for name, of_one in rates.items()}


def has_mooncake() -> bool:
    """Return whether Mooncake is installed."""
    return importlib.util.find_spec("mooncake") is not None


def report(rates: dict[str, list[float]], *, as_json: bool) -> None:
    """Print medians, and how often the tier goes into the time of the others."""
    if as_json:
        print(json.dumps(rates))
        return
    print(f"{'':<42}{'GB/s':>8}{'tier / it':>12}{'from':>8}{'to':>8}")
    for name, of_one in sorted(rates.items(), key=lambda item: (item[0].partition(":")[0], item[0])):
        of_tier = rates[f"{name.partition(':')[0]}: {BASE}"]
        ratios = [tier / other for tier, other in zip(of_tier, of_one, strict=True)]
        middle = statistics.median(ratios)
        print(f"{name:<42}{statistics.median(of_one) / 1e9:>8.2f}{middle:>12.2f}{min(ratios):>8.2f}{max(ratios):>8.2f}")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--size-mib", type=int, default=256, help="a multiple of 256; default: 256")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print the rates of all rounds, in bytes per second")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)  # LMCache tells of each step
    if importlib.util.find_spec("lmcache") is None:
        print("not measured: there is nothing to compare with (make .venvs/beside/.installed)")
        return
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="infinistore-bench-", dir=arguments.folder) as folder:
        tier = Tier(Path(folder, "tier"), arguments.size_mib * MIB)
        for block_bytes in BLOCKS:
            rates |= measure(Path(folder), tier, block_bytes, arguments.rounds)
        tier.close()
    report(rates, as_json=arguments.json)


if __name__ == "__main__":
    main()
