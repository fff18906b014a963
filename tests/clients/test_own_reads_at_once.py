"""Reads without asking, many at a time."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from infinistore import blocking
from infinistore.blocking import BlockingStore
from tests.clients.on_this_host import server_process
from tests.clients.own_reading import arrays_of, needs_tables
from tests.clients.shared_serving import Shared

pytestmark = [needs_tables, pytest.mark.filterwarnings("ignore::infinistore.LeaseStillInUse")]


KEYS = [f"key {index}" for index in range(6)]


class Struggle:
    """Threads that write and threads that read, until the writers are done. Checksums
    are off: only what lies in the memory counts. Each value is one number again and
    again."""

    def __init__(self) -> None:
        self.written = dict.fromkeys(KEYS, 0)  # the least that a reader may find
        self.over = threading.Event()

    def write(self, store: BlockingStore, mine: list[str]) -> None:
        for number in range(1, 40):
            for key in mine:
                if number % 7 == 3:
                    store.delete([key])
                store.put(key, number.to_bytes(2, "big") * (4000 + 1000 * (number % 3)))
                self.written[key] = number

    def read(self, store: BlockingStore) -> None:
        kept: list[list[Any]] = []
        while not self.over.is_set():
            least = dict(self.written)
            for key, value in zip(KEYS, store.get_many(KEYS), strict=True):
                if value is not None:
                    assert value == value[:2] * (len(value) // 2)
                    assert int.from_bytes(value[:2], "big") >= least[key]
            kept.append(arrays_of(store, *KEYS[:3]))
            if len(kept) > 2:
                assert all(len(set(array[start::2].tolist())) == 1 for array in kept.pop(0) for start in (0, 1))


@pytest.mark.process
def test_many_threads_read_replace_and_delete_at_once_and_see_no_wrong_byte(tmp_path: Path) -> None:
    url = f"shm://{tmp_path}/store.sock"
    options: dict[str, Any] = {"verify": "never", "inline_bytes": 0}
    with (
        server_process(tmp_path, "--prealloc-size", "1MiB"),
        blocking.open_store(url, **options) as one,
        blocking.open_store(url, **options) as two,
        ThreadPoolExecutor(5) as threads,
    ):
        struggle = Struggle()
        readers = [threads.submit(struggle.read, store) for store in (one, one, two)]
        writers = [threads.submit(struggle.write, one, KEYS[:3]), threads.submit(struggle.write, two, KEYS[3:])]
        wait(writers)
        struggle.over.set()
        for thread in (*writers, *readers):
            thread.result()
        gc.collect()
        while one.stats().store.leases:
            one.exists("anything")


def test_many_threads_share_one_mapping_and_what_each_reads_is_kept_apart(one_kind: Shared) -> None:
    store: Any = one_kind.open(max_connections=4)

    def work(number: int) -> None:
        key = f"key {number}"
        for turn in range(10):
            value = bytes([number, turn]) * 25_000
            store.put(key, value)
            for _ in range(4):
                assert store.get(key) == value
                (array,) = arrays_of(store, key)
                assert array.tobytes() == value
                assert store.exists(key)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    one_kind.until(leases=0, pinned_bytes=0)
    assert one_kind.core_statistics().hits >= 8 * 80
    assert len(store.calls.mapped_pool.descriptors) == 1
