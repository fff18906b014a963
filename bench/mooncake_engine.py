"""One Mooncake Store with a disk, as a process of its own: `disk_beside.py` starts it.

    python bench/mooncake_engine.py BACKEND FOLDER SIZE_BYTES BLOCK_BYTES

It says "ready", and then answers each line on standard input with a number of seconds:

- `write`: puts blocks under new keys, until the master knows a copy of each on disk. The
  master hands out this work with heartbeats, of which there is one a second here, not
  one in ten seconds as by default.
- `read`: reads all blocks back into this process's memory, when only the disk has them.

Any error ends it. Mooncake's master is a process of its own, on ports that are free.
"""

import mmap
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

_BEHIND_S = 60.0
_BUCKET_BLOCKS = 256
_LOOK_S = 0.01


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Mooncake:
    """A store whose memory and disk are this process's."""

    def __init__(self, folder: Path, master: str, size_bytes: int, block_bytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._folder = folder
        self._store: Any = MooncakeDistributedStore()
        settings = {"enable_ssd_offload": True, "ssd_offload_path": str(folder)}
        segment_bytes = 2 * size_bytes
        failed = self._store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", master, **settings)
        self._check([failed])
        self._sizes = [block_bytes] * (size_bytes // block_bytes)
        # Until the end: the store knows where they are.
        self._memory = [np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8) for _ in range(2)]
        self._memory[0][:] = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)
        for memory in self._memory:
            self._check([self._store.register_buffer(memory.ctypes.data, size_bytes)])
        self._keys: list[str] = []
        self._rounds = 0

    def write(self) -> float:
        """Put blocks; return how long it takes until all of them are on disk, too."""
        self._store.remove_all()
        self._rounds += 1
        self._keys = [f"{self._rounds}/{number:06}" for number in range(len(self._sizes))]
        start = time.perf_counter()
        self._check(self._store.batch_put_from(self._keys, self._places(0), self._sizes))
        waiting = self._keys[::-1]  # the last one is the last to be written
        while waiting:
            if any(replica.is_local_disk_replica() for replica in self._store.get_replica_desc(waiting[0])):
                waiting.pop(0)
            elif time.perf_counter() - start > _BEHIND_S:
                raise SystemExit(f"{len(waiting)} of {len(self._keys)} blocks did not get to the disk")
            else:
                time.sleep(_LOOK_S)
        return time.perf_counter() - start

    def read(self) -> float:
        """Read blocks that are in nobody's memory; return how long it takes."""
        self._store.batch_replica_clear(self._keys, self._store.get_hostname())
        left = self._store.get_replica_desc(self._keys[0])
        if not left or any(replica.is_memory_replica() for replica in left):
            raise SystemExit(f"not on disk alone: {left}")
        for path in self._folder.rglob("*"):
            if path.is_file():
                file = os.open(path, os.O_RDONLY)
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)
        self._memory[1][:] = 0
        start = time.perf_counter()
        lengths = self._store.batch_get_into(self._keys, self._places(1), self._sizes)
        elapsed_s = time.perf_counter() - start
        if lengths != self._sizes or not np.array_equal(self._memory[0], self._memory[1]):
            raise SystemExit(f"read something else: {sorted(set(lengths))}")
        return elapsed_s

    def close(self) -> None:
        """Leave the master."""
        self._store.close()

    def _places(self, memory: int) -> list[int]:
        start = int(self._memory[memory].ctypes.data)
        return [start + number * size for number, size in enumerate(self._sizes)]

    def _check(self, results: list[int]) -> None:
        if any(results):
            raise SystemExit(f"Mooncake failed: {sorted(set(results))}")


def main() -> None:
    """Serve until standard input ends."""
    backend, folder, size_bytes, block_bytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    folder.mkdir()
    os.environ |= {
        "GLOG_minloglevel": "2",
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(folder),
        "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": backend,
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        # So that no bucket waits for more blocks than there are.
        "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(_BUCKET_BLOCKS * block_bytes),
        "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": str(_BUCKET_BLOCKS),
    }
    import mooncake

    port = free_port()
    command = [str(Path(mooncake.__file__).with_name("mooncake_master")), f"--rpc_port={port}"]
    command += ["--enable_offload=true", f"--metrics_port={free_port()}", "--default_kv_lease_ttl=0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as master:
        try:
            time.sleep(1)
            store = Mooncake(folder, f"127.0.0.1:{port}", size_bytes, block_bytes)
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            for line in sys.stdin:
                seconds = store.write() if line.strip() == "write" else store.read()
                sys.stdout.write(f"{seconds}\n")
                sys.stdout.flush()
            store.close()
        finally:
            master.terminate()


if __name__ == "__main__":
    main()
